"""Matrix products with weights of 8 or 4 bits, which become numbers of the rows' dtype in registers.

A group of inputs of one output shares a scale. The device multiplies the rows with the codes, which every dtype here holds
exactly, sums each group in float32, and only that sum is multiplied with the scale: nothing is rounded but by the float32
additions and at the end. Weights are the left operand, so that Hopper's tensor cores take them from registers, where they
are made, while rows are read from shared memory: the other way round they would have to be written there first.

Against the native library's formats: its int8 is the same with groups of 32; its int4 also keeps a minimum for each 32. Here
a minimum would need the sum of the rows' group as well, and a group may not be smaller than what one instruction multiplies,
so int4 is symmetric as GGUF's Q4_0, and coarser. The library rounds rows to 14 bits; here they stay as they are.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.linear import multiply, num_segments, tile_of
from kernels.gpu.variant import GFX942, SM_80, SM_90, SM_100, TRITON_TYPES, Arch, Config, Variant, arch_of
from kernels.linear import linear_ref

GROUP = 128  # inputs that share a scale; an output's last ones may be padded with zeros
_FEW_ROWS, _SOME_ROWS = 16, 64  # up to these, and above both, a tile is as high as 16, 64 and 128 rows
_MAX_SEGMENTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """Weights [out, in] as integers and the scales that make numbers of them."""

    codes: Tensor  # [groups, out, 4 * bits] int32, as `_pack` orders them
    scales: Tensor  # [groups, out] float32
    bits: Literal[8, 4]
    num_inputs: int
    num_outputs: int


def quantize(weight: Tensor, bits: Literal[8, 4]) -> QuantizedWeight:
    """Round weights to the nearest of 255 or 16 multiples of their group's scale.

    8 bits: -127 to 127 times the largest of the group / 127. 4 bits: -8 to 7, the scale signed so that the largest is -8: a
    step smaller than 7 to either side has it, and weights that were rounded so before (GGUF's Q4_0) come back exactly.

    Args:
        weight: [out, in], any float dtype, finite: a group with a number that is not finite becomes NaN. Takes about 16 bytes
            for each weight while it works.
        bits: of a code.
    Returns:
        The codes and scales, on the weights' device.
    Raises:
        ValueError: another number of bits, or codes of 8 GiB and more.
    """
    if bits not in (8, 4):
        raise ValueError(f"bits={bits}: need 8 or 4")
    num_outputs, num_inputs = weight.shape
    if num_outputs * (num_inputs + GROUP) * bits >= 2**31 * 32:  # the kernel counts words in 32 bits
        raise ValueError(f"weights {tuple(weight.shape)}: too many, need fewer than 8 GiB of codes")
    grouped = F.pad(weight.float(), (0, -num_inputs % GROUP)).view(num_outputs, -1, GROUP)
    largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
    scales = largest.abs() / 127 if bits == 8 else largest / -8
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    # A group of zeros divides by zero: NaN, and with the scale 0 any code would do.
    codes = (grouped / scales).round().nan_to_num(0.0, high, low).clamp(low, high).int()
    return QuantizedWeight(
        codes=_pack(codes, bits),
        scales=scales[..., 0].T.contiguous(),
        bits=bits,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
    )


def _pack(codes: Tensor, bits: int) -> Tensor:
    # A tile of outputs is one run of memory for each group, and one output's part of it is words of 32 bits. The group's
    # inputs are cut into 16 / bits parts; a word holds two neighbours of each part, in its lower and its upper half: where
    # two numbers of 16 bits lie in a register of the tensor cores' operand. A shift and a mask thus unpack two at a time.
    parts = 16 // bits
    pairs = (codes + (1 << bits - 1)).view(*codes.shape[:2], parts, GROUP // parts // 2, 2)
    words = sum(pairs[:, :, part, :, half] << part * bits + 16 * half for part in range(parts) for half in range(2))
    assert isinstance(words, Tensor)
    return words.transpose(0, 1).contiguous()  # int32: what reaches the 32nd bit is its sign


def dequantize(weight: QuantizedWeight) -> Tensor:
    """What the codes stand for: [out, in] float32."""
    bits, parts = weight.bits, 16 // weight.bits
    shifts = torch.tensor([[part * bits, part * bits + 16] for part in range(parts)], device=weight.codes.device)
    codes = (weight.codes[:, :, None, :, None] >> shifts[:, None, :]) & ((1 << bits) - 1)
    numbers = (codes - (1 << bits - 1)).flatten(2) * weight.scales[..., None]
    return numbers.transpose(0, 1).flatten(1)[:, : weight.num_inputs]


def quantized_linear_ref(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """The specification: the product with the dequantised weights, in float32, rounded once."""
    return linear_ref(x, dequantize(weight), bias)


@triton.jit
def _part_of(words, PART: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    # [outputs, words] int32 -> [outputs, 2 * words]: the codes of one part, exact in `dtype`.
    pairs = words >> (BITS * PART)
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    if dtype == tl.float32:
        codes = _halves(pairs & MASK, tl.int16).to(tl.float32) - OFFSET
    # Converting integers takes the device several instructions each. Put into the last bits of a power of two instead, a
    # code is that power plus the code; subtracting works on the two halves of a register at once.
    elif dtype == tl.float16:
        codes = _halves((pairs & MASK) | 0x64006400, dtype) - (1024 + OFFSET)
    elif BITS == 4:
        codes = _halves((pairs & MASK) | 0x43004300, dtype) - (128 + OFFSET)
    else:
        # bf16 has 7 bits after its first: the code's 8th decides whether 128 or 256 is taken away.
        least = _halves((pairs & 0x00800080) ^ 0x43804380, dtype)
        codes = _halves((pairs & 0x007F007F) | 0x43004300, dtype) - least
    return codes


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high).reshape(pairs.shape[0], 2 * pairs.shape[1])


@triton.jit
def _segment_sum(
    x_ptrs,
    has_row,
    codes_ptr,
    scales_ptr,
    columns,
    begin,
    end,
    num_inputs,
    num_outputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    PARTS: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = GROUP // PARTS // 2
    has_column = columns < num_outputs
    codes_ptrs = codes_ptr + columns[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for group in range(begin, end):
        first_output = group * num_outputs
        words = tl.load(codes_ptrs + first_output * WORDS, mask=has_column[:, None], other=0)
        scale = tl.load(scales_ptr + first_output + columns, mask=has_column, other=0.0)
        products = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for part in tl.static_range(PARTS):
            inputs = group * GROUP + part * 2 * WORDS + tl.arange(0, 2 * WORDS)
            mask = has_row[None, :]
            if not IS_WHOLE:
                mask = mask & (inputs < num_inputs)[:, None]
            x = tl.load(x_ptrs + inputs[:, None], mask=mask, other=0.0)
            products = tl.dot(_part_of(words, part, BITS, x.dtype), x, products, input_precision="ieee")
        acc += products * scale[:, None]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_linear_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_inputs,
    num_outputs,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    row_tile, column_tile = tile_of(num_rows, num_outputs, BLOCK_M, BLOCK_N, GROUP_M)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row = rows < num_rows
    x_ptrs = x_ptr + rows[None, :].to(tl.int64) * x_stride
    out_rows = rows.to(tl.int64)

    num_groups = tl.cdiv(num_inputs, GROUP)
    size = tl.cdiv(num_groups, SEGMENTS)
    if IS_SPLIT or SEGMENTS == 1:
        begin = tl.program_id(1) * size
        end = tl.minimum(begin + size, num_groups)
        total = _segment_sum(
            x_ptrs, has_row, codes_ptr, scales_ptr, columns, begin, end, num_inputs, num_outputs,
            BLOCK_M, BLOCK_N, GROUP, BITS, IS_WHOLE,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for segment in range(SEGMENTS):
            begin = segment * size
            end = tl.minimum(begin + size, num_groups)
            total += _segment_sum(
                x_ptrs, has_row, codes_ptr, scales_ptr, columns, begin, end, num_inputs, num_outputs,
                BLOCK_M, BLOCK_N, GROUP, BITS, IS_WHOLE,
            )  # fmt: skip

    has_column = columns < num_outputs
    if IS_SPLIT:
        out_rows += tl.program_id(1).to(tl.int64) * num_rows
    elif bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + out_rows[:, None] * num_outputs + columns[None, :]
    tl.store(out_ptrs, tl.trans(total).to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


def quantized_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    is_deterministic: bool = False,
    config: Config | None = None,
) -> Tensor:
    """x @ weight.T + bias, the weights as `quantize` packed them.

    A row's result depends on how many rows there are only by which of three sizes of tiles they get, never on what is in
    them. The sums of segments take memory besides the result: at most 8 float32 for each of its elements, for few rows.

    Args:
        x: [n, in], bf16, fp16 or fp32; rows may lie apart, the elements of one are contiguous.
        weight: on x's device.
        bias: [out], contiguous, x's dtype; or None.
        is_deterministic: one size of tiles for every n: a row is the same bits in any batch.
        config: tile sizes to use instead of the chosen ones. Other tiles may give other bits.
    Returns:
        [n, out], contiguous, in x's dtype: accumulated in float32, rounded once.
    Raises:
        ValueError: shapes, strides or dtypes do not fit.
    Source: products in registers as Marlin's (Frantar et al., PPoPP 2025), here with exact codes and float32 scales.
    """
    num_rows, num_inputs = x.shape
    if num_inputs != weight.num_inputs or x.stride(1) != 1 or x.dtype not in TRITON_TYPES or not x.is_floating_point():
        raise ValueError(
            f"need rows of {weight.num_inputs} contiguous floats; got x {tuple(x.shape)} {x.stride()} {x.dtype}"
        )
    has_many_rows = num_rows > _SOME_ROWS and not is_deterministic
    if config is None:
        height = 128 if has_many_rows else 64 if is_deterministic or num_rows > _FEW_ROWS else 16
        config = _config(arch_of(x.device), x.dtype, weight.bits, height)
    most = 1 if has_many_rows else _MAX_SEGMENTS
    segments = num_segments(num_inputs, weight.num_outputs, config.tiles["BLOCK_N"], most)
    constants = {"GROUP": GROUP, "BITS": weight.bits, "SEGMENTS": segments, "IS_WHOLE": num_inputs % GROUP == 0}
    packed = (weight.codes, weight.scales)
    return multiply(_quantized_linear_kernel, x, packed, bias, weight.num_outputs, config, constants)


@functools.cache
def _config(arch: Arch, dtype: torch.dtype, bits: int, height: int) -> Config:
    is_low = height == 16
    if dtype == torch.float32:
        # With 64 outputs triton 3.7 gives sm_100's tensor cores the product in tf32, whatever precision is asked for.
        return Config(_tiles(16, 32), num_warps=4, num_stages=2)
    if arch is GFX942:
        return Config(_tiles(height, 128), num_warps=4 if is_low else 8, num_stages=2)
    if arch is SM_80 and not is_low:
        return Config(_tiles(height, 64), num_warps=8, num_stages=3)
    if arch is SM_100 and bits == 4:
        height = min(height, 64)  # the sums of 4 parts and their operands fill the tensor memory
    return Config(_tiles(height, 128), num_warps=4 if is_low else 8, num_stages=4 if is_low else 3)


def _candidates(arch: Arch, dtype: torch.dtype, height: int) -> tuple[Config, ...]:
    if arch is not SM_90 or dtype != torch.bfloat16:
        return ()
    if height == 16:
        return (
            Config(_tiles(16, 64), num_warps=4, num_stages=5),
            Config(_tiles(16, 128), num_warps=4, num_stages=6),
            Config(_tiles(16, 128), num_warps=8, num_stages=4),
        )
    if height == 64:
        return (Config(_tiles(64, 64), num_warps=4, num_stages=4),)
    return (Config(_tiles(64, 128), num_warps=8, num_stages=4),)


def _tiles(block_m: int, block_n: int) -> dict[str, int]:
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "GROUP_M": 8}


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form for inputs that fill their groups, and outputs that divide by 16; 4 segments where it has some."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for bits in (8, 4):
            forms: dict[str, Variant] = {}
            for height in (16, 64, 128):
                chosen = _config(arch, dtype, bits, height)
                for config in (chosen, *_candidates(arch, dtype, height)):
                    # Many rows have no segments; few have too few tiles for segments one after the other.
                    shapes = {16: ("one", "split"), 64: ("one", "sequential", "split"), 128: ("one",)}[height]
                    shapes += tuple(f"{shape}-bias" for shape in shapes if shape != "split")
                    for shape in shapes:
                        form = _variant(dtype, bits, config, shape, config is chosen)
                        forms.setdefault(form.label, form)  # heights may share a configuration
            yield from forms.values()


def _variant(dtype: torch.dtype, bits: int, config: Config, shape: str, is_chosen: bool) -> Variant:
    kind, tiles, is_split = TRITON_TYPES[dtype], config.tiles, shape == "split"
    constants: dict[str, Any] = {**tiles, "GROUP": GROUP, "BITS": bits, "SEGMENTS": 1 if shape.startswith("one") else 4}
    constants |= {"IS_SPLIT": is_split, "IS_WHOLE": True}
    types = {"x_ptr": f"*{kind}", "codes_ptr": "*i32", "scales_ptr": "*fp32", "bias_ptr": f"*{kind}"}
    types |= {"out_ptr": "*fp32" if is_split else f"*{kind}"}
    types |= dict.fromkeys(("num_rows", "num_inputs", "num_outputs", "x_stride"), "i32")
    types |= dict.fromkeys(constants, "constexpr")
    if not shape.endswith("bias"):
        types["bias_ptr"], constants["bias_ptr"] = "constexpr", None
    size = f"m{tiles['BLOCK_M']}n{tiles['BLOCK_N']}w{config.num_warps}s{config.num_stages}"
    return Variant(
        kernel=_quantized_linear_kernel,
        label=f"int{bits}-{kind}-{size}-{shape}",
        signature=types,
        constants=constants,
        config=config,
        is_chosen=is_chosen,
        aligned=frozenset({"num_inputs", "num_outputs", "x_stride"}),
    )
