"""`plan_step` and `finish_reason`: what a step holds, and when an answer ends."""

from array import array
from dataclasses import replace
from typing import Any

import pytest

from core.errors import ConfigError
from core.layout import growth_blocks
from core.sampling import SamplingParams
from core.sequence import SequenceSpec
from engine.block_pool import BlockPool
from engine.plan import StepPlan
from engine.scheduler import AGEING_STEPS, PATIENCE_STEPS, StepLimits, plan_step
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
            one.block_table = array("i", pool.acquire(-(-len(one.token_ids) // BLOCK)).blocks)


def planned(sequences: list[Sequence], limits: StepLimits) -> list[tuple[str, int]]:
    pool = BlockPool(1000)
    number(sequences, pool)
    plan = plan_step(sequences, limits, pool, BLOCK)
    assert not plan.preempted
    return [(chunk.sequence.spec.sequence_id, chunk.num_tokens) for chunk in plan.chunks]


def test_decodes_come_first_and_the_last_prompt_is_cut_to_fit() -> None:
    sequences = [sequence("old", 3), decoding("d1"), sequence("young", 50), decoding("d2"), sequence("last", 1)]
    limits = StepLimits(max_batched_tokens=10, max_sequences=8)
    assert planned(sequences, limits) == [("d1", 1), ("d2", 1), ("last", 1), ("old", 3), ("young", 4)]


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
        alone.block_table = alone.block_table or array("i", pool.acquire(3).blocks)
        alone.num_computed_tokens += chunk.num_tokens
    assert seen == cuts


def test_no_sequences_no_step() -> None:
    assert planned([], StepLimits()) == []


class Desk:
    """A pool and sequences whose state a test sets; plans are carried out by hand where they matter."""

    def __init__(self, num_blocks: int, *, budget: int = 64, max_sequences: int = 8) -> None:
        self.pool = BlockPool(num_blocks)
        self.limits = StepLimits(max_batched_tokens=budget, max_sequences=max_sequences)
        self.sequences: list[Sequence] = []

    def add(
        self, name: str, num_blocks: int | None = None, *, promise: int = 0, waited: int = 0, **more: Any
    ) -> Sequence:
        """One more sequence, started if it has blocks. `tokens` of them are known; `decodes`: all but one are computed."""
        tokens, decodes = more.pop("tokens", 1), more.pop("decodes", False)
        one = sequence(name, tokens - decodes, tokens - decodes if decodes else 0, int(decodes), **more)
        one.number, one.num_waited_steps = len(self.sequences), waited
        if num_blocks is not None:
            one.block_table, one.num_promised_blocks = self.pool.acquire(num_blocks, promise=promise).blocks, promise
        self.sequences.append(one)
        return one

    def decoder(self, name: str, num_blocks: int, **more: Any) -> Sequence:
        """One whose blocks are full, so that it needs another for its newest token."""
        return self.add(name, num_blocks, tokens=num_blocks * BLOCK + 1, decodes=True, **more)

    def plan(self) -> StepPlan:
        return plan_step(self.sequences, self.limits, self.pool, BLOCK)

    def chunks(self) -> list[tuple[str, int]]:
        return [(chunk.sequence.spec.sequence_id, chunk.num_tokens) for chunk in self.plan().chunks]

    def preempted(self) -> list[str]:
        return [one.spec.sequence_id for one in self.plan().preempted]

    def started(self) -> list[str]:
        return [start.sequence.spec.sequence_id for start in self.plan().starts]


class TestOrder:
    def test_a_higher_priority_starts_first_and_gets_half_of_the_step(self) -> None:
        desk = Desk(100, max_sequences=2)
        for name, priority in (("low", 0), ("high", 2), ("middle", 1)):
            desk.add(name, tokens=100, priority=priority)
        assert desk.chunks() == [("high", 32), ("middle", 32)]

    def test_the_first_keeps_its_half_and_the_shortest_of_equals_get_the_rest(self) -> None:
        desk = Desk(100)
        for name, tokens in (("long", 500), ("longer", 900), ("short", 10), ("middle", 30)):
            desk.add(name, tokens=tokens)
        assert desk.chunks() == [("long", 32), ("short", 10), ("middle", 22)]

    def test_what_the_others_leave_is_the_first_s(self) -> None:
        desk = Desk(100)
        desk.add("long", tokens=500)
        desk.add("short", tokens=10)
        assert desk.chunks() == [("long", 54), ("short", 10)]

    def test_a_short_low_priority_does_not_pass_a_long_high_one(self) -> None:
        desk = Desk(100, max_sequences=2)
        desk.add("first", tokens=500, priority=1)
        desk.add("low", tokens=10)
        desk.add("high", tokens=500, priority=1)
        assert desk.chunks() == [("first", 32), ("high", 32)]

    @pytest.mark.parametrize(("waited", "first"), [(AGEING_STEPS - 1, "high"), (AGEING_STEPS, "low")])
    def test_waiting_counts_as_priority(self, waited: int, first: str) -> None:
        desk = Desk(100, max_sequences=1)
        desk.add("low", tokens=8, waited=waited)  # older
        desk.add("high", tokens=8, priority=1)
        assert desk.started() == [first]


class TestStarting:
    def test_room_is_for_all_known_tokens_and_some_growth(self) -> None:
        desk = Desk(100)
        desk.add("a", tokens=40)
        [start] = desk.plan().starts
        # 3 blocks hold 40 tokens and 9 hold these and the answer's 100.
        assert start.num_promised_blocks == growth_blocks(40, 140, BLOCK) == 6

    @pytest.mark.parametrize(("num_free", "starts"), [(8, []), (9, ["a"])])
    def test_it_fits_or_it_waits(self, num_free: int, starts: list[str]) -> None:
        desk = Desk(20)
        desk.pool.acquire(20 - num_free)
        desk.add("a", tokens=40)
        assert desk.started() == starts
        assert desk.plan().num_kept_blocks == (0 if starts else 9)

    @pytest.mark.parametrize(("waited", "starts"), [(PATIENCE_STEPS - 1, ["small"]), (PATIENCE_STEPS, [])])
    def test_a_first_that_does_not_fit_is_passed_until_it_loses_patience(self, waited: int, starts: list[str]) -> None:
        desk = Desk(20)
        desk.pool.acquire(8)
        desk.add("big", tokens=200, waited=waited)
        desk.add("small", tokens=4, sampling=SamplingParams(max_tokens=4, seed=0))
        assert desk.started() == starts
        assert desk.plan().num_kept_blocks == 19

    def test_nobody_passes_one_that_had_to_yield(self) -> None:
        desk = Desk(20)
        desk.pool.acquire(8)
        desk.add("yielded", tokens=200).num_preemptions = 1
        desk.add("small", tokens=4, sampling=SamplingParams(max_tokens=4, seed=0))
        desk.add("high", tokens=4, sampling=SamplingParams(max_tokens=4, seed=0), priority=1)
        assert desk.started() == ["high"]

    def test_two_that_fit_alone_do_not_both_start(self) -> None:
        desk = Desk(17)
        desk.add("a", tokens=40)
        desk.add("b", tokens=40)
        assert desk.started() == ["a"]

    def test_cached_blocks_that_others_hold_need_no_room(self) -> None:
        desk = Desk(12)
        holder = desk.add("holder", 3, tokens=49, hash_seed=b"s")
        for block, block_hash in zip(holder.block_table, holder.hashes(BLOCK), strict=True):
            desk.pool.publish(block, block_hash)
        desk.sequences.clear()
        desk.pool.acquire(2)
        desk.add("same", tokens=49, hash_seed=b"s", sampling=SamplingParams(max_tokens=100, seed=0))
        assert desk.chunks() == [("same", 1)]  # 7 are available, and it needs 10 in all
        desk.add("other", tokens=49, hash_seed=b"t")
        assert desk.started() == ["same"]

    def test_a_prompt_waits_for_the_block_that_another_computes_now(self) -> None:
        desk = Desk(100)
        desk.add("a", tokens=40, hash_seed=b"s")
        desk.add("same", tokens=40, hash_seed=b"s")
        desk.add("other", tokens=20, hash_seed=b"t")
        desk.add("private", tokens=4)
        assert desk.chunks() == [("a", 40), ("other", 20), ("private", 4)]


class TestFullPool:
    def test_is_searched_once_however_many_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        desk, searched = Desk(5), []
        desk.add("runs", 5, tokens=5 * BLOCK, decodes=True)
        for number in range(20):
            desk.add(f"waits{number}", tokens=33)
        find = desk.pool.find
        monkeypatch.setattr(desk.pool, "find", lambda hashes: searched.append(hashes) or find(hashes))
        assert (desk.chunks(), desk.started()) == ([("runs", 1)], [])
        assert len(searched) == 2  # once a plan, for what newcomers must leave


class TestPreemption:
    def test_nobody_yields_while_there_is_room(self) -> None:
        desk = Desk(5)
        desk.decoder("a", 2)
        desk.decoder("b", 2)
        assert (desk.preempted(), desk.chunks()) == (["b"], [("a", 1)])
        desk = Desk(6)
        desk.decoder("a", 2)
        desk.decoder("b", 2)
        assert (desk.preempted(), desk.chunks()) == ([], [("a", 1), ("b", 1)])

    def test_what_is_set_aside_is_used_first_and_protects_from_equals(self) -> None:
        desk = Desk(5)
        desk.decoder("old", 2)
        desk.decoder("young", 2, promise=1)
        assert (desk.preempted(), desk.chunks()) == (["old"], [("young", 1)])

    def test_what_is_set_aside_does_not_protect_from_a_higher_priority(self) -> None:
        desk = Desk(5)
        desk.decoder("low", 2, promise=1)
        desk.decoder("high", 2, priority=1)
        assert (desk.preempted(), desk.chunks()) == (["low"], [("high", 1)])

    def test_the_lowest_goes_first_then_the_youngest(self) -> None:
        desk = Desk(12)
        for name, priority in (("first", 1), ("low", 0), ("second", 1), ("third", 1)):
            desk.decoder(name, 3, priority=priority)
        # One gives room for three.
        assert (desk.preempted(), [name for name, _ in desk.chunks()]) == (["low"], ["first", "second", "third"])
        desk.sequences[1].spec = replace(desk.sequences[1].spec, priority=1)
        assert desk.preempted() == ["third"]

    def test_who_ranks_higher_never_yields_to_who_ranks_lower(self) -> None:
        desk = Desk(5)
        desk.add("high", 3, tokens=40, decodes=True, priority=1)
        desk.decoder("low", 2)
        assert (desk.preempted(), desk.chunks()) == (["low"], [("high", 1)])

    def test_a_prompt_that_is_handed_over_never_yields(self) -> None:
        desk = Desk(5)
        desk.decoder("high", 2, priority=1)
        desk.add("prefill", 3, tokens=40, prefill_only=True)
        assert desk.preempted() == ["high"]

    def test_holders_of_the_same_blocks_yield_together_if_that_helps(self) -> None:
        desk = Desk(5)
        desk.decoder("a", 2)
        desk.decoder("b", 3)
        twin = desk.decoder("twin", 0)
        twin.token_ids, twin.num_computed_tokens = list(desk.sequences[1].token_ids), 3 * BLOCK
        twin.block_table = array("i", desk.sequences[1].block_table)
        desk.pool.share(twin.block_table)
        assert (desk.preempted(), desk.chunks()) == (["twin", "b"], [("a", 1)])
        desk.pool.share(twin.block_table)  # now somebody else has them too
        assert desk.preempted() == ["a"]  # which makes room for the two

    def test_in_that_step_nobody_starts_and_newcomers_get_nothing(self) -> None:
        desk = Desk(6)
        desk.decoder("a", 2)
        desk.decoder("b", 4)
        desk.add("waits", tokens=1, sampling=SamplingParams(max_tokens=1, seed=0))
        plan = desk.plan()
        assert (len(plan.preempted), plan.starts, plan.num_kept_blocks) == (1, (), 3)


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
