"""Decode attention over paged KV: the reference's numbers, and a row's bits whatever else is in the batch."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.decode_attention import decode_attention_ref
from kernels.gpu.decode_attention import MAX_SPLITS, decode_attention, decode_items, decode_scratch, max_items
from tests.gpu.paged import Paged, paged

pytestmark = pytest.mark.usefixtures("poisoned_empty")

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def attend(x: Paged, window: int | None = None, num_padded: int = 0, num_programs: int = 3) -> Tensor:
    """In buffers of a larger batch, as a graph has them: rows after the last have no items, the rest is garbage."""
    work = decode_items((x.starts + 1).cpu().numpy(), window)
    device, n = x.q.device, len(x.q) + num_padded
    items = torch.full((max_items(n), 3), -7, dtype=torch.int32, device=device)
    items[: len(work.items)] = torch.from_numpy(work.items)
    first_items = torch.full((n + 1,), len(work.items), dtype=torch.int32, device=device)
    first_items[: len(work.first_items)] = torch.from_numpy(work.first_items)
    first_blocks = torch.cat([x.first_blocks, x.first_blocks[-1:].expand(num_padded)])
    q = torch.cat([x.q, torch.full_like(x.q[:1].expand(num_padded, -1, -1), float("nan"))]) if num_padded else x.q
    num_items = torch.tensor([len(work.items)], dtype=torch.int32, device=device)
    scratch = decode_scratch(len(items), q.shape[1], q.shape[2], device)
    return decode_attention(q, x.kv, x.tables, first_blocks, items, first_items, num_items, scratch, num_programs)


def single_tokens(context_lens: Sequence[int]) -> list[tuple[int, int]]:
    return [(length - 1, 1) for length in context_lens]


def assert_is_reference(x: Paged, window: int | None = None) -> None:
    expected = decode_attention_ref(x.q, x.kv, x.block_table(), x.starts + 1, window)
    tolerance = TOLERANCES[x.q.dtype]
    torch.testing.assert_close(attend(x, window), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_size_and_dtype_is_the_reference(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    assert_is_reference(paged(device, single_tokens([1, 300, 64]), dim=dim, dtype=dtype))


@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (64, 8), (28, 4), (1, 1), (17, 1), (6, 6)], ids=str)
def test_every_grouping_of_heads_is_the_reference(device: torch.device, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_is_reference(paged(device, single_tokens([1, 65]), heads))


@pytest.mark.parametrize("block_tokens", [1, 16, 64, 256])
@pytest.mark.parametrize("window", [None, 1, 17, 100, 300])
def test_every_size_of_block_and_window_is_the_reference(
    device: torch.device, block_tokens: int, window: int | None
) -> None:
    torch.manual_seed(0)
    lengths = [1, 15, 16, 17, 63, 64, 65, 100, 256, 257, 513]
    assert_is_reference(paged(device, single_tokens(lengths), (1, 1), block_tokens=block_tokens, window=window), window)


def test_a_context_of_many_splits_is_the_reference(device: torch.device) -> None:
    torch.manual_seed(0)
    x = paged(device, single_tokens([MAX_SPLITS * 256 + 1, 1000]), (3, 1))
    assert len(decode_items((x.starts + 1).numpy(force=True), None).items) == 22 + 4
    assert_is_reference(x)


@pytest.mark.parametrize("window", [None, 100, 500])
def test_a_row_alone_is_the_row_in_a_batch_bit_for_bit(device: torch.device, window: int | None) -> None:
    torch.manual_seed(0)
    x = paged(device, single_tokens([1000, 1, 63, 513, 256]), window=window)
    together = attend(x, window, num_programs=4)
    for row in range(len(x.q)):
        assert torch.equal(attend(x.only(row), window, num_programs=1)[0], together[row])


def test_rows_that_fill_a_batch_up_become_zeros(device: torch.device) -> None:
    torch.manual_seed(0)
    x = paged(device, single_tokens([700, 5]))
    out = attend(x, num_padded=2)
    assert torch.equal(out[:2], attend(x))
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))


def test_a_batch_without_items_becomes_zeros(device: torch.device) -> None:
    x = paged(device, single_tokens([3]))
    empty = torch.zeros((4, 3), dtype=torch.int32, device=device)
    none = torch.zeros(2, dtype=torch.int32, device=device)
    scratch = decode_scratch(4, 4, 64, device)
    out = decode_attention(x.q, x.kv, x.tables, x.first_blocks, empty, none, none[:1], scratch, 3)
    assert torch.equal(out, torch.zeros_like(out))


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    block_tokens=st.sampled_from([1, 4, 16, 128]),
    window=st.none() | st.integers(1, 700),
)
def test_any_batch_is_the_reference(
    lengths: list[int], block_tokens: int, window: int | None, device: torch.device
) -> None:
    torch.manual_seed(0)
    assert_is_reference(paged(device, single_tokens(lengths), (2, 1), block_tokens=block_tokens, window=window), window)


@given(lengths=st.lists(st.integers(0, 200_000), max_size=6), window=st.none() | st.integers(1, 200_000))
def test_items_cover_each_context_once_in_order_with_few_splits(lengths: list[int], window: int | None) -> None:
    work = decode_items(np.array(lengths, np.int32), window)
    assert work.items.dtype == work.first_items.dtype == np.int32
    assert work.first_items[0] == 0
    assert work.first_items[-1] == len(work.items) <= max_items(len(lengths))
    for row, length in enumerate(lengths):
        items = work.items[work.first_items[row] : work.first_items[row + 1]]
        first = 0 if window is None else max(0, length - window)
        assert len(items) <= MAX_SPLITS
        assert (items[:, 0] == row).all()
        bounds = items[:, 1:].ravel().tolist()
        assert bounds[:1] == [first][: len(bounds)]
        assert bounds[-1:] == [length][: len(bounds)]
        assert bounds[1:-1:2] == bounds[2::2]
        assert all(bound % 128 == 0 for bound in bounds[2::2])
        assert (items[:, 1] < items[:, 2]).all()
        alone = decode_items(np.array([length], np.int32), window).items
        assert np.array_equal(alone[:, 1:], items[:, 1:])


def test_a_cache_of_another_dtype_or_layout_is_refused(device: torch.device) -> None:
    x = paged(device, single_tokens([3]), heads=(16, 16))
    rest = (x.tables, x.first_blocks, x.first_blocks, x.first_blocks, x.first_blocks, x.q, 1)
    with pytest.raises(ValueError, match="does not fit"):
        decode_attention(x.q, x.kv.half(), *rest)
    with pytest.raises(ValueError, match="contiguous"):
        decode_attention(x.q, x.kv.transpose(2, 3), *rest)
