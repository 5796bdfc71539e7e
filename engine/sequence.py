"""One sequence while the engine runs it. The loop owns it; a runner only reads it, all but `counts`."""

from array import array
from dataclasses import dataclass, field

from core.hashing import hash_blocks
from core.sequence import SequenceSpec
from engine.token_counts import TokenCounts

AWAITED = -1  # in `token_ids`: a token that a step in flight samples


@dataclass(slots=True, eq=False)
class Sequence:
    """States, derived and not stored: waiting (no blocks: not started, or preempted), computing its prompt, decoding (one
    token a step), ended.

    While a step is in flight, what it computes counts as computed, and what it samples stands in `token_ids` as AWAITED:
    so the next step is planned as if it were known. What leaves the engine looks at what is confirmed.
    """

    spec: SequenceSpec
    number: int = 0  # order of arrival
    token_ids: list[int] = field(init=False)  # prompt, then output
    block_table: "array[int]" = field(init=False)  # holds every computed token, and those of the next step
    num_promised_blocks: int = field(init=False)  # set aside in the pool for its growth
    num_computed_tokens: int = field(init=False)
    num_unconfirmed_tokens: int = 0  # of these, in steps in flight
    num_awaited_tokens: int = 0  # at the end of `token_ids`
    has_ended: bool = False  # its blocks are let go of when no step in flight computes it any more
    num_prompt_tokens: int = field(init=False)  # this and the next are kept here for speed: every step asks for them
    is_plain: bool = field(init=False)  # greedy, and nobody edits its logits or asks to see any
    counts: TokenCounts | None = None  # for penalties: the sampler's, kept here so that it ends with the sequence
    num_cached_tokens: int = 0  # found in the cache until it first had to yield
    num_published_blocks: int = 0
    num_waited_steps: int = 0  # steps of the engine that it had no part in
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # given out
    swap_slots: list[int] = field(default_factory=list)  # where its computed blocks are while it is preempted
    _hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = [*self.spec.prompt, *self.spec.output]
        self.block_table = array("i", self.spec.block_table)
        self.num_promised_blocks = self.spec.num_promised_blocks
        self.num_computed_tokens = self.spec.num_computed_tokens
        self.num_prompt_tokens = len(self.spec.prompt)
        sampling = self.spec.sampling
        shows_logits = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self.is_plain = sampling.is_greedy and not sampling.edits_logits and not shows_logits

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far, the ones sampled elsewhere included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """Prompt and answer, without what is awaited."""
        return len(self.token_ids) - self.num_awaited_tokens

    @property
    def num_confirmed_tokens(self) -> int:
        """Tokens whose KV is in the blocks for certain."""
        return self.num_computed_tokens - self.num_unconfirmed_tokens

    @property
    def is_final(self) -> bool:
        """Whether the token that is awaited is its last, whichever it is."""
        if not self.num_awaited_tokens:
            return False
        return self.spec.prefill_only or self.num_output_tokens >= (self.spec.sampling.max_tokens or 0)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens whose KV it may ever write."""
        if self.spec.prefill_only:
            return len(self.token_ids)
        assert self.spec.sampling.max_tokens is not None, f"{self.spec.sequence_id}: max_tokens is not set"
        return self.num_prompt_tokens + self.spec.sampling.max_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is not in the blocks yet; 1 for a decoding sequence."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def has_blocks(self) -> bool:
        """Whether it has started, and was not preempted since."""
        return bool(self.block_table)

    @property
    def is_decoding(self) -> bool:
        """Whether the next step computes just the newest token."""
        num_tokens = len(self.token_ids)  # spelled out: the loop asks this of every sequence in every step
        return self.num_computed_tokens == num_tokens - 1 and num_tokens > self.num_prompt_tokens

    def hashes(self, block_tokens: int) -> list[bytes]:
        """The hash of each full block of known tokens; none where its blocks are nobody else's business."""
        if self.spec.hash_seed is None:
            return []
        num_hashed = len(self._hashes)
        num_known = self.num_known_tokens
        if num_known - num_hashed * block_tokens >= block_tokens:
            parent = self._hashes[-1] if self._hashes else self.spec.hash_seed
            self._hashes += hash_blocks(parent, self.token_ids[num_hashed * block_tokens : num_known], block_tokens)
        return self._hashes

    def reusable_hashes(self, block_tokens: int) -> list[bytes]:
        """Of the blocks it may take from the cache: not the one with its newest token, which must be computed to go on,
        and none while log-probabilities of its prompt are owed.
        """
        if self.spec.sampling.prompt_logprobs is not None and self.num_output_tokens == 0:
            return []
        return self.hashes(block_tokens)[: (len(self.token_ids) - 1) // block_tokens]
