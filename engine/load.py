"""From a model folder to a loaded model, on whatever device."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.errors import ConfigError
from core.layout import Fingerprint, KVLayout
from core.model_config import ModelConfig, load_model_config
from engine.backend import (
    ModelRunner,
    WorkerMemory,
    find_place,
    load_backend,
    native_library,
    resolve_dtype,
    step_limits,
)
from engine.batch import Decoder
from engine.kv_cache import DTYPES
from engine.scheduler import StepLimits
from engine.weights import Progress, WeightReader, checkpoint_dtype, weights_hash
from kernels.native.ops import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Everything a worker needs of one loaded model."""

    runner: ModelRunner
    model: Decoder
    memory: WorkerMemory
    cache: Tensor  # [num_blocks, layers, 2, kv_heads, block_tokens, dim]
    config: ModelConfig
    layout: KVLayout
    fingerprint: Fingerprint


def load_runner(
    folder: Path,
    *,
    model: str,
    revision: str = "",
    dtype: str = "auto",
    device: str = "cpu",
    block_tokens: int = 16,
    num_blocks: int | None = None,
    kv_memory_bytes: int | None = None,
    limits: StepLimits | None = None,
    max_context_tokens: int = 0,
    gpu_memory_share: float = 0.9,
    threads: int | None = None,
    deterministic: bool = False,
    quantization: Quantization | None = None,
    load_progress: Progress | None = None,
    hash_progress: Progress | None = None,
) -> LoadedModel:
    """Load a model folder and allocate its KV blocks. Takes seconds; call `runner.warm_up()` afterwards.

    Args:
        folder: a Hugging Face model folder with safetensors.
        model, revision: what the fingerprint calls it; equal on all workers that exchange KV.
        dtype: auto, float32, bfloat16 or float16, of weights, activations and KV.
        device: auto, cpu or cuda.
        block_tokens: tokens in one KV block; a power of two.
        num_blocks: how many KV blocks; or
        kv_memory_bytes: memory to fill with them. One of the two is given, or, on a GPU, neither: what it has left.
        limits: of any step; None: the device's own.
        max_context_tokens, gpu_memory_share: as for `load_backend`.
        threads: compute threads of this process; None: one, and what torch chooses for its own operations.
        deterministic: a token's logits are the same bits in any batch, however its prompt was cut into chunks.
        quantization: int8 or int4 weights instead of the checkpoint's. Such KV is not exchanged with others.
        load_progress: called with (bytes, total bytes) while weights are read.
        hash_progress: the same while weights without known checksums are hashed.
    Raises:
        ModelError: the folder needs a piece Baton does not have, or is damaged.
        ConfigError: any other value that cannot work.
    """
    place = find_place(device)
    num_given = (num_blocks is not None) + (kv_memory_bytes is not None)
    if num_given > 1 or (place.type == "cpu" and num_given == 0):
        raise ConfigError("give either a number of KV blocks or the memory for them")
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads={threads}: must be at least 1")
        torch.set_num_threads(threads)
    config = load_model_config(folder)
    library = native_library(place)
    dtype = resolve_dtype(dtype, place, checkpoint_dtype(folder), library)
    layout = config.kv_layout(block_tokens, dtype)
    with WeightReader(folder, config, DTYPES[dtype], load_progress) as reader:
        backend = load_backend(
            config,
            reader,
            place,
            layout,
            library,
            limits or step_limits(device, None, None),
            max_context_tokens=max_context_tokens,
            gpu_memory_share=gpu_memory_share,
            num_blocks=num_blocks,
            kv_memory_bytes=kv_memory_bytes,
            threads=threads or 1,
            deterministic=deterministic,
            quantization=quantization,
        )
    fingerprint = Fingerprint(
        model=model,
        revision=revision,
        weights_hash=weights_hash(folder, hash_progress) + (f"+{quantization}" if quantization else ""),
        dtype=dtype,
        kv_dtype=layout.dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=block_tokens,
    )
    return LoadedModel(
        runner=backend.runner,
        model=backend.model,
        memory=backend.memory,
        cache=backend.cache,
        config=config,
        layout=layout,
        fingerprint=fingerprint,
    )
