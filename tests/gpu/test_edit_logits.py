"""Edited logits, bit for bit those of the reference and of the CPU sampler, among rows that must not be touched."""

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.sampling import SamplingParams
from engine.token_counts import TokenCounts
from kernels.gpu.edit_logits import edit_logits, edit_logits_ref

INF = math.inf


class Row(NamedTuple):
    """One request's edits."""

    bias: dict[int, float] = {}  # noqa: RUF012 - never changed
    said: dict[int, float] = {}  # noqa: RUF012
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


def tensors(rows: Seq[Row], device: torch.device) -> tuple[Tensor, ...]:
    """The arguments after the logits, in their order; behind the lists lies what no row may read."""

    def ragged(lists: Seq[dict[int, float]]) -> tuple[Tensor, ...]:
        first = np.cumsum([0, *(len(each) for each in lists)])
        ids = [token for each in lists for token in each] + [2**30] * 3
        values = [value for each in lists for value in each.values()] + [math.nan] * 3
        return (
            torch.tensor(first, dtype=torch.int32),
            torch.tensor(ids, dtype=torch.int32),
            torch.tensor(values, dtype=torch.float32),
        )

    scalars = [
        torch.tensor([getattr(row, name) for row in rows], dtype=torch.float32)
        for name in ("repetition", "frequency", "presence")
    ]
    parts = (*ragged([row.bias for row in rows]), *ragged([row.said for row in rows]), *scalars)
    return tuple(part.to(device) for part in parts)


def assert_edited(logits: Tensor, rows: Seq[Row], device: torch.device) -> Tensor:
    """Bit for bit the reference's; returns the edited logits on the CPU."""
    edited, expected, arguments = logits.to(device, copy=True), logits.clone(), tensors(rows, device)
    edit_logits(edited, *arguments)
    edit_logits_ref(expected, *(each.cpu() for each in arguments))
    torch.testing.assert_close(edited.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    return edited.cpu()


@st.composite
def rows_of(draw: st.DrawFn, vocab: int) -> Row:
    tokens = st.integers(0, vocab - 1)
    biases = st.one_of(st.just(-INF), st.floats(-100, 100, width=32))
    return Row(
        bias=draw(st.dictionaries(tokens, biases, max_size=6)),
        said=draw(st.dictionaries(tokens, st.integers(0, 2000).map(float), max_size=6)),
        repetition=draw(st.sampled_from([1.0, 0.01, 0.7, 1.3, 10.0])),
        frequency=draw(st.sampled_from([0.0, 0.3, -2.0, 2.0])),
        presence=draw(st.sampled_from([0.0, 0.1, -2.0, 2.0])),
    )


@given(st.data(), st.sampled_from([1, 2, 15, 16, 17, 63, 100, 127, 128, 1000]), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_edits_are_the_reference_s_bit_for_bit(device: torch.device, data: st.DataObject, vocab: int, n: int) -> None:
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab + n)) * 9
    assert_edited(logits, [data.draw(rows_of(vocab)) for _ in range(n)], device)


@pytest.mark.parametrize("length", [1, 1023, 1024, 1025, 3000])
def test_lists_of_every_length_are_gone_through_to_their_end(device: torch.device, length: int) -> None:
    torch.manual_seed(length)
    ids = torch.randperm(4001)[:length].tolist()
    long = Row(dict.fromkeys(ids, 1.5), dict.fromkeys(reversed(ids), 3.0), 1.7, 0.3, -0.7)
    logits = torch.randn(4, 4001) * 5
    edited = assert_edited(logits, [Row(), long, Row(said=dict.fromkeys(ids, 1.0)), long], device)
    assert torch.equal(edited[0], logits[0])
    assert int((edited[1] != logits[1]).sum()) == length
    assert torch.equal(edited[2], logits[2]), "penalties that are off change no bit"


def test_penalties_are_those_of_the_cpu_sampler_bit_for_bit(device: torch.device) -> None:
    torch.manual_seed(5)
    tokens = torch.randint(0, 300, (900,)).tolist()
    for repetition, frequency, presence in [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (0.9, -1.1, 0.5), (5.0, 2.0, -2.0)]:
        counts = TokenCounts()
        counts.update(tokens, 400)
        params = SamplingParams(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
        logits = torch.randn(1, 300) * 10
        expected = logits.clone()
        counts.penalise(expected[0].numpy(), params)
        said = {token: float(tokens[400:].count(token)) for token in dict.fromkeys(tokens)}
        edited = assert_edited(logits, [Row({}, said, repetition, frequency, presence)], device)
        assert torch.equal(edited, expected)


def test_a_bias_comes_before_the_penalties_and_never_lifts_what_is_held_back(device: torch.device) -> None:
    logits = torch.tensor([[-1.0, 4.0, 2.0, INF, math.nan, -INF, INF, 1.0]])
    bias = {0: 3.0, 1: -INF, 3: -INF, 4: -INF, 5: 100.0, 7: -1.0}
    said = {0: 0.0, 1: 5.0, 2: 2.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 0.0}
    edited = assert_edited(logits, [Row(bias, said, 2.0, -2.0, -2.0)], device)
    assert edited[0].tolist() == [1.0, -INF, 1.0 + 4.0 + 2.0, -INF, -INF, -INF, INF, 0.0]


def test_what_no_list_names_is_left_alone_also_between_the_rows(device: torch.device) -> None:
    wide = torch.full((3, 200), math.nan, device=device)
    logits = wide[:, :129]
    logits.copy_(torch.arange(129.0).repeat(3, 1))
    rows = [Row(), Row({128: 1.0, 0: -2.0}, {5: 1.0}, presence=1.0), Row({128: 7.0})]
    edit_logits(logits, *tensors(rows, device))
    expected = torch.arange(129.0).repeat(3, 1)
    expected[1, 128], expected[1, 0], expected[1, 5], expected[2, 128] = 129.0, -2.0, 4.0, 135.0
    assert torch.equal(logits.cpu(), expected)
    assert bool(wide[:, 129:].isnan().all())


def test_a_row_alone_is_the_row_in_a_batch(device: torch.device) -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, 333) * 7
    rows = [
        Row({token: 0.3 * token for token in range(index * 5)}, dict.fromkeys(range(index * 30), 2.0), 1.1, 0.3, 0.2)
        for index in range(7)
    ]
    together = logits.to(device, copy=True)
    edit_logits(together, *tensors(rows, device))
    for index, row in enumerate(rows):
        alone = logits[index : index + 1].to(device, copy=True)
        edit_logits(alone, *tensors([row], device))
        assert torch.equal(alone[0], together[index])


def test_other_logits_than_float32_rows_are_refused(device: torch.device) -> None:
    arguments = tensors([Row(), Row()], device)
    with pytest.raises(ValueError, match="float32"):
        edit_logits(torch.zeros(2, 4, dtype=torch.bfloat16, device=device), *arguments)
    with pytest.raises(ValueError, match="stride"):
        edit_logits(torch.zeros(4, 2, device=device).T, *arguments)


def test_no_rows_are_no_work(device: torch.device) -> None:
    edit_logits(torch.zeros(0, 4, device=device), *tensors([], device))
