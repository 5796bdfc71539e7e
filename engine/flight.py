"""A step between its launch and its end, what that means for its sequences, and what they say of it."""

from dataclasses import dataclass

from core.errors import BatonError
from core.sequence import FinishReason, SequenceOutput, TokenLogprobs
from engine.plan import Chunk, Launched, Sampled, StepPlan
from engine.sequence import AWAITED, Sequence


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched and is not settled."""

    plan: StepPlan
    launched: Launched
    counts: dict[str, int]  # what `StepResult` says of it
    started: float


def must_be_known(plan: StepPlan) -> bool:
    """Whether the next step cannot be launched before this one's tokens are known: penalties count them."""
    sequences = (chunk.sequence for chunk in plan.chunks)
    return any(not sequence.is_plain and sequence.spec.sampling.has_penalties for sequence in sequences)


def explain(error: Exception) -> str:
    """What those whose step failed are told."""
    # Only the type of a foreign error leaves the worker: its message may quote the request.
    return str(error) if isinstance(error, BatonError) else f"engine step failed: {type(error).__name__}"


def go_ahead(chunk: Chunk) -> None:
    """Let a sequence stand where it will once its chunk, just launched, is computed."""
    sequence = chunk.sequence
    if chunk.samples:
        sequence.token_ids.append(AWAITED)
        sequence.num_awaited_tokens += 1
    sequence.num_computed_tokens += chunk.num_tokens
    sequence.num_unconfirmed_tokens += chunk.num_tokens


def new_prompt_logprobs(sequence: Sequence, start: int, sampled: Sampled) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of prompt tokens that were not given out before: a preempted prompt is computed twice."""
    num_known = sequence.num_prompt_logprobs - start  # entry i is of the token after position i
    sequence.num_prompt_logprobs = max(sequence.num_prompt_logprobs, start + len(sampled.prompt_logprobs))
    return sampled.prompt_logprobs[max(num_known, 0) :]


def output_of(
    sequence: Sequence,
    token_id: int | None = None,
    logprobs: TokenLogprobs | None = None,
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    has_ended: bool = False,
    finish_reason: FinishReason | None = None,
    matched_stop_id: int | None = None,
    error: str = "",
) -> SequenceOutput:
    """What a sequence says after a step: where it stands, and what is new."""
    spec = sequence.spec
    return SequenceOutput(
        sequence_id=spec.sequence_id,
        token_ids=() if token_id is None else (token_id,),
        logprobs=() if logprobs is None else (logprobs,),
        prompt_logprobs=prompt_logprobs,
        num_computed_tokens=sequence.num_confirmed_tokens,
        num_cached_tokens=min(sequence.num_cached_tokens, sequence.num_prompt_tokens - 1),
        block_table=tuple(sequence.block_table) if spec.prefill_only else (),
        has_ended=has_ended,
        finish_reason=finish_reason,
        matched_stop_id=matched_stop_id,
        error=error,
    )
