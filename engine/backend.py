"""What computes a model on a device: the one place that chooses."""

import logging
import math
from pathlib import Path

import numpy as np
import torch

from core.errors import ConfigError
from core.model_config import ModelConfig
from engine.batch import Decoder
from engine.draw import RoughWeights, Row, Weigh, rough_weights
from engine.kv_cache import DTYPES
from engine.model import Model
from engine.native_model import MixedModel, NativeModel
from engine.weights import WeightReader
from kernels.linear import is_native
from kernels.native.library import find_library
from kernels.native.ops import NativeOps, Quantization
from kernels.native.sampling import SamplingOps

logger = logging.getLogger(__name__)


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
