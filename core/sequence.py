"""What a service hands to an engine, what the engine hands back after each step, and the KV blocks that others move."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from core.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One sequence for an engine to run.

    The engine finds its blocks itself, unless its KV came from elsewhere: then `block_table` holds its known tokens, and
    the references to those blocks, with `num_promised_blocks` set aside in the pool, become the engine's.
    """

    sequence_id: str  # unique in the worker
    prompt: tuple[int, ...]
    sampling: SamplingParams  # max_tokens and seed are set
    eos_token_ids: tuple[int, ...]
    block_table: tuple[int, ...] = ()
    num_promised_blocks: int = 0
    num_computed_tokens: int = 0  # tokens whose KV is in the blocks already
    output: tuple[int, ...] = ()  # tokens sampled elsewhere: the first one, after a hand-off
    prefill_only: bool = False  # ends after one sampled token without a finish reason; the hand-off goes on elsewhere
    priority: int = 0  # higher is sooner
    hash_seed: bytes | None = None  # `core.hashing.hash_seed`; None: its blocks are neither found nor published


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log, before temperature and filters) at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(slots=True, kw_only=True)  # not frozen: that takes twice the time to make, once per sequence and step
class SequenceOutput:
    """What one step gave one sequence. `has_ended` outputs are the last: its blocks are back in the pool.

    Except those of a `prefill_only` sequence: each of its outputs names them, and the references of the last one's belong
    to whoever gets it, who releases them when the hand-off is over.
    """

    sequence_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt tokens this step computed; the first has none
    num_computed_tokens: int = 0  # KV in the blocks after this step
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache when it first started
    block_table: tuple[int, ...] = ()  # of a prefill_only sequence
    has_ended: bool = False
    finish_reason: FinishReason | None = None  # None with has_ended: a prefill_only sequence that goes on elsewhere
    matched_stop_id: int | None = None  # the EOS or stop token that ended it
    error: str = ""  # with finish_reason "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One engine step: every sequence that moved, in one message."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    num_waiting: int = 0  # sequences whose prompt is not computed yet
    num_running: int = 0  # sequences that decode
    num_waiting_tokens: int = 0  # prompt tokens not computed yet
    num_prompt_tokens: int = 0  # known tokens computed in this step,
    num_recomputed_tokens: int = 0  # and those computed again after a preemption
    num_preemptions: int = 0  # sequences that had to yield their blocks in this step
    num_looked_up_tokens: int = 0  # known tokens of the sequences that started in this step,
    num_found_tokens: int = 0  # and how many of them the prefix cache had
    step_s: float = 0.0


StepListener = Callable[[StepResult], None]


class Engine(Protocol):
    """Runs sequences step by step in its own thread. Every method may be called from any thread and returns at once."""

    def start(self, listener: StepListener) -> None:
        """Begin. `listener` is called in the engine's thread after every step; it must not block."""

    def submit(self, spec: SequenceSpec) -> None:
        """Add a sequence. It always ends with one output with `has_ended`."""

    def abort(self, sequence_id: str) -> None:
        """End a sequence at the next step border with finish_reason "abort"; unknown or ended ids are ignored."""

    def stalled_s(self) -> float:
        """Seconds the current step has been running; 0 when idle. Readiness looks at it."""

    def stop(self) -> None:
        """End every sequence with "abort", then the thread. Returns when both are done."""


class Reading(Protocol):
    """Bytes of blocks on their way to the host, or there."""

    @property
    def is_ready(self) -> bool:
        """Whether they are there, or never will be. Does not change back."""

    @property
    def error(self) -> str:
        """Why there are no bytes, once ready; empty when there are."""

    @property
    def parts(self) -> Sequence[memoryview]:
        """One for each block, once ready and until `release`; not to be written to."""

    def release(self) -> None:
        """The bytes are no longer looked at, or no longer wanted. From any thread; a second call does nothing."""


class BlockMemory(Protocol):
    """KV blocks by number, for those who move their bytes: the two ends of KV transfer. One thread at a time calls it."""

    @property
    def num_blocks(self) -> int:
        """How many there are."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    @property
    def max_read_blocks(self) -> int:
        """Most blocks of one reading."""

    @property
    def failure(self) -> str:
        """Why no bytes will ever move again, so that this process is of no use; empty while they do. From any thread."""

    @property
    def max_readings(self) -> int | None:
        """Most readings that one of several users should have open, so that none waits for a slow one. None: any number."""

    def read(self, blocks: Sequence[int], on_ready: Callable[[], None]) -> Reading:
        """Begin to bring the bytes of blocks to the host. Returns at once.

        Args:
            blocks: whose content is final: the steps that computed it are done on their device, and nothing writes to them
                before the reading is released. At most `max_read_blocks`; repeats allowed.
            on_ready: called once, from any thread, when the reading is ready and has not been released; perhaps not when it
                is ready on return. Where readings have no room they become ready in turn, as others are released.
        Raises:
            IndexError: no such block.
        """

    def write(self, blocks: Sequence[int], parts: Sequence[bytes | memoryview]) -> None:
        """Fill blocks. Whatever is launched from here on sees the new bytes, and so does a reading.

        Args:
            blocks: that no step in flight reads or writes; each once.
            parts: `block_bytes` for each block; may change once this returns.
        Raises:
            IndexError: no such block; nothing is written.
            TransferError: the device failed.
        """

    def close(self) -> None:
        """Let go of what moves bytes; no reading is open and nothing is written any more. A second call does nothing."""


class SwapMemory(Protocol):
    """KV blocks by number, for the engine's own thread, between steps."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def copy_out(self, blocks: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Copy blocks as they are after every step launched so far. Returns when it is done.

        Args:
            blocks: repeats allowed.
            targets: `block_bytes` for each block.
        Raises:
            IndexError: no such block; nothing is copied.
        """

    def copy_in(self, blocks: Sequence[int], sources: Sequence[memoryview]) -> None:
        """Fill blocks, for the steps launched from here on. Returns when `sources` may change.

        Args:
            blocks: each once.
            sources: `block_bytes` for each block.
        Raises:
            IndexError: no such block; nothing is copied.
        """


def require_blocks(blocks: Iterable[int], num_blocks: int) -> None:
    """Raise IndexError unless each of `blocks` is one of `num_blocks`."""
    for block in blocks:
        if not 0 <= block < num_blocks:
            raise IndexError(f"block {block} is not in [0, {num_blocks})")
