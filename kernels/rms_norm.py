"""Root-mean-square normalisation."""

import torch
from torch import Tensor


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification: everything in float32, rounded once."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: [..., dim], any float dtype.
        weight: [dim].
        eps: keeps the root away from zero.
    Returns:
        [..., dim] in x's dtype.
    Source: Zhang and Sennrich, NeurIPS 2019.
    """
    return rms_norm_ref(x, weight, eps)
