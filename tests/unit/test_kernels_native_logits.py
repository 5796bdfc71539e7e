"""Logits of the native library: the head's product, and the best token of each row, found on the way."""

import ctypes

import pytest
import torch
from torch import Tensor

from kernels.native.library import LayerStruct, ModelStruct
from kernels.native.ops import Integers
from tests.unit.native import native_ops

SIZE = 64  # of the hidden rows
NAN, INFINITY = float("nan"), float("inf")


def logits(head: Tensor, hidden: Tensor, integers: Integers | None = None, threads: int = 1) -> tuple[Tensor, Tensor]:
    ops, norm = native_ops(threads), torch.ones(SIZE)
    packed = ops.pack([head], None, integers)
    model = ModelStruct(
        hidden_size=SIZE,
        norm_eps=1e-6,
        layers=ctypes.cast((LayerStruct * 0)(), ctypes.POINTER(LayerStruct)),
        head=packed.struct,
        final_norm=norm.data_ptr(),
    )
    rows, best = ops.logits(model, hidden)
    return rows.clone(), best


@pytest.mark.parametrize("integers", [None, "int16", "int8"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 5, 6, 7, 200])
@pytest.mark.parametrize("vocab", [1, 37, 64, 1003])
def test_the_best_token_is_the_first_of_the_highest(
    vocab: int, num_rows: int, threads: int, integers: Integers | None
) -> None:
    torch.manual_seed(vocab)
    distinct = torch.randn(-(-vocab // 3), SIZE).bfloat16()
    head = distinct.repeat(3, 1)[:vocab]  # three of each, far apart
    rows, best = logits(head, torch.randn(num_rows, SIZE), integers, threads)
    assert rows.shape == (num_rows, vocab)
    assert best.tolist() == rows.numpy().argmax(1).tolist()
    if vocab > len(distinct):
        assert best.max() < len(distinct)


@pytest.mark.parametrize("place", [0, 15, 16, 36])
@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_a_score_that_is_no_number_is_the_best(place: int, value: float) -> None:
    torch.manual_seed(1)
    head = torch.randn(37, SIZE)
    head[place] = value  # infinity times a positive number and a negative one is NaN as well
    hidden = torch.randn(3, SIZE)
    rows, best = logits(head, hidden)
    assert rows[:, place].isnan().all()
    assert best.tolist() == [place] * 3 == rows.numpy().argmax(1).tolist()
    hidden[1, 5] = NAN
    rows, best = logits(torch.randn(37, SIZE).bfloat16(), hidden, "int16")
    assert not rows[1, best[1]].isfinite()
    assert best[[0, 2]].tolist() == rows[[0, 2]].numpy().argmax(1).tolist()
