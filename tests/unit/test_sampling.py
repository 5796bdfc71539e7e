"""Limits of the sampling parameters, and the random draw that depends on (seed, position) alone."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequestError
from core.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
    choice_seed,
    philox4x32,
    uniform_draw,
)

GOLDEN_DRAWS = [
    0.3990464708489645,
    0.9722412015223156,
    0.8902591729757107,
    0.4301902469608202,
    0.7012239789962063,
]  # a seed stands for the same answer on every worker and device
# kat_vectors of Random123: counter, key, result.
PHILOX_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
GOLDEN_SEEDS = [-1057213974847118239, 8377724174605511960]
ACCEPTED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-4},
    {"temperature": 100.0},
    {"top_p": 1.0},
    {"top_p": 5e-324},
    {"top_k": 0},
    {"top_k": 2**31 - 1},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"max_tokens": 1},
    {"max_tokens": 5, "min_tokens": 5},
    {"min_tokens": 7},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"logprobs": 0},
    {"logprobs": MAX_TOP_LOGPROBS},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": MAX_TOP_LOGPROBS},
    *({field: value} for field in ("frequency_penalty", "presence_penalty") for value in (-2.0, -0.0, 2.0)),
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 10.0},
    {"logit_bias": tuple((token, 100.0) for token in range(MAX_LOGIT_BIAS))},
    {"logit_bias": ((0, -100.0), (2**32, -0.0))},
    {"stop": ("x" * MAX_STOP_CHARS,) * MAX_STOP_STRINGS},
    {"stop_token_ids": (1,) * MAX_STOP_TOKEN_IDS},
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 9e-5}),
    ("temperature", {"temperature": 100.1}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.0001}),
    ("top_k", {"top_k": -1}),
    ("top_k", {"top_k": 2**31}),
    ("min_p", {"min_p": -0.01}),
    ("min_p", {"min_p": 1.01}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 2**31}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"max_tokens": 4, "min_tokens": 5}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": -(2**63) - 1}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": MAX_TOP_LOGPROBS + 1}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": MAX_TOP_LOGPROBS + 1}),
    *((field, {field: value}) for field in ("frequency_penalty", "presence_penalty") for value in (-2.001, 2.001)),
    *(("repetition_penalty", {"repetition_penalty": value}) for value in (-1.0, 0.0, 0.0099, 10.01)),
    *(("logit_bias", {"logit_bias": ((3, value),)}) for value in (-100.1, 100.1, math.nan, math.inf)),
    ("logit_bias", {"logit_bias": ((3, 1.0), (4, 1.0), (3, 1.0))}),
    ("logit_bias", {"logit_bias": tuple((token, 1.0) for token in range(MAX_LOGIT_BIAS + 1))}),
    ("stop", {"stop": ("",)}),
    ("stop", {"stop": ("x" * (MAX_STOP_CHARS + 1),)}),
    ("stop", {"stop": ("x",) * (MAX_STOP_STRINGS + 1)}),
    ("stop_token_ids", {"stop_token_ids": (1,) * (MAX_STOP_TOKEN_IDS + 1)}),
    *(
        (field, {field: value})
        for field in (
            "temperature",
            "top_p",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        )
        for value in (math.nan, math.inf, -math.inf)
    ),
]


@pytest.mark.parametrize("given_fields", ACCEPTED)
def test_the_limits_themselves_are_accepted(given_fields: dict[str, Any]) -> None:
    assert SamplingParams(**given_fields).is_greedy is (given_fields.get("temperature") == 0.0)


@pytest.mark.parametrize(("field", "given_fields"), REFUSED)
def test_one_step_beyond_a_limit_is_refused_by_the_field_s_name(field: str, given_fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**given_fields)
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field}: ")


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20))
def test_a_draw_depends_on_seed_and_position_alone(seed: int, position: int) -> None:
    draw = uniform_draw(seed, position)
    assert 0.0 <= draw < 1.0
    assert uniform_draw(seed, position) == draw
    assert uniform_draw(seed % 2**64, position) == draw, "signed and unsigned seeds are one"
    assert uniform_draw(seed, position + 1) != draw
    assert uniform_draw(seed ^ 1, position) != draw


def test_draws_of_golden_seeds() -> None:
    pairs = ((0, 0), (0, 1), (1, 0), (-1, 7), (-(2**63), 2**40 + 5))
    assert [uniform_draw(*pair) for pair in pairs] == GOLDEN_DRAWS
    assert uniform_draw(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53, "the first two words, the first one on top"


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_ANSWERS)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3, k0, k1, *answer = (int(word, 16) for word in f"{counter} {key} {expected}".split())
    assert list(philox4x32((c0, c1, c2, c3), (k0, k1))) == answer


def test_seed_and_position_are_laid_out_low_word_first() -> None:
    words = philox4x32((5, 9, 0, 0), (0xFFFFFFFE, 0x7FFFFFFF))
    assert uniform_draw(0x7FFFFFFFFFFFFFFE, 9 << 32 | 5) == ((words[0] << 32 | words[1]) >> 11) / 2**53


def test_each_answer_to_a_prompt_has_a_seed_of_its_own() -> None:
    assert choice_seed(-7, 0) == -7
    seeds = [choice_seed(seed, choice) for seed in (0, 1, -7, 2**63 - 1, -(2**63)) for choice in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert [choice_seed(1, 1), choice_seed(1, 2)] == GOLDEN_SEEDS


@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_are_spread_evenly(by: str) -> None:
    draws = [uniform_draw(5, n) if by == "position" else uniform_draw(n, 5) for n in range(10_000)]
    counts = [0] * 10
    for draw in draws:
        counts[int(draw * 10)] += 1
    # Chi-squared with 9 degrees of freedom: 33.7 is exceeded once in 10,000 fair samples; this sample never changes.
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 33.7
    pairs = itertools.pairwise(draws)
    mean = sum(draws) / len(draws)
    covariance = sum((a - mean) * (b - mean) for a, b in pairs) / len(draws)
    assert abs(covariance / (1 / 12)) < 0.04, "neighbours are independent"
