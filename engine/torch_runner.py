"""Carries out step plans with torch: builds the batch, runs the model, samples."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from core.sequence import TokenLogprobs
from engine.batch import Decoder, build_batch
from engine.draw import Weigh, rough_weights
from engine.plan import Chunk, Done, Sampled, StepPlan, output_rows, spread
from engine.sampler import UNUSABLE, prompt_logprobs, sample
from engine.sequence import Sequence
from engine.warm_up import GREEDY, warm_up

LOGPROB_ROWS = 64  # logits of a prompt that exist at once


class TorchRunner:
    """Implements `engine.plan.Runner`. Knows nothing from one step to the next but the cache."""

    def __init__(self, model: Decoder, cache: Tensor, weigh: Weigh = rough_weights) -> None:
        """Join a model and the cache its KV goes to.

        Args:
            model: on the cache's device.
            cache: [num_blocks, layers, 2, kv_heads, block_tokens, dim], in the model's dtype.
            weigh: what sampling takes to weigh rows of logits.
        """
        assert cache.dtype == model.dtype, "KV is stored in the model's dtype"
        self._model = model
        self._cache = cache
        self._block_tokens = cache.shape[4]
        self._weigh = weigh

    def launch(self, plan: StepPlan) -> Done:
        """Compute one step; see `engine.plan.Runner`."""
        return Done(self.run(plan))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Sampled]:
        """The results of one step, one for each chunk."""
        if not plan.chunks:
            return []
        chunks = plan.chunks
        batch = build_batch(chunks, self._block_tokens)
        samples = [chunk.samples for chunk in chunks]
        sampling = [chunk.sequence for chunk, does in zip(chunks, samples, strict=True) if does]
        hidden = self._model.forward(batch, self._cache)
        if len(hidden) == len(sampling):
            return spread(self._sample(hidden, sampling), samples)
        # Some prompt's log-probabilities are asked for: it has a row for each of its tokens.
        rows = output_rows(chunks)
        last = [of_chunk.stop - 1 for of_chunk, does in zip(rows, samples, strict=True) if does]
        newest = hidden[torch.tensor(last, dtype=torch.long, device=hidden.device)]
        results = spread(self._sample(newest, sampling), samples)
        return [
            self._with_prompt_logprobs(result, chunk, hidden[of_chunk])
            if chunk.owes_prompt_logprobs and not result.error
            else result
            for result, chunk, of_chunk in zip(results, chunks, rows, strict=True)
        ]

    def _sample(self, hidden: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
        """The next token of each sequence. `hidden`: [n, hidden size], the row of its newest token."""
        if not sequences:
            return []
        logits = self._model.logits(hidden)
        return sample(logits.rows.cpu(), sequences, self._weigh, logits.best)

    def _with_prompt_logprobs(self, sampled: Sampled, chunk: Chunk, hidden: Tensor) -> Sampled:
        """Add those of the prompt tokens that follow the chunk's. `hidden`: [tokens of the chunk, hidden size]."""
        spec, start = chunk.sequence.spec, chunk.sequence.num_computed_tokens
        assert spec.sampling.prompt_logprobs is not None, "asked for"
        expected = spec.prompt[start + 1 : start + 1 + chunk.num_tokens]
        entries: list[TokenLogprobs] = []
        for first in range(0, len(expected), LOGPROB_ROWS):
            ids = expected[first : first + LOGPROB_ROWS]
            logits = self._model.logits(hidden[first : first + len(ids)])
            piece = prompt_logprobs(logits.rows.cpu(), ids, spec.sampling.prompt_logprobs, self._weigh)
            if piece is None:
                return Sampled(None, error=UNUSABLE)
            entries += piece
        return Sampled(sampled.token_id, sampled.logprobs, tuple(entries))

    def begin(self) -> None:
        """A CPU keeps nothing for a thread."""

    def warm_up(self) -> None:
        """Run a small prompt and one decode, so that the first request meets no first-call cost.

        Call it before any sequence exists: it writes into block 0.

        Raises:
            ModelError: what the model computes is not usable; its weights are damaged or not of this dtype.
        """
        warm_up(self.run, self._block_tokens, [GREEDY])
