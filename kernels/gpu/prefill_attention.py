"""Attention of many sequences' chunks over their paged KV, in one launch: what came before each chunk, and the chunk.

A program attends with one tile of a sequence's queries: consecutive tokens, each with some of the query heads that
share one KV head (so that short chunks and single tokens fill a tile, and read their keys once). It walks that
sequence's keys in tiles that begin at multiples of BLOCK_N of the sequence, from the first one its rows may see. So a
row's sums are the same bits however the prompt was cut into chunks and whatever else is in the batch: a tile of which
it may see nothing changes nothing.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kernels.gpu.variant import (
    GFX942,
    SM_80,
    SM_90,
    TRITON_TYPES,
    Arch,
    Config,
    Variant,
    arch_of,
    round_up_to_power_of_2,
)
from kernels.prefill_attention import prefill_attention_ref

Ints = NDArray[np.int32]

_MAX_PACKED_HEADS = 16  # of one KV head in one tile; more would leave a tile too few tokens


def prefill_attention_varlen_ref(
    q: Tensor, kv: Tensor, tables: Tensor, first_blocks: Tensor, first_rows: Tensor, starts: Tensor, window: int | None
) -> Tensor:
    """The specification, one sequence after the other; arguments as `prefill_attention` has them."""
    outs = []
    for sequence, start in enumerate(starts.tolist()):
        rows = slice(int(first_rows[sequence]), int(first_rows[sequence + 1]))
        table = tables[int(first_blocks[sequence]) : int(first_blocks[sequence + 1])].long()
        outs.append(prefill_attention_ref(q[rows], kv, table, start, window))
    return torch.cat(outs)


@triton.jit
def load_blocks(tables, n0, first_key, end_key, BLOCK_N: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """The blocks of the tokens from n0, [BLOCK_N] int32, or the one that has them all; n0 divides by BLOCK_N."""
    if BLOCK_TOKENS >= BLOCK_N:
        blocks = tl.load(tables + n0 // BLOCK_TOKENS, mask=n0 < end_key, other=0)
    else:
        slots = n0 // BLOCK_TOKENS + tl.arange(0, BLOCK_N) // BLOCK_TOKENS
        # Of whole blocks, not of tokens: a thread then loads the block of several of its tokens once.
        is_seen = (slots >= first_key // BLOCK_TOKENS) & (slots * BLOCK_TOKENS < end_key)
        blocks = tl.load(tables + slots, mask=is_seen, other=0)
    return blocks


@triton.jit
def token_offsets(blocks, n0, stride_block, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """[BLOCK_N] int64: where the tokens from n0 are, in elements after the first block of the cache."""
    lanes = tl.arange(0, BLOCK_N)
    if BLOCK_TOKENS >= BLOCK_N:
        offsets = blocks.to(tl.int64) * stride_block + (n0 % BLOCK_TOKENS + lanes) * DIM
    else:
        offsets = blocks.to(tl.int64) * stride_block + (lanes % BLOCK_TOKENS) * DIM
    return offsets


@triton.jit
def load_tokens(base, offsets, columns, is_seen, DIM: tl.constexpr, IS_PADDED: tl.constexpr):
    """[tokens, columns] of one head: zeros for a token not seen, which may hold NaN, and past the head's end."""
    pointers = base + offsets[:, None] + columns[None, :]
    if is_seen is None and not IS_PADDED:
        tile = tl.load(pointers)
    elif is_seen is None:
        tile = tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)
    elif IS_PADDED:
        tile = tl.load(pointers, mask=is_seen[:, None] & (columns < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers, mask=is_seen[:, None], other=0.0)
    return tile


@triton.jit(do_not_specialize=["window"])
def _prefill_attention_kernel(
    q_ptr, kv_ptr, out_ptr, tables_ptr, first_blocks_ptr, first_rows_ptr, starts_ptr, tiles_ptr, window,
    stride_q_row, stride_q_head, stride_out_row, stride_block, stride_kv, stride_kv_head,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, IS_WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    SCALE: tl.constexpr = DIM**-0.5 * 1.4426950408889634  # of exp2
    TILE_ROWS: tl.constexpr = BLOCK_M // PACKED
    # Heads before tiles: programs that run at one time read the same sequence's keys, and the longest tiles go first.
    tile = tl.program_id(0) // (NUM_HEADS // PACKED)
    head = tl.program_id(0) % (NUM_HEADS // PACKED) * PACKED
    sequence = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    sequence_row = tl.load(first_rows_ptr + sequence)
    num_rows = tl.minimum(tl.load(first_rows_ptr + sequence + 1) - sequence_row - first, TILE_ROWS)
    first_position = tl.load(starts_ptr + sequence) + first
    tables_ptr += tl.load(first_blocks_ptr + sequence)

    m = tl.arange(0, BLOCK_M)
    tile_row = tl.minimum(m // PACKED, num_rows - 1)  # past the last one, copies of it, which are not stored
    is_stored = m < num_rows * PACKED
    positions = first_position + tile_row
    rows = (sequence_row + first + tile_row).to(tl.int64)
    heads = head + m % PACKED
    columns = tl.arange(0, WIDTH)
    q_rows = rows * stride_q_row + heads * stride_q_head
    q = load_tokens(q_ptr, q_rows, columns, None, DIM, WIDTH > DIM)
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    if REST:
        rest_columns = tl.arange(0, REST)
        q_rest = load_tokens(q_ptr + WIDTH, q_rows, rest_columns, None, DIM, False)
        acc_rest = tl.zeros((BLOCK_M, REST), tl.float32)
    # Finite, so that a row that has seen nothing yet has no NaN: it keeps exp2(0) of its zeros.
    best = tl.full((BLOCK_M,), -1e38, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)

    keys_ptr = kv_ptr + (head // GROUP).to(tl.int64) * stride_kv_head
    first_key = 0
    end_key = first_position + num_rows
    full_lo = 0  # from here every row sees every key
    full_hi = (first_position + 1) // BLOCK_N * BLOCK_N  # up to here
    if IS_WINDOWED:
        first_key = tl.maximum(first_position + 1 - window, 0)
        full_lo = end_key - window
    lo = first_key // BLOCK_N * BLOCK_N
    blocks = load_blocks(tables_ptr, lo, first_key, end_key, BLOCK_N, BLOCK_TOKENS)
    for n0 in tl.range(lo, end_key, BLOCK_N):
        keys = n0 + tl.arange(0, BLOCK_N)
        is_seen = keys < end_key
        if IS_WINDOWED:
            is_seen &= keys >= first_key
        offsets = token_offsets(blocks, n0, stride_block, DIM, BLOCK_N, BLOCK_TOKENS)
        # A tile ahead: the loads of keys, which the compiler starts two tiles ahead, would else wait for these.
        blocks = load_blocks(tables_ptr, n0 + BLOCK_N, first_key, end_key, BLOCK_N, BLOCK_TOKENS)
        k = load_tokens(keys_ptr, offsets, columns, None, DIM, WIDTH > DIM)
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if REST:
            k_rest = load_tokens(keys_ptr + WIDTH, offsets, rest_columns, None, DIM, False)
            scores = tl.dot(q_rest, k_rest.T, scores, input_precision=PRECISION)
        scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
        # A branch, not a second loop: each loop would fill and drain its pipeline of loads anew.
        if (n0 < full_lo) | (n0 >= full_hi):
            is_visible = keys[None, :] <= positions[:, None]
            if IS_WINDOWED:
                is_visible &= keys[None, :] > positions[:, None] - window
            scores = tl.where(is_visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * SCALE)
        weights = tl.exp2(tl.fma(scores, SCALE, -new_best[:, None]))
        decay = tl.exp2(best - new_best)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        best = new_best
        # A token that no row sees has weight zero, but zero times a stale NaN is NaN.
        v = load_tokens(keys_ptr + stride_kv, offsets, columns, is_seen, DIM, WIDTH > DIM)
        weights = weights.to(v.dtype)
        acc = tl.dot(weights, v, acc * decay[:, None], input_precision=PRECISION)
        if REST:
            v_rest = load_tokens(keys_ptr + stride_kv + WIDTH, offsets, rest_columns, is_seen, DIM, False)
            acc_rest = tl.dot(weights, v_rest, acc_rest * decay[:, None], input_precision=PRECISION)

    out_rows = rows * stride_out_row + heads * DIM  # as constants they take more registers
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_rows[:, None] + columns[None, :], out, mask=is_stored[:, None] & (columns < DIM)[None, :])
    if REST:
        rest = (acc_rest / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + WIDTH + out_rows[:, None] + rest_columns[None, :], rest, mask=is_stored[:, None])


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    first_blocks: Tensor,
    first_rows: Tensor,
    starts: Tensor,
    tiles: Tensor,
    window: int | None,
    config: Config | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with the tokens of many sequences' chunks; their own keys and values are in the cache already.

    Args:
        q: [n, heads, dim], bf16, fp16 or fp32; any strides but 1 of the last dimension.
        kv: [num_blocks, 2, kv_heads, block_tokens, dim], one layer's view of the cache, in q's dtype; a head's
            [block_tokens, dim] contiguous; block_tokens a power of two. May hold anything, NaN too, where no token is.
        tables: [blocks] int32, each sequence's blocks in order, one sequence after the other. Not range-checked.
        first_blocks: [s + 1] int32, where each sequence's blocks begin in `tables`.
        first_rows: [s + 1] int32, where each sequence's tokens begin in the n.
        starts: [s] int32, tokens of each sequence before these.
        tiles: [t, 2] int32, of `prefill_tiles` for the `tile_rows` of q's dtype and heads.
        window: a token sees at most this many tokens, itself included, at least 1; None: all.
        config: tile sizes other than the chosen ones; `tiles` must be made for its BLOCK_M.
        out: [n, heads, dim] contiguous, to write into; None: a new one.
    Returns:
        [n, heads, dim], softmax and sums in float32; rows of sequences without tiles are not written.
    Raises:
        ValueError: q's or kv's layout or dtype is another, or a count of heads is not a multiple of kv's.
    Source: FlashAttention-2 (Dao, ICLR 2024) over the paged KV of PagedAttention (Kwon et al., SOSP 2023).
    """
    check_paged(q, kv)
    _, num_heads, dim = q.shape
    if out is None:
        out = torch.empty((len(q), num_heads, dim), dtype=q.dtype, device=q.device)
    config = config or _config(arch_of(q.device), q.dtype, dim)
    constants = _constants(num_heads, kv.shape[2], dim, kv.shape[3], window is not None, q.dtype)
    if len(tiles):
        _prefill_attention_kernel[(len(tiles) * (num_heads // constants["PACKED"]),)](
            q,
            kv,
            out,
            tables,
            first_blocks,
            first_rows,
            starts,
            tiles,
            window or 0,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            kv.stride(0),
            kv.stride(1),
            kv.stride(2),
            **constants,
            **config.tiles,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


def prefill_tiles(first_rows: Ints, tile_rows: int, starts: Ints) -> Ints:
    """Cut chunks into the tiles that one program each attends with, those with the most keys first.

    Args:
        first_rows: [s + 1], where each sequence's tokens begin.
        tile_rows: of `tile_rows`.
        starts: [s] tokens of each sequence before these.
    Returns:
        [t, 2]: a tile's sequence and its first row among the sequence's. For only the last of a batch's sequences pass
        only their entries, and add the number of the others to the first column.
    """
    counts = -(-np.diff(first_rows) // tile_rows)
    sequences = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    rows = (np.arange(len(sequences), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_rows
    # The last programs to start should be the shortest: they decide how long the device waits half empty.
    order = np.argsort(-(rows + starts[sequences]), kind="stable")
    return np.stack((sequences[order], rows[order]), axis=1).astype(np.int32)


def tile_rows(arch: Arch, dtype: torch.dtype, dim: int, queries_per_kv: int) -> int:
    """Tokens of a sequence in one tile, for `prefill_tiles`."""
    return _config(arch, dtype, dim).tiles["BLOCK_M"] // packed_heads(queries_per_kv)


@functools.cache
def _constants(
    num_heads: int, num_kv_heads: int, dim: int, block_tokens: int, is_windowed: bool, dtype: torch.dtype
) -> dict[str, Any]:
    group = num_heads // num_kv_heads
    width, rest = split_dim(dim)
    return {
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "PACKED": packed_heads(group),
        "DIM": dim,
        "BLOCK_TOKENS": block_tokens,
        "WIDTH": width,
        "REST": rest,
        "IS_WINDOWED": is_windowed,
        "PRECISION": dot_precision(dtype),
    }


def packed_heads(queries_per_kv: int) -> int:
    """Query heads of one KV head in one tile: the most that divide all of them."""
    return max(heads for heads in range(1, _MAX_PACKED_HEADS + 1) if queries_per_kv % heads == 0)


def split_dim(dim: int) -> tuple[int, int]:
    """A head's dimensions as one or two powers of two, since products take no other sizes: 80 is 64 and 16, not 128."""
    width = round_up_to_power_of_2(dim)
    rest = dim - width // 2
    return (width // 2, rest) if rest >= 16 and rest == round_up_to_power_of_2(rest) and dim < width else (width, 0)


@functools.cache
def _config(arch: Arch, dtype: torch.dtype, dim: int) -> Config:
    if dtype == torch.float32:
        # No matrix units (but on CDNA): products unrolled in registers, so tiles that keep compiling in seconds.
        return _tiles(32, 32, 4, 2) if dim <= 128 else _tiles(32, 16, 4, 1)
    if arch is GFX942:
        return _tiles(128, 32, 4, 2) if dim <= 128 else _tiles(64, 32, 4, 1)
    if arch is SM_80:
        return _tiles(128, 64, 4, 3) if dim <= 64 else _tiles(128, 64, 8, 3) if dim <= 128 else _tiles(128, 32, 8, 2)
    # One program fills a multiprocessor: its two warp groups' products are as wide as registers allow.
    if dim <= 128:
        return _tiles(128, 128, 8, 3)
    return _tiles(128, 64, 8, 2) if arch is SM_90 else _tiles(64, 32, 4, 3)


def _candidates(arch: Arch) -> tuple[Config, ...]:
    """For a dimension of 128 and 16-bit elements."""
    if arch is GFX942:
        return _tiles(128, 64, 8, 1), _tiles(128, 32, 4, 1), _tiles(64, 64, 4, 2)
    if arch is SM_80:
        return _tiles(128, 32, 4, 3), _tiles(64, 64, 4, 3)
    # The first three let two programs share a multiprocessor: one multiplies while the other takes exponentials.
    return _tiles(128, 32, 4, 3), _tiles(64, 64, 4, 3), _tiles(128, 64, 4, 2), _tiles(128, 64, 8, 3)


def _tiles(block_m: int, block_n: int, num_warps: int, num_stages: int) -> Config:
    return Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps, num_stages)


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form of the kernel that `arch` compiles, for blocks of 16 tokens and 4 query heads to a KV head."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim in (64, 80, 96, 128, 256):
            for is_windowed in (False, True):
                yield _variant(_config(arch, dtype, dim), dtype, dim, is_windowed, is_chosen=True)
    for config in _candidates(arch):
        yield _variant(config, torch.bfloat16, 128, is_windowed=False, is_chosen=False)


def _variant(config: Config, dtype: torch.dtype, dim: int, is_windowed: bool, is_chosen: bool) -> Variant:
    label = f"d{dim}-{TRITON_TYPES[dtype]}" + "-window" * is_windowed
    if not is_chosen:
        label += f"-m{config.tiles['BLOCK_M']}n{config.tiles['BLOCK_N']}w{config.num_warps}s{config.num_stages}"
    constants = {**_constants(32, 8, dim, 16, is_windowed, dtype), **config.tiles}
    strides = ("stride_q_row", "stride_q_head", "stride_out_row", "stride_block", "stride_kv", "stride_kv_head")
    return Variant(
        kernel=_prefill_attention_kernel,
        label=label,
        signature={
            **dict.fromkeys(("q_ptr", "kv_ptr", "out_ptr"), f"*{TRITON_TYPES[dtype]}"),
            **dict.fromkeys(("tables_ptr", "first_blocks_ptr", "first_rows_ptr", "starts_ptr", "tiles_ptr"), "*i32"),
            **dict.fromkeys(("window", *strides), "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        config=config,
        is_chosen=is_chosen,
        aligned=frozenset(strides),
    )


def dot_precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies: float32 as it is; of 16-bit elements products are exact either way."""
    return "ieee" if dtype == torch.float32 else "tf32"


def check_paged(q: Tensor, kv: Tensor) -> None:
    """Refuse queries [n, heads, dim] and a cache [blocks, 2, kv_heads, block_tokens, dim] that no kernel here reads.

    Raises:
        ValueError: q's or kv's layout or dtype is another, or the count of heads is not a multiple of kv's.
    """
    _, num_heads, dim = q.shape
    if kv.shape[-1] != dim or kv.dtype != q.dtype or num_heads % kv.shape[2]:
        raise ValueError(f"kv {tuple(kv.shape)} {kv.dtype} does not fit q {tuple(q.shape)} {q.dtype}")
    if q.stride(2) != 1 or kv.stride(4) != 1 or kv.stride(3) != dim:
        raise ValueError(f"need contiguous rows of q and heads of kv; got strides {q.stride()}, {kv.stride()}")
