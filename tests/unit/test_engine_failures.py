"""Steps that fail, engines that stop, loops that crash: every sequence hears of it, and every block returns."""

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from core.clock import ManualClock
from core.errors import DeviceLostError, InternalError
from core.sequence import SequenceSpec, StepResult
from engine.loop import EngineLoop
from engine.plan import Done, Runner, Sampled, StepPlan
from engine.scheduler import Room, StepLimits, plan_step
from engine.scripted import ScriptedEngine, StepGate, scripted_engine
from engine.sequence import Sequence
from tests.engine_harness import WAIT_S, Recorder, answer, assert_all_returned, spec
from tests.processes import wait_until

BUDGET = 8  # tokens in a step


def loop_of(parts: ScriptedEngine, runner: Runner | None = None, **others: Any) -> EngineLoop:
    """A loop over the same parts."""
    limits = StepLimits(max_batched_tokens=BUDGET, max_sequences=4)
    return EngineLoop(runner or parts.runner, limits, parts.pool, parts.layout.block_tokens, **others)


def fails_on(name: str, error: Exception) -> Callable[[StepPlan], Exception | None]:
    return lambda plan: error if any(c.sequence.spec.sequence_id == name for c in plan.chunks) else None


def test_a_failed_step_ends_its_sequences_and_no_others(
    parts: ScriptedEngine, gate: StepGate, listener: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    parts.runner.fail_when = fails_on("bad", RuntimeError("the secret prompt"))
    parts.loop.submit(spec(parts, "first", [4], max_tokens=1))
    gate.wait_until_holding()
    for name, num_tokens in (("bad", 1), ("beside", 1), ("cut", 9), ("outside", 30)):  # the third fills the step
        parts.loop.submit(spec(parts, name, range(5, 5 + num_tokens)))
    gate.open()
    for name in ("bad", "beside", "cut"):
        end = listener.end_of(name)
        assert (end.finish_reason, end.error) == ("error", "engine step failed: RuntimeError")
    for name in ("first", "outside"):
        assert listener.end_of(name).finish_reason == "length"
    assert listener.tokens("outside") == answer(range(5, 35), 3)
    assert "engine step of 3 chunks failed" in caplog.text


def test_an_error_of_ours_says_what_it_is(parts: ScriptedEngine, listener: Recorder) -> None:
    parts.runner.fail_when = fails_on("bad", InternalError("block 7 is gone"))
    parts.loop.submit(spec(parts, "bad", [5]))
    assert listener.end_of("bad").error == "block 7 is gone"


def test_an_abort_during_a_failing_step_is_an_abort(parts: ScriptedEngine, gate: StepGate, listener: Recorder) -> None:
    parts.runner.fail_when = fails_on("a", RuntimeError())
    parts.loop.submit(spec(parts, "a", [5]))
    gate.wait_until_holding()
    parts.loop.abort("a")
    gate.open()
    assert listener.end_of("a").finish_reason == "abort"


def test_a_listener_that_raises_does_not_stop_the_engine(
    parts: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()

    def listener(result: StepResult) -> None:
        recorder(result)
        raise ValueError("listener bug")

    parts.loop.start(listener)
    parts.loop.submit(spec(parts, "a", [5]))
    assert recorder.end_of("a").finish_reason == "length"
    parts.loop.stop()
    assert "engine listener failed" in caplog.text


def test_stop_ends_every_sequence_and_the_thread(parts: ScriptedEngine, gate: StepGate) -> None:
    recorder = Recorder()
    parts.loop.start(recorder)
    names = [f"s{i}" for i in range(6)]
    for name in names:
        parts.loop.submit(spec(parts, name, range(9)))
    gate.wait_until_holding()
    stopper = threading.Thread(target=parts.loop.stop)
    stopper.start()
    wait_until(lambda: parts.loop._inbox.is_closed, "the stop heard")
    gate.open()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()
    assert [recorder.end_of(name).finish_reason for name in names] == ["abort"] * 6
    assert "engine" not in [thread.name for thread in threading.enumerate()]
    parts.loop.stop()


def test_what_is_submitted_after_stop_ends_at_once(parts: ScriptedEngine) -> None:
    recorder = Recorder()
    parts.loop.start(recorder)
    parts.loop.stop()
    parts.loop.submit(spec(parts, "late", [5]))
    assert [output.finish_reason for output in recorder.of("late")] == ["abort"]
    parts.loop.abort("late")
    assert len(recorder.of("late")) == 1


def test_submitting_from_many_threads_during_stop_loses_nothing(parts: ScriptedEngine) -> None:
    recorder = Recorder()
    parts.loop.start(recorder)
    specs = [spec(parts, f"s{i}", [5, i], max_tokens=2) for i in range(60)]

    def submit_all(part: list[SequenceSpec]) -> None:
        for one in part:
            parts.loop.submit(one)

    threads = [threading.Thread(target=submit_all, args=(specs[start::3],)) for start in range(3)]
    for thread in threads:
        thread.start()
    recorder.wait_for(lambda: len(recorder.results) > 0)
    parts.loop.stop()
    for thread in threads:
        thread.join(WAIT_S)
    assert {recorder.end_of(one.sequence_id).finish_reason for one in specs} <= {"abort", "length"}


def test_an_idle_engine_sleeps(parts: ScriptedEngine) -> None:
    num_tokens_planned: list[int] = []

    def counting_plan(sequences: Iterable[Sequence], limits: StepLimits, room: Room, block_tokens: int) -> StepPlan:
        plan = plan_step(sequences, limits, room, block_tokens)
        num_tokens_planned.append(sum(chunk.num_tokens for chunk in plan.chunks))
        return plan

    recorder = Recorder()
    loop = loop_of(parts, plan=counting_plan)
    loop.start(recorder)
    for number in range(20):
        loop.submit(spec(parts, f"s{number}", [5], max_tokens=1))
        recorder.end_of(f"s{number}")
    loop.stop()
    # At most two empty plans before each answer, one of them since blocks came back, and the last ones.
    assert num_tokens_planned.count(0) <= 42


def test_a_step_that_hangs_shows_as_stalled(parts: ScriptedEngine) -> None:
    clock, gate, recorder = ManualClock(), StepGate(), Recorder()
    parts.runner.gate = gate
    loop = loop_of(parts, clock=clock)
    loop.start(recorder)
    assert loop.stalled_s() == 0.0
    loop.submit(spec(parts, "a", [5], max_tokens=1))
    gate.wait_until_holding()
    clock.advance(7.0)
    assert loop.stalled_s() == 7.0
    gate.open()
    recorder.end_of("a")
    assert loop.stalled_s() == 0.0
    assert [result.step_s for result in recorder.results] == [7.0]
    loop.stop()


def test_a_crash_of_the_loop_ends_every_sequence_and_shows_as_stalled_for_ever(
    parts: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def broken_plan(sequences: Iterable[Sequence], limits: StepLimits, room: Room, block_tokens: int) -> StepPlan:
        if list(sequences):
            loop.submit(spec(parts, "b", [6]))  # still in the inbox when the loop crashes
            raise KeyError("bug")
        return StepPlan()

    recorder = Recorder()
    loop = loop_of(parts, plan=broken_plan)
    loop.start(recorder)
    loop.submit(spec(parts, "a", [5]))
    for name in ("a", "b"):
        end = recorder.end_of(name)
        assert (end.finish_reason, end.error) == ("error", "the engine crashed")
    assert loop.stalled_s() == math.inf
    loop.stop()
    assert "engine loop crashed" in caplog.text
    assert_all_returned(parts.pool, recorder)


def test_a_crash_in_the_middle_of_a_turn_loses_no_end_and_no_block(parts: ScriptedEngine) -> None:
    class BreaksTheSecondRow:
        def launch(self, plan: StepPlan) -> Done:
            results = parts.runner.run(plan)
            return Done(results if len(results) == 1 else [results[0], None, *results[2:]])

    recorder = Recorder()
    gate = parts.runner.gate = StepGate()
    loop = loop_of(parts, runner=BreaksTheSecondRow())
    loop.start(recorder)
    loop.submit(spec(parts, "first", [9], max_tokens=1))
    gate.wait_until_holding()
    for name, prefill_only in (("ended", False), ("broken", False), ("handed over", True)):
        loop.submit(spec(parts, name, range(20) if prefill_only else [5], max_tokens=1, prefill_only=prefill_only))
    gate.open()
    assert recorder.end_of("ended").finish_reason == "length"
    for name in ("broken", "handed over"):
        assert recorder.end_of(name).error == "the engine crashed"
    loop.stop()
    assert_all_returned(parts.pool, recorder)


def test_a_row_that_cannot_be_sampled_ends_its_own_sequence_only(parts: ScriptedEngine) -> None:
    class BreaksOneRow:
        def launch(self, plan: StepPlan) -> Done:
            return Done(
                [
                    Sampled(None, error="no usable logits") if chunk.sequence.spec.sequence_id == "bad" else sampled
                    for chunk, sampled in zip(plan.chunks, parts.runner.run(plan), strict=True)
                ]
            )

    loop = loop_of(parts, runner=BreaksOneRow())
    listener = Recorder()
    parts.runner.gate = StepGate()
    loop.start(listener)
    loop.submit(spec(parts, "first", [9], max_tokens=1))
    parts.runner.gate.wait_until_holding()
    for name, prompt in (("good", [5, 6]), ("bad", [1, 2])):
        loop.submit(spec(parts, name, prompt, max_tokens=4))  # the two share their steps
    parts.runner.gate.open()
    assert listener.end_of("bad").error == "no usable logits"
    assert listener.end_of("bad").finish_reason == "error"
    assert listener.end_of("good").finish_reason == "length"
    assert listener.tokens("good") == answer([5, 6], 4)
    loop.stop()


def test_a_pool_that_breaks_is_told_to_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("the pool is broken")

    parts, listener = scripted_engine(), Recorder()
    gate = parts.runner.gate = StepGate()
    parts.loop.start(listener)
    parts.loop.submit(spec(parts, "a", range(20)))
    gate.wait_until_holding()
    parts.loop.submit(spec(parts, "b", range(20)))
    for method in ("publish", "release", "acquire"):
        monkeypatch.setattr(parts.pool, method, broken)
    gate.open()
    assert {listener.end_of(name).finish_reason for name in "ab"} == {"error"}
    assert parts.loop.stalled_s() == math.inf
    parts.loop.stop()


@pytest.mark.parametrize("has_crashed", [False, True])
def test_stopping_leaves_a_hanging_step_behind(
    parts: ScriptedEngine, has_crashed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    is_over, plans = threading.Event(), list[StepPlan]()

    class Hanging:
        is_ahead = True

        def results(self) -> list[Sampled]:
            is_over.wait(WAIT_S)
            return [Sampled(1) for _ in plans[0].chunks]

    class Hangs:
        def launch(self, plan: StepPlan) -> Hanging:
            plans.append(plan)
            if has_crashed and len(plans) == 2:
                raise DeviceLostError("the device is lost")
            return Hanging()

    loop, recorder = loop_of(parts, runner=Hangs(), max_last_step_s=0.05), Recorder()
    loop.start(recorder)
    loop.submit(spec(parts, "one", [1, 2]))
    wait_until(lambda: len(plans) == 2, "the second step")
    loop.stop()
    assert "hangs and is left behind" in caplog.text
    is_over.set()
    recorder.end_of("one")
    loop.stop()
    assert_all_returned(parts.pool, recorder)


def test_a_lost_device_ends_the_engine_so_that_another_process_takes_over(parts: ScriptedEngine) -> None:
    class LosesItsDevice:
        def launch(self, plan: StepPlan) -> Done:
            raise DeviceLostError("the device is lost")

    loop, recorder = loop_of(parts, runner=LosesItsDevice()), Recorder()
    loop.start(recorder)
    loop.submit(spec(parts, "one", [1, 2]))
    assert recorder.end_of("one").error == "the engine crashed"
    assert loop.stalled_s() == math.inf
    loop.stop()
    assert_all_returned(parts.pool, recorder)
