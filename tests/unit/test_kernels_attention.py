"""Paged attention and the paged cache, on awkward shapes, in a cache where every slot not written holds a NaN."""

import pytest
import torch
from torch import Tensor

from kernels.decode_attention import DecodeIndex, decode_attention, decode_attention_ref
from kernels.kv_write import kv_write, kv_write_ref
from kernels.prefill_attention import PrefillIndex, prefill_attention, prefill_attention_ref

NUM_BLOCKS = 37
HEADS = [(1, 1), (4, 4), (6, 2), (9, 3), (8, 1)]  # query heads, KV heads
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def poisoned_layer(num_kv_heads: int, block_tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The middle layer's view of a three-layer cache full of NaN, so that its strides are those of a real one."""
    shape = (NUM_BLOCKS, 3, 2, num_kv_heads, block_tokens, dim)
    return torch.full(shape, float("nan"), dtype=dtype)[:, 1]


def fill(kv: Tensor, table: Tensor, num_tokens: int) -> None:
    """Random keys and values for one sequence's tokens."""
    positions = torch.arange(num_tokens)
    k, v = torch.randn(2, num_tokens, kv.shape[2], kv.shape[4]).to(kv.dtype)
    kv_write(kv, k, v, table[positions // kv.shape[3]], positions % kv.shape[3])


@pytest.mark.parametrize("window", [None, 1, 5, 16, 1000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize(("block_tokens", "dim"), [(1, 8), (4, 6), (16, 64)])
def test_decode_attention_is_the_reference(
    window: int | None, num_heads: int, num_kv_heads: int, block_tokens: int, dim: int
) -> None:
    torch.manual_seed(1)
    kv = poisoned_layer(num_kv_heads, block_tokens, dim)
    order = torch.randperm(NUM_BLOCKS - 1) + 1  # block 0 pads the tables and stays poisoned
    lens, tables = [1, block_tokens, 2 * block_tokens + 1, 9], []
    width = max(-(-length // block_tokens) for length in lens)
    for length in lens:
        table, order = order[: -(-length // block_tokens)], order[-(-length // block_tokens) :]
        fill(kv, table, length)
        tables.append(torch.cat((table, table.new_zeros(width - len(table)))))
    block_tables, context_lens = torch.stack(tables), torch.tensor(lens)
    q = torch.randn(len(lens), num_heads, dim)
    expected = decode_attention_ref(q, kv, block_tables, context_lens, window)
    assert expected.isfinite().all()
    index = DecodeIndex.build(block_tables, context_lens, block_tokens, window)
    torch.testing.assert_close(decode_attention(q, kv, index), expected, rtol=0, atol=TOLERANCE[torch.float32])


def test_a_decode_row_is_the_same_alone_and_in_a_ragged_batch() -> None:
    torch.manual_seed(2)
    kv = poisoned_layer(2, 4, 8)
    tables = torch.stack((torch.arange(8), torch.tensor([9, 10, 0, 0, 0, 0, 0, 0])))
    fill(kv, tables[0], 31)
    fill(kv, tables[1], 6)
    q, lens = torch.randn(2, 4, 8), torch.tensor([31, 6])
    together = decode_attention(q, kv, DecodeIndex.build(tables, lens, 4, None))
    alone = decode_attention(q[1:], kv, DecodeIndex.build(tables[1:], lens[1:], 4, None))
    torch.testing.assert_close(together[1:], alone, rtol=0, atol=1e-6)


def test_a_window_gathers_only_its_blocks() -> None:
    [group] = DecodeIndex.build(torch.arange(20).view(2, 10), torch.tensor([40, 13]), 4, window=4).groups
    assert group.rows.tolist() == [0, 1]
    assert group.block_ids.tolist() == [9, 9, 12, 13]  # 36-39 in one block (padded); 9-12 across two
    assert PrefillIndex.build(torch.arange(10), 30, 5, 4, window=4).block_ids.tolist() == [6, 7, 8]


def test_long_and_short_sequences_are_gathered_apart() -> None:
    torch.manual_seed(6)
    lens = torch.tensor([3, 2500, 40, 1, 1200, 700])
    kv = torch.randn(300, 2, 1, 16, 4)
    tables = torch.randint(300, (6, 157))
    index = DecodeIndex.build(tables, lens, 16, None)
    assert [group.rows.tolist() for group in index.groups] == [[0, 3, 2], [5], [4], [1]]
    q = torch.randn(6, 2, 4)
    expected = decode_attention_ref(q, kv, tables, lens, None)
    torch.testing.assert_close(decode_attention(q, kv, index), expected, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 7), (0, 32), (3, 2), (16, 17), (29, 1)])
def test_prefill_attention_is_the_reference(
    window: int | None, num_heads: int, num_kv_heads: int, start: int, num_tokens: int
) -> None:
    torch.manual_seed(3)
    kv = poisoned_layer(num_kv_heads, 8, 12)
    table = torch.randperm(NUM_BLOCKS)[:9]  # more blocks than tokens: the answer's room
    fill(kv, table, start + num_tokens)
    q = torch.randn(num_tokens, num_heads, 12)
    expected = prefill_attention_ref(q, kv, table, start, window)
    assert expected.isfinite().all()
    index = PrefillIndex.build(table, start, num_tokens, 8, window)
    torch.testing.assert_close(prefill_attention(q, kv, index), expected, rtol=0, atol=TOLERANCE[torch.float32])


def test_low_precision_attention_accumulates_in_float32() -> None:
    torch.manual_seed(4)
    kv = poisoned_layer(2, 4, 16, torch.bfloat16)
    table, q = torch.arange(20), torch.randn(3, 4, 16).bfloat16()
    fill(kv, table, 80)
    lens = torch.tensor([80, 79, 78])
    tables = table.expand(3, -1)
    decoded = decode_attention(q, kv, DecodeIndex.build(tables, lens, 4, None))
    assert decoded.dtype == torch.bfloat16
    assert torch.equal(decoded, decode_attention_ref(q, kv, tables, lens, None))
    prefilled = prefill_attention(q, kv, PrefillIndex.build(table, 77, 3, 4, None))
    expected = prefill_attention_ref(q, kv, table, 77, None)
    torch.testing.assert_close(prefilled.float(), expected.float(), rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_large_scores_do_not_overflow() -> None:
    kv = poisoned_layer(1, 4, 4)
    fill(kv, torch.tensor([2]), 3)
    kv[2, 0, :, 1] = 1e18
    q = torch.full((1, 1, 4), 1e18)
    out = decode_attention(q, kv, DecodeIndex.build(torch.tensor([[2]]), torch.tensor([3]), 4, None))
    torch.testing.assert_close(out[0, 0], kv[2, 1, 0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_write_is_the_reference_and_touches_nothing_else(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    kv, expected = poisoned_layer(3, 4, 8, dtype), poisoned_layer(3, 4, 8, dtype)
    blocks, offsets = torch.tensor([36, 0, 5, 5]), torch.tensor([3, 0, 1, 2])  # both ends, and two in one block
    k, v = torch.randn(2, 4, 3, 8).to(dtype)
    kv_write(kv, k, v, blocks, offsets)
    kv_write_ref(expected, k, v, blocks, offsets)
    torch.testing.assert_close(kv, expected, rtol=0, atol=0, equal_nan=True)
    assert int(kv.isnan().logical_not().sum()) == 2 * 4 * 3 * 8
