"""What the next step computes: pure functions from sequences to a plan. No clock, no device, nothing changed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from core.errors import ConfigError
from engine.plan import Chunk, StepPlan
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How much one step may hold. `max_batched_tokens >= max_sequences`, so that no sequence in a step can starve."""

    max_batched_tokens: int = 512  # tokens in one step, decodes and prompt chunks together
    max_sequences: int = 64  # sequences that run at the same time

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise ConfigError(f"max_sequences={self.max_sequences}: must be at least 1")
        if self.max_batched_tokens < self.max_sequences:
            raise ConfigError(
                f"max_batched_tokens={self.max_batched_tokens} is below max_sequences={self.max_sequences}: "
                "each running sequence needs one token of every step; raise the first or lower the second"
            )


Plan = Callable[[Iterable[Sequence], StepLimits], StepPlan]


def plan_step(sequences: Iterable[Sequence], limits: StepLimits) -> StepPlan:
    """Choose the next step: one token for every decode, then prompt chunks, oldest first, the last one cut to fit.

    The oldest `max_sequences` sequences run and all others wait, decoding or not, so nothing overtakes and what runs
    keeps running. While a prompt is among them at most `max_sequences - 1` decode, so at least one token is left for it.

    A prompt is cut where the budget ends, not at block borders: a prompt that runs alone is always cut into pieces of
    `max_batched_tokens`, in a prefill worker as in an aggregated one, hence rounded alike. Whoever ships blocks ships
    the full ones.

    Args:
        sequences: every sequence that has not ended, oldest first; each has at least one uncomputed token.
        limits: of one step.
    Returns:
        Decodes, then prompt chunks, each group oldest first; empty only when `sequences` is.
    """
    decodes: list[Chunk] = []
    prompts: list[Sequence] = []
    for sequence in islice(sequences, limits.max_sequences):
        if sequence.is_decoding:
            decodes.append(Chunk(sequence, 1))
        else:
            prompts.append(sequence)
    budget = limits.max_batched_tokens - len(decodes)
    chunks = decodes
    for sequence in prompts:
        if budget == 0:
            break
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        chunks.append(Chunk(sequence, num_tokens))
        budget -= num_tokens
    return StepPlan(chunks)
