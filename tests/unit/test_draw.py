"""Draws over large vocabularies: where float32 shortens the way, the token is the one that float64 over everything gives."""

import math

import numpy as np
import pytest

from core.sampling import SamplingParams
from engine.backend import load_weigh
from engine.draw import FLOAT32_ERROR, Row, Weigh, draw, top_tokens
from tests.logit_rows import logits_of
from tests.unit.native import built_library

SHAPES = ["peaked", "flat", "equal", "ties", "holes", "steep"]


@pytest.fixture(params=["torch", "native"])
def weigh(request: pytest.FixtureRequest) -> Weigh:
    return load_weigh(built_library() if request.param == "native" else None)


def by_definition(row: Row, params: SamplingParams) -> tuple[list[int], list[float]]:
    """What the filters leave, in order, and where each token's share ends; plain Python over a full sort."""
    best = max(row.tolist())
    weights = [math.exp((value - best) / params.temperature) for value in row.tolist()]
    tokens = [token for token, weight in enumerate(weights) if weight >= params.min_p]
    is_cut = 0 < params.top_k < len(row)
    if is_cut or params.top_p < 1.0:
        tokens.sort(key=lambda token: -weights[token])  # stable: equal ones stay in the order of ids
    if is_cut:
        tokens = tokens[: params.top_k]
    if params.top_p < 1.0:
        total = math.fsum(weights[token] for token in tokens)
        kept, mass = [], 0.0
        for token in tokens:
            if mass >= params.top_p * total:
                break
            kept.append(token)
            mass += weights[token]
        tokens = kept
    ends = np.cumsum([weights[token] for token in tokens])
    return tokens, (ends / ends[-1]).tolist()


@pytest.mark.parametrize("size", [3, 129, 2003])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_p": 0.5},
        {"top_p": 0.99, "temperature": 2.0},
        {"top_p": 1.0 - 1e-7},
        {"top_p": 1e-6},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 1500, "top_p": 0.9},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"min_p": 0.001, "top_k": 300, "top_p": 0.7, "temperature": 0.6},
        {"min_p": 0.1, "top_p": 0.8},
    ],
    ids=str,
)
def test_the_token_is_the_one_by_definition(size: int, shape: str, filters: dict[str, float]) -> None:
    params = SamplingParams(**filters)  # type: ignore[arg-type]
    row = logits_of(shape, size, seed=size)
    tokens, ends = by_definition(row, params)
    best = float(row.max())
    for uniform in (0.0, 0.1, 0.37, 0.5, 0.93, 1.0 - 2**-53):
        drawn = {draw(row, best, params, uniform, weigh) for weigh in (load_weigh(None), load_weigh(built_library()))}
        # Sums in another order differ in the last bits: which token has a border there is not defined closer than that.
        first = int(np.searchsorted(ends, uniform - 1e-12, side="right"))
        last = min(int(np.searchsorted(ends, uniform + 1e-12, side="right")), len(tokens) - 1)
        assert drawn <= set(tokens[first : last + 1]), uniform


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_rough_weights_err_less_than_they_say(shape: str, temperature: float, weigh: Weigh) -> None:
    row = logits_of(shape, 50_001, seed=3)
    best = float(row.max())
    exact = np.exp((row.astype(np.float64) - best) / temperature)
    rough = weigh(row, best, temperature).block_sums.cumsum()
    ends = np.append(exact.cumsum()[127::128], exact.sum())
    assert len(rough) == len(ends) == 391
    assert np.abs(rough - ends).max() < FLOAT32_ERROR * exact.sum()


def test_a_draw_next_to_a_border_is_decided_exactly(weigh: Weigh) -> None:
    """Where float32 cannot tell which side of a border the number lies on, the answer is still the right one."""
    row = logits_of("flat", 50_000, seed=1)
    best = float(row.max())
    ends = np.exp(row.astype(np.float64) - best).cumsum()
    for token in (5_000, 25_000, 49_998):
        border = float(ends[token] / ends[-1])
        params = SamplingParams()
        assert draw(row, best, params, border - 1e-10, weigh) == token
        assert draw(row, best, params, border + 1e-10, weigh) == token + 1


@pytest.mark.parametrize("size", [1, 5, 128, 1000, 50_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_tokens_are_those_of_a_full_sort(size: int, shape: str) -> None:
    row = logits_of(shape, size, seed=size)
    values = row.tolist()
    expected = sorted(range(size), key=lambda token: (-values[token], token))
    for k in (1, 2, 20, 300, size):
        assert top_tokens(row, k).tolist() == expected[:k]


def test_zeros_of_both_signs_are_equal() -> None:
    row = np.array([-0.0, 0.0, -0.0, -1.0], np.float32)
    assert top_tokens(row, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 1.7}, {"top_p": 0.9}, {"top_p": 0.99, "temperature": 0.5}], ids=str
)
def test_torch_and_the_native_library_lead_to_the_same_tokens(shape: str, filters: dict[str, float]) -> None:
    row = logits_of(shape, 49_152, seed=9)
    params, best = SamplingParams(**filters), float(row.max())  # type: ignore[arg-type]
    drawn = [
        [draw(row, best, params, number / 17, weigh) for number in range(17)]
        for weigh in (load_weigh(None), load_weigh(built_library()))
    ]
    assert drawn[0] == drawn[1]
