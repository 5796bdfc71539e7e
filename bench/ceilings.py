"""What this machine could do at best, and what a step would need of it: the two bounds that steps are held against.

Reading: how fast memory is read once, in order, from a buffer far larger than any cache. Multiplying: the products of one
layer with enough rows, by everything at hand that multiplies. The fastest way of each is the ceiling.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from torch import Tensor

from core.model_config import ModelConfig
from engine.weights import expected_shapes
from kernels.linear import Linear, is_native
from kernels.native.library import find_library
from kernels.native.ops import Integers, NativeOps

BUFFER_BYTES = 1 << 29
# Calls of some milliseconds: on a machine that others use too, some of them are not interrupted.
READ_BYTES = 1 << 26  # in one call, the next piece of the buffer each time
GEMM_ROWS = 192
ROUND_S = 0.3  # spent on each way in each round, or one call if that takes longer

_CPU = torch.device("cpu")


class Work(NamedTuple):
    """The least that any implementation does."""

    flops: float  # of products with weights
    read_bytes: float  # of weights and KV, each read once


class Costs:
    """What steps of one model need.

    Args:
        config: the model's shape.
        layer_weight_bytes, head_weight_bytes: of one weight in memory, its part of the scales included.
        kv_bytes: of one element of the KV.
    """

    def __init__(self, config: ModelConfig, layer_weight_bytes: float, head_weight_bytes: float, kv_bytes: int) -> None:
        shapes = expected_shapes(config)
        weights = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
        layers = {name: size for name, size in weights.items() if name.startswith("model.layers.")}
        self._layer_weights = sum(layers.values())
        # What comes after attention in the last layer, only rows that get logits need.
        last = f"model.layers.{config.num_layers - 1}."
        self._late_weights = sum(
            size for name, size in layers.items() if name.startswith((f"{last}self_attn.o_proj", f"{last}mlp."))
        )
        self._head_weights = config.vocab_size * config.hidden_size
        self._layer_weight_bytes, self._head_weight_bytes = layer_weight_bytes, head_weight_bytes
        self._layer_kv_bytes = 2 * config.num_kv_heads * config.head_dim * kv_bytes
        self._windows = config.sliding_windows

    def step(self, num_rows: int, num_sampled: int, contexts: Iterable[int]) -> Work:
        """Of one step.

        Args:
            num_rows: tokens computed.
            num_sampled: of them, those that get logits.
            contexts: of each sequence, the tokens it has after the step.
        """
        early = self._layer_weights - self._late_weights
        read_bytes = early * self._layer_weight_bytes + sum(self._kv_bytes(context) for context in contexts)
        if num_sampled:
            read_bytes += self._late_weights * self._layer_weight_bytes + self._head_weights * self._head_weight_bytes
        late = self._late_weights + self._head_weights
        return Work(2.0 * (num_rows * early + num_sampled * late), read_bytes)

    def _kv_bytes(self, context: int) -> int:
        tokens = sum(min(context, window or context) for window in self._windows)
        return tokens * self._layer_kv_bytes


class Ceilings:
    """Measures both ceilings, a little in each round, so that a drift of the machine hits them as it hits the steps.

    Args:
        config: the model's shape.
        dtype: the engine's.
        threads: compute threads; torch's are set by whoever loaded the model.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, threads: int) -> None:
        self._readers = _readers()
        self._multipliers = _multipliers(config, dtype, threads)
        weights = sum(outputs * inputs for outputs, inputs in _layer_shapes(config))
        self._gemm_flops = 2.0 * GEMM_ROWS * weights
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def measure(self) -> None:
        """One round."""
        for name, call in (self._readers | self._multipliers).items():
            call()
            until = time.perf_counter() + ROUND_S
            while not self._seconds[name] or time.perf_counter() < until:
                began = time.perf_counter()
                call()
                self._seconds[name].append(time.perf_counter() - began)

    def read_rates(self) -> dict[str, float]:
        """Bytes/s of each way to read at its best, the fastest first."""
        return self._rates(self._readers, READ_BYTES)

    def gemm_rates(self) -> dict[str, float]:
        """FLOP/s of each way to multiply at its best, the fastest first."""
        return self._rates(self._multipliers, self._gemm_flops)

    def _rates(self, ways: Iterable[str], amount: float) -> dict[str, float]:
        rates = {name: amount / min(self._seconds[name]) for name in ways}
        return dict(sorted(rates.items(), key=lambda item: -item[1]))


def _readers() -> dict[str, Callable[[], object]]:
    pieces = cycle(torch.ones(BUFFER_BYTES // 4).view(BUFFER_BYTES // READ_BYTES, -1, 4096))
    vector = torch.ones(4096)
    return {"torch.sum": lambda: next(pieces).sum(), "torch.mv": lambda: next(pieces).mv(vector)}


def _layer_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of one layer's products."""
    attended = config.num_heads * config.head_dim
    return [
        (attended + 2 * config.num_kv_heads * config.head_dim, config.hidden_size),
        (config.hidden_size, attended),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]


def _multipliers(config: ModelConfig, dtype: torch.dtype, threads: int) -> dict[str, Callable[[], object]]:
    shapes = _layer_shapes(config)
    weights = [torch.randn(shape) * 0.02 for shape in shapes]
    inputs = [torch.randn(GEMM_ROWS, num_inputs) for _, num_inputs in shapes]

    def each(products: Sequence[Callable[[Tensor], Tensor]], wanted: torch.dtype) -> Callable[[], object]:
        rows = [x.to(wanted) for x in inputs]
        return lambda: [product(x) for product, x in zip(products, rows, strict=True)]

    ways = {
        "torch float32": each([partial(F.linear, weight=weight) for weight in weights], torch.float32),
        "packed float32": each([Linear(weight) for weight in weights], torch.float32),
    }
    if is_native(torch.bfloat16, _CPU):
        ways["packed bfloat16"] = each([Linear(weight.bfloat16()) for weight in weights], torch.bfloat16)
    if (library := find_library()) is not None:
        ops = NativeOps(library, threads)
        integers: Integers | None = None if dtype == torch.float32 else "int16"
        packed = [ops.pack([weight.to(dtype)], None, integers) for weight in weights]
        ways["native"] = each([partial(ops.multiply, linear) for linear in packed], torch.float32)
    return ways
