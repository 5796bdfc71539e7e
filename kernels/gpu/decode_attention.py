"""Attention of single tokens over their paged KV: the decode half of every step, at the speed of reading that KV once.

A sequence is split into items of consecutive tokens, by its own length alone; a fixed number of programs share all
items of all sequences and KV heads, each item read once for all query heads of its KV head; a second kernel merges the
items of each row. The launch depends on nothing but constants of the process, so a CUDA graph can hold it, and a row's
bits depend on nothing but its sequence.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decode_attention import decode_attention_ref as decode_attention_ref
from kernels.gpu.prefill_attention import Ints, check_paged, dot_precision, load_blocks, load_tokens, token_offsets
from kernels.gpu.variant import GFX942, TRITON_TYPES, Arch, Config, Variant, arch_of, round_up_to_power_of_2

MAX_SPLITS = 32  # of one sequence: what one program merges at once
_MIN_SPLIT_TOKENS = 256  # fewer would not pay for writing and merging their result
_SPLIT_STEP_TOKENS = 128  # items begin at multiples, as every BLOCK_N divides: no tile is read for two of them
_STATISTICS = 4  # floats of scratch after a head's dimensions: the maximum, the sum, and what keeps 16-byte alignment

_MERGE = Config({}, num_warps=4)


@dataclass(frozen=True, slots=True)
class DecodeItems:
    """The items of one step, for every layer with the same window."""

    items: Ints  # [m, 3]: row, first token, end token
    first_items: Ints  # [n + 1]: where each row's items begin


def decode_items(context_lens: Ints, window: int | None) -> DecodeItems:
    """Split sequences into items, each by its own length alone.

    Args:
        context_lens: [n] tokens each row attends to, its own included; 0: a row that has no items and becomes zeros.
        window: the token sees at most this many tokens, itself included; None: all.
    """
    firsts = np.zeros_like(context_lens) if window is None else np.maximum(context_lens - window, 0)
    bases = firsts // _SPLIT_STEP_TOKENS * _SPLIT_STEP_TOKENS
    spans = context_lens - bases
    steps = -(-spans // (MAX_SPLITS * _SPLIT_STEP_TOKENS))
    splits = np.maximum(steps * _SPLIT_STEP_TOKENS, _MIN_SPLIT_TOKENS)
    counts = -(-spans // splits)
    first_items = np.zeros(len(context_lens) + 1, np.int32)
    np.cumsum(counts, out=first_items[1:])
    rows = np.repeat(np.arange(len(context_lens), dtype=np.int32), counts)
    items = np.empty((len(rows), 3), np.int32)
    begins = bases[rows] + (np.arange(len(rows), dtype=np.int32) - first_items[rows]) * splits[rows]
    items[:, 0] = rows
    np.maximum(begins, firsts[rows], out=items[:, 1])
    np.minimum(begins + splits[rows], context_lens[rows], out=items[:, 2])
    return DecodeItems(items, first_items)


def max_items(num_rows: int) -> int:
    """The most items that so many rows can have."""
    return num_rows * MAX_SPLITS


def decode_scratch(num_items: int, num_heads: int, dim: int, device: torch.device) -> Tensor:
    """What `decode_attention` keeps its items' results in, unordered between calls.

    Args:
        num_items: the most items of one call, e.g. `max_items` of its rows.
    Returns:
        [num_items, heads, dim + 4] float32: each item's sum of values, its greatest score, its sum of weights; unset.
    """
    return torch.empty((num_items, num_heads, dim + _STATISTICS), dtype=torch.float32, device=device)


def num_programs(device: torch.device, dtype: torch.dtype, dim: int) -> int:
    """Programs that share the items: as many as the device runs at one time."""
    if device.type == "cpu":
        return 3
    num_multiprocessors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return num_multiprocessors * _per_multiprocessor(arch_of(device), dtype, dim)


@triton.jit
def _decode_attention_kernel(
    q_ptr, kv_ptr, out_ptr, scratch_ptr, tables_ptr, first_blocks_ptr, items_ptr, first_items_ptr, num_items_ptr,
    stride_q_row, stride_q_head, stride_block, stride_kv, stride_kv_head,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SCRATCH_ROW: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    SCALE: tl.constexpr = DIM**-0.5 * 1.4426950408889634  # of exp2
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    group = tl.arange(0, GROUP_TILE)
    columns = tl.arange(0, WIDTH)
    is_stored = group < GROUP
    num_work = tl.load(num_items_ptr) * NUM_KV_HEADS
    for work in tl.range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        row = tl.load(items_ptr + 3 * item)
        first = tl.load(items_ptr + 3 * item + 1)
        end = tl.load(items_ptr + 3 * item + 2)
        tables = tables_ptr + tl.load(first_blocks_ptr + row)
        is_whole = tl.load(first_items_ptr + row + 1) - tl.load(first_items_ptr + row) == 1
        heads = kv_head * GROUP + tl.minimum(group, GROUP - 1)
        q_rows = row.to(tl.int64) * stride_q_row + heads * stride_q_head
        q = load_tokens(q_ptr, q_rows, columns, None, DIM, WIDTH > DIM)
        keys_ptr = kv_ptr + kv_head.to(tl.int64) * stride_kv_head
        acc = tl.zeros((GROUP_TILE, WIDTH), tl.float32)
        best = tl.full((GROUP_TILE,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_TILE,), tl.float32)
        lo = first // BLOCK_N * BLOCK_N
        blocks = load_blocks(tables, lo, first, end, BLOCK_N, BLOCK_TOKENS)
        for n0 in tl.range(lo, end, BLOCK_N):
            keys = n0 + tl.arange(0, BLOCK_N)
            is_seen = (keys >= first) & (keys < end)
            offsets = token_offsets(blocks, n0, stride_block, DIM, BLOCK_N, BLOCK_TOKENS)
            # A tile ahead: the loads of keys would wait for these.
            blocks = load_blocks(tables, n0 + BLOCK_N, first, end, BLOCK_N, BLOCK_TOKENS)
            k = load_tokens(keys_ptr, offsets, columns, None, DIM, WIDTH > DIM)
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            scores = tl.where(is_seen[None, :], scores, float("-inf"))  # also where a stale key made it NaN
            new_best = tl.maximum(best, tl.max(scores, 1) * SCALE)
            weights = tl.exp2(scores * SCALE - new_best[:, None])
            decay = tl.exp2(best - new_best)
            total = total * decay + tl.sum(weights, 1)
            best = new_best
            # A token that is not seen has weight zero, but zero times a stale NaN is NaN.
            v = load_tokens(keys_ptr + stride_kv, offsets, columns, is_seen, DIM, WIDTH > DIM)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        mask = is_stored[:, None] & (columns < DIM)[None, :]
        if is_whole:
            out_rows = out_ptr + (row.to(tl.int64) * NUM_HEADS + heads) * DIM
            out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_rows[:, None] + columns[None, :], out, mask=mask)
        else:
            scratch_rows = scratch_ptr + (item.to(tl.int64) * NUM_HEADS + heads) * SCRATCH_ROW
            tl.store(scratch_rows[:, None] + columns[None, :], acc, mask=mask)
            tl.store(scratch_rows + DIM, best, mask=is_stored)
            tl.store(scratch_rows + DIM + 1, total, mask=is_stored)


@triton.jit
def _merge_items_kernel(
    scratch_ptr, first_items_ptr, out_ptr,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SCRATCH_ROW: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_items_ptr + row)
    count = tl.load(first_items_ptr + row + 1) - first
    columns = tl.arange(0, WIDTH)
    splits = tl.arange(0, SPLITS)
    if count != 1:  # else its only item wrote the row
        scratch_rows = scratch_ptr + ((first + splits).to(tl.int64) * NUM_HEADS + head) * SCRATCH_ROW
        is_item = splits < count
        best = tl.load(scratch_rows + DIM, mask=is_item, other=float("-inf"))
        total = tl.load(scratch_rows + DIM + 1, mask=is_item, other=0.0)
        mask = is_item[:, None] & (columns < DIM)[None, :]
        acc = tl.load(scratch_rows[:, None] + columns[None, :], mask=mask, other=0.0)
        # Without items (a row that only fills a batch up): zeros over one.
        weights = tl.where(is_item, tl.exp2(best - tl.where(count > 0, tl.max(best, 0), 0.0)), 0.0)
        out = tl.sum(acc * weights[:, None], 0) / tl.where(count > 0, tl.sum(total * weights, 0), 1.0)
        out_row = out_ptr + (row.to(tl.int64) * NUM_HEADS + head) * DIM
        tl.store(out_row + columns, out.to(out_ptr.dtype.element_ty), mask=columns < DIM)


def decode_attention(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    first_blocks: Tensor,
    items: Tensor,
    first_items: Tensor,
    num_items: Tensor,
    scratch: Tensor,
    num_programs: int,
    config: Config | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with one query token of each sequence; a row without items becomes zeros.

    Args:
        q: [n, heads, dim], bf16, fp16 or fp32; any strides but 1 of the last dimension.
        kv: [num_blocks, 2, kv_heads, block_tokens, dim], one layer's view of the cache, in q's dtype; a head's
            [block_tokens, dim] contiguous; block_tokens a power of two. May hold anything, NaN too, where no token is.
        tables: [blocks] int32, each row's blocks in order, one row after the other. Not range-checked.
        first_blocks: [n + 1] int32, where each row's blocks begin in `tables`.
        items: [at least num_items, 3] int32, contiguous, of `decode_items`.
        first_items: [n + 1] int32, of `decode_items`; equal entries: a row without items.
        num_items: [1] int32, on the device, so that a graph's launch need not know it.
        scratch: of `decode_scratch` for at least as many items.
        num_programs: of `num_programs`; any number gives the same bits.
        config: tile sizes other than the chosen ones.
        out: [n, heads, dim] contiguous, to write into; None: a new one.
    Returns:
        [n, heads, dim], softmax and sums in float32.
    Raises:
        ValueError: q's or kv's layout or dtype is another, or the count of heads is not a multiple of kv's.
    Source: Flash-Decoding (Dao et al., 2023) over the paged KV of PagedAttention (Kwon et al., SOSP 2023).
    """
    check_paged(q, kv)
    n, num_heads, dim = q.shape
    if out is None:
        out = torch.empty((n, num_heads, dim), dtype=q.dtype, device=q.device)
    config = config or _config(arch_of(q.device), q.dtype, dim)
    _decode_attention_kernel[(num_programs,)](
        q,
        kv,
        out,
        scratch,
        tables,
        first_blocks,
        items,
        first_items,
        num_items,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        **_constants(num_heads, kv.shape[2], dim, kv.shape[3], q.dtype),
        **config.tiles,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    _merge_items_kernel[(n, num_heads)](
        scratch,
        first_items,
        out,
        **_merge_constants(num_heads, dim),
        num_warps=_MERGE.num_warps,
        num_stages=_MERGE.num_stages,
    )
    return out


@functools.cache
def _constants(num_heads: int, num_kv_heads: int, dim: int, block_tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    group = num_heads // num_kv_heads
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "GROUP_TILE": max(16, round_up_to_power_of_2(group)),
        "DIM": dim,
        "WIDTH": round_up_to_power_of_2(dim),
        "BLOCK_TOKENS": block_tokens,
        "SCRATCH_ROW": dim + _STATISTICS,
        "PRECISION": dot_precision(dtype),
    }


@functools.cache
def _merge_constants(num_heads: int, dim: int) -> dict[str, int]:
    return {
        "NUM_HEADS": num_heads,
        "DIM": dim,
        "WIDTH": round_up_to_power_of_2(dim),
        "SCRATCH_ROW": dim + _STATISTICS,
        "SPLITS": MAX_SPLITS,
    }


@functools.cache
def _config(arch: Arch, dtype: torch.dtype, dim: int) -> Config:
    if dtype == torch.float32:
        return _tiles(16, 4, 1) if arch is GFX942 and dim > 128 else _tiles(32, 4, 2)
    if arch is GFX942:
        return _tiles(32, 4, 2)
    return _tiles(64, 4, 3) if dim <= 128 else _tiles(32, 4, 3)


@functools.cache
def _per_multiprocessor(arch: Arch, dtype: torch.dtype, dim: int) -> int:
    """Programs at one time: as many as find room, but no more than it takes to hide each other's waits."""
    if arch is GFX942:  # its registers, or for wide rows of float32 its shared memory, have room for
        return 2 if dim > 128 else 1 if dtype == torch.float32 and dim > 64 else 3
    config, width = _config(arch, dtype, dim), round_up_to_power_of_2(dim)
    block_n, stages = config.tiles["BLOCK_N"], config.num_stages - 1
    shared_bytes = (stages * 2 * block_n * width + 16 * width + 16 * block_n) * dtype.itemsize + (1 << 10)
    return min(4, arch.shared_total_bytes // shared_bytes)


def _candidates(arch: Arch) -> tuple[Config, ...]:
    """For a dimension of 128 and 16-bit elements."""
    if arch is GFX942:
        return (_tiles(32, 4, 1),)
    return _tiles(32, 4, 4), _tiles(64, 4, 4), _tiles(128, 4, 2), _tiles(128, 4, 3)


def _tiles(block_n: int, num_warps: int, num_stages: int) -> Config:
    return Config({"BLOCK_N": block_n}, num_warps, num_stages)


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form of the kernels that `arch` compiles, for blocks of 16 tokens and 4 query heads to a KV head."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim in (64, 80, 96, 128, 256):
            yield _variant(_config(arch, dtype, dim), dtype, dim, is_chosen=True)
            yield _merge_variant(dtype, dim)
    for config in _candidates(arch):
        yield _variant(config, torch.bfloat16, 128, is_chosen=False)


def _variant(config: Config, dtype: torch.dtype, dim: int, is_chosen: bool) -> Variant:
    label = f"d{dim}-{TRITON_TYPES[dtype]}"
    if not is_chosen:
        label += f"-n{config.tiles['BLOCK_N']}w{config.num_warps}s{config.num_stages}"
    constants = {**_constants(32, 8, dim, 16, dtype), **config.tiles}
    indices = ("tables_ptr", "first_blocks_ptr", "items_ptr", "first_items_ptr", "num_items_ptr")
    strides = ("stride_q_row", "stride_q_head", "stride_block", "stride_kv", "stride_kv_head")
    return Variant(
        kernel=_decode_attention_kernel,
        label=label,
        signature={
            **dict.fromkeys(("q_ptr", "kv_ptr", "out_ptr"), f"*{TRITON_TYPES[dtype]}"),
            "scratch_ptr": "*fp32",
            **dict.fromkeys(indices, "*i32"),
            **dict.fromkeys(strides, "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        config=config,
        is_chosen=is_chosen,
        aligned=frozenset(strides),
    )


def _merge_variant(dtype: torch.dtype, dim: int) -> Variant:
    constants = _merge_constants(32, dim)
    pointers = {"scratch_ptr": "*fp32", "first_items_ptr": "*i32", "out_ptr": f"*{TRITON_TYPES[dtype]}"}
    return Variant(
        kernel=_merge_items_kernel,
        label=f"d{dim}-{TRITON_TYPES[dtype]}-merge",
        signature={**pointers, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        config=_MERGE,
    )
