"""`plan_step` and `finish_reason`: what a step holds, and when an answer ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from core.sampling import SamplingParams
from core.sequence import SequenceSpec
from engine.scheduler import StepLimits, plan_step
from engine.sequence import Sequence
from engine.stopping import Finish, finish_reason

EOS, STOP = 2, 7


def sequence(name: str, prompt_tokens: int, computed: int = 0, output: int = 0) -> Sequence:
    return Sequence(
        SequenceSpec(
            sequence_id=name,
            prompt=(1,) * prompt_tokens,
            sampling=SamplingParams(max_tokens=100, seed=0),
            eos_token_ids=(EOS,),
            block_table=(),
            num_computed_tokens=computed,
            output=(5,) * output,
        )
    )


def decoding(name: str) -> Sequence:
    return sequence(name, 4, computed=4, output=1)


def planned(sequences: list[Sequence], limits: StepLimits) -> list[tuple[str, int]]:
    return [(chunk.sequence.spec.sequence_id, chunk.num_tokens) for chunk in plan_step(sequences, limits).chunks]


def test_decodes_come_first_and_the_last_prompt_is_cut_to_fit() -> None:
    sequences = [sequence("old", 3), decoding("d1"), sequence("young", 50), decoding("d2"), sequence("last", 1)]
    limits = StepLimits(max_batched_tokens=10, max_sequences=8)
    assert planned(sequences, limits) == [("d1", 1), ("d2", 1), ("old", 3), ("young", 5)]


def test_only_the_oldest_sequences_run_whatever_they_do() -> None:
    sequences = [decoding("d1"), sequence("p1", 3), decoding("d2"), sequence("p2", 3)]
    limits = StepLimits(max_batched_tokens=10, max_sequences=2)
    assert planned(sequences, limits) == [("d1", 1), ("p1", 3)]


def test_a_prompt_progresses_beside_as_many_decodes_as_fit() -> None:
    sequences = [decoding("d1"), decoding("d2"), sequence("p", 9)]
    assert planned(sequences, StepLimits(max_batched_tokens=3, max_sequences=3))[-1] == ("p", 1)


def test_a_prompt_with_its_first_token_but_missing_kv_is_a_prompt() -> None:
    assert planned([sequence("half", 8, computed=4, output=1)], StepLimits(max_batched_tokens=9, max_sequences=1)) == [
        ("half", 5)
    ]


@pytest.mark.parametrize(("prompt_tokens", "cuts"), [(1, [1]), (8, [8]), (9, [8, 1]), (24, [8, 8, 8])])
def test_a_lone_prompt_is_always_cut_the_same_way(prompt_tokens: int, cuts: list[int]) -> None:
    alone = sequence("alone", prompt_tokens)
    seen = []
    while alone.num_uncomputed_tokens:
        [chunk] = plan_step([alone], StepLimits(max_batched_tokens=8, max_sequences=4)).chunks
        seen.append(chunk.num_tokens)
        assert chunk.samples == (chunk.num_tokens == alone.num_uncomputed_tokens)
        alone.num_computed_tokens += chunk.num_tokens
    assert seen == cuts


def test_no_sequences_no_step() -> None:
    assert planned([], StepLimits()) == []


@pytest.mark.parametrize(("max_batched_tokens", "max_sequences"), [(3, 4), (0, 0), (10, -1)])
def test_limits_that_would_starve_a_sequence_are_refused(max_batched_tokens: int, max_sequences: int) -> None:
    with pytest.raises(ConfigError, match=f"max_sequences={max_sequences}"):
        StepLimits(max_batched_tokens=max_batched_tokens, max_sequences=max_sequences)


states = st.one_of(st.none(), st.integers(1, 40))  # decoding, or a prompt with that many tokens left


@given(
    kinds=st.lists(states, max_size=20),
    max_sequences=st.integers(1, 12),
    spare_tokens=st.integers(0, 30),
)
def test_every_plan_fits_and_starves_nobody(kinds: list[int | None], max_sequences: int, spare_tokens: int) -> None:
    sequences = [decoding(f"{i}") if left is None else sequence(f"{i}", left) for i, left in enumerate(kinds)]
    limits = StepLimits(max_batched_tokens=max_sequences + spare_tokens, max_sequences=max_sequences)
    before = [(s.num_computed_tokens, list(s.token_ids)) for s in sequences]
    plan = planned(sequences, limits)

    assert sum(tokens for _, tokens in plan) <= limits.max_batched_tokens
    assert len({name for name, _ in plan}) == len(plan) <= max_sequences
    assert [(s.num_computed_tokens, s.token_ids) for s in sequences] == before
    active = sequences[:max_sequences]
    assert [name for name, _ in plan[: sum(s.is_decoding for s in active)]] == [
        s.spec.sequence_id for s in active if s.is_decoding
    ]
    prompts = [s for s in active if not s.is_decoding]
    chunks = plan[len(active) - len(prompts) :]
    assert [name for name, _ in chunks] == [s.spec.sequence_id for s in prompts[: len(chunks)]]  # oldest first, no gap
    assert bool(chunks) == bool(prompts)
    assert all(tokens == s.num_uncomputed_tokens for s, (_, tokens) in zip(prompts, chunks[:-1], strict=False))
    if len(chunks) < len(prompts):
        assert sum(tokens for _, tokens in plan) == limits.max_batched_tokens


def answer(tokens: list[int], *, arrived: int = 0, **sampling: object) -> Finish:
    """finish_reason after `tokens`, of which the first `arrived` were sampled elsewhere."""
    params = SamplingParams(**{"seed": 0, "stop_token_ids": (STOP,), "max_tokens": 5, **sampling})  # type: ignore[arg-type]
    ended = Sequence(
        SequenceSpec(
            sequence_id="s",
            prompt=(EOS, STOP),  # a prompt's own stop tokens end nothing
            sampling=params,
            eos_token_ids=(EOS, 3),
            block_table=(),
            output=tuple(tokens[:arrived]),
        )
    )
    ended.token_ids += tokens[arrived:]
    return finish_reason(ended)


GOES_ON = Finish(None, None)


@pytest.mark.parametrize(
    ("tokens", "sampling", "expected"),
    [
        ([], {}, GOES_ON),
        ([9], {}, GOES_ON),
        ([9], {"max_tokens": 1}, Finish("length", None)),
        ([9, 9, 9, 9], {}, GOES_ON),
        ([9, 9, 9, 9, 9], {}, Finish("length", None)),
        ([EOS], {}, Finish("stop", EOS)),
        ([9, 3], {}, Finish("stop", 3)),
        ([9, STOP], {}, Finish("stop", STOP)),
        ([EOS, 9], {}, GOES_ON),  # only the newest token counts
        ([EOS], {"max_tokens": 1}, Finish("stop", EOS)),
        ([EOS], {"ignore_eos": True}, GOES_ON),
        ([EOS], {"ignore_eos": True, "max_tokens": 1}, Finish("length", None)),
        ([STOP], {"ignore_eos": True}, Finish("stop", STOP)),
        ([EOS], {"ignore_eos": True, "stop_token_ids": (EOS,)}, Finish("stop", EOS)),
        ([9, EOS], {"min_tokens": 3}, GOES_ON),
        ([9, STOP], {"min_tokens": 3}, GOES_ON),
        ([9, 9, EOS], {"min_tokens": 3}, Finish("stop", EOS)),
        ([9, 9, EOS], {"min_tokens": 3, "max_tokens": 3}, Finish("stop", EOS)),
    ],
)
@pytest.mark.parametrize("arrived", [0, 1])
def test_an_answer_ends_at_its_newest_token(
    tokens: list[int], sampling: dict[str, object], expected: Finish, arrived: int
) -> None:
    assert answer(tokens, arrived=arrived, **sampling) == expected
