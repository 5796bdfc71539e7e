"""Whole KV blocks out of the cache into one buffer, and back: what a transfer sends and receives."""

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.variant import Arch, Config, Variant, arch_of, round_up_to_power_of_2

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}  # by their bytes
_TRITON_NAMES = {8: "i64", 4: "i32", 2: "i16", 1: "u8"}


def pack_blocks_ref(cache: Tensor, block_ids: Tensor) -> Tensor:
    """The specification of gathering."""
    return cache[block_ids.long()]


def unpack_blocks_ref(packed: Tensor, block_ids: Tensor, cache: Tensor) -> None:
    """The specification of scattering."""
    cache[block_ids.long()] = packed


@triton.jit
def _copy_blocks_kernel(source_ptr, target_ptr, ids_ptr, block_words, IS_GATHER: tl.constexpr, TILE: tl.constexpr):
    # One grid axis, a block's tiles one after the other: a second axis ends at 65,535 blocks, and neighbours on the
    # device stay in one page of memory.
    num_tiles = tl.cdiv(block_words, TILE)
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    words = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
    mask = words < block_words
    block = tl.load(ids_ptr + row).to(tl.int64)  # int64: id * block_words passes 2**31 in a cache of 16 GiB
    if IS_GATHER:
        source, target = block, row
    else:
        source, target = row, block
    tile = tl.load(source_ptr + source * block_words + words, mask=mask, other=0)
    tl.store(target_ptr + target * block_words + words, tile, mask=mask)


def pack_blocks(cache: Tensor, block_ids: Tensor, out: Tensor | None = None, config: Config | None = None) -> Tensor:
    """Gather scattered KV blocks into one buffer that a single send can carry: out[i] = cache[block_ids[i]].

    Args:
        cache: [num_blocks, ...], contiguous, any dtype.
        block_ids: [n] int32, each in [0, num_blocks); repeats allowed. Not range-checked: that would need a sync.
        out: [n, ...], contiguous, the buffer to fill; None: a new one.
        config: instead of the chosen one, to time it.
    Returns:
        [n, ...] on the same device, equal to `pack_blocks_ref` bit for bit; `out` where it is given.
    Raises:
        ValueError: a tensor is not contiguous, `block_ids` is not int32, or `out` does not fit.
    Source: the batched block copy of PagedAttention (Kwon et al., SOSP 2023).
    """
    if out is None:
        out = torch.empty((len(block_ids), *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
    _check(cache, block_ids, out)
    _copy(cache, out, block_ids, True, config)
    return out


def unpack_blocks(packed: Tensor, block_ids: Tensor, cache: Tensor, config: Config | None = None) -> None:
    """Scatter what one receive brought into its KV blocks, in place: cache[block_ids[i]] = packed[i].

    Args:
        packed: [n, ...], contiguous, in cache's dtype.
        block_ids: [n] int32, distinct, each in [0, num_blocks). Neither is checked: that would need a sync.
        cache: [num_blocks, ...], contiguous, any dtype.
        config: instead of the chosen one, to time it.
    Raises:
        ValueError: a tensor is not contiguous, `block_ids` is not int32, or `packed` does not fit.
    Source: the batched block copy of PagedAttention (Kwon et al., SOSP 2023).
    """
    _check(cache, block_ids, packed)
    _copy(packed, cache, block_ids, False, config)


def _check(cache: Tensor, block_ids: Tensor, packed: Tensor) -> None:
    if block_ids.dtype != torch.int32 or not (
        cache.is_contiguous() and packed.is_contiguous() and block_ids.is_contiguous()
    ):
        raise ValueError(
            f"need contiguous tensors and int32 ids; got strides {cache.stride()}, {packed.stride()}, "
            f"{block_ids.stride()} and {block_ids.dtype}"
        )
    if packed.dtype != cache.dtype or packed.shape != (len(block_ids), *cache.shape[1:]):
        raise ValueError(
            f"need {len(block_ids)} blocks {tuple(cache.shape[1:])} {cache.dtype}; "
            f"got {tuple(packed.shape)} {packed.dtype}"
        )


def _copy(source: Tensor, target: Tensor, block_ids: Tensor, is_gather: bool, config: Config | None) -> None:
    if source.numel() == 0 or target.numel() == 0:
        return
    block_bytes = source.nbytes // len(source)
    # The widest word that both ends and every block between begin at.
    edges = block_bytes | source.data_ptr() | target.data_ptr()
    word_bytes = min(edges & -edges, 8)
    block_words = block_bytes // word_bytes
    config = config or _config(arch_of(source.device), block_words)
    _copy_blocks_kernel[(len(block_ids) * -(-block_words // config.tiles["TILE"]),)](
        triton.reinterpret(source, _WORDS[word_bytes]),
        triton.reinterpret(target, _WORDS[word_bytes]),
        block_ids,
        block_words,
        IS_GATHER=is_gather,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **config.tiles,
    )


@functools.cache
def _config(arch: Arch, block_words: int) -> Config:
    # 8 words of 8 bytes a thread: four loads of 16 bytes at once, so that half of a multiprocessor's threads already
    # ask for more bytes than reach it in the time of one.
    tile = min(2048, round_up_to_power_of_2(block_words))
    return Config({"TILE": tile}, num_warps=max(1, tile // 8 // arch.warp_size))


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form of the kernel that `arch` compiles."""
    for is_gather in (True, False):
        for word_bytes in _WORDS:
            yield _variant(_config(arch, 1 << 18), word_bytes, is_gather, is_chosen=True)
        for tile, lane_words in ((1024, 8), (2048, 16), (4096, 16)):
            config = Config({"TILE": tile}, num_warps=tile // lane_words // arch.warp_size)
            yield _variant(config, 8, is_gather, is_chosen=False)


def _variant(config: Config, word_bytes: int, is_gather: bool, is_chosen: bool) -> Variant:
    pointer = f"*{_TRITON_NAMES[word_bytes]}"
    label = f"{'pack' if is_gather else 'unpack'}-{_TRITON_NAMES[word_bytes]}"
    return Variant(
        kernel=_copy_blocks_kernel,
        label=label if is_chosen else f"{label}-t{config.tiles['TILE']}w{config.num_warps}",
        signature={
            "source_ptr": pointer,
            "target_ptr": pointer,
            "ids_ptr": "*i32",
            "block_words": "i32",
            "IS_GATHER": "constexpr",
            "TILE": "constexpr",
        },
        constants={"IS_GATHER": is_gather, **config.tiles},
        config=config,
        is_chosen=is_chosen,
        aligned=frozenset({"block_words"} if word_bytes == 8 else ()),
    )
