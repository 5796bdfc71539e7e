"""When blocks run out: who yields, who waits how long, and that no answer changes by it. Bounds are in steps."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from core.errors import CapacityError
from engine.loop import EngineLoop
from engine.scheduler import AGEING_STEPS, PATIENCE_STEPS, StepLimits
from engine.scripted import ScriptedEngine, scripted_engine, scripted_layout
from engine.sequence import Sequence
from tests.engine_harness import Recorder, acting_loop, answer, assert_all_returned, serve, spec

BLOCK = 4
SWAP = [0, 1_000]  # blocks in host memory


def engine(num_blocks: int) -> ScriptedEngine:
    return scripted_engine(num_blocks=num_blocks, layout=scripted_layout(BLOCK))


def steps_until(listener: Recorder, name: str) -> float:
    """Steps that had passed when a sequence got its first token; infinity: it never did."""
    for number, result in enumerate(listener.results):
        if any(output.sequence_id == name and output.token_ids for output in result.outputs):
            return number + 1
    return math.inf


@pytest.mark.parametrize("swap_blocks", SWAP)
@pytest.mark.parametrize("num_priorities", [1, 3])
def test_a_storm_of_streams_ends_with_few_preemptions_and_the_right_tokens(
    swap_blocks: int, num_priorities: int
) -> None:
    num_streams, num_tokens = 64, 160
    parts = engine(8 * -(-(9 + num_tokens) // BLOCK))  # for eight streams
    preemptions: Counter[str] = Counter()

    def count(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        preemptions.update({s.spec.sequence_id: s.num_preemptions - preemptions[s.spec.sequence_id] for s in live})

    prompts = {f"s{number}": [number] * 9 for number in range(num_streams)}
    listener = serve(
        parts,
        [
            spec(parts, name, prompt, max_tokens=num_tokens, priority=number % num_priorities)
            for number, (name, prompt) in enumerate(prompts.items())
        ],
        StepLimits(max_batched_tokens=128, max_sequences=num_streams),
        count,
        swap_blocks=swap_blocks,
    )
    for name, prompt in prompts.items():
        assert listener.tokens(name) == answer(prompt, num_tokens)
    assert max(preemptions.values()) < 10
    assert 20 < preemptions.total() == listener.total("num_preemptions")
    num_answered = num_streams * num_tokens
    assert listener.total("num_recomputed_tokens") < num_answered  # no more than half of the work is done twice
    assert len(listener.results) < num_answered / 8 + 100  # no slower than eight at a time


def crowd(
    parts: ScriptedEngine, priorities: dict[str, int], num_tokens: int = 60, swap_blocks: int = 0
) -> tuple[Recorder, list[str]]:
    """Streams that start together and do not fit together; and who yielded, in order."""
    victims: list[str] = []
    seen: dict[str, int] = {}

    def note(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        for sequence in live:
            name = sequence.spec.sequence_id
            victims.extend([name] * (sequence.num_preemptions - seen.get(name, 0)))
            seen[name] = sequence.num_preemptions

    specs = [
        spec(parts, name, [number] * BLOCK, max_tokens=num_tokens, priority=priority)
        for number, (name, priority) in enumerate(priorities.items())
    ]
    limits = StepLimits(max_batched_tokens=32, max_sequences=8)
    listener = serve(parts, specs, limits, note, swap_blocks=swap_blocks)
    for one in specs:
        assert listener.tokens(one.sequence_id) == answer(one.prompt, num_tokens)
    return listener, victims


@pytest.mark.parametrize("swap_blocks", SWAP)
def test_the_lowest_priority_yields_first_and_the_youngest_of_equals(
    swap_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.layout.GROWTH_BLOCKS", 0)
    listener, victims = crowd(engine(40), {"low": 0, "old": 1, "young": 1, "high": 2}, swap_blocks=swap_blocks)
    assert victims[0] == "low"
    assert victims[1] == "young"
    assert "high" not in victims
    assert bool(listener.total("num_recomputed_tokens")) == (not swap_blocks)


def test_a_device_that_hangs_while_blocks_are_swapped_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.layout.GROWTH_BLOCKS", 0)
    parts, loops, was_seen = engine(20), list[EngineLoop](), dict[str, list[bool]]()

    def watched(name: str, copy: Callable[..., None]) -> Callable[..., None]:
        def copied(*args: Any) -> None:
            was_seen.setdefault(name, []).append(loops[0]._step_started is not None)
            copy(*args)

        return copied

    for name in ("copy_out", "copy_in"):
        monkeypatch.setattr(parts.memory, name, watched(name, getattr(parts.memory, name)), raising=False)
    specs = [spec(parts, name, [number] * BLOCK, max_tokens=50) for number, name in enumerate("abc")]
    limits = StepLimits(max_batched_tokens=32, max_sequences=8)
    serve(parts, specs, limits, lambda loop, *_: loops.append(loop), swap_blocks=1_000)
    assert was_seen.keys() == {"copy_out", "copy_in"}
    assert all(all(seen) for seen in was_seen.values())
    assert loops[0].stalled_s() == 0


def test_a_stream_that_yields_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.layout.GROWTH_BLOCKS", 0)
    listener, victims = crowd(engine(20), {"a": 0, "b": 0, "c": 0}, num_tokens=50)
    assert victims
    for name in "abc":
        computed = [output.num_computed_tokens for output in listener.of(name) if output.token_ids]
        assert computed == list(range(BLOCK, BLOCK + 50))  # one token after the other, none twice


def test_prompt_log_probabilities_come_once_however_often_the_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("core.layout.GROWTH_BLOCKS", 0)
    parts, prompt = engine(16), list(range(40))
    specs = [
        spec(parts, "high", [9], max_tokens=60, priority=1),
        spec(parts, "low", prompt, max_tokens=5, prompt_logprobs=1),
    ]
    listener = serve(parts, specs, StepLimits(max_batched_tokens=3, max_sequences=2))
    assert listener.total("num_recomputed_tokens") > 0
    given = [entry.token_id for output in listener.of("low") for entry in output.prompt_logprobs]
    assert given == prompt[1:]
    assert listener.tokens("low") == answer(prompt, 5)


def test_a_high_priority_waits_for_no_low_ones_in_line() -> None:
    parts = engine(64)  # each needs half of it

    def high_comes(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        if num_steps == 5 and len(live) == 8:
            loop.submit(spec(parts, "high", [99] * 60, max_tokens=60, priority=1))

    lows = [spec(parts, f"low{number}", [number] * 60, max_tokens=60) for number in range(8)]
    listener = serve(parts, lows, StepLimits(max_batched_tokens=64, max_sequences=8), high_comes)
    listener.end_of("high")
    started_before = [low for low in lows if steps_until(listener, low.sequence_id) < steps_until(listener, "high")]
    assert len(started_before) == 2  # those that ran when it came


def test_a_low_priority_gets_in_though_higher_ones_never_stop_coming() -> None:
    parts = engine(64)
    num_highs = 0

    def highs_come(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        nonlocal num_highs
        if any(sequence.spec.sequence_id == "low" for sequence in live):
            loop.submit(spec(parts, f"high{num_highs}", [num_highs % 250, 7] * 4, max_tokens=9, priority=1))
            num_highs += 1

    running = [spec(parts, f"running{number}", [200 + number] * 8, max_tokens=9, priority=1) for number in range(2)]
    low = spec(parts, "low", [99] * 40, max_tokens=4)
    listener = serve(parts, [*running, low], StepLimits(max_batched_tokens=4, max_sequences=2), highs_come)
    assert listener.tokens("low") == answer(low.prompt, 4)
    waited = steps_until(listener, "low")
    assert sum(steps_until(listener, f"high{number}") < waited for number in range(num_highs)) > 20
    # It ages until it is the first of all; one of the two that run ends; then half of each step is its own.
    assert waited <= AGEING_STEPS + 11 + 40 / 2


def test_a_long_prompt_that_has_started_goes_on_though_higher_ones_never_stop_coming() -> None:
    parts = engine(200)
    num_highs = 0

    def highs_come(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        nonlocal num_highs
        while any(one.spec.sequence_id == "low" for one in live) and num_highs < 2 * num_steps:
            loop.submit(spec(parts, f"high{num_highs}", [num_highs % 250, 7] * 8, max_tokens=1, priority=1))
            num_highs += 1

    low = spec(parts, "low", [99] * 200, max_tokens=1)
    listener = serve(parts, [low], StepLimits(max_batched_tokens=8, max_sequences=4), highs_come)
    assert steps_until(listener, "low") <= AGEING_STEPS + 4 + 200 / 4


def test_short_prompts_pass_two_very_long_ones_which_still_progress() -> None:
    parts, limits = engine(4_000), StepLimits(max_batched_tokens=64, max_sequences=16)
    asked: dict[str, int] = {}

    def shorts_come(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        if num_steps % 5 == 0 and len(asked) < 40 and f"short{num_steps}" not in asked:
            asked[f"short{num_steps}"] = num_steps
            loop.submit(spec(parts, f"short{num_steps}", [num_steps, 3] * 8, max_tokens=2))

    longs = [spec(parts, f"long{number}", [number, *range(200)] * 30, max_tokens=1) for number in range(2)]
    listener = serve(parts, longs, limits, shorts_come)
    for name, step in asked.items():
        listener.end_of(name)
        assert steps_until(listener, name) <= step + 2  # one step runs while it arrives; the next has room for it
    left = limits.max_batched_tokens - 2  # of a step, beside the decodes
    assert steps_until(listener, "long0") <= 2 * 6_030 / left + 1
    assert steps_until(listener, "long1") <= 4 * 6_030 / left + 1


def test_a_head_that_does_not_fit_lets_others_pass_for_a_while_only() -> None:
    parts, limits = engine(100), StepLimits(max_batched_tokens=64, max_sequences=32)
    num_small = 0

    def small_ones_come(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        nonlocal num_small
        is_big_waiting = num_steps == 0 or any(s.spec.sequence_id == "big" and not s.has_blocks for s in live)
        while is_big_waiting and num_small < 2 * num_steps:
            loop.submit(spec(parts, f"small{num_small}", [num_small % 250] * 8, max_tokens=24))
            num_small += 1

    specs = [spec(parts, f"first{number}", [200 + number] * 80, max_tokens=120) for number in range(2)]
    big = spec(parts, "big", [199] * 240, max_tokens=20)
    listener = serve(parts, [*specs, big], limits, small_ones_come)
    waited = steps_until(listener, "big")
    passed = [number for number in range(num_small) if steps_until(listener, f"small{number}") < waited]
    assert len(passed) > 10
    # Then nobody passes, and what ran by then ends: at most the longest answer that was there.
    assert waited <= PATIENCE_STEPS + 120 + 240 / 32 + 5


def test_newcomers_of_the_service_leave_room_for_the_first_that_waits() -> None:
    parts, num_refused = engine(40), 0
    transfers = {15: parts.pool.acquire(20).blocks}  # by the step in which they end

    def transfers_come(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        nonlocal num_refused
        parts.pool.release(transfers.pop(num_steps, []))
        while num_steps and any(one.spec.sequence_id == "big" and not one.has_blocks for one in live):
            try:
                transfers.setdefault(num_steps + 10, []).extend(parts.pool.admit(3).blocks)
            except CapacityError:
                num_refused += 1
                return

    runs, big = spec(parts, "runs", [1] * 4, max_tokens=150), spec(parts, "big", [2] * 8, max_tokens=60)
    listener = serve(parts, [runs, big], StepLimits(max_batched_tokens=16, max_sequences=4), transfers_come)
    assert steps_until(listener, "big") < 20
    assert num_refused > 10


@pytest.mark.parametrize("swap_blocks", SWAP)
def test_what_came_from_another_worker_yields_and_goes_on(swap_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.layout.GROWTH_BLOCKS", 0)
    prompts = {f"s{number}": [number, *range(10)] for number in range(4)}
    source = engine(40)
    limits = StepLimits(max_batched_tokens=32, max_sequences=8)
    tables: dict[str, tuple[int, ...]] = {}
    for name, prompt in prompts.items():
        listener = Recorder()
        loop = acting_loop(source, limits, lambda *_: None)
        loop.start(listener)
        loop.submit(spec(source, name, prompt, max_tokens=40, prefill_only=True))
        tables[name] = listener.end_of(name).block_table
        loop.stop()

    target, specs = engine(20), []
    for name, prompt in prompts.items():
        blocks = target.pool.acquire(len(tables[name])).blocks
        for ours, theirs in zip(blocks, tables[name], strict=True):
            target.memory.view(ours)[:] = source.memory.view(theirs)
        one = spec(target, name, prompt, max_tokens=40)
        adopted = {"block_table": tuple(blocks), "num_computed_tokens": len(prompt), "output": answer(prompt, 1)}
        specs.append(replace(one, **adopted))
    listener = serve(target, specs, limits, swap_blocks=swap_blocks)
    assert listener.total("num_preemptions") > 0
    assert listener.total("num_looked_up_tokens") == 0  # the service did, before the blocks came
    for name, prompt in prompts.items():
        assert listener.tokens(name) == answer(prompt, 40)[1:]


def test_the_last_running_request_waits_for_blocks_that_others_hold() -> None:
    parts = engine(12)
    taken: list[int] = []

    def transfers_come_and_go(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        if num_steps == 3:
            taken.extend(parts.pool.acquire(parts.pool.num_available).blocks)
        if live and not live[0].has_blocks and taken:
            parts.pool.release([taken.pop()])

    # It grows beyond what is set aside for it.
    listener = serve(
        parts,
        [spec(parts, "only", [5] * 4, max_tokens=44)],
        StepLimits(max_batched_tokens=8, max_sequences=2),
        transfers_come_and_go,
    )
    assert listener.tokens("only") == answer([5] * 4, 44)


@pytest.mark.parametrize("prefill_only", [False, True])
@pytest.mark.parametrize(("more", "fits"), [(-1, True), (0, True), (1, False)])
def test_what_fits_exactly_runs_and_what_can_never_fit_is_refused_at_once(
    more: int, fits: bool, prefill_only: bool
) -> None:
    parts = engine(10)
    num_prompt, num_answer = (40 + more, 5) if prefill_only else (20, 20 + more)
    one = spec(parts, "a", range(num_prompt), max_tokens=num_answer, prefill_only=prefill_only)
    beside = spec(parts, "b", [7] * 30, max_tokens=4)
    listener = serve(parts, [beside, one], StepLimits(max_batched_tokens=16, max_sequences=2))
    end = listener.end_of("a")
    assert listener.tokens("b") == answer([7] * 30, 4)
    if fits:
        assert listener.tokens("a") == answer(range(num_prompt), 1 if prefill_only else num_answer)
    else:
        assert end.error == "the sequence may need 11 KV blocks; the pool has 10"
        assert [listener.tokens("a"), listener.of("a")] == [[], [end]]


def test_an_aborted_sequence_gives_back_its_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.layout.GROWTH_BLOCKS", 0)
    parts, listener = engine(20), Recorder()
    num_cycles = num_aborted = 0

    def next_cycle(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        nonlocal num_cycles, num_aborted
        if not live and num_cycles < 20:
            loop.submit(spec(parts, f"high{num_cycles}", [num_cycles] * 4, max_tokens=60, priority=1))
            loop.submit(spec(parts, f"low{num_cycles}", [100 + num_cycles] * 32, max_tokens=40))
            num_cycles += 1
        for sequence in live:
            if sequence.swap_slots:  # it yielded; host memory has room for one such sequence
                loop.abort(sequence.spec.sequence_id)
                num_aborted += 1

    loop = acting_loop(parts, StepLimits(max_batched_tokens=40, max_sequences=2), next_cycle, swap_blocks=16)
    loop.start(listener)
    for cycle in range(20):
        assert listener.end_of(f"high{cycle}").finish_reason == "length"
        assert listener.end_of(f"low{cycle}").finish_reason == "abort"
    loop.stop()
    assert num_aborted == 20
    assert_all_returned(parts.pool, listener)
