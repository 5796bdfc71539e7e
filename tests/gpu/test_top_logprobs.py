"""Log-probabilities of chosen and best tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.sampling import MIN_LOGPROB
from kernels.gpu.top_logprobs import top_logprobs, top_logprobs_ref
from kernels.gpu.variant import Config

SMALL = Config({"TILE": 128}, num_warps=4)


def check(logits: torch.Tensor, tokens: torch.Tensor, num_top: int, config: Config | None = None) -> None:
    for ours, expected in zip(
        top_logprobs(logits, tokens, num_top, config), top_logprobs_ref(logits, tokens, num_top), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab", [1, 2, 17, 127, 128, 129, 1000])
def test_values_and_order_are_the_reference_s(
    vocab: int, num_top: int, device: torch.device, poisoned_empty: None
) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(3, vocab, device=device) * 8
    check(logits, torch.randint(vocab, (3,), dtype=torch.int32, device=device), num_top, SMALL)


def test_a_real_vocabulary_with_the_chosen_tiles(device: torch.device) -> None:
    torch.manual_seed(0)
    check(torch.randn(2, 49152, device=device), torch.tensor([49151, 0], dtype=torch.int32, device=device), 3)


@settings(max_examples=40)
@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=300), num_top=st.integers(0, 20))
def test_equal_logits_come_in_the_order_of_ids(values: list[int], num_top: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = torch.tensor([values], dtype=torch.float32, device=device)
    check(logits, torch.tensor([len(values) - 1], dtype=torch.int32, device=device), num_top, SMALL)


def test_what_is_impossible_has_the_floor_and_comes_last(device: torch.device) -> None:
    logits = torch.full((1, 300), -torch.inf, device=device)
    logits[0, 290], logits[0, 5] = 1.0, 2.0
    chosen, ids, values = top_logprobs(logits, torch.tensor([0], dtype=torch.int32, device=device), 4, SMALL)
    assert chosen.tolist() == [MIN_LOGPROB]
    assert ids.tolist() == [[5, 290, 0, 1]]
    assert values[0, 2:].tolist() == [MIN_LOGPROB] * 2
    assert values[0, :2].exp().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_a_row_is_the_same_alone_and_beside_one_that_is_nothing(device: torch.device) -> None:
    torch.manual_seed(1)
    wide = torch.randn(3, 700, device=device)
    logits = wide[:, :500]  # rows further apart than they are long
    logits[1] = torch.nan
    tokens = torch.tensor([3, 4, 499], dtype=torch.int32, device=device)
    together = top_logprobs(logits, tokens, 7, SMALL)
    for row in (0, 2):
        alone = top_logprobs(logits[row : row + 1].clone(), tokens[row : row + 1], 7, SMALL)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_other_types_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="need float32 rows"):
        top_logprobs(torch.zeros(1, 4, device=device).half(), torch.zeros(1, dtype=torch.int32, device=device), 1)
    with pytest.raises(ValueError, match="int32 tokens"):
        top_logprobs(torch.zeros(1, 4, device=device), torch.zeros(1, dtype=torch.int64, device=device), 1)
