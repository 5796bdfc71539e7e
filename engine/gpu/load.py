"""From checked weights to a GPU runner and its KV blocks, as many as fit."""

from typing import NamedTuple

import torch

from core.errors import ConfigError
from core.layout import KVLayout
from core.model_config import ModelConfig
from core.sampling import SamplingParams
from engine.gpu.device import Device
from engine.gpu.memory import DeviceBlocks
from engine.gpu.model import GpuLimits, GpuModel
from engine.gpu.runner import GpuRunner
from engine.kv_cache import KVCache
from engine.plan import Chunk, StepPlan
from engine.warm_up import in_block_0
from engine.weights import WeightReader
from kernels.native.ops import Quantization

_GRAPH_BYTES = 512 << 20  # for the graphs themselves and what libraries allocate as they are captured


class LoadedGpu(NamedTuple):
    """What computes, not warmed up, and where its KV lives."""

    model: GpuModel
    runner: GpuRunner
    blocks: DeviceBlocks
    cache: torch.Tensor  # [num_blocks, layers, 2, kv_heads, block_tokens, dim]


def load_gpu(
    config: ModelConfig,
    reader: WeightReader,
    device: Device,
    layout: KVLayout,
    limits: GpuLimits,
    *,
    num_blocks: int | None,
    kv_memory_bytes: int | None,
    memory_share: float,
    deterministic: bool,
    quantization: Quantization | None,
) -> LoadedGpu:
    """Take the weights to the device, see what a largest step needs there, and give the rest to KV blocks.

    Args:
        config: the model's shape.
        reader: its checked weights.
        device: where everything goes.
        layout: of one block.
        limits: of any step.
        num_blocks: how many blocks, or
        kv_memory_bytes: memory to fill with them; both None: what is left of
        memory_share: of the device's memory that this process takes, the weights and the largest step included.
        deterministic: a row's result is the same bits in any batch.
        quantization: of the weights.
    Raises:
        ConfigError: not one block fits.
    """
    if not 0 < memory_share <= 1:
        raise ConfigError(f"gpu_memory_share={memory_share}: must be above 0 and at most 1, e.g. 0.9")
    try:
        model = GpuModel(config, reader, device, limits, deterministic=deterministic, quantization=quantization)
        if num_blocks is None:
            kv_memory_bytes = kv_memory_bytes or _bytes_left(model, device, layout, memory_share)
            num_blocks = kv_memory_bytes // layout.block_bytes
        cache = KVCache(layout, num_blocks, device.place).tensor
        blocks = DeviceBlocks(cache, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the model and its KV blocks do not fit the device: {error}") from error
    return LoadedGpu(model, GpuRunner(model, cache, device, blocks.before_step), blocks, cache)


def _bytes_left(model: GpuModel, device: Device, layout: KVLayout, memory_share: float) -> int:
    """Memory for KV blocks, measured by running the largest step over a cache of one block."""
    runner = GpuRunner(model, KVCache(layout, 1, device.place).tensor, device, before_step=lambda: None)
    step_bytes = device.peak_bytes(lambda: runner.run(StepPlan(tuple(_largest_chunks(model.limits)))))
    free, total, held = device.memory()
    # CUDA graphs keep as much as a step needs to themselves, the logits they share, and something for each.
    graph_bytes = step_bytes + 4 * model.limits.max_sequences * model.config.vocab_size + _GRAPH_BYTES
    left = min(free, round(memory_share * total) - held) - step_bytes - graph_bytes
    if left < layout.block_bytes:
        raise ConfigError(
            f"gpu_memory_share={memory_share}: of {total >> 20} MiB the model takes {held >> 20}, {free >> 20} are free, "
            f"and steps may need {(step_bytes + graph_bytes) >> 20}; that leaves no KV block. Raise it, end what else uses "
            "the device, or lower max_batched_tokens or max_sequences"
        )
    return left


def _largest_chunks(limits: GpuLimits) -> list[Chunk]:
    """As many sequences as a step may have, and as many tokens."""
    num_tokens = min(limits.max_batched_tokens // limits.max_sequences, limits.max_context_tokens - 1)
    sampling = SamplingParams(temperature=1.0, top_p=0.5, max_tokens=1, seed=0)
    return [in_block_0(max(num_tokens, 1), limits.block_tokens, sampling) for _ in range(limits.max_sequences)]
