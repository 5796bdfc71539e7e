"""What one step computes: decided by pure functions (`engine.scheduler`), carried out by a runner."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from core.sequence import TokenLogprobs
from engine.sequence import Sequence


class Chunk(NamedTuple):
    """The next `num_tokens` uncomputed tokens of one sequence: 1 for a decode, most often more for a piece of prompt."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the newest known token, so that its last row gives the next one."""
        return self.sequence.num_computed_tokens + self.num_tokens == len(self.sequence.token_ids)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether its tokens' log-probabilities are asked for: not when a preempted sequence is computed again."""
        sequence = self.sequence
        if sequence.is_plain:
            return False
        return sequence.spec.sampling.prompt_logprobs is not None and sequence.num_output_tokens == 0

    @property
    def num_outputs(self) -> int:
        """How many of its rows, the last ones, get logits."""
        return self.num_tokens if self.owes_prompt_logprobs else int(self.samples)


@dataclass(frozen=True, slots=True)
class Start:
    """A waiting sequence that gets its blocks before the step, with some set aside for its growth."""

    sequence: Sequence
    num_promised_blocks: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Decodes first, then prompt chunks, those of a single token before the others. Without chunks: nothing can run now."""

    chunks: Seq[Chunk] = ()
    preempted: Seq[Sequence] = ()  # yield their blocks before the step
    starts: Seq[Start] = ()
    num_kept_blocks: int = 0  # to be left by newcomers for the first sequence that waits for room


class Sampled(NamedTuple):
    """What a chunk gave: a token where it samples, log-probabilities where its sequence asked for them, or an error."""

    token_id: int | None  # None: the chunk does not reach the newest token, or failed
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the chunk's prompt tokens; the first of a prompt has none
    error: str = ""  # ends this sequence alone


NOTHING = Sampled(None)


def spread(sampled: Seq[Sampled], samples: Seq[bool]) -> list[Sampled]:
    """One result for each chunk, given those of the chunks that sample."""
    following = iter(sampled)
    return [next(following) if does else NOTHING for does in samples]


def output_rows(chunks: Seq[Chunk]) -> list[slice]:
    """Of each chunk: which of the step's rows with logits are its own."""
    rows, end = [], 0
    for chunk in chunks:
        begin, end = end, end + chunk.num_outputs
        rows.append(slice(begin, end))
    return rows


class Launched(Protocol):
    """A step that was given to the device."""

    @property
    def is_ahead(self) -> bool:
        """Whether the next step may be launched before its results are known."""

    def results(self) -> list[Sampled]:
        """Wait for it. Raises what went wrong; called once."""


class Done:
    """A step that was computed when it was launched. Implements `Launched`."""

    is_ahead = False

    def __init__(self, results: list[Sampled]) -> None:
        self._results = results

    def results(self) -> list[Sampled]:
        """Known already."""
        return self._results


class Runner(Protocol):
    """Computes plans. The engine's thread calls it, one plan after the other."""

    def launch(self, plan: StepPlan) -> Launched:
        """Write the KV of every chunk's tokens into its sequence's blocks; sample where `chunk.samples`.

        The last tokens of a sequence may be AWAITED: what the step launched before samples for it, or another that is not
        yet waited for. Runners whose launches are never ahead do not meet one.

        Returns:
            What gives one Sampled for each chunk, in the plan's order. The sequences themselves are not changed.
        """
