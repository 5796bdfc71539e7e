"""Ops that read rows once and write them once: norms, the gate, KV blocks packed and unpacked."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from torch import Tensor

from bench.kernels.case import Case, Inputs, Make, Outputs
from bench.kernels.ceilings import Cost
from bench.kernels.timing import num_sets
from kernels.gpu.add_rms_norm import add_rms_norm, add_rms_norm_ref
from kernels.gpu.pack_blocks import pack_blocks, pack_blocks_ref, unpack_blocks, unpack_blocks_ref
from kernels.gpu.silu_mul import silu_mul, silu_mul_ref
from kernels.gpu.variant import Config

_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class AddRmsNorm(Case):
    """The residual sum and the norm after it."""

    op = "add_rms_norm"

    num_rows: int
    dim: int = 4096

    @property
    def shape(self) -> str:
        return f"n {self.num_rows}, dim {self.dim}"

    @property
    def label(self) -> str:
        return f"d{self.dim}-{self.type_name}"

    def cost(self) -> Cost:
        return Cost((4 * self.num_rows + 1) * self.dim * self.dtype.itemsize, 0)

    def inputs(self, make: Make) -> Inputs:
        rows = [make.normal(self.num_rows, self.dim, dtype=self.dtype) for _ in range(2)]
        return *rows, make.normal(self.dim, dtype=self.dtype)

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        x, residual, weight = inputs
        return add_rms_norm(x, residual, weight, _EPS, config=config)

    def expected(self, inputs: Inputs) -> Outputs:
        x, residual, weight = inputs
        return add_rms_norm_ref(x, residual, weight, _EPS)

    def alternatives(self, inputs: Inputs) -> Mapping[str, Callable[[], object]]:
        x, residual, weight = inputs

        def separate() -> Outputs:
            summed = x + residual
            return F.rms_norm(summed, (self.dim,), weight, _EPS), summed

        return {"add, rms_norm": separate}


@dataclass(frozen=True, slots=True)
class SiluMul(Case):
    """The gate of the feed-forward layer."""

    op = "silu_mul"

    num_rows: int
    dim: int = 14336

    @property
    def shape(self) -> str:
        return f"n {self.num_rows}, dim {self.dim}"

    @property
    def label(self) -> str:
        return f"d{self.dim}-{self.type_name}"

    def cost(self) -> Cost:
        return Cost(3 * self.num_rows * self.dim * self.dtype.itemsize, 0)

    def inputs(self, make: Make) -> Inputs:
        return (make.normal(self.num_rows, 2 * self.dim, dtype=self.dtype),)

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        return (silu_mul(inputs[0], config=config),)

    def expected(self, inputs: Inputs) -> Outputs:
        return (silu_mul_ref(*inputs),)

    def alternatives(self, inputs: Inputs) -> Mapping[str, Callable[[], object]]:
        gate, up = inputs[0].chunk(2, dim=-1)
        return {"silu, mul": lambda: (F.silu(gate) * up,)}


@dataclass(frozen=True, slots=True)
class _Blocks(Case):
    """Blocks of a cache twice the size of what is moved, at least."""

    op = "pack_blocks"
    target = 0.8

    num_blocks: int
    block_bytes: int

    @property
    def shape(self) -> str:
        size = f"{self.block_bytes >> 20} MiB" if self.block_bytes >= 1 << 20 else f"{self.block_bytes / 1024:g} KiB"
        return f"{self._verb}, {self.num_blocks} blocks of {size}"

    @property
    def label(self) -> str:
        return f"{self._verb}-i64"

    @property
    def _verb(self) -> str:
        return type(self).__name__.removesuffix("Blocks").lower()

    def cost(self) -> Cost:
        return Cost(self.num_blocks * (2 * self.block_bytes + 4), 0)

    def inputs(self, make: Make) -> Inputs:
        return next(self._input_sets(make, 1))

    def input_sets(self, make: Make) -> Iterator[Inputs]:
        return self._input_sets(make, num_sets(self.set_bytes()))

    def _input_sets(self, make: Make, count: int) -> Iterator[Inputs]:
        elements = self.block_bytes // self.dtype.itemsize
        cache = make.normal(max(2, count) * self.num_blocks, elements, dtype=self.dtype)
        ids = make.permutation(len(cache)).view(-1, self.num_blocks)
        for number in range(count):
            yield cache, ids[number], ids[number].long()

    def difference(self, got: Outputs, wanted: Outputs) -> str:
        same = all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
        return "" if same else "blocks differ"


@dataclass(frozen=True, slots=True)
class PackBlocks(_Blocks):
    """What a transfer sends."""

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        cache, ids, _ = inputs
        return (pack_blocks(cache, ids, config=config),)

    def expected(self, inputs: Inputs) -> Outputs:
        cache, ids, _ = inputs
        return (pack_blocks_ref(cache, ids),)

    def alternatives(self, inputs: Inputs) -> Mapping[str, Callable[[], object]]:
        cache, _, ids = inputs
        return {"index_select": lambda: (cache.index_select(0, ids),)}


@dataclass(frozen=True, slots=True)
class UnpackBlocks(_Blocks):
    """What a transfer receives."""

    def _input_sets(self, make: Make, count: int) -> Iterator[Inputs]:
        for cache, ids, wide_ids in _Blocks._input_sets(self, make, count):
            yield cache, ids, wide_ids, make.normal(self.num_blocks, cache.shape[1], dtype=self.dtype)

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        cache, ids, _, packed = inputs
        unpack_blocks(packed, ids, cache, config=config)
        return (cache,)

    def expected(self, inputs: Inputs) -> Outputs:
        cache, ids, _, packed = inputs
        changed: Tensor = cache.clone()
        unpack_blocks_ref(packed, ids, changed)
        return (changed,)

    def alternatives(self, inputs: Inputs) -> Mapping[str, Callable[[], object]]:
        cache, _, ids, packed = inputs
        return {"index_copy_": partial(cache.index_copy_, 0, ids, packed)}
