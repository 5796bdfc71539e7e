"""How the next token is chosen: the parameters, their limits, and the random draw."""

import hashlib
import math
from dataclasses import dataclass

from core.errors import InvalidRequestError

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024  # token ids of one request
MAX_CHOICES = 16  # answers to one prompt
MIN_LOGPROB = -9999.0  # stands for what is less likely still: neither JSON nor most readers take -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling, with every default resolved except `max_tokens` and `seed` (the router fills them).

    `stop` is matched on text by the router; everything else is obeyed by the engine. `seed` is set for every request,
    so that prefill, decode and a retry draw the same numbers.
    """

    temperature: float = 1.0  # 0 is greedy; ties go to the lowest id
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    max_tokens: int | None = None  # None: the rest of the context
    min_tokens: int = 0  # no EOS, stop id or stop string ends the answer before
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # the matched stop string or stop token stays in the text
    ignore_eos: bool = False
    seed: int | None = None
    frequency_penalty: float = 0.0  # taken off a token's logit for each time it is in the answer
    presence_penalty: float = 0.0  # taken off once if it is in the answer at all
    repetition_penalty: float = 1.0  # of tokens in prompt or answer: divides a logit above 0, multiplies one below
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), in any order
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best ones'
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # `not (low <= x <= high)` also catches NaN, for which every comparison is false.
        _check("temperature", self.temperature, 0.0, 100.0)
        if 0.0 < self.temperature < 1e-4:
            raise InvalidRequestError("temperature", f"{self.temperature} is below 0.0001; use 0 for greedy")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError("top_p", f"{self.top_p} is not in (0, 1]")
        _check("top_k", self.top_k, 0, 2**31 - 1)
        _check("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens", f"{self.min_tokens} is above max_tokens={self.max_tokens}")
        if self.seed is not None:
            _check("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        # Near 0 it would carry logits beyond what a float holds.
        _check("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        self._check_bias()
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError("stop", f"{len(self.stop)} strings, at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidRequestError(
                    "stop", f"a string of {len(text)} characters; each needs 1 to {MAX_STOP_CHARS}"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError("stop_token_ids", f"{len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS}")

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError("logit_bias", f"{len(self.logit_bias)} ids, at most {MAX_LOGIT_BIAS}")
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequestError("logit_bias", "names a token id twice")
        for token_id, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequestError("logit_bias", f"{bias} of token {token_id} is not in [-100.0, 100.0]")

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before changes a logit."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def edits_logits(self) -> bool:
        """Whether a token may be chosen from other logits than the model's."""
        return self.min_tokens > 0 or bool(self.logit_bias) or self.has_penalties

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken without a draw."""
        return self.temperature == 0.0


def _check(field: str, value: float, low: float, high: float) -> None:
    if not (low <= value <= high) or not math.isfinite(value):
        raise InvalidRequestError(field, f"{value} is not in [{low}, {high}]")


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of several answers to a prompt: the request's own for the first, one derived from it for others.

    Args:
        seed: the request's, a signed 64-bit number.
        choice: index of the answer, from 0.
    """
    if choice == 0:
        return seed
    mixed = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=8, salt=choice.to_bytes(8, "little"))
    return int.from_bytes(mixed.digest(), "little", signed=True)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32: four random words for a counter of four words, under a key of two.

    Args:
        counter: each word in [0, 2**32).
        key: likewise.
    Source: Salmon et al., SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (odd >> 32) ^ c1 ^ k0, odd & 0xFFFFFFFF
        c2, c3 = (even >> 32) ^ c3 ^ k1, even & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform_draw(seed: int, position: int) -> float:
    """The random number in [0, 1) for one token: a function of (seed, position) alone.

    Args:
        seed: the request's 64-bit seed, signed or not.
        position: index of the token in the answer, from 0.
    Source: counter-based generation (Salmon et al., SC 2011): the same on every machine, whatever else shares the
        batch, and computed as well on a GPU as here.
    """
    w0, w1, _, _ = philox4x32(
        (position & 0xFFFFFFFF, position >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    )
    return ((w0 << 32 | w1) >> 11) / 2**53
