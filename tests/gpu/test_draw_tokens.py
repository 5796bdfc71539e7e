"""Tokens drawn on the device are those of the CPU sampler, but where a number lies within 1e-5 of a border between two."""

import math
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.sampling import SamplingParams, uniform_draw
from engine.draw import Row, draw
from kernels.gpu.draw_tokens import MAX_VOCAB, _uniform, draw_tokens, draw_tokens_ref
from kernels.gpu.variant import Config
from tests.logit_rows import logits_of

INF, NAN = math.inf, math.nan
BORDER = 1e-5

# Many tiles of a small row, and a list so short that an edge often lies beyond it.
SMALL = Config(
    {"TILE": 128, "TILES": 64, "WORK": 2 * 64 + 2 * 32, "SCAN": 256, "BOUNDS": 4, "LIST": 32, "LIST_SCAN": 16},
    num_warps=4,
)
SHAPES = ["peaked", "flat", "equal", "ties", "holes", "steep", "signs"]
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 5.0},
    {"top_p": 0.5},
    {"top_p": 0.99, "temperature": 2.0},
    {"top_p": 1.0 - 2**-53},
    {"top_p": 5e-324},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 2**31 - 1, "temperature": 0.2},
    {"top_k": 90, "top_p": 0.9},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"min_p": 0.001, "top_k": 300, "top_p": 0.7, "temperature": 0.6},
    {"min_p": 0.1, "top_p": 0.8},
    {"min_p": 1e-300, "top_k": 3},
]


def params_of(filters: dict[str, float]) -> SamplingParams:
    return SamplingParams(**filters)  # type: ignore[arg-type]


def arguments(params: Seq[SamplingParams], seeds: Seq[int], positions: Seq[int]) -> list[Tensor]:
    return [
        torch.tensor([each.temperature for each in params], dtype=torch.float64),
        torch.tensor([each.min_p for each in params], dtype=torch.float64),
        torch.tensor([each.top_k for each in params], dtype=torch.int32),
        torch.tensor([each.top_p for each in params], dtype=torch.float64),
        torch.tensor(seeds, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int32),
    ]


def drawn(
    logits: Tensor,
    params: Seq[SamplingParams],
    seeds: Seq[int],
    positions: Seq[int],
    device: torch.device,
    config: Config | None = None,
) -> list[int]:
    others = [each.to(device) for each in arguments(params, seeds, positions)]
    tokens = draw_tokens(logits.to(device), *others, config=config)
    assert tokens.dtype == torch.int32
    result: list[int] = tokens.tolist()
    return result


def by_definition(row: Row, params: SamplingParams, top_p: float) -> tuple[list[int], Row]:
    """What the filters leave, in order, and where each token's share ends; over a full sort in float64."""
    order = np.arange(len(row))
    is_cut = 0 < params.top_k < len(row)
    if is_cut or params.top_p < 1.0:
        order = np.argsort(-row.astype(np.float64), kind="stable")
    weights = np.exp((row[order].astype(np.float64) - float(row.max())) / params.temperature)
    is_kept = weights >= params.min_p
    order, weights = order[is_kept], weights[is_kept]
    if is_cut:
        order, weights = order[: params.top_k], weights[: params.top_k]
    ends = weights.cumsum()
    if params.top_p < 1.0:
        count = int(ends.searchsorted(top_p * ends[-1])) + 1
        order, ends = order[:count], ends[:count]
    return order.tolist(), (ends / ends[-1])


def possible(row: Row, params: SamplingParams, uniform: float) -> set[int]:
    """The token by definition, and those that it could be if the number or top-p lay up to BORDER beside where it lies."""
    tokens: set[int] = set()
    for slack in (-BORDER, 0.0, BORDER) if params.top_p < 1.0 else (0.0,):
        order, ends = by_definition(row, params, min(max(params.top_p + slack, 0.0), 1.0))
        first = int(ends.searchsorted(uniform - BORDER, side="right"))
        last = min(int(ends.searchsorted(uniform + BORDER, side="right")), len(order) - 1)
        tokens |= {token for token in order[first : last + 1] if row[token] > -INF}
    return tokens


def assert_drawn_right(
    rows: Seq[Row], filters: Seq[dict[str, float]], seed: int, device: torch.device, config: Config | None
) -> None:
    params = [params_of(each) for each in filters]
    seeds = [seed + index for index in range(len(rows))]
    tokens = drawn(
        torch.tensor(np.stack(rows)), params, seeds, [index * 2**24 for index in range(len(rows))], device, config
    )
    for index, (row, each, token) in enumerate(zip(rows, params, tokens, strict=True)):
        if each.is_greedy:
            assert token == row.argmax()
            continue
        uniform = uniform_draw(seeds[index], index * 2**24)
        allowed = possible(row, each, uniform)
        assert token in allowed, (each, uniform)
        if len(allowed) == 1:
            assert token == draw(row, float(row.max()), each, uniform)


@triton.jit
def _uniform_kernel(seeds_ptr, positions_ptr, out_ptr):
    index = tl.program_id(0)
    tl.store(out_ptr + index, _uniform(tl.load(seeds_ptr + index), tl.load(positions_ptr + index)))


def test_the_device_draws_the_numbers_of_the_cpu_bit_for_bit(device: torch.device) -> None:
    pairs = [(0, 0), (1, 0), (-1, 7), (-(2**63), 2**40 + 5), (2**63 - 1, 2**31), (5 << 32, 2**32 - 1), (77, 2**62 + 1)]
    pairs += [(seed * 0x9E3779B97F4A7C1 - 2**62, seed) for seed in range(20)]
    seeds, positions = torch.tensor(pairs, device=device).T.contiguous()
    out = torch.empty(len(pairs), dtype=torch.float64, device=device)
    _uniform_kernel[(len(pairs),)](seeds, positions, out)
    assert out.tolist() == [uniform_draw(*pair) for pair in pairs]


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 63, 100, 127, 128, 1000])
@pytest.mark.parametrize("shape", ["peaked", "ties"])
def test_small_vocabularies(size: int, shape: str, device: torch.device, poisoned_empty: None) -> None:
    some = FILTERS[size % 3 :: 3] + FILTERS[:2]
    assert_drawn_right([logits_of(shape, size, seed) for seed in range(len(some))], some, size, device, None)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_filter_on_every_kind_of_row_beyond_a_list_and_within(
    shape: str, device: torch.device, poisoned_empty: None
) -> None:
    rows = [logits_of(shape, 301, seed) for seed in range(len(FILTERS))]
    assert_drawn_right(rows, FILTERS, 7, device, SMALL)


def test_a_whole_vocabulary_of_49152(device: torch.device, poisoned_empty: None) -> None:
    filters: list[dict[str, float]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 50, "top_p": 0.95},
        {"min_p": 0.05},
        {"temperature": 0.0},
    ]
    rows = [logits_of(shape, 49152, 1) for shape in ("flat", "peaked", "ties", "peaked", "flat")]
    assert_drawn_right(rows, filters, 3, device, None)


@given(
    st.integers(1, 700),
    st.sampled_from(SHAPES),
    st.floats(0.05, 20.0),
    st.sampled_from([0.0, 0.3, 0.01]),
    st.integers(0, 800),
    st.one_of(st.just(1.0), st.floats(0.01, 1.0, exclude_min=True)),
    st.integers(-(2**63), 2**63 - 100),
)
@settings(max_examples=12, deadline=None)
def test_any_parameters(
    device: torch.device, size: int, shape: str, temperature: float, min_p: float, top_k: int, top_p: float, seed: int
) -> None:
    filters = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    assert_drawn_right([logits_of(shape, size, size)], [filters], seed, device, SMALL)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.75}, {"top_k": 5}, {"min_p": 0.4}], ids=str)
def test_the_ends_of_the_unit_interval_stay_within_what_is_kept(
    filters: dict[str, float], device: torch.device
) -> None:
    draws = sorted((uniform_draw(seed, 0), seed) for seed in range(30_000))
    seeds = [seed for _, seed in (*draws[:2], *draws[-2:])]
    logits = torch.tensor([-INF, 0.0, 1.0, 0.5, -INF, 1.0, -1e30, 0.0, -INF]).repeat(len(seeds), 1)
    params = params_of(filters)
    tokens = drawn(logits, [params] * len(seeds), seeds, [0] * len(seeds), device, SMALL)
    row = logits[0].numpy()
    assert tokens == [draw(row, 1.0, params, uniform_draw(seed, 0)) for seed in seeds]
    assert set(tokens) <= {1, 2, 3, 5, 7}


def test_greedy_takes_the_best_and_the_lowest_id_among_equals(device: torch.device) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [4000, 123, 3777]] = 5.0
    logits[1] = -INF
    logits[1, 4999] = -7.0
    logits[2, ::2] = -0.0
    assert drawn(logits, [params_of({"temperature": 0.0})] * 3, [1, 2, 3], [0, 0, 0], device) == [123, 4999, 0]


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_an_unusable_row_gives_no_token_and_leaves_its_neighbours_alone(
    filters: dict[str, float], device: torch.device, poisoned_empty: None
) -> None:
    logits = torch.randn(6, 2100, generator=torch.Generator().manual_seed(8))
    logits[1, 2099], logits[2, 0], logits[3], logits[4, 1000] = NAN, INF, -INF, NAN
    logits[4, 1001] = INF
    params = [params_of(filters)] * 6
    tokens = drawn(logits, params, list(range(6)), [0] * 6, device)
    expected = draw_tokens_ref(logits, *arguments(params, list(range(6)), [0] * 6)).tolist()
    assert tokens == expected
    assert [token == -1 for token in tokens] == [False, True, True, True, True, False]


@pytest.mark.parametrize("temperature", [1e-4, 100.0])
def test_logits_as_large_as_floats_can_be(temperature: float, device: torch.device) -> None:
    row = torch.tensor([3.4e38, -3.4e38, 0.0, 3.3e38, -INF])
    filters: list[dict[str, float]] = [{}, {"top_p": 0.99}, {"top_k": 3}, {"min_p": 0.5}, {"min_p": 0.5, "top_p": 0.5}]
    params = [params_of({"temperature": temperature} | each) for each in filters]
    assert drawn(row.repeat(5, 1), params, list(range(5)), [0] * 5, device, SMALL) == [0] * 5


def test_a_row_alone_is_the_row_in_a_batch_of_distant_rows(device: torch.device, poisoned_empty: None) -> None:
    some = FILTERS[::3]
    n = len(some)
    wide = torch.full((n, 1500), NAN)
    logits = wide[:, 3:1004]
    logits.copy_(torch.tensor(np.stack([logits_of(SHAPES[seed % 7], 1001, seed) for seed in range(n)])))
    params = [params_of(each) for each in some]
    others = [each.to(device) for each in arguments(params, list(range(n)), [9] * n)]
    together = draw_tokens(wide.to(device)[:, 3:1004], *others, config=SMALL).tolist()
    for index in range(n):
        row = logits[index : index + 1].contiguous().to(device)
        assert draw_tokens(row, *(each[index : index + 1] for each in others), config=SMALL).tolist() == [
            together[index]
        ]


def test_logits_are_not_changed(device: torch.device) -> None:
    logits = torch.tensor(logits_of("ties", 300, 0), device=device)[None]
    before = logits.clone()
    drawn(logits, [params_of({"top_p": 0.9})], [1], [1], device, SMALL)
    assert torch.equal(logits, before)


def test_what_it_cannot_compute_is_refused(device: torch.device) -> None:
    others = [each.to(device) for each in arguments([SamplingParams()] * 2, [1, 2], [0, 0])]
    with pytest.raises(ValueError, match="float32"):
        draw_tokens(torch.zeros(2, 4, dtype=torch.float16, device=device), *others)
    with pytest.raises(ValueError, match="stride 1"):
        draw_tokens(torch.zeros(4, 2, device=device).T, *others)
    with pytest.raises(ValueError, match=str(MAX_VOCAB + 1)):
        draw_tokens(torch.zeros(2, 1, device=device).expand(2, MAX_VOCAB + 1), *others)
    with pytest.raises(ValueError, match="float64"):
        draw_tokens(torch.zeros(2, 4, device=device), others[0].float(), *others[1:])


def test_no_rows_are_no_work(device: torch.device) -> None:
    others = [each.to(device) for each in arguments([], [], [])]
    assert draw_tokens(torch.zeros(0, 4, device=device), *others).shape == (0,)
