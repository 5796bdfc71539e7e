"""What the device can do at best, measured by torch: how fast it copies its memory, how fast it multiplies matrices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from bench.kernels.timing import Clock

_COPY_BYTES = 2 << 30
_MATRIX = 8192
_BUDGET_S = 0.5


class Cost(NamedTuple):
    """The least that any implementation of an op does."""

    moved_bytes: int  # read once, and written once
    flops: int  # of products of matrices


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that no kernel passes."""

    copy_bytes_per_s: float  # read and written ones, both
    matmul_flops_per_s: float  # in bfloat16

    def bound_s(self, cost: Cost) -> float:
        """The least time that work takes: data moves while matrices are multiplied."""
        return max(cost.moved_bytes / self.copy_bytes_per_s, cost.flops / self.matmul_flops_per_s)

    def is_memory_bound(self, cost: Cost) -> bool:
        """Whether moving data takes the longer."""
        return cost.moved_bytes / self.copy_bytes_per_s >= cost.flops / self.matmul_flops_per_s


H200 = Ceilings(copy_bytes_per_s=4.3e12, matmul_flops_per_s=790e12)  # as measured in this way


def measure_ceilings(device: torch.device, clock: Clock, scale: float = 1.0) -> Ceilings:
    """Measure both.

    Args:
        device: where.
        clock: of that device.
        scale: of the sizes; small where it is only to be seen that it works.
    """
    elements = int(_COPY_BYTES * scale) // 2
    pairs = [torch.zeros(2, elements, dtype=torch.bfloat16, device=device) for _ in range(2)]
    copies: list[Callable[[], object]] = [partial(pair[1].copy_, pair[0]) for pair in pairs]
    copy_s = clock.time(copies, 4 * elements / H200.copy_bytes_per_s, _BUDGET_S * scale).median_s
    del pairs, copies

    side = max(16, int(_MATRIX * scale**0.5))
    # Random: a device draws less power, and so runs faster, over zeros.
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(left)
    multiply = partial(torch.matmul, left, right.T, out=product)
    flops = 2 * side**3
    matmul_s = clock.time([multiply], flops / H200.matmul_flops_per_s, _BUDGET_S * scale).median_s
    return Ceilings(4 * elements / copy_s, flops / matmul_s)
