"""Carries out step plans on a GPU: launches, and says later what they gave.

A launch never waits for the device. Tokens that the step before samples are read there: `Sequence.token_ids` has AWAITED in
their place, and the device is told which row of `GpuModel.sampled` to take. Results come back through pinned memory, marked.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from core.errors import ConfigError, DeviceLostError
from core.sampling import MAX_TOP_LOGPROBS, SamplingParams
from core.sequence import TokenLogprobs
from engine.batch import Batch, build_batch
from engine.gpu.device import Device, Mark, loss
from engine.gpu.graphs import Graphs
from engine.gpu.model import GpuModel
from engine.gpu.sampler import Drawn, GpuSampler, one_logprobs, read_sampled
from engine.plan import Chunk, Sampled, StepPlan, output_rows, spread
from engine.sampler import UNUSABLE
from engine.sequence import Sequence
from engine.warm_up import GREEDY, in_block_0, warm_up
from kernels.gpu.top_logprobs import top_logprobs

_LOGPROB_ROWS = 64  # logits of a prompt that exist at once
_NUM_RESULTS = 3  # steps of which results are on their way, and one more
_INTS_PER_ROW = 2 + 2 * MAX_TOP_LOGPROBS  # of a result: token, its log-probability, the best ones' ids and theirs
_SAMPLINGS = (  # every kernel of sampling once, so that none is compiled for a request
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=2, seed=0),
    SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=5,
        min_p=0.01,
        max_tokens=2,
        seed=0,
        logit_bias=((0, 1.0),),
        repetition_penalty=1.1,
        logprobs=1,
        prompt_logprobs=1,
    ),
)

# Products of few rows have other tiles than those of many; the last is as many as there may be.
_PROMPT_TOKENS = (1, 17, 64, 65, 1 << 20)

Entries = tuple[TokenLogprobs, ...]


@contextmanager
def _lost_devices() -> Iterator[None]:
    """Tell the loss of the device, which ends the engine, from what ends a step."""
    try:
        yield
    except RuntimeError as error:
        if why := loss(error):
            raise DeviceLostError(why) from error
        raise


class GpuRunner:
    """Implements `engine.plan.Runner`; the engine's thread calls it.

    Args:
        model: on the device.
        cache: [num_blocks, layers, 2, kv_heads, block_tokens, dim], where its KV goes.
        device: that computes.
        before_step: makes what is launched next wait for KV that was brought from elsewhere.
    """

    def __init__(self, model: GpuModel, cache: Tensor, device: Device, before_step: Callable[[], None]) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._before_step = before_step
        self._block_tokens = model.limits.block_tokens
        self._sampler = GpuSampler(device, model.limits.max_sequences, model.config.vocab_size)
        num_bytes = 4 * model.limits.max_sequences * _INTS_PER_ROW
        self._results = [device.host_buffer(num_bytes).view(torch.int32) for _ in range(_NUM_RESULTS)]
        self._num_launched = 0
        self._graphs: Graphs | None = None
        self._places: dict[Sequence, int] = {}  # in `GpuModel.sampled`, of those that the newest step samples for

    def warm_up(self) -> None:
        """Compile and capture everything a request can need; writes into block 0. Raises ModelError."""
        try:
            with torch.inference_mode():
                self._graphs = Graphs(self._model, self._cache, self._device, self._model.limits.max_sequences)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"CUDA graphs do not fit beside the KV blocks; lower gpu_memory_share: {error}"
            ) from error
        warm_up(self.run, self._block_tokens, _SAMPLINGS)
        limits = self._model.limits
        most = min(limits.max_batched_tokens, limits.max_context_tokens - 1)
        for num_tokens in dict.fromkeys(min(number, most) for number in _PROMPT_TOKENS):
            # With log-probabilities of the prompt, for which the head multiplies many rows too.
            self.run(StepPlan((in_block_0(num_tokens, self._block_tokens, _SAMPLINGS[-1]),)))
        self._places = {}

    def begin(self) -> None:
        """Called first in the thread that will launch; writes into block 0."""
        self._device.enter_thread()
        self.run(StepPlan((in_block_0(1, self._block_tokens, GREEDY),)))
        self._places = {}

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Launch one step and wait for it."""
        return self.launch(plan).results() if plan.chunks else []

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "GpuStep":
        """Launch one step; see `engine.plan.Runner`."""
        with _lost_devices():
            try:
                return self._launch(plan)
            except Exception:  # raised again, whatever it is
                self._device.mark().wait()  # what was launched still writes to blocks that are given away after this
                raise

    def _launch(self, plan: StepPlan) -> "GpuStep":
        self._before_step()
        chunks = plan.chunks
        batch = build_batch(chunks, self._block_tokens)
        self._point_to_awaited(batch, chunks)
        samples = [chunk.samples for chunk in chunks]
        sequences = [chunk.sequence for chunk, does in zip(chunks, samples, strict=True) if does]
        owes = [chunk.owes_prompt_logprobs for chunk in chunks]
        prompt_logprobs: list[_PromptLogprobs | None] = [None] * len(chunks)
        logits = None if any(owes) or self._graphs is None else self._graphs.run(batch)
        if logits is None:
            step = self._model.stage(batch)
            hidden = self._model.compute(step, self._cache)[step.outputs]
            rows = output_rows(chunks)
            for index, does in enumerate(owes):
                if does:
                    prompt_logprobs[index] = self._prompt_logprobs(chunks[index], hidden[rows[index]])
            if any(owes):
                last = [of_chunk.stop - 1 for of_chunk, does in zip(rows, samples, strict=True) if does]
                hidden = hidden[self._device.send(last)]
            if sequences:
                logits = self._model.logits(hidden).rows
        drawn = self._sampler.launch(logits, sequences) if logits is not None and sequences else None
        host = self._bring_back(drawn)
        self._places = {sequence: place for place, sequence in enumerate(sequences)}
        return GpuStep(self._device.mark(), sequences, samples, drawn, host, prompt_logprobs)

    def _point_to_awaited(self, batch: Batch, chunks: Seq[Chunk]) -> None:
        """Let token ids that are not known yet say where the device finds them."""
        for row in np.flatnonzero(batch.token_ids < 0).tolist():
            assert row < batch.num_decodes, "only a sequence that decodes awaits a token"
            batch.token_ids[row] = -1 - self._places[chunks[row].sequence]

    def _bring_back(self, drawn: Drawn | None) -> Tensor:
        """Keep what was drawn for the next step, and begin to copy it to the host; returns where it will be."""
        host = self._results[self._num_launched % _NUM_RESULTS]
        self._num_launched += 1
        if drawn is not None:
            n = len(drawn.tokens)
            self._model.sampled[:n].copy_(drawn.tokens)
            parts = (drawn.tokens, *(drawn.logprobs or ()))
            packed = torch.cat([part.flatten().view(torch.int32) for part in parts]) if drawn.logprobs else drawn.tokens
            host[: len(packed)].copy_(packed, non_blocking=True)
        return host

    def _prompt_logprobs(self, chunk: Chunk, hidden: Tensor) -> "_PromptLogprobs":
        """Launch those of the prompt tokens that follow the chunk's. `hidden`: [tokens of the chunk, hidden size]."""
        spec, start = chunk.sequence.spec, chunk.sequence.num_computed_tokens
        assert spec.sampling.prompt_logprobs is not None, "asked for"
        expected = spec.prompt[start + 1 : start + 1 + chunk.num_tokens]
        ids = self._device.send(expected)
        pieces = []
        for first in range(0, len(expected), _LOGPROB_ROWS):
            piece = ids[first : first + _LOGPROB_ROWS]
            logits = self._model.logits(hidden[first : first + len(piece)]).rows
            pieces.append((logits.amax(1), *top_logprobs(logits, piece, spec.sampling.prompt_logprobs)))
        return _PromptLogprobs(expected, spec.sampling.prompt_logprobs, pieces)


class _PromptLogprobs:
    """Of one chunk, on the device."""

    def __init__(self, token_ids: Seq[int], num_top: int, pieces: Seq[tuple[Tensor, ...]]) -> None:
        self._token_ids = token_ids
        self._num_top = num_top
        self._pieces = pieces

    def read(self) -> Entries | None:
        """Wait for them; None when a row is no distribution."""
        if not self._pieces:
            return ()
        best, *parts = (torch.cat(part).cpu() for part in zip(*self._pieces, strict=True))
        if not best.isfinite().all():
            return None
        rows = zip(self._token_ids, *(part.tolist() for part in parts), strict=True)
        return tuple(one_logprobs(token, self._num_top, *row) for token, *row in rows)


class GpuStep:
    """A step that was launched. Implements `engine.plan.Launched`."""

    def __init__(
        self,
        mark: Mark,
        sequences: Seq[Sequence],
        samples: Seq[bool],
        drawn: Drawn | None,
        host: Tensor,
        prompt_logprobs: Seq[_PromptLogprobs | None],
    ) -> None:
        self._mark = mark
        self._sequences = sequences
        self._samples = samples
        self._drawn = drawn
        self._host = host
        self._prompt_logprobs = prompt_logprobs

    @property
    def is_ahead(self) -> bool:
        """Not where prompts' log-probabilities are read: that waits for all that was launched."""
        return not any(self._prompt_logprobs)

    def results(self) -> list[Sampled]:
        """Wait for the step, and read what it gave."""
        with _lost_devices():
            return self._read()

    def _read(self) -> list[Sampled]:
        self._mark.wait()
        results = spread(self._sampled(), self._samples)
        for index, prompt_logprobs in enumerate(self._prompt_logprobs):
            if prompt_logprobs is not None and not results[index].error:
                entries = prompt_logprobs.read()
                token, logprobs = results[index].token_id, results[index].logprobs
                failed = Sampled(None, error=UNUSABLE)
                results[index] = failed if entries is None else Sampled(token, logprobs, entries)
        return results

    def _sampled(self) -> list[Sampled]:
        drawn, n = self._drawn, len(self._sequences)
        if drawn is None:
            return []
        values = self._host.numpy()
        tokens = values[:n].tolist()
        if drawn.logprobs is None:
            return read_sampled(self._sequences, tokens, None)
        num_top = drawn.logprobs[1].shape[1]
        chosen, ids, best = np.split(values[n : n * (2 + 2 * num_top)], [n, n * (1 + num_top)])
        floats = (chosen.view(np.float32).tolist(), best.view(np.float32).reshape(n, num_top).tolist())
        return read_sampled(self._sequences, tokens, (floats[0], ids.reshape(n, num_top).tolist(), floats[1]))
