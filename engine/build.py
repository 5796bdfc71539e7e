"""From a model folder to a running engine: the one place that chooses the parts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError
from core.layout import Fingerprint, KVLayout
from core.model_config import ModelConfig
from engine.batch import Decoder
from engine.block_pool import BlockPool
from engine.kv_cache import KVCache
from engine.loop import EngineLoop
from engine.scheduler import StepLimits
from engine.torch_runner import load_runner
from engine.weights import Progress
from kernels.native.ops import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine, not started, and what it works on."""

    engine: EngineLoop
    model: Decoder
    pool: BlockPool
    memory: KVCache
    layout: KVLayout
    fingerprint: Fingerprint
    config: ModelConfig


def build_engine(
    folder: Path,
    *,
    model: str,
    dtype: str,
    device: str,
    block_tokens: int,
    num_blocks: int,
    kv_memory_bytes: int,
    threads: int,
    limits: StepLimits,
    swap_bytes: int = 0,
    quantization: Quantization | None = None,
    deterministic: bool = False,
    cores: frozenset[int] = frozenset(),
    load_progress: Progress | None = None,
) -> BuiltEngine:
    """Load a model, allocate its KV blocks and warm it up. Takes seconds.

    Args:
        folder: a Hugging Face model folder.
        model: what the fingerprint calls it; equal on all workers that exchange KV.
        dtype, device, block_tokens, threads: as for `load_runner`; device "auto" is cuda where there is one.
        num_blocks: KV blocks; 0: as many as `kv_memory_bytes` holds.
        limits: of one step.
        swap_bytes: of host memory for the blocks of preempted sequences; 0: they are always computed anew.
        quantization: int8 or int4 weights, made on load; None: the checkpoint's own.
        deterministic: an answer is the same, bit for bit, whatever else the engine computes.
        cores: that the engine's threads keep to; empty: any.
        load_progress: told (bytes, total bytes) while weights are read.
    Raises:
        ConfigError: a value or a model that cannot work.
    """
    if device not in ("auto", "cpu"):
        raise ConfigError(f"device={device}: this version computes on cpu only")
    with _kept_to(cores):
        loaded = load_runner(
            folder,
            model=model,
            dtype=dtype,
            device="cpu",
            block_tokens=block_tokens,
            num_blocks=num_blocks or None,
            kv_memory_bytes=None if num_blocks else kv_memory_bytes,
            threads=threads,
            quantization=quantization,
            deterministic=deterministic,
            load_progress=load_progress,
        )
        loaded.runner.warm_up()
    pool = BlockPool(loaded.kv_cache.num_blocks)
    swap_memory = (loaded.kv_cache, swap_bytes) if swap_bytes else None
    return BuiltEngine(
        engine=EngineLoop(loaded.runner, limits, pool, block_tokens, swap_memory=swap_memory, cores=cores),
        model=loaded.model,
        pool=pool,
        memory=loaded.kv_cache,
        layout=loaded.layout,
        fingerprint=loaded.fingerprint,
        config=loaded.config,
    )


@contextmanager
def _kept_to(cores: frozenset[int]) -> Iterator[None]:
    """Keep the calling thread to cores for a while, and for good those that it starts meanwhile: the compute threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
