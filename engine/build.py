"""From a model folder to a running engine: the one place that chooses the parts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from core.layout import Fingerprint, KVLayout
from core.model_config import ModelConfig
from engine.backend import WorkerMemory, find_place
from engine.batch import Decoder
from engine.block_pool import BlockPool
from engine.load import load_runner
from engine.loop import EngineLoop
from engine.scheduler import StepLimits
from engine.weights import Progress
from kernels.native.ops import Quantization

_DEFAULT_CPU_BYTES = 1 << 30  # of KV blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine, not started, and what it works on."""

    engine: EngineLoop
    model: Decoder
    pool: BlockPool
    memory: WorkerMemory
    cache: Tensor  # [num_blocks, layers, 2, kv_heads, block_tokens, dim]: what `memory` moves
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
    kv_memory_bytes: int | None,
    threads: int,
    limits: StepLimits,
    max_context_tokens: int = 0,
    gpu_memory_share: float = 0.9,
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
        num_blocks: KV blocks; 0: as many as `kv_memory_bytes` holds; None there: what a GPU has left, 1 GiB of a CPU's.
        limits: of one step.
        max_context_tokens: of one sequence; 0: what the model was made for.
        gpu_memory_share: of a GPU's memory, for weights, steps and KV blocks together.
        swap_bytes: of host memory for the blocks of preempted sequences; 0: they are always computed anew.
        quantization: int8 or int4 weights, made on load; None: the checkpoint's own.
        deterministic: an answer is the same, bit for bit, whatever else the engine computes.
        cores: that the engine's threads keep to; empty: any.
        load_progress: told (bytes, total bytes) while weights are read.
    Raises:
        ConfigError: a value or a model that cannot work.
    """
    if not num_blocks and kv_memory_bytes is None and find_place(device).type == "cpu":
        kv_memory_bytes = _DEFAULT_CPU_BYTES
    with _kept_to(cores):
        loaded = load_runner(
            folder,
            model=model,
            dtype=dtype,
            device=device,
            block_tokens=block_tokens,
            num_blocks=num_blocks or None,
            kv_memory_bytes=None if num_blocks else kv_memory_bytes,
            limits=limits,
            max_context_tokens=max_context_tokens,
            gpu_memory_share=gpu_memory_share,
            threads=threads,
            quantization=quantization,
            deterministic=deterministic,
            load_progress=load_progress,
        )
        loaded.runner.warm_up()
    pool = BlockPool(loaded.memory.num_blocks)
    swap_memory = (loaded.memory, swap_bytes) if swap_bytes else None
    return BuiltEngine(
        engine=EngineLoop(
            loaded.runner,
            limits,
            pool,
            block_tokens,
            swap_memory=swap_memory,
            cores=cores,
            on_start=loaded.runner.begin,
        ),
        model=loaded.model,
        pool=pool,
        memory=loaded.memory,
        cache=loaded.cache,
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
