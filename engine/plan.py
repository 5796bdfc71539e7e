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
    prompt_logprobs: tuple[
        TokenLogprobs, ...
    ] = ()  # of the chunk's prompt tokens; the first token of a prompt has none
    error: str = ""  # ends this sequence alone


class Runner(Protocol):
    """Computes a plan. The engine's thread calls it, one plan at a time."""

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Write the KV of every chunk's tokens into its sequence's blocks; sample where `chunk.samples`.

        Returns:
            One Sampled for each chunk, in the plan's order. The sequences themselves are not changed.
        """
