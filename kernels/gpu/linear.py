"""Matrix products with weights whose rows are the same bits in any batch: for the deterministic mode.

The libraries of the devices choose their tiles by the number of rows, and with them the order of additions. Here tiles are
fixed, and so is where the inputs are cut into segments: each segment is summed from zero, and the segments are added in
their order. A large batch adds them one after the other in one program; a small one, which has too few tiles to keep the
device busy, sums each segment in its own program and adds them in a second kernel. Both ways it is the same instructions on
the same tiles, and the same additions after them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.variant import GFX942, SM_80, SM_90, TRITON_TYPES, Arch, Config, Variant, arch_of
from kernels.linear import linear_ref

__all__ = ["linear", "linear_ref", "multiply", "num_segments", "should_split", "tile_of", "variants"]

_ENOUGH_PROGRAMS = 384  # to keep a device busy: the largest have 132 to 304 multiprocessors
_MIN_SEGMENT_INPUTS = 256  # below, a program would wait for its first loads more than it computes
_MAX_SEGMENTS = 4  # each costs a large batch the start of another pipeline
_SUM_COLUMNS = 256


@triton.jit
def tile_of(num_rows, num_outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    # Programs that run at the same time share GROUP_M tiles of rows and few tiles of weights: both stay in the L2 cache.
    program = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    num_column_tiles = tl.cdiv(num_outputs, BLOCK_N)
    in_group = GROUP_M * num_column_tiles
    first_row_tile = program // in_group * GROUP_M
    num_together = tl.minimum(num_row_tiles - first_row_tile, GROUP_M)
    row_tile = first_row_tile + program % in_group % num_together
    return row_tile, program % in_group // num_together


@triton.jit
def _segment_sum(
    x_ptrs,
    weight_ptrs,
    has_row,
    has_column,
    begin,
    end,
    num_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(begin, end, BLOCK_K):
        inputs = first + tl.arange(0, BLOCK_K)
        if IS_WHOLE:
            x_mask, weight_mask = has_row[:, None], has_column[None, :]
        else:
            x_mask = has_row[:, None] & (inputs < num_inputs)[None, :]
            weight_mask = has_column[None, :] & (inputs < num_inputs)[:, None]
        x = tl.load(x_ptrs + inputs[None, :], mask=x_mask, other=0.0)
        weight = tl.load(weight_ptrs + inputs[:, None], mask=weight_mask, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_inputs,
    num_outputs,
    x_stride,
    weight_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SEGMENTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    row_tile, column_tile = tile_of(num_rows, num_outputs, BLOCK_M, BLOCK_N, GROUP_M)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_column = rows < num_rows, columns < num_outputs
    # int64: 16384 rows of 152k logits pass 2**31, and rows may lie anywhere in a wider matrix.
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * x_stride
    weight_ptrs = weight_ptr + columns[None, :].to(tl.int64) * weight_stride
    out_rows = rows.to(tl.int64)

    size = tl.cdiv(tl.cdiv(num_inputs, BLOCK_K), SEGMENTS) * BLOCK_K
    if IS_SPLIT or SEGMENTS == 1:
        begin = tl.program_id(1) * size
        end = tl.minimum(begin + size, num_inputs)
        total = _segment_sum(
            x_ptrs, weight_ptrs, has_row, has_column, begin, end, num_inputs, BLOCK_M, BLOCK_N, BLOCK_K, IS_WHOLE
        )
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for segment in range(SEGMENTS):
            begin = segment * size
            end = tl.minimum(begin + size, num_inputs)
            total += _segment_sum(
                x_ptrs, weight_ptrs, has_row, has_column, begin, end, num_inputs, BLOCK_M, BLOCK_N, BLOCK_K, IS_WHOLE
            )

    if IS_SPLIT:
        out_rows += tl.program_id(1).to(tl.int64) * num_rows
    elif bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + out_rows[:, None] * num_outputs + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _sum_kernel(partials_ptr, bias_ptr, out_ptr, num_rows, num_outputs, SEGMENTS: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < num_outputs
    total = tl.zeros((BLOCK_N,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        total += tl.load(partials_ptr + (segment * num_rows + row) * num_outputs + columns, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_outputs + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, config: Config | None = None) -> Tensor:
    """x @ weight.T + bias, each row of it the same bits in any batch.

    The sums of segments take memory besides the result: at most 4 float32 for each of its elements, and only for few rows.

    Args:
        x: [n, in], bf16, fp16 or fp32; rows may lie apart, the elements of one are contiguous.
        weight: [out, in], x's dtype and device; rows as x's.
        bias: [out], contiguous, x's dtype; or None.
        config: tile sizes to use instead of the chosen ones. Other tiles may give other bits.
    Returns:
        [n, out], contiguous, in x's dtype: accumulated in float32, rounded once.
    Raises:
        ValueError: shapes, strides or dtypes do not fit.
    Source: batch-invariant products (He et al., "Defeating Nondeterminism in LLM Inference", 2025).
    """
    num_outputs, num_inputs = weight.shape
    if x.shape[1] != num_inputs or x.dtype != weight.dtype or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(
            f"need rows of one size, dtype and contiguous elements; got x {tuple(x.shape)} {x.stride()} {x.dtype}, "
            f"weight {tuple(weight.shape)} {weight.stride()} {weight.dtype}"
        )
    if config is None:
        config = _config(arch_of(x.device), x.dtype)
    segments = num_segments(num_inputs, num_outputs, config.tiles["BLOCK_N"], _MAX_SEGMENTS)
    constants = {"SEGMENTS": segments, "IS_WHOLE": num_inputs % config.tiles["BLOCK_K"] == 0}
    return multiply(_linear_kernel, x, (weight,), bias, num_outputs, config, constants, (weight.stride(0),))


def multiply(
    kernel: Any,
    x: Tensor,
    weights: tuple[Tensor, ...],
    bias: Tensor | None,
    num_outputs: int,
    config: Config,
    constants: dict[str, int],
    weight_strides: tuple[int, ...] = (),
) -> Tensor:
    """Launch a kernel of products: a program for each tile, or where there are few for each segment of it.

    Args:
        kernel: of these arguments in the order of `_linear_kernel`.
        x: [n, in].
        weights: what it reads of them.
        bias: [num_outputs], contiguous, x's dtype; or None.
        num_outputs: of the weights.
        config: tile sizes.
        constants: the others, SEGMENTS among them, but IS_SPLIT.
        weight_strides: what it takes after x's.
    Returns:
        [n, num_outputs], contiguous, in x's dtype.
    Raises:
        ValueError: `bias` does not fit.
    """
    if bias is not None and (bias.shape != (num_outputs,) or bias.dtype != x.dtype or bias.stride(0) != 1):
        raise ValueError(f"need a bias [{num_outputs}] {x.dtype}; got {tuple(bias.shape)} {bias.dtype}")
    num_rows, num_inputs = x.shape
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    num_tiles = -(-num_rows // config.tiles["BLOCK_M"]) * -(-num_outputs // config.tiles["BLOCK_N"])
    segments = constants["SEGMENTS"]
    is_split = should_split(num_tiles, segments)
    partials = torch.empty((segments, *out.shape), dtype=torch.float32, device=x.device) if is_split else None
    kernel[(num_tiles, segments if is_split else 1)](
        x,
        *weights,
        None if is_split else bias,
        out if partials is None else partials,
        num_rows,
        num_inputs,
        num_outputs,
        x.stride(0),
        *weight_strides,
        **config.tiles,
        **constants,
        IS_SPLIT=is_split,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if partials is not None:
        _add_segments(partials, bias, out)
    return out


def _add_segments(partials: Tensor, bias: Tensor | None, out: Tensor) -> None:
    segments, num_rows, num_outputs = partials.shape
    grid = (num_rows, -(-num_outputs // _SUM_COLUMNS))
    _sum_kernel[grid](
        partials, bias, out, num_rows, num_outputs, SEGMENTS=segments, BLOCK_N=_SUM_COLUMNS, num_warps=2, num_stages=1
    )


def num_segments(num_inputs: int, num_outputs: int, block_n: int, most: int) -> int:
    """Into how many parts the inputs are cut: by the shape of the weights alone."""
    num_column_tiles = -(-num_outputs // block_n)
    segments = 1
    while (
        segments < most
        and num_column_tiles * segments * 2 <= _ENOUGH_PROGRAMS
        and num_inputs >= segments * 2 * _MIN_SEGMENT_INPUTS
    ):
        segments *= 2
    return segments


def should_split(num_tiles: int, segments: int) -> bool:
    """Whether segments get a program each. It decides who adds, not in which order."""
    return segments > 1 and num_tiles * 2 <= _ENOUGH_PROGRAMS


@functools.cache
def _config(arch: Arch, dtype: torch.dtype) -> Config:
    if dtype == torch.float32:
        return Config(_tiles(64, 64, 16), num_warps=4, num_stages=3)
    if arch is GFX942:
        return Config(_tiles(128, 128, 64), num_warps=8, num_stages=2)
    if arch is SM_80:
        return Config(_tiles(128, 128, 32), num_warps=8, num_stages=4)
    return Config(_tiles(128, 128, 64), num_warps=8, num_stages=3)


def _candidates(arch: Arch, dtype: torch.dtype) -> tuple[Config, ...]:
    if arch is not SM_90 or dtype != torch.bfloat16:
        return ()
    return (
        Config(_tiles(128, 128, 64), num_warps=8, num_stages=4),
        Config(_tiles(64, 128, 64), num_warps=4, num_stages=4),
        Config(_tiles(64, 128, 128), num_warps=4, num_stages=3),
        Config(_tiles(64, 64, 128), num_warps=4, num_stages=4),
    )


def _tiles(block_m: int, block_n: int, block_k: int) -> dict[str, int]:
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8}


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form, for inputs and outputs that divide by 16 and inputs that fill their tiles; 4 segments where it has some."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        chosen = _config(arch, dtype)
        for config in (chosen, *_candidates(arch, dtype)):
            for shape in ("one", "one-bias", "sequential", "sequential-bias", "split"):
                yield _variant(dtype, config, shape, config is chosen)
        kind = TRITON_TYPES[dtype]
        for has_bias in (False, True):
            types = {
                "partials_ptr": "*fp32",
                "bias_ptr": f"*{kind}" if has_bias else "constexpr",
                "out_ptr": f"*{kind}",
            }
            types |= {"num_rows": "i32", "num_outputs": "i32", "SEGMENTS": "constexpr", "BLOCK_N": "constexpr"}
            no_bias: dict[str, Any] = {} if has_bias else {"bias_ptr": None}
            yield Variant(
                kernel=_sum_kernel,
                label=f"sum-{kind}" + "-bias" * has_bias,
                signature=types,
                constants={"SEGMENTS": 4, "BLOCK_N": _SUM_COLUMNS, **no_bias},
                config=Config({"BLOCK_N": _SUM_COLUMNS}, num_warps=2),
                aligned=frozenset({"num_outputs"}),
            )


def _variant(dtype: torch.dtype, config: Config, shape: str, is_chosen: bool) -> Variant:
    kind, tiles, is_split = TRITON_TYPES[dtype], config.tiles, shape == "split"
    constants: dict[str, Any] = {
        **tiles,
        "SEGMENTS": 1 if shape.startswith("one") else 4,
        "IS_SPLIT": is_split,
        "IS_WHOLE": True,
    }
    types = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr"), f"*{kind}")
    types |= {"out_ptr": "*fp32" if is_split else f"*{kind}"}
    types |= dict.fromkeys(("num_rows", "num_inputs", "num_outputs", "x_stride", "weight_stride"), "i32")
    types |= dict.fromkeys(constants, "constexpr")
    if not shape.endswith("bias"):
        types["bias_ptr"], constants["bias_ptr"] = "constexpr", None
    size = f"m{tiles['BLOCK_M']}n{tiles['BLOCK_N']}k{tiles['BLOCK_K']}w{config.num_warps}s{config.num_stages}"
    return Variant(
        kernel=_linear_kernel,
        label=f"{kind}-{size}-{shape}",
        signature=types,
        constants=constants,
        config=config,
        is_chosen=is_chosen,
        aligned=frozenset({"num_inputs", "num_outputs", "x_stride", "weight_stride"}),
    )
