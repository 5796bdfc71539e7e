"""Prefill attention over paged KV: the reference's numbers, and the same bits however a prompt is cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.gpu.prefill_attention import (
    packed_heads,
    prefill_attention,
    prefill_attention_varlen_ref,
    prefill_tiles,
    split_dim,
    tile_rows,
)
from kernels.gpu.variant import arch_of
from tests.gpu.paged import Paged, paged

pytestmark = pytest.mark.usefixtures("poisoned_empty")

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def tiles_of(x: Paged) -> Tensor:
    rows = tile_rows(arch_of(x.q.device), x.q.dtype, x.q.shape[2], x.q.shape[1] // x.kv.shape[2])
    tiles = prefill_tiles(x.first_rows.numpy(force=True), rows, x.starts.numpy(force=True))
    return torch.from_numpy(tiles).to(x.q.device)


def attend(x: Paged, window: int | None = None) -> Tensor:
    return prefill_attention(x.q, x.kv, x.tables, x.first_blocks, x.first_rows, x.starts, tiles_of(x), window)


def assert_is_reference(x: Paged, window: int | None = None) -> None:
    expected = prefill_attention_varlen_ref(x.q, x.kv, x.tables, x.first_blocks, x.first_rows, x.starts, window)
    tolerance = TOLERANCES[x.q.dtype]
    torch.testing.assert_close(attend(x, window), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_size_and_dtype_is_the_reference(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    assert_is_reference(paged(device, [(0, 17), (63, 1), (40, 30)], (2, 1), dim=dim, dtype=dtype))


@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (64, 8), (28, 4), (1, 1), (17, 1), (6, 6)], ids=str)
def test_every_grouping_of_heads_is_the_reference(device: torch.device, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_is_reference(paged(device, [(0, 1), (30, 15)], heads))


@pytest.mark.parametrize("block_tokens", [1, 16, 64, 256])
@pytest.mark.parametrize("window", [None, 1, 17, 100])
def test_every_size_of_block_and_window_is_the_reference(
    device: torch.device, block_tokens: int, window: int | None
) -> None:
    torch.manual_seed(0)
    chunks = [(0, 1), (15, 2), (16, 16), (31, 1), (47, 33), (127, 1), (128, 5)]
    assert_is_reference(paged(device, chunks, (3, 1), block_tokens=block_tokens, window=window), window)


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, rows) for rows in (1, 15, 16, 17, 63, 100)],
        [(15, 17), (16, 1), (17, 15), (63, 16), (100, 63), (1000, 1), (1000, 17)],
    ],
    ids=["prompts", "after a prefix"],
)
def test_every_length_is_the_reference(device: torch.device, chunks: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    assert_is_reference(paged(device, chunks, (2, 1)))


def test_a_long_prompt_is_the_reference(device: torch.device) -> None:
    torch.manual_seed(0)
    assert_is_reference(paged(device, [(0, 1000)], (2, 1), dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("window", "dtype"),
    [(None, torch.float32), (None, torch.bfloat16), (1, torch.bfloat16), (17, torch.float32), (90, torch.bfloat16)],
)
def test_a_prompt_cut_anyhow_is_the_prompt_at_once_bit_for_bit(
    device: torch.device, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = paged(device, [(10, 120), (0, 40)], (3, 1), dtype=dtype)
    whole = attend(x, window)
    for cuts in ([1, 2, 3, 120], [53, 54, 55, 120], [17, 100, 120]):
        for first, end in zip([0, *cuts], cuts, strict=False):
            assert torch.equal(attend(x.only(0, slice(first, end)), window), whole[first:end]), (first, end)
    assert torch.equal(attend(x.only(1), window), whole[120:])


def test_rows_of_sequences_without_tiles_keep_what_they_hold(device: torch.device) -> None:
    torch.manual_seed(0)
    x = paged(device, [(7, 1), (0, 40), (20, 3)])
    out = torch.full((len(x.q), 4, 64), 7.0, device=device)
    tiles = tiles_of(x)
    tiles = tiles[tiles[:, 0] != 0]
    given_back = prefill_attention(x.q, x.kv, x.tables, x.first_blocks, x.first_rows, x.starts, tiles, None, out=out)
    assert given_back is out
    assert (out[:1] == 7).all()
    assert torch.equal(out[1:], attend(x)[1:])


def test_no_tiles_are_no_work(device: torch.device) -> None:
    x = paged(device, [(0, 3)])
    none = torch.empty((0, 2), dtype=torch.int32, device=device)
    out = prefill_attention(x.q, x.kv, x.tables, x.first_blocks, x.first_rows, x.starts, none, None)
    assert out.isnan().all()


@settings(max_examples=8, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=4),
    block_tokens=st.sampled_from([1, 4, 16, 128]),
    window=st.none() | st.integers(1, 200),
)
def test_any_batch_is_the_reference(
    chunks: list[tuple[int, int]], block_tokens: int, window: int | None, device: torch.device
) -> None:
    torch.manual_seed(0)
    assert_is_reference(paged(device, chunks, (2, 1), block_tokens=block_tokens, window=window), window)


@given(
    chunks=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 300)), max_size=6),
    tile=st.sampled_from([1, 16, 42, 128]),
)
def test_tiles_cover_each_row_once_and_the_longest_come_first(chunks: list[tuple[int, int]], tile: int) -> None:
    starts, lens = np.array(chunks, np.int32).reshape(-1, 2).T
    tiles = prefill_tiles(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32), tile, starts)
    assert tiles.dtype == np.int32
    assert sorted(map(tuple, tiles.tolist())) == [(s, row) for s, n in enumerate(lens) for row in range(0, n, tile)]
    work = starts[tiles[:, 0]] + tiles[:, 1]
    assert (np.diff(work) <= 0).all()


@pytest.mark.parametrize(("queries", "packed"), [(1, 1), (3, 3), (7, 7), (8, 8), (17, 1), (32, 16), (24, 12)])
def test_packed_heads_divide_a_kv_heads_queries(queries: int, packed: int) -> None:
    assert packed_heads(queries) == packed


@pytest.mark.parametrize(
    ("dim", "parts"),
    [(64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (112, (128, 0)), (128, (128, 0)), (192, (128, 64))],
)
def test_a_head_splits_into_powers_of_two(dim: int, parts: tuple[int, int]) -> None:
    assert split_dim(dim) == parts


def test_a_cache_of_another_dtype_or_layout_is_refused(device: torch.device) -> None:
    x = paged(device, [(0, 3)], block_tokens=16, heads=(16, 16))
    rest = (x.tables, x.first_blocks, x.first_rows, x.starts, tiles_of(x), None)
    with pytest.raises(ValueError, match="does not fit"):
        prefill_attention(x.q, x.kv.half(), *rest)
    with pytest.raises(ValueError, match="contiguous"):
        prefill_attention(x.q, x.kv.transpose(2, 3), *rest)
