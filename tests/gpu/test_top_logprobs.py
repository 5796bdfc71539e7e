"""Log-probabilities against a float64 softmax and a full sort, over awkward vocabularies and broken rows."""

import math

import pytest
import torch
from torch import Tensor

from core.sampling import MIN_LOGPROB
from kernels.gpu.top_logprobs import MAX_VOCAB, top_logprobs, top_logprobs_ref

INF, NAN = math.inf, math.nan


def assert_right(logits: Tensor, tokens: list[int], num_top: int, device: torch.device) -> None:
    """Ids exactly, values to a rounding or two."""
    chosen_ids = torch.tensor(tokens, dtype=torch.int32)
    got = top_logprobs(logits.to(device), chosen_ids.to(device), num_top)
    expected = top_logprobs_ref(logits, chosen_ids, num_top)
    assert [part.dtype for part in got] == [torch.float32, torch.int32, torch.float32]
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=1e-6, atol=2e-6, equal_nan=True)
    assert got[1].tolist() == expected[1].tolist()
    torch.testing.assert_close(got[2].cpu(), expected[2], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 63, 100, 127, 128, 129, 1000, 2047, 5000])
def test_they_are_those_of_a_log_softmax(vocab: int, device: torch.device, poisoned_empty: None) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(3, vocab) * 5
    logits[1] = logits[1].round()  # many equal ones
    logits[2] -= 1e4
    assert_right(logits, [0, vocab - 1, vocab // 2], 20, device)


def test_a_whole_vocabulary_of_49152(device: torch.device, poisoned_empty: None) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 49152) * 3
    logits[0, -20:] = 40.0  # all in one group
    logits[1, ::2048] = 40.0  # each in a group of its own, more than are asked for
    assert_right(logits, [49151, 7], 20, device)


@pytest.mark.parametrize("num_top", [0, 1, 2, 5, 19])
def test_any_number_of_the_best_may_be_asked_for(num_top: int, device: torch.device, poisoned_empty: None) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(num_top))
    assert_right(logits, [3, 299], num_top, device)


def test_equal_logits_come_by_id_and_zeros_of_both_signs_are_equal(device: torch.device) -> None:
    logits = torch.full((2, 400), 1.0)
    logits[1] = 0.0
    logits[1, ::3] = -0.0
    _, ids, _ = top_logprobs(logits.to(device), torch.zeros(2, dtype=torch.int32, device=device), 20)
    assert ids.tolist() == [list(range(20))] * 2


def test_what_a_float_cannot_say_has_the_floor_s_logprob(device: torch.device) -> None:
    logits = torch.tensor([[0.0, -INF, 1.0, -2e4], [-INF, -INF, -INF, 3.0]])
    assert_right(logits, [1, 3], 6, device)
    chosen, ids, values = top_logprobs(logits.to(device), torch.tensor([1, 3], dtype=torch.int32, device=device), 6)
    assert chosen.tolist() == [MIN_LOGPROB, 0.0]
    assert ids.tolist() == [[2, 0, 3, 1, -1, -1], [3, 0, 1, 2, -1, -1]]
    assert values[:, 2:].tolist() == [[MIN_LOGPROB] * 4] * 2


def test_a_broken_row_and_a_token_that_is_none_concern_themselves_only(device: torch.device) -> None:
    logits = torch.randn(6, 2100, generator=torch.Generator().manual_seed(4))
    logits[1, 2099], logits[2, 0], logits[3] = NAN, INF, -INF
    assert_right(logits, [5, 5, 5, 5, -1, 5], 3, device)
    chosen, ids, _ = top_logprobs(
        logits.to(device), torch.tensor([5, 5, 5, 5, -1, 2100], dtype=torch.int32, device=device), 3
    )
    assert chosen.isnan().tolist() == [False, True, True, True, True, True]
    assert (ids == -1).all(dim=1).tolist() == [False, True, True, True, False, False]


def test_a_row_alone_is_the_row_in_a_batch_of_distant_rows(device: torch.device) -> None:
    torch.manual_seed(9)
    wide = torch.full((4, 3000), NAN, device=device)
    logits = wide[:, 1:2600]
    logits.copy_(torch.randn(4, 2599) * 4)
    tokens = torch.tensor([0, 2598, 17, 18], dtype=torch.int32, device=device)
    together = top_logprobs(logits, tokens, 7)
    for row in range(4):
        alone = top_logprobs(logits[row : row + 1].contiguous(), tokens[row : row + 1], 7)
        assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, together, strict=True))


def test_what_it_cannot_compute_is_refused(device: torch.device) -> None:
    tokens = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="float32"):
        top_logprobs(torch.zeros(2, 4, dtype=torch.float64, device=device), tokens, 1)
    with pytest.raises(ValueError, match="stride 1"):
        top_logprobs(torch.zeros(4, 2, device=device).T, tokens, 1)
    with pytest.raises(ValueError, match=str(MAX_VOCAB + 1)):
        top_logprobs(torch.zeros(1, 1, device=device).expand(1, MAX_VOCAB + 1), tokens, 1)
    for num_top in (-1, 21):
        with pytest.raises(ValueError, match=f"num_top={num_top}"):
            top_logprobs(torch.zeros(2, 4, device=device), tokens, num_top)


def test_no_rows_are_no_work(device: torch.device) -> None:
    shapes = [
        part.shape
        for part in top_logprobs(torch.zeros(0, 4, device=device), torch.zeros(0, dtype=torch.int32, device=device), 3)
    ]
    assert shapes == [(0,), (0, 3), (0, 3)]
