"""The gate of a SwiGLU feed-forward layer."""

import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from torch import Tensor


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """The specification: float32 inside, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where one projection gave both.

    Args:
        gate_up: [n, 2 * dim], gate first.
    Returns:
        [n, dim] in the same dtype.
    Source: GLU variants (Shazeer, 2020).
    """
    return silu_mul_ref(gate_up)
