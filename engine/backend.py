"""What computes a model on a device: the one place that chooses."""

import logging
import math
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from core.errors import ConfigError
from core.layout import KVLayout
from core.model_config import ModelConfig
from core.sequence import BlockMemory, SwapMemory
from engine.batch import Decoder
from engine.draw import RoughWeights, Row, Weigh, rough_weights
from engine.kv_cache import DTYPES, KVCache
from engine.model import Model
from engine.native_model import MixedModel, NativeModel
from engine.plan import Runner, Sampled, StepPlan
from engine.scheduler import StepLimits
from engine.torch_runner import TorchRunner
from engine.weights import WeightReader
from kernels.linear import is_native
from kernels.native.library import find_library
from kernels.native.ops import NativeOps, Quantization
from kernels.native.sampling import SamplingOps

logger = logging.getLogger(__name__)


class ModelRunner(Runner, Protocol):
    """A runner with a model inside."""

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Launch one step and wait for its results."""

    def begin(self) -> None:
        """Called first in the thread that will launch, before any sequence exists."""

    def warm_up(self) -> None:
        """Let everything happen that happens once only; writes into block 0. Raises ModelError."""


class WorkerMemory(BlockMemory, SwapMemory, Protocol):
    """KV blocks, for transfers and for the engine."""


class Backend(NamedTuple):
    """What computes, not warmed up, and where its KV lives."""

    model: Decoder
    runner: ModelRunner
    memory: WorkerMemory
    cache: Tensor  # [num_blocks, layers, 2, kv_heads, block_tokens, dim], what `memory` moves


def find_place(name: str) -> torch.device:
    """The device of a --device flag: auto is a GPU where there is one.

    Raises:
        ConfigError: there is no such device here, or nothing to compute with on it.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={name}: must be auto, cpu or cuda (which is ROCm's name too)")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError(
            f"device=cuda: torch {torch.__version__} finds no CUDA or ROCm device; use cpu, or another torch"
        )
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    if find_spec("triton") is None:
        raise ConfigError("device=cuda: needs triton, which a torch built for CUDA or ROCm brings; pip install triton")
    from kernels.gpu.variant import why_unfit  # not above: a worker on a CPU needs no triton

    place = torch.device("cuda")
    if unfit := why_unfit(place):
        raise ConfigError(
            f"device={name}: {torch.cuda.get_device_name(place)} has {unfit}; Baton's kernels are for A100, H100, B200, MI300 "
            "and their like. Use --device cpu"
        )
    return place


def step_limits(device: str, max_batched_tokens: int | None, max_sequences: int | None) -> StepLimits:
    """How much a step on a device holds: what was asked for, else what computes prompts about as fast as it can.

    A GPU reads its weights once for all rows of a step: more than a few hundred rows are needed to keep it computing, and
    2,048 hide that each step costs the host some milliseconds.

    Args:
        device: of a --device flag.
        max_batched_tokens, max_sequences: see `StepLimits`; None: the device's own.
    Raises:
        ConfigError: no such device here, or limits that do not go together.
    """
    is_gpu = find_place(device).type != "cpu"
    if max_sequences is None:
        max_sequences = 256 if is_gpu else 64
    if max_batched_tokens is None:
        max_batched_tokens = max(2048 if is_gpu else 512, max_sequences)
    return StepLimits(max_batched_tokens=max_batched_tokens, max_sequences=max_sequences)


def load_backend(
    config: ModelConfig,
    reader: WeightReader,
    place: torch.device,
    layout: KVLayout,
    library: Path | None,
    limits: StepLimits,
    *,
    max_context_tokens: int = 0,
    gpu_memory_share: float = 0.9,
    num_blocks: int | None = None,
    kv_memory_bytes: int | None = None,
    threads: int = 1,
    deterministic: bool = False,
    quantization: Quantization | None = None,
) -> Backend:
    """Read the weights into whatever computes them fastest, and allocate KV blocks beside it.

    Args:
        config: the model's shape.
        reader: its checked weights; gives the dtype.
        place: where they go.
        layout: of one block.
        library: the native library, or None.
        limits: of any step; a GPU's buffers are made for them, a CPU allocates as it goes.
        max_context_tokens: of one sequence; 0: what the model was made for.
        gpu_memory_share: of a GPU's memory, for weights, steps and KV blocks together.
        num_blocks: how many KV blocks, or
        kv_memory_bytes: memory to fill with them; neither: what a GPU has left.
        threads: native compute threads.
        deterministic: a token's result is the same bits in any batch.
        quantization: of the weights, on the way into memory.
    Raises:
        ConfigError: the model or the machine cannot do what is asked for.
    """
    if place.type == "cuda":
        # Not above: a worker on a CPU needs no triton.
        from engine.gpu.device import CudaDevice
        from engine.gpu.load import load_gpu
        from engine.gpu.model import GpuLimits

        gpu = load_gpu(
            config,
            reader,
            CudaDevice(place),
            layout,
            GpuLimits(
                max_batched_tokens=limits.max_batched_tokens,
                max_sequences=limits.max_sequences,
                max_context_tokens=max_context_tokens or config.max_context_tokens,
                block_tokens=layout.block_tokens,
            ),
            num_blocks=num_blocks,
            kv_memory_bytes=kv_memory_bytes,
            memory_share=gpu_memory_share,
            deterministic=deterministic,
            quantization=quantization,
        )
        return Backend(gpu.model, gpu.runner, gpu.blocks, gpu.cache)
    decoder = load_decoder(
        config, reader, place, library, threads=threads, deterministic=deterministic, quantization=quantization
    )
    if num_blocks is None:
        assert kv_memory_bytes is not None, "a CPU's memory is not ours to fill"
        num_blocks = kv_memory_bytes // layout.block_bytes
    kv_cache = KVCache(layout, num_blocks, place)
    return Backend(decoder, TorchRunner(decoder, kv_cache.tensor, load_weigh(library)), kv_cache, kv_cache.tensor)


def load_weigh(library: Path | None) -> Weigh:
    """What weighs rows of logits fastest: the native library, or torch without one. Sampled tokens are the same."""
    if library is None:
        return rough_weights
    ops = SamplingOps(library)

    def weigh(row: Row, best: float, temperature: float) -> RoughWeights:
        weights, sums = ops.weigh(row, best, 1.0 / (temperature * math.log(2.0)))
        return RoughWeights(weights, sums.astype(np.float64))

    return weigh


def native_library(device: torch.device) -> Path | None:
    """The native library for a device; None, and a warning where it is missed: there is none."""
    if device.type != "cpu":
        return None
    library = find_library()
    if library is None:
        logger.warning("no native library, computing in plain torch, slowly: run `python -m kernels.native.build`")
    return library


def resolve_dtype(name: str, device: torch.device, stored: torch.dtype, library: Path | None) -> str:
    """The dtype "auto" stands for: the checkpoint's own, or float32 where 16 bits would be emulated.

    Args:
        name: a dtype's name, or "auto".
        device: that computes.
        stored: the checkpoint's dtype.
        library: the native library, which multiplies 16-bit weights as integers.
    Raises:
        ConfigError: an unknown name.
    """
    if name == "auto":
        is_fast = library is not None or is_native(stored, device)
        return next(name for name, dtype in DTYPES.items() if dtype == (stored if is_fast else torch.float32))
    if name not in DTYPES:
        raise ConfigError(f"dtype={name}: must be auto, {', '.join(DTYPES)}")
    return name


def load_decoder(
    config: ModelConfig,
    reader: WeightReader,
    device: torch.device,
    library: Path | None,
    *,
    threads: int = 1,
    deterministic: bool = False,
    quantization: Quantization | None = None,
) -> Decoder:
    """Read the weights into whatever computes them fastest.

    Args:
        config: the model's shape.
        reader: its checked weights; gives the dtype.
        device: where they go.
        library: the native library, or None.
        threads: native compute threads.
        deterministic: a token's result is the same bits in any batch. The plain torch model cannot promise that.
        quantization: of the weights, on the way into memory; native only.
    Raises:
        ConfigError: the model or the machine cannot do what is asked for.
    """
    if library is not None:
        ops = NativeOps(library, threads)
        if ops.can_attend(config.num_heads, config.num_kv_heads, config.head_dim):
            # A CPU that multiplies 16 bits in hardware does so many times faster than float32.
            if reader.dtype != torch.float32 and is_native(reader.dtype, device) and quantization is None:
                return MixedModel(config, reader, ops, deterministic)
            try:
                return NativeModel(config, reader, ops, quantization)
            except ValueError as error:
                raise ConfigError(f"quantization={quantization}: {error}") from error
        logger.warning("heads of %d: too large for the native library, computing in plain torch", config.head_dim)
    if deterministic or quantization is not None:
        raise ConfigError("deterministic, quantization: need the native library; run `python -m kernels.native.build`")
    return Model(config, reader, device)
