"""Sampling: exact results of every filter, draws that depend on the sequence alone, and errors for broken rows."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.sampling import MIN_LOGPROB, SamplingParams, uniform_draw
from core.sequence import SequenceSpec
from engine.sampler import prompt_logprobs, sample
from engine.sequence import Sequence

INF = math.inf


def sequence(output: int = 0, eos: tuple[int, ...] = (0,), **params: Any) -> Sequence:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 100, "seed": 1} | params)
    return Sequence(
        SequenceSpec(
            sequence_id="s",
            prompt=(1,),
            sampling=sampling,
            eos_token_ids=eos,
            block_table=(0,),
            output=(1,) * output,
        )
    )


def token(logits: list[float] | Tensor, **params: Any) -> int:
    return sample(torch.as_tensor(logits, dtype=torch.float32)[None], [sequence(**params)])[0].token_id


def reachable(logits: list[float], draws: int = 200, temperature: float = 1.0, **params: Any) -> set[int]:
    """Every token that many draws give."""
    sequences = [sequence(output=i, temperature=temperature, **params) for i in range(draws)]
    return {one.token_id for one in sample(torch.tensor(logits).repeat(draws, 1), sequences)}


def test_greedy_takes_the_best_and_the_lowest_id_among_equals() -> None:
    assert token([0.0, 3.0, 1.0]) == 1
    assert token([0.0, 3.0, 3.0, 3.0]) == 1
    many = torch.zeros(50_000)
    many[[40_000, 123, 7_777]] = 5.0
    assert token(many) == 123


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000), st.lists(st.floats(-5, 5), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_a_draw_is_the_inverse_of_the_cumulated_probabilities(seed: int, position: int, logits: list[float]) -> None:
    probabilities = torch.tensor(logits).double().div(0.7).softmax(0).cumsum(0).tolist()
    uniform = uniform_draw(seed, position)
    drawn = token(logits, seed=seed, output=position, temperature=0.7)
    below = probabilities[drawn - 1] if drawn else 0.0
    assert below - 1e-6 <= uniform <= probabilities[drawn] + 1e-6


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    draws = 4000
    sampled = sample(probabilities.log().repeat(draws, 1), [sequence(output=i, temperature=1.0) for i in range(draws)])
    counts = torch.bincount(torch.tensor([one.token_id for one in sampled]), minlength=4) / draws
    torch.testing.assert_close(counts, probabilities, rtol=0, atol=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    assert reachable([0.0, 1.0, 0.0], temperature=0.01) == {1}
    assert reachable([0.0, 8.0, 0.0], temperature=100.0) == {0, 1, 2}
    assert token([0.0, 1e30, 0.0], temperature=1e-4) == 1  # no overflow on the way


def test_top_k_keeps_exactly_k_even_among_equals() -> None:
    assert reachable([1.0, 3.0, 2.0, 0.0], top_k=2) == {1, 2}
    assert reachable([1.0, 1.0, 1.0, 1.0], top_k=2) == {0, 1}
    assert reachable([1.0, 3.0], top_k=1) == {1}
    assert reachable([1.0, 1.5], top_k=50) == {0, 1}


def test_top_p_keeps_the_fewest_that_reach_the_share() -> None:
    logits = torch.tensor([0.15, 0.5, 0.3, 0.05]).log().tolist()
    assert reachable(logits, top_p=0.45) == {1}
    assert reachable(logits, top_p=0.55) == {1, 2}
    assert reachable(logits, top_p=0.85) == {0, 1, 2}
    assert reachable(logits, top_p=0.999) == {0, 1, 2, 3}
    assert reachable([1.0] * 4, top_p=0.4) == {0, 1}
    assert reachable(logits, top_p=1e-9) == {1}


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=60), st.floats(0.01, 0.999))
@settings(max_examples=100, deadline=None)
def test_top_p_is_that_of_a_full_sort(logits: list[float], top_p: float) -> None:
    # Of logits, not of weights: two that differ by almost nothing have the same weight.
    order = torch.tensor(logits).sort(descending=True, stable=True).indices
    weights = torch.tensor(logits).double().softmax(0)[order]
    before = weights.cumsum(0) - weights
    kept = set(order[before < top_p + 1e-9].tolist())
    drawn = {token(logits, temperature=1.0, top_p=top_p, seed=seed) for seed in range(10)}
    assert drawn <= kept


def test_min_p_compares_with_the_best_after_temperature() -> None:
    logits = torch.tensor([0.1, 0.6, 0.3]).log().tolist()
    assert reachable(logits, min_p=0.4) == {1, 2}
    assert reachable(logits, min_p=0.4, temperature=0.5) == {1}
    assert reachable(logits, min_p=1.0) == {1}


def test_min_p_comes_before_top_k_before_top_p() -> None:
    # After min-p and top-k, 4 : 3 remain; the share of the best is 4/7, which reaches 0.5. Before, it was 0.4.
    logits = torch.tensor([0.4, 0.3, 0.25, 0.05]).log().tolist()
    assert reachable(logits, top_p=0.5) == {0, 1}
    assert reachable(logits, top_k=2, top_p=0.5) == {0}
    assert reachable(logits, min_p=0.7, top_p=0.5) == {0}


def test_min_tokens_holds_back_everything_that_ends_the_answer() -> None:
    logits = [9.0, 8.0, 7.0, 6.0]
    held = {"eos": (0,), "stop_token_ids": (1, 99), "min_tokens": 3}
    assert token(logits, output=2, **held) == 2
    assert token(logits, output=2, ignore_eos=True, **held) == 2
    assert token(logits, output=3, **held) == 0
    assert reachable(logits, draws=3, temperature=100.0, **held) <= {2, 3}
    assert token(logits, eos=(), min_tokens=1) == 0


def test_a_mask_over_everything_is_an_error_not_a_guess() -> None:
    (sampled,) = sample(torch.tensor([[1.0, 2.0]]), [sequence(eos=(0, 1), min_tokens=1)])
    assert "min_tokens leaves no token" in sampled.error


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, 3.0])
    raw = logits.log_softmax(0)
    params = {"temperature": 0.5, "top_k": 1, "min_tokens": 5, "eos": (3,), "logprobs": 3}
    [sampled] = sample(logits[None], [sequence(**params)])
    assert sampled.logprobs is not None
    assert sampled.token_id == sampled.logprobs.token_id == 2
    assert sampled.logprobs.logprob == pytest.approx(float(raw[2]))
    assert [pair[0] for pair in sampled.logprobs.top] == [2, 3, 1]  # best first, equals by id, the masked one too
    assert [pair[1] for pair in sampled.logprobs.top] == pytest.approx([float(raw[i]) for i in (2, 3, 1)])


def test_logprobs_none_zero_and_more_than_the_vocabulary() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    assert sample(logits, [sequence()])[0].logprobs is None
    zero = sample(logits, [sequence(logprobs=0)])[0].logprobs
    assert zero is not None
    assert zero.top == ()
    more = sample(logits, [sequence(logprobs=20)])[0].logprobs
    assert more is not None
    assert len(more.top) == 2


VARIETY: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.8, "logprobs": 2},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.0, "output": 1, "min_tokens": 4, "eos": (1, 2)},
    {"repetition_penalty": 1.3, "output": 5, "logprobs": 0},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": -0.5, "output": 3},
    {"logit_bias": ((7, 100.0), (8, -100.0))},
    {"temperature": 1.0, "logit_bias": ((7, 3.0),), "top_p": 0.5, "repetition_penalty": 0.7},
]


@given(st.lists(st.sampled_from(range(len(VARIETY))), min_size=1, max_size=32), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_the_rest_of_the_batch(kinds: list[int], seed: int) -> None:
    """Seeded rows among unseeded, greedy, filtered and penalised ones, in any order and number, bit for bit."""
    logits = torch.randn(len(VARIETY), 700, generator=torch.Generator().manual_seed(seed)) * 3
    batch = sample(logits[kinds].clone(), [sequence(**{"seed": kind + seed} | VARIETY[kind]) for kind in kinds])
    for kind, together in zip(kinds, batch, strict=True):
        alone = sample(logits[kind : kind + 1].clone(), [sequence(**{"seed": kind + seed} | VARIETY[kind])])
        assert [together] == alone


def penalised(values: list[float], prompt: list[int], answer: list[int], params: SamplingParams) -> list[float]:
    """The definition, as transformers and vLLM have it: repetition over both, frequency and presence over the answer."""
    result = []
    for token, value in enumerate(values):
        if token in prompt or token in answer:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * answer.count(token)
        value -= params.presence_penalty * (token in answer)
        result.append(value)
    return result


@given(
    st.lists(st.integers(0, 29), min_size=1, max_size=200),
    st.lists(st.integers(0, 29), max_size=200),
    st.floats(0.01, 10.0),
    st.floats(-2.0, 2.0),
    st.floats(-2.0, 2.0),
)
@settings(max_examples=60, deadline=None)
def test_penalties_step_by_step_are_the_definition(
    prompt: list[int], answer: list[int], repetition: float, frequency: float, presence: float
) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=999,
        seed=1,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    spec = SequenceSpec(sequence_id="s", prompt=tuple(prompt), sampling=params, eos_token_ids=(), block_table=())
    growing = Sequence(spec)
    raw = torch.linspace(-4.0, 5.0, 30)
    for length in range(0, len(answer) + 1, 7):
        growing.token_ids += answer[growing.num_output_tokens : length]
        logits = raw[None].clone()
        sample(logits, [growing])
        expected = penalised(raw.tolist(), prompt, answer[:length], params)
        if params.has_penalties:
            torch.testing.assert_close(logits[0], torch.tensor(expected), rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(logits[0], raw)


def test_a_penalty_counts_the_first_token_though_another_worker_sampled_it() -> None:
    logits = [0.0, 1.0, 0.9]
    assert token(logits, output=1, presence_penalty=0.2) == 2, "the answer so far is token 1"
    assert token(logits, presence_penalty=2.0) == 1, "token 1 is in the prompt only"
    assert token(logits, repetition_penalty=1.2) == 2, "and that is enough here"


def test_bias_comes_before_penalties_and_cannot_lift_what_min_tokens_holds_back() -> None:
    # Token 1 was said: (-1 + 3) / 2 = 1; the other way round it would be -2 + 3.
    params = {"repetition_penalty": 2.0, "logit_bias": ((1, 3.0),)}
    assert token([1.01, -1.0], **params) == 0
    assert token([0.99, -1.0], **params) == 1
    assert token([0.0, 1.0], eos=(0,), min_tokens=1, logit_bias=((0, 100.0),)) == 1


def test_bias_moves_the_choice_and_not_the_logprobs() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    [sampled] = sample(logits[None].clone(), [sequence(logit_bias=((0, 100.0),), logprobs=1)])
    assert sampled.token_id == 0
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(float(logits.log_softmax(0)[0]))
    assert sampled.logprobs.top[0][0] == 2
    assert token([1.0, 3.0], logit_bias=((0, -100.0), (1, -100.0))) == 1, "-100 on everything changes nothing"
    assert reachable([0.0, 0.0, 0.0], logit_bias=((1, -100.0),)) == {0, 2}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-4},
        {"temperature": 100.0},
        {"temperature": 1.0, "top_p": 5e-324},
        {"temperature": 1.0, "top_p": 1.0 - 2**-53},
        {"temperature": 1.0, "top_k": 2**31 - 1},
        {"temperature": 1.0, "min_p": 1.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 10.0, "frequency_penalty": 2.0, "presence_penalty": -2.0},
        {"logit_bias": tuple((each, -100.0) for each in range(300))},
    ],
    ids=str,
)
def test_parameters_at_their_edges_choose_a_token_and_leave_neighbours_alone(params: dict[str, Any]) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(2)) * 8
    neighbours = [sequence(), sequence(temperature=1.0)]
    expected = sample(logits[[0, 2]].clone(), neighbours)
    first, edge, last = sample(logits.clone(), [neighbours[0], sequence(output=2, **params), neighbours[1]])
    assert [first, last] == expected
    assert edge.error == ""
    assert 0 <= edge.token_id < 300


def test_what_a_float_cannot_say_has_the_floor_s_logprob() -> None:
    logits = torch.tensor([[0.0, -INF, 1.0, -2e4]])
    [sampled] = sample(logits.clone(), [sequence(logprobs=4)])
    assert sampled.logprobs is not None
    assert [pair[0] for pair in sampled.logprobs.top] == [2, 0, 3, 1]
    assert [pair[1] for pair in sampled.logprobs.top][2:] == [MIN_LOGPROB, MIN_LOGPROB]


@pytest.mark.parametrize("vocab", [5, 4099])
def test_logprobs_of_a_prompt_are_those_of_a_log_softmax(vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(3)) * 5
    ids = [0, vocab - 1, 2, 2, 1, 3]
    entries = prompt_logprobs(logits, ids, 3)
    assert entries is not None
    reference = logits.log_softmax(-1)
    best = reference.topk(3)
    for row, entry in enumerate(entries):
        assert entry.token_id == ids[row]
        assert entry.logprob == pytest.approx(float(reference[row, ids[row]]), abs=2e-5)
        assert [pair[0] for pair in entry.top] == best.indices[row].tolist()
        assert [pair[1] for pair in entry.top] == pytest.approx(best.values[row].tolist(), abs=2e-5)
    assert [entry.top for entry in prompt_logprobs(logits, ids, 0) or ()] == [()] * 6
    logits[4, 1] = math.nan
    assert prompt_logprobs(logits, ids, 3) is None


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [INF, 1.0], [-INF, -INF]])
def test_unusable_logits_concern_their_own_row_only(bad: list[float]) -> None:
    good, broken = sample(torch.tensor([[1.0, 2.0], bad]), [sequence(temperature=0.0), sequence()])
    assert (good.token_id, good.error) == (1, "")
    assert "no usable logits" in broken.error


def test_minus_infinity_is_never_drawn() -> None:
    assert reachable([-INF, 0.0, -INF, 0.0, -INF], temperature=100.0) == {1, 3}
