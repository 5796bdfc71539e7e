"""From a projection to rotated queries and a longer cache: split, per-head norm, rotation and KV write in one pass."""

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.variant import TRITON_TYPES, Arch, Config, Variant, arch_of, round_up_to_power_of_2
from kernels.kv_write import kv_write_ref
from kernels.rms_norm import rms_norm_ref
from kernels.rope import rope_ref


def qkv_rope_write_ref(
    qkv: Tensor,
    kv: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    cos: Tensor,
    sin: Tensor,
    angle_rows: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    has_rope: bool,
) -> Tensor:
    """The specification: what it is made of, one after the other, each rounded to qkv's dtype."""
    num_kv_heads, dim = kv.shape[2], kv.shape[4]
    q, k, v = qkv.view(len(qkv), -1, dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_ref(q, q_norm, eps), rms_norm_ref(k, k_norm, eps)
    is_real = blocks >= 0
    if has_rope:
        rows = angle_rows.masked_fill(~is_real, 0)
        q, k = rope_ref(q, cos[rows], sin[rows]), rope_ref(k, cos[rows], sin[rows])
    kv_write_ref(kv, k[is_real], v[is_real], blocks[is_real], offsets[is_real])
    queries: Tensor = q.masked_fill(~is_real[:, None, None], 0.0)
    return queries


@triton.jit
def _sum_of_squares(x):
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit
def _for_each_head(ptrs, mask, TILE_HEADS: tl.constexpr):
    # Loaded as often as there are heads, which one warp's threads do at once: a single row would have to be handed from
    # thread to thread through shared memory.
    shape: tl.constexpr = (TILE_HEADS, ptrs.shape[0])
    return tl.load(ptrs[None, :].broadcast_to(shape), mask=mask[None, :].broadcast_to(shape), other=0.0)


@triton.jit
def _normalised(x, scale, weight_ptrs, mask):
    weight = _for_each_head(weight_ptrs, mask, x.shape[0]).to(tl.float32)
    return (x.to(tl.float32) * scale * weight).to(x.dtype)


@triton.jit
def _qkv_rope_write_kernel(
    qkv_ptr,
    kv_ptr,
    blocks_ptr,
    offsets_ptr,
    cos_ptr,
    sin_ptr,
    angle_rows_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    eps,
    block_stride,
    kind_stride,
    head_stride,
    token_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # 0: no rotation
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    # A program has a few heads of one token, all of them queries, keys or values, in this order of groups. A head is in
    # three parts, the two that rotate with each other and the rest: so no lane needs what another one holds.
    q_groups: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    kv_groups: tl.constexpr = (KV_HEADS + TILE_HEADS - 1) // TILE_HEADS
    num_groups: tl.constexpr = q_groups + 2 * kv_groups
    has_rest: tl.constexpr = 2 * HALF < DIM
    token = (tl.program_id(0) // num_groups).to(tl.int64)  # int64: 131,072 rows of 16,384 pass 2**31
    group = tl.program_id(0) % num_groups
    # What other addresses wait for comes first.
    block = tl.load(blocks_ptr + token).to(tl.int64)  # int64: block * block_stride passes 2**31 in a 4 GiB bf16 cache
    offset = tl.load(offsets_ptr + token)
    if HALF > 0:
        angle_row = tl.load(angle_rows_ptr + token).to(tl.int64)
    is_real = block >= 0
    is_q = group < q_groups
    is_v = group >= q_groups + kv_groups
    first_head = tl.where(is_q, group, tl.where(is_v, group - kv_groups, group) - q_groups) * TILE_HEADS
    heads = (first_head + tl.arange(0, TILE_HEADS))[:, None]
    skipped = tl.where(is_q, 0, tl.where(is_v, HEADS + KV_HEADS, HEADS))
    mask = heads < tl.where(is_q, HEADS, KV_HEADS)

    half_cols = tl.arange(0, HALF_LANES)
    half_mask = half_cols < HALF
    rest_cols = 2 * HALF + tl.arange(0, REST_LANES)
    rest_mask = rest_cols < DIM
    rows = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * DIM) + (skipped + heads) * DIM
    if HALF > 0:
        first = tl.load(rows + half_cols[None, :], mask=mask & half_mask[None, :], other=0.0)
        second = tl.load(rows + HALF + half_cols[None, :], mask=mask & half_mask[None, :], other=0.0)
    if has_rest:
        rest = tl.load(rows + rest_cols[None, :], mask=mask & rest_mask[None, :], other=0.0)

    if not is_v:
        if HALF > 0:
            # A padding row's place in the tables is anything.
            angles = angle_row * HALF + half_cols
            cos = _for_each_head(cos_ptr + angles, half_mask & is_real, TILE_HEADS)
            sin = _for_each_head(sin_ptr + angles, half_mask & is_real, TILE_HEADS)
        if q_norm_ptr is not None:
            norm_ptr = tl.where(is_q, q_norm_ptr, k_norm_ptr)
            total = tl.zeros((TILE_HEADS,), tl.float32)
            if HALF > 0:
                total += _sum_of_squares(first) + _sum_of_squares(second)
            if has_rest:
                total += _sum_of_squares(rest)
            scale = tl.rsqrt(total / DIM + eps)[:, None]
            if HALF > 0:
                first = _normalised(first, scale, norm_ptr + half_cols, half_mask)
                second = _normalised(second, scale, norm_ptr + HALF + half_cols, half_mask)
            if has_rest:
                rest = _normalised(rest, scale, norm_ptr + rest_cols, rest_mask)
        if HALF > 0:
            x, y = first.to(tl.float32), second.to(tl.float32)
            first = (x * cos - y * sin).to(first.dtype)
            second = (y * cos + x * sin).to(second.dtype)

    place = block * block_stride + tl.where(is_v, kind_stride, 0) + offset * token_stride
    out = tl.where(is_q, q_ptr + token * (HEADS * DIM), kv_ptr + place) + heads * tl.where(is_q, DIM, head_stride)
    mask &= is_q | is_real
    if HALF > 0:
        tl.store(out + half_cols[None, :], tl.where(is_real, first, 0.0), mask=mask & half_mask[None, :])
        tl.store(out + HALF + half_cols[None, :], tl.where(is_real, second, 0.0), mask=mask & half_mask[None, :])
    if has_rest:
        tl.store(out + rest_cols[None, :], tl.where(is_real, rest, 0.0), mask=mask & rest_mask[None, :])


def qkv_rope_write(
    qkv: Tensor,
    kv: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    cos: Tensor,
    sin: Tensor,
    angle_rows: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    has_rope: bool,
    config: Config | None = None,
) -> Tensor:
    """Split a projection into heads, normalise and rotate queries and keys, and store keys and values in the cache.

    A row whose block is negative is padding: whatever its other values, zeros go to its queries and nothing elsewhere.

    Args:
        qkv: [n, (num_heads + 2 * kv_heads) * dim] bfloat16, float16 or float32, contiguous: queries, keys, values.
        kv: [num_blocks, 2, kv_heads, block_tokens, dim] in qkv's dtype, the last dimension contiguous: one layer's view
            of the cache, written in place.
        blocks, offsets: [n] int32, block and token inside it; no slot twice. Not range-checked: that would need a sync.
        cos, sin: [rows, rotary_dim / 2] float32, contiguous; rotary_dim <= dim, further dimensions pass unchanged.
        angle_rows: [n] int32, each token's row of them; not range-checked. Without `has_rope` none of them is read.
        num_heads: query heads.
        q_norm, k_norm: [dim] in qkv's dtype, weights of the norm of each query and key head before it is rotated; or
            both None.
        eps: of these norms.
        has_rope: whether to rotate.
        config: instead of the chosen one, to time it.
    Returns:
        q [n, num_heads, dim] in qkv's dtype, contiguous. A row's result does not depend on the other rows.
    Raises:
        ValueError: `qkv`, `kv` and the angles do not fit each other or are not contiguous where they must be, or
            there is one norm without the other.
    Source: RoFormer (Su et al., 2021), in the half-split order of Hugging Face checkpoints; the cache of PagedAttention
        (Kwon et al., SOSP 2023).
    """
    num_kv_heads, dim = kv.shape[2], kv.shape[4]
    n, half = len(qkv), cos.shape[1] if has_rope else 0
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * dim or qkv.dtype != kv.dtype or 2 * half > dim:
        raise ValueError(
            f"need qkv [n, ({num_heads} + 2 * {num_kv_heads}) * {dim}] {kv.dtype} and angles up to {dim // 2}; "
            f"got {tuple(qkv.shape)} {qkv.dtype}, {half}"
        )
    if not (qkv.is_contiguous() and kv.stride(4) == 1 and cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(
            "need contiguous qkv, cos, sin and last dimension of kv; "
            f"got strides {qkv.stride()}, {cos.stride()}, {sin.stride()}, {kv.stride()}"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("need both norms or none")
    config = config or _config(arch_of(qkv.device), num_heads, num_kv_heads, dim, half)
    q = torch.empty((n, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    tile_heads = config.tiles["TILE_HEADS"]
    num_groups = -(-num_heads // tile_heads) + 2 * -(-num_kv_heads // tile_heads)
    _qkv_rope_write_kernel[(n * num_groups,)](
        qkv,
        kv,
        blocks,
        offsets,
        cos,
        sin,
        angle_rows,
        q_norm,
        k_norm,
        q,
        eps,
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        DIM=dim,
        HALF=half,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **config.tiles,
    )
    return q


@functools.cache
def _config(
    arch: Arch, num_heads: int, num_kv_heads: int, dim: int, half: int, tile_heads: int = 0, lane_elements: int = 16
) -> Config:
    # As many heads as there are keys': lanes of a wider tile would be empty. 16 elements a thread: one of 16-bit values
    # loads 16 bytes of each half at once.
    most = max(num_kv_heads, min(num_heads, 4))
    tile_heads = tile_heads or min(round_up_to_power_of_2(most), 8)
    half_lanes = round_up_to_power_of_2(max(half, 1))
    rest_lanes = round_up_to_power_of_2(max(dim - 2 * half, 1))
    elements = tile_heads * (2 * half_lanes if half else rest_lanes)
    return Config(
        {"HALF_LANES": half_lanes, "REST_LANES": rest_lanes, "TILE_HEADS": tile_heads},
        num_warps=max(1, elements // (lane_elements * arch.warp_size)),
    )


_HEADS = (32, 8)  # of the variants


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form of the kernel that `arch` compiles, for 32 heads that share 8."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim in (64, 80, 96, 128, 256):
            for has_norm in (False, True):
                yield _variant(_config(arch, *_HEADS, dim, dim // 2), dtype, dim, dim // 2, has_norm)
        yield _variant(_config(arch, *_HEADS, 128, 0), dtype, 128, 0, has_norm=False)  # a layer without positions
        # Three quarters of a head rotate.
        yield _variant(_config(arch, *_HEADS, 128, 48), dtype, 128, 48, has_norm=False)
        for tile_heads, lane_elements in ((4, 16), (16, 16), (16, 32)):
            config = _config(arch, *_HEADS, 128, 64, tile_heads, lane_elements)
            yield _variant(config, dtype, 128, 64, has_norm=True, is_chosen=False)


def _variant(
    config: Config, dtype: torch.dtype, dim: int, half: int, has_norm: bool, is_chosen: bool = True
) -> Variant:
    pointer = f"*{TRITON_TYPES[dtype]}"
    norm = pointer if has_norm else "constexpr"
    label = f"d{dim}-{TRITON_TYPES[dtype]}"
    label += "" if 2 * half == dim else f"-r{2 * half}"
    label += "-norm" if has_norm else ""
    label += "" if is_chosen else f"-h{config.tiles['TILE_HEADS']}w{config.num_warps}"
    strides = ("block_stride", "kind_stride", "head_stride", "token_stride")
    constants = {"HEADS": _HEADS[0], "KV_HEADS": _HEADS[1], "DIM": dim, "HALF": half, **config.tiles}
    return Variant(
        kernel=_qkv_rope_write_kernel,
        label=label,
        signature={
            "qkv_ptr": pointer,
            "kv_ptr": pointer,
            "blocks_ptr": "*i32",
            "offsets_ptr": "*i32",
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            "angle_rows_ptr": "*i32",
            "q_norm_ptr": norm,
            "k_norm_ptr": norm,
            "q_ptr": pointer,
            "eps": "fp32",
            **dict.fromkeys(strides, "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants if has_norm else {**constants, "q_norm_ptr": None, "k_norm_ptr": None},
        config=config,
        is_chosen=is_chosen,
        aligned=frozenset(strides),
    )
