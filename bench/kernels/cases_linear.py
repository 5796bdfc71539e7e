"""Products with weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows

from bench.kernels.case import Case, Inputs, Make, Outputs
from bench.kernels.ceilings import Cost
from kernels.gpu.linear import linear, linear_ref
from kernels.gpu.quantized_linear import GROUP, quantize, quantized_linear, quantized_linear_ref
from kernels.gpu.variant import Config


@dataclass(frozen=True, slots=True)
class Linear(Case):
    """x @ weight.T."""

    op = "linear"

    num_rows: int
    num_outputs: int
    num_inputs: int

    @property
    def shape(self) -> str:
        return f"n {self.num_rows}, {self.num_inputs} to {self.num_outputs}"

    @property
    def label(self) -> str:
        return self.type_name

    def cost(self) -> Cost:
        moved = self.num_inputs * self.num_outputs + self.num_rows * (self.num_inputs + self.num_outputs)
        return Cost(moved * self.dtype.itemsize, 2 * self.num_rows * self.num_inputs * self.num_outputs)

    def inputs(self, make: Make) -> Inputs:
        weight = make.normal(self.num_outputs, self.num_inputs, dtype=self.dtype, scale=self.num_inputs**-0.5)
        return make.normal(self.num_rows, self.num_inputs, dtype=self.dtype), weight

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        x, weight = inputs
        return (linear(x, weight, config=config),)

    def expected(self, inputs: Inputs) -> Outputs:
        return (linear_ref(*inputs),)

    def alternatives(self, inputs: Inputs) -> Mapping[str, Callable[[], object]]:
        return {"F.linear": lambda: (F.linear(*inputs),)}


@dataclass(frozen=True, slots=True)
class QuantizedLinear(Case):
    """x @ weight.T, the weights as integers."""

    op = "quantized_linear"

    num_rows: int
    num_outputs: int
    num_inputs: int
    bits: Literal[8, 4]

    @property
    def shape(self) -> str:
        return f"int{self.bits}, n {self.num_rows}, {self.num_inputs} to {self.num_outputs}"

    @property
    def label(self) -> str:
        return f"int{self.bits}-{self.type_name}"

    def cost(self) -> Cost:
        weights = self.num_inputs * self.num_outputs
        weight_bytes = weights * self.bits // 8 + weights // GROUP * 4
        rows_bytes = self.num_rows * (self.num_inputs + self.num_outputs) * self.dtype.itemsize
        return Cost(weight_bytes + rows_bytes, 2 * self.num_rows * weights)

    def inputs(self, make: Make) -> Inputs:
        weight = make.normal(self.num_outputs, self.num_inputs, dtype=self.dtype, scale=self.num_inputs**-0.5)
        return make.normal(self.num_rows, self.num_inputs, dtype=self.dtype), quantize(weight, self.bits), weight

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        x, weight, _ = inputs
        return (quantized_linear(x, weight, config=config),)

    def expected(self, inputs: Inputs) -> Outputs:
        x, weight, _ = inputs
        return (quantized_linear_ref(x, weight),)

    def alternatives(self, inputs: Inputs) -> Mapping[str, Callable[[], object]]:
        x, _, weight = inputs
        return {"F.linear of bfloat16": lambda: (F.linear(x, weight),)}
