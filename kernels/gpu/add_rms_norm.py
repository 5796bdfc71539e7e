"""The residual sum and the normalisation after it, in one pass over memory."""

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.variant import TRITON_TYPES, Arch, Config, Variant, arch_of, round_up_to_power_of_2
from kernels.rms_norm import rms_norm_ref

_MAX_DIM = 16384  # a row stays in one program's registers


def add_rms_norm_ref(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The specification: the sum is rounded before it is normalised, as a model without this kernel stores it."""
    summed = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    return rms_norm_ref(summed, weight, eps), summed


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    summed_ptr,
    eps,
    x_stride,
    residual_stride,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # int64: 131,072 rows of 16,384 pass 2**31
    cols = tl.arange(0, LANES)
    mask = cols < DIM
    # Every load before the first sum: the weight's way from memory is then no longer than the row's.
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(summed_ptr + row * DIM + cols, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + eps)
    tl.store(normed_ptr + row * DIM + cols, (wide * scale * weight.to(tl.float32)).to(x.dtype), mask=mask)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalise the sum: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: [n, dim] bfloat16, float16 or float32, dim at most 16,384; each row contiguous, rows any stride apart.
        residual: [n, dim] in x's dtype, likewise; None: nothing is added.
        weight: [dim], contiguous, in x's dtype; its dtype is not checked.
        eps: keeps the root away from zero.
        config: instead of the chosen one, to time it.
    Returns:
        normed [n, dim], and summed [n, dim], what was normalised, both in x's dtype and contiguous; without `residual`,
        summed is `x` itself. A row's result does not depend on the other rows.
    Raises:
        ValueError: a row is not contiguous or too long, or `residual` is of another shape or dtype.
    Source: RMSNorm (Zhang and Sennrich, NeurIPS 2019).
    """
    n, dim = x.shape
    if dim > _MAX_DIM or x.stride(1) != 1:
        raise ValueError(f"need contiguous rows of at most {_MAX_DIM}; got {dim}, stride {x.stride(1)}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(1) != 1):
        raise ValueError(
            f"need residual {tuple(x.shape)} {x.dtype} with contiguous rows; "
            f"got {tuple(residual.shape)} {residual.dtype}, stride {residual.stride(1)}"
        )
    config = config or _config(arch_of(x.device), dim)
    normed = torch.empty((n, dim), dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(normed)
    _add_rms_norm_kernel[(n,)](
        x,
        residual,
        weight,
        normed,
        None if residual is None else summed,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        DIM=dim,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **config.tiles,
    )
    return normed, summed


@functools.cache
def _config(arch: Arch, dim: int, lane_elements: int = 16) -> Config:
    # One row to a program: even 576 elements are 2 loads of 16 bytes for each thread of two warps, and as many warps
    # as a multiprocessor holds keep the memory busy. 16 elements a thread: two such loads at once of 16-bit values.
    lanes = round_up_to_power_of_2(dim)
    max_warps = 1024 // arch.warp_size // 2
    return Config({"LANES": lanes}, num_warps=min(max(lanes // (lane_elements * arch.warp_size), 1), max_warps))


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form of the kernel that `arch` compiles."""
    for dim in (576, 2048, 4096, 8192, _MAX_DIM):
        chosen = _config(arch, dim)
        others = {_config(arch, dim, lane_elements).num_warps for lane_elements in (8, 32)} - {chosen.num_warps}
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for has_residual in (True, False):
                yield _variant(chosen, dim, dtype, has_residual, is_chosen=True)
            for num_warps in sorted(others):
                yield _variant(Config(chosen.tiles, num_warps), dim, dtype, has_residual=True, is_chosen=False)


def _variant(config: Config, dim: int, dtype: torch.dtype, has_residual: bool, is_chosen: bool) -> Variant:
    pointer = f"*{TRITON_TYPES[dtype]}"
    added = pointer if has_residual else "constexpr"
    label = f"d{dim}-{TRITON_TYPES[dtype]}" + ("" if has_residual else "-alone")
    return Variant(
        kernel=_add_rms_norm_kernel,
        label=label if is_chosen else f"{label}-w{config.num_warps}",
        signature={
            "x_ptr": pointer,
            "residual_ptr": added,
            "weight_ptr": pointer,
            "normed_ptr": pointer,
            "summed_ptr": added,
            "eps": "fp32",
            "x_stride": "i32",
            "residual_stride": "i32",
            "DIM": "constexpr",
            "LANES": "constexpr",
        },
        constants={"DIM": dim, **config.tiles} | ({} if has_residual else {"residual_ptr": None, "summed_ptr": None}),
        config=config,
        is_chosen=is_chosen,
        aligned=frozenset({"x_stride", "residual_stride"}),
    )
