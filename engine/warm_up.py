"""The first steps of an engine, before it is ready: whatever happens once only happens here, not to the first request."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from core.errors import ModelError
from core.sampling import SamplingParams
from core.sequence import SequenceSpec
from engine.plan import Chunk, Sampled, StepPlan
from engine.sequence import Sequence

GREEDY = SamplingParams(temperature=0.0, max_tokens=2, seed=0)


def warm_up(run: Callable[[StepPlan], list[Sampled]], block_tokens: int, samplings: Seq[SamplingParams]) -> None:
    """Run a small prompt and one decode with each way to sample. Block 0 is written, so no sequence may exist yet.

    Args:
        run: computes a plan.
        block_tokens: tokens in one block.
        samplings: each allows two tokens.
    Raises:
        ModelError: what the model computes is not usable; its weights are damaged or not of this dtype.
    """
    for sampling in samplings:
        spec = SequenceSpec(
            sequence_id="warm-up",
            prompt=(0,) * max(block_tokens - 1, 1),
            sampling=sampling,
            eos_token_ids=(),
            block_table=(0,),
        )
        sequence = Sequence(spec)
        while sequence.num_output_tokens < 2 and sequence.num_computed_tokens < block_tokens:
            chunk = Chunk(sequence, sequence.num_uncomputed_tokens)
            (sampled,) = run(StepPlan((chunk,)))
            if sampled.error:
                raise ModelError(f"{sampled.error} for a first prompt: the weights are damaged, or overflow this dtype")
            sequence.num_computed_tokens += chunk.num_tokens
            assert sampled.token_id is not None, "the chunk reaches the newest token"
            sequence.token_ids.append(sampled.token_id)


def in_block_0(num_tokens: int, block_tokens: int, sampling: SamplingParams) -> Chunk:
    """A prompt all of whose blocks are one: what it computes means nothing, how it computes is that of any other."""
    spec = SequenceSpec(
        sequence_id="warm-up",
        prompt=(0,) * num_tokens,
        sampling=sampling,
        eos_token_ids=(),
        block_table=(0,) * -(-num_tokens // block_tokens),
    )
    return Chunk(Sequence(spec), num_tokens)
