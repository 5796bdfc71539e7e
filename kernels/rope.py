"""Rotary position embedding, applied to query and key heads."""

import torch
from torch import Tensor


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The specification: dimension i rotates with dimension i + rotary_dim / 2; float32 inside, rounded once."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading dimensions of every head by its token's angles.

    Args:
        x: [n, heads, dim], any float dtype.
        cos, sin: [n, rotary_dim / 2] float32; rotary_dim <= dim, further dimensions pass unchanged.
    Returns:
        [n, heads, dim] in x's dtype.
    Source: RoFormer (Su et al., 2021), in the half-split order of Hugging Face checkpoints.
    """
    return rope_ref(x, cos, sin)
