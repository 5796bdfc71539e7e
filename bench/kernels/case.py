"""One op on one shape: its inputs, the call, what must come out, and what it costs at the least."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bench.kernels.ceilings import Cost
from bench.kernels.timing import num_sets
from kernels.gpu.variant import TRITON_TYPES, Config

Inputs = tuple[Any, ...]
Outputs = tuple[Tensor, ...]

# How far a result may be from the reference, relative to its largest value: about one rounding.
_TOLERANCES = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-5}


@dataclass(frozen=True, slots=True)
class Case(ABC):
    """A subclass is an op, an instance its shape: of one layer of Llama 3.1 8B, but for what is given."""

    op: ClassVar[str]  # the module's name
    target: ClassVar[float | None] = None  # the share of its bound that it must reach

    dtype: torch.dtype

    @property
    @abstractmethod
    def shape(self) -> str:
        """What sets this case apart from the others of its op."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Of the variant that the call launches."""

    @abstractmethod
    def cost(self) -> Cost:
        """Of one call."""

    @abstractmethod
    def inputs(self, make: "Make") -> Inputs:
        """One set of fresh random inputs."""

    @abstractmethod
    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        """The public call; also tensors that it changed in place are outputs."""

    @abstractmethod
    def expected(self, inputs: Inputs) -> Outputs:
        """By the op's torch reference, without changing the inputs."""

    def adapted(self, inputs: Inputs, config: Config) -> Inputs:  # noqa: ARG002
        """The same inputs, for a call with other tile sizes than the chosen ones."""
        return inputs

    def alternatives(self, inputs: Inputs) -> Mapping[str, Callable[[], object]]:  # noqa: ARG002
        """What torch itself has for the same work, by name."""
        return {}

    def set_bytes(self) -> int:
        """Of one set of inputs and its outputs."""
        return self.cost().moved_bytes

    def input_sets(self, make: "Make") -> Iterator[Inputs]:
        """As many as the device's cache cannot hold."""
        for _ in range(num_sets(self.set_bytes())):
            yield self.inputs(make)

    def difference(self, got: Outputs, wanted: Outputs) -> str:
        """What is wrong with a result, "" if nothing is."""
        for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
            if one.shape != other.shape or one.dtype != other.dtype:
                return f"output {number} is {_described(one)} instead of {_described(other)}"
            if not one.is_floating_point():
                if not torch.equal(one, other):
                    return f"output {number} has {int((one != other).sum())} wrong elements"
                continue
            scale = other.float().abs().max().item()
            worst = (one.float() - other.float()).abs().max().item()
            if not worst <= scale * self.tolerance:  # a NaN is not below anything
                return f"output {number} is off by {worst:.3g}, with values up to {scale:.3g}"
        return ""

    def wrong_at_size(self, inputs: Inputs) -> str:
        """What is wrong with the result at the size that is timed, "" if nothing is: small cases have small offsets."""
        wanted = self.expected(inputs)
        return self.difference(self.call(inputs, None), wanted)

    @property
    def tolerance(self) -> float:
        """Relative to the largest value of an output."""
        return _TOLERANCES[self.dtype]

    @property
    def type_name(self) -> str:
        """As the variants' labels have it."""
        return TRITON_TYPES[self.dtype]


class Make:
    """Random tensors on a device, others with every call."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def memory_bytes(self) -> int:
        """Of the device; where an interpreter takes its place, of a small one."""
        if self.device.type == "cpu":
            return 1 << 30
        total: int = torch.cuda.get_device_properties(self.device).total_memory
        return total

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Normally distributed."""
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(0.0, scale, generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        """float32 in [0, 1)."""
        return torch.rand(shape, device=self.device, generator=self._generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """In [low, high)."""
        return torch.randint(low, high, shape, dtype=dtype, device=self.device, generator=self._generator)

    def permutation(self, count: int) -> Tensor:
        """[count] int32: each number once, in no order."""
        return torch.randperm(count, device=self.device, generator=self._generator).to(torch.int32)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
