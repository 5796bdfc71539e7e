"""What the edges (gRPC, HTTP) ask of the router's core, and what they get back. Neither edge knows the other."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

from core.errors import InvalidRequestError
from core.sampling import MAX_CHOICES, SamplingParams
from core.sequence import FinishReason, TokenLogprobs

MAX_PRIORITY = 100  # and as far below 0
MAX_SALT_CHARS = 256

Path = Literal["disaggregated", "local_prefill", "aggregated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a chat; `content` is plain text (an edge joins text parts)."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One request as an edge understood it. Exactly one of `text`, `token_ids`, `chat` is not None."""

    request_id: str = ""  # made by the core when empty
    model: str = ""  # empty: the only model served
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: tuple[ChatMessage, ...] | None = None
    sampling: SamplingParams
    n: int = 1  # answers to it, each with its own index and end
    echo: bool = False  # the first chunk brings the prompt
    timeout_s: float | None = None  # time left of the client's deadline
    priority: int = 0  # higher is sooner
    cache_salt: str = ""  # only requests with the same one share cached blocks

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidRequestError("n", f"{self.n} is not in [1, {MAX_CHOICES}]")
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise InvalidRequestError("priority", f"{self.priority} is not in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
        if len(self.cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequestError("cache_salt", f"{len(self.cache_salt)} characters, at most {MAX_SALT_CHARS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """The prompt as it was understood."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Text and tokens new since the last chunk. Either may be empty: text waits for whole characters and stop strings.

    `logprobs` has one entry for each of `token_ids` when they were asked for. `prompt_logprobs` has entries of the prompt's
    tokens after its first: in order, over any number of chunks, all before the answer's first token. They and `echoed`, in
    the first chunk of all, come with index 0 only; the other answers begin after them.
    """

    index: int = 0  # of the answer, below the call's `n`
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    echoed: EchoedPrompt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Milliseconds from arrival at the router to the last token; the parts sum to `e2e_ms`."""

    queue_ms: float = 0.0
    route_ms: float = 0.0
    reserve_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    adopt_ms: float = 0.0
    first_decode_ms: float = 0.0
    decode_ms: float = 0.0
    e2e_ms: float = 0.0
    ttft_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of one answer; nothing of that index follows it."""

    index: int = 0
    finish_reason: FinishReason
    matched_stop: str = ""  # the stop string, or the decimal id of the stop token
    prompt_tokens: int  # the same for every answer of a call
    completion_tokens: int
    cached_tokens: int = 0
    timings: Timings
    prefill_worker: str = ""
    decode_worker: str = ""
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """One served model."""

    name: str
    revision: str
    max_model_len: int
    vocab_size: int


class RouterCore(Protocol):
    """The router behind its edges."""

    def generate(self, call: GenerateCall) -> AsyncGenerator[Chunk | Done, None]:
        """Stream the answers: chunks, and one Done for each index. Closing the iterator early aborts the request.

        Raises:
            ServingError: from the first or any later step; what was yielded before stands, and no Done follows.
        """

    def models(self) -> tuple[ModelCard, ...]:
        """The models that can be asked for, served at this moment or not."""

    def why_unready(self) -> str:
        """Empty when a request sent now would find workers, else the reason."""

    def token_text(self, token_id: int) -> str:
        """How one token reads alone, for logprobs: its text, special tokens by their name."""
