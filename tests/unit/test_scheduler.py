"""`plan_step` and `finish_reason`: what a step holds, and when an answer ends."""

from typing import Any

import pytest

from core.errors import ConfigError
from core.sampling import SamplingParams
from core.sequence import SequenceSpec
from engine.block_pool import BlockPool
from engine.scheduler import StepLimits, plan_step
from engine.sequence import Sequence
from engine.stopping import Finish, finish_reason

EOS, STOP = 2, 7
BLOCK = 16


def sequence(name: str, prompt_tokens: int, computed: int = 0, output: int = 0, **more: Any) -> Sequence:
    """A sequence as it arrives; `planned` numbers it and lets it start if it has computed tokens."""
    more.setdefault("sampling", SamplingParams(max_tokens=100, seed=0))
    return Sequence(
        SequenceSpec(
            sequence_id=name,
            prompt=(1,) * prompt_tokens,
            eos_token_ids=(EOS,),
            num_computed_tokens=computed,
            output=(5,) * output,
            **more,
        )
    )


def decoding(name: str, **more: Any) -> Sequence:
    return sequence(name, 4, computed=4, output=1, **more)


def number(sequences: list[Sequence], pool: BlockPool) -> None:
    """In order of arrival; those with computed tokens have blocks for all known ones."""
    for index, one in enumerate(sequences):
        one.number = index
        if one.num_computed_tokens:
            one.block_table = pool.acquire(-(-len(one.token_ids) // BLOCK)).blocks


def planned(sequences: list[Sequence], limits: StepLimits) -> list[tuple[str, int]]:
    pool = BlockPool(1000)
    number(sequences, pool)
    plan = plan_step(sequences, limits, pool, BLOCK)
    assert not plan.preempted
    return [(chunk.sequence.spec.sequence_id, chunk.num_tokens) for chunk in plan.chunks]


def test_decodes_come_first_and_the_last_prompt_is_cut_to_fit() -> None:
    sequences = [sequence("old", 3), decoding("d1"), sequence("young", 50), decoding("d2"), sequence("last", 1)]
    limits = StepLimits(max_batched_tokens=10, max_sequences=8)
    assert planned(sequences, limits) == [("d1", 1), ("d2", 1), ("old", 3), ("young", 4), ("last", 1)]


def test_no_more_sequences_start_than_may_run() -> None:
    sequences = [decoding("d1"), sequence("p1", 3), decoding("d2"), sequence("p2", 3)]
    assert planned(sequences, StepLimits(max_batched_tokens=10, max_sequences=2)) == [("d1", 1), ("d2", 1)]


def test_a_prompt_progresses_beside_as_many_decodes_as_fit() -> None:
    sequences = [decoding("d1"), decoding("d2"), sequence("p", 9)]
    assert planned(sequences, StepLimits(max_batched_tokens=3, max_sequences=3))[-1] == ("p", 1)


def test_a_prompt_with_its_first_token_but_missing_kv_is_a_prompt() -> None:
    assert planned([sequence("half", 8, computed=4, output=1)], StepLimits(max_batched_tokens=9, max_sequences=1)) == [
        ("half", 5)
    ]


@pytest.mark.parametrize(("prompt_tokens", "cuts"), [(1, [1]), (8, [8]), (9, [8, 1]), (24, [8, 8, 8])])
def test_a_lone_prompt_is_always_cut_the_same_way(prompt_tokens: int, cuts: list[int]) -> None:
    alone, pool = sequence("alone", prompt_tokens), BlockPool(10)
    seen = []
    while alone.num_uncomputed_tokens:
        limits = StepLimits(max_batched_tokens=8, max_sequences=4)
        [chunk] = plan_step([alone], limits, pool, BLOCK).chunks
        seen.append(chunk.num_tokens)
        assert chunk.samples == (chunk.num_tokens == alone.num_uncomputed_tokens)
        alone.block_table = alone.block_table or pool.acquire(3).blocks
        alone.num_computed_tokens += chunk.num_tokens
    assert seen == cuts


def test_no_sequences_no_step() -> None:
    assert planned([], StepLimits()) == []


@pytest.mark.parametrize(("max_batched_tokens", "max_sequences"), [(3, 4), (0, 0), (10, -1)])
def test_limits_that_would_starve_a_sequence_are_refused(max_batched_tokens: int, max_sequences: int) -> None:
    with pytest.raises(ConfigError, match=f"max_sequences={max_sequences}"):
        StepLimits(max_batched_tokens=max_batched_tokens, max_sequences=max_sequences)


def answer(tokens: list[int], *, arrived: int = 0, **sampling: object) -> Finish:
    """finish_reason after `tokens`, of which the first `arrived` were sampled elsewhere."""
    params = SamplingParams(**{"seed": 0, "stop_token_ids": (STOP,), "max_tokens": 5, **sampling})  # type: ignore[arg-type]
    ended = Sequence(
        SequenceSpec(
            sequence_id="s",
            prompt=(EOS, STOP),  # a prompt's own stop tokens end nothing
            sampling=params,
            eos_token_ids=(EOS, 3),
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
