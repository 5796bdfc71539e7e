"""Decode steps that are launched with one call each: captured once for every bucket of batch sizes, before the first request.

A step of n single tokens runs in the smallest bucket that holds it; the rows beyond n are padding. Which bucket that is
depends on the batch, so products may round otherwise (cuBLAS chooses its kernels by the number of rows); in deterministic
mode they do not.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import Batch
from engine.gpu.device import Device
from engine.gpu.inputs import NO_TOKENS
from engine.gpu.model import Bucket, GpuModel


class _Graph(NamedTuple):
    bucket: Bucket
    replay: Callable[[], None]
    logits: Tensor  # [bucket's rows, vocab], overwritten by each replay of any


def bucket_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 that grow to an eighth of the size, up to `max_rows`: little padding, few captures."""
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 4))
    return [*sizes, max_rows]


class Graphs:
    """The captured steps of a model over one cache.

    Args:
        model: whose steps.
        cache: that they read and write.
        device: that captures.
        max_rows: of the largest bucket.
    """

    def __init__(self, model: GpuModel, cache: Tensor, device: Device, max_rows: int) -> None:
        self._model = model
        self._logits = torch.empty(max_rows, model.config.vocab_size, dtype=torch.float32, device=device.place)
        # The largest first: the smaller ones then find room in the memory it took.
        sizes = reversed(bucket_sizes(max_rows))
        graphs = [_capture(model, cache, device, self._logits[:size]) for size in sizes]
        self._graphs = graphs[::-1]

    def run(self, batch: Batch) -> Tensor | None:
        """Launch a step of single tokens.

        Returns:
            [rows, vocab] float32, the logits of all its tokens, overwritten by the next step; None where no bucket holds it.
        """
        graph = next((one for one in self._graphs if len(one.logits) >= batch.num_tokens), None)
        # A cut prompt's single token gives no output.
        is_decode = batch.num_decodes == batch.num_sequences == len(batch.outputs)
        if graph is None or not is_decode:
            return None
        self._model.stage_into(graph.bucket, batch)
        graph.replay()
        return graph.logits[: batch.num_tokens]


def _capture(model: GpuModel, cache: Tensor, device: Device, logits: Tensor) -> _Graph:
    bucket = model.bucket(len(logits))
    model.stage_into(bucket, NO_TOKENS)

    def run() -> None:
        # All graphs write to the same rows: what a graph makes itself it keeps for good.
        logits.copy_(model.logits(model.compute(bucket.step, cache)).rows)

    return _Graph(bucket, device.capture(run), logits)
