"""The contract of `core.sequence.Engine`, on the engine loop over a scripted runner."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from core.clock import ManualClock
from core.errors import InternalError
from core.sampling import SamplingParams
from core.sequence import SequenceSpec, StepResult
from engine.loop import EngineLoop
from engine.plan import Runner, Sampled, StepPlan
from engine.scheduler import Room, StepLimits, plan_step
from engine.scripted import ScriptedEngine, StepGate, scripted_engine
from engine.sequence import Sequence
from tests.engine_harness import EOS, WAIT_S, Recorder, answer, assert_all_returned, spec
from tests.processes import wait_until

BUDGET = 8  # tokens in a step


@pytest.fixture
def parts() -> ScriptedEngine:
    return scripted_engine(limits=StepLimits(max_batched_tokens=BUDGET, max_sequences=4))


@pytest.fixture
def gate(parts: ScriptedEngine) -> StepGate:
    parts.runner.gate = StepGate()
    return parts.runner.gate


@pytest.fixture
def listener(parts: ScriptedEngine) -> Iterator[Recorder]:
    """Started on use; a test that also uses `gate` holds every step."""
    listener = Recorder()
    parts.loop.start(listener)
    yield listener
    if parts.runner.gate is not None:
        parts.runner.gate.open()
    parts.loop.stop()
    assert_all_returned(parts.pool, listener)


def loop_of(parts: ScriptedEngine, runner: Runner | None = None, **others: Any) -> EngineLoop:
    """A loop over the same parts."""
    limits = StepLimits(max_batched_tokens=BUDGET, max_sequences=4)
    return EngineLoop(runner or parts.runner, limits, parts.pool, parts.layout.block_tokens, **others)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 129])  # below, at and across KV blocks and steps
@pytest.mark.parametrize("max_tokens", [1, 2, 16])
def test_an_answer_has_exactly_max_tokens(
    parts: ScriptedEngine, listener: Recorder, num_tokens: int, max_tokens: int
) -> None:
    prompt = range(10, 10 + num_tokens)
    parts.loop.submit(spec(parts, "a", prompt, max_tokens=max_tokens))
    end = listener.end_of("a")
    assert (end.finish_reason, end.matched_stop_id) == ("length", None)
    assert listener.tokens("a") == answer(prompt, max_tokens)
    assert end.num_computed_tokens == num_tokens + max_tokens - 1


def test_every_chunk_of_a_prompt_is_reported(parts: ScriptedEngine, gate: StepGate, listener: Recorder) -> None:
    parts.loop.submit(spec(parts, "a", range(20), max_tokens=2))
    gate.open()
    listener.end_of("a")
    assert [(o.num_computed_tokens, len(o.token_ids)) for o in listener.of("a")] == [(8, 0), (16, 0), (20, 1), (21, 1)]
    waits = [(r.num_waiting, r.num_running, r.num_waiting_tokens) for r in listener.results]
    assert waits == [(1, 0, 12), (1, 0, 4), (0, 1, 0), (0, 0, 0)]
    assert listener.threads == {"engine"}


def test_one_step_is_one_call_for_all_its_sequences(parts: ScriptedEngine, gate: StepGate, listener: Recorder) -> None:
    parts.loop.submit(spec(parts, "first", [5], max_tokens=1))
    gate.wait_until_holding()
    for name in "abc":
        parts.loop.submit(spec(parts, name, [6, 7], max_tokens=4))
    gate.open()
    ends = [listener.end_of(name) for name in "abc"]
    assert [end.finish_reason for end in ends] == ["length"] * 3
    assert [len(result.outputs) for result in listener.results] == [1, 3, 3, 3, 3]


def test_logprobs_come_with_their_tokens(parts: ScriptedEngine, listener: Recorder) -> None:
    parts.loop.submit(spec(parts, "a", [5], logprobs=2))
    parts.loop.submit(spec(parts, "plain", [5]))
    listener.end_of("a")
    listener.end_of("plain")
    for output in listener.of("a"):
        [logprobs] = output.logprobs
        assert (logprobs.token_id,) == output.token_ids
        assert len(logprobs.top) == 2
    assert not any(output.logprobs for output in listener.of("plain"))


def eos_at(position: int) -> Callable[[Sequence], int | None]:
    return lambda sequence: EOS if sequence.num_output_tokens == position else None


@pytest.mark.parametrize("position", [0, 1, 4])
def test_eos_ends_an_answer(parts: ScriptedEngine, listener: Recorder, position: int) -> None:
    parts.runner.script = eos_at(position)
    parts.loop.submit(spec(parts, "a", [5, 6], max_tokens=9))
    end = listener.end_of("a")
    assert (end.finish_reason, end.matched_stop_id, end.token_ids) == ("stop", EOS, (EOS,))
    assert listener.tokens("a") == [*answer([5, 6], position), EOS]


def test_a_stop_id_ends_an_answer_but_not_before_min_tokens(parts: ScriptedEngine, listener: Recorder) -> None:
    tokens = answer([5, 6], 6)
    parts.loop.submit(spec(parts, "a", [5, 6], max_tokens=6, stop_token_ids=(tokens[1],)))
    parts.loop.submit(spec(parts, "b", [5, 6], max_tokens=6, stop_token_ids=(tokens[1], tokens[4]), min_tokens=3))
    assert (listener.end_of("a").matched_stop_id, listener.tokens("a")) == (tokens[1], tokens[:2])
    assert (listener.end_of("b").matched_stop_id, listener.tokens("b")) == (tokens[4], tokens[:5])


@pytest.mark.parametrize(("eos_position", "max_tokens", "reason"), [(9, 5, None), (0, 5, "stop"), (9, 1, "length")])
def test_a_prefill_ends_after_one_token_with_a_reason_only_if_the_answer_ends(
    parts: ScriptedEngine, listener: Recorder, eos_position: int, max_tokens: int, reason: str | None
) -> None:
    parts.runner.script = eos_at(eos_position)
    parts.loop.submit(spec(parts, "a", range(20), max_tokens=max_tokens, prefill_only=True))
    end = listener.end_of("a")
    assert (end.finish_reason, len(listener.tokens("a")), end.num_computed_tokens) == (reason, 1, 20)


def test_an_answer_that_arrives_complete_ends_without_a_token(parts: ScriptedEngine, listener: Recorder) -> None:
    parts.loop.submit(
        SequenceSpec(
            sequence_id="a",
            prompt=(5,),
            sampling=SamplingParams(max_tokens=4, seed=0),
            eos_token_ids=(EOS,),
            block_table=tuple(parts.pool.acquire(1, promise=3).blocks),
            num_promised_blocks=3,
            num_computed_tokens=1,
            output=(EOS,),
        )
    )
    assert (listener.end_of("a").finish_reason, listener.tokens("a")) == ("stop", [])


class TestAbort:
    """In each phase: one "abort" output, no token after it, and the others never notice."""

    def test_while_waiting_for_a_step(self, parts: ScriptedEngine, gate: StepGate, listener: Recorder) -> None:
        parts.loop.submit(spec(parts, "other", [5]))
        gate.wait_until_holding()
        parts.loop.submit(spec(parts, "a", [6]))
        parts.loop.abort("a")
        gate.allow()
        assert listener.end_of("a").finish_reason == "abort"
        gate.open()
        assert listener.end_of("other").finish_reason == "length"
        assert listener.tokens("a") == []
        assert listener.tokens("other") == answer([5], 3)

    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])  # in each chunk of the prompt, then in a decode
    def test_during_a_step(self, parts: ScriptedEngine, gate: StepGate, listener: Recorder, steps: int) -> None:
        parts.loop.submit(spec(parts, "a", range(24), max_tokens=9))
        for done in range(steps):
            gate.allow()
            listener.wait_for(lambda done=done: len(listener.results) > done)  # type: ignore[misc]
        gate.wait_until_holding()
        parts.loop.abort("a")
        gate.open()
        end = listener.end_of("a")
        assert (end.finish_reason, end.token_ids) == ("abort", ())
        assert listener.tokens("a") == answer(range(24), max(0, steps - 2))
        assert end.num_computed_tokens == min(8 * steps, 24) + max(0, steps - 3)

    def test_beyond_the_running_sequences(self, parts: ScriptedEngine, gate: StepGate, listener: Recorder) -> None:
        names = [f"s{i}" for i in range(6)]  # four run
        for name in names:
            parts.loop.submit(spec(parts, name, [5]))
        gate.wait_until_holding()
        parts.loop.abort("s5")
        gate.open()
        assert listener.end_of("s5").finish_reason == "abort"
        assert [listener.end_of(name).finish_reason for name in names[:5]] == ["length"] * 5

    def test_twice_and_after_the_end_and_unknown(
        self, parts: ScriptedEngine, gate: StepGate, listener: Recorder
    ) -> None:
        parts.loop.submit(spec(parts, "a", [5]))
        parts.loop.abort("nobody")
        gate.wait_until_holding()
        parts.loop.abort("a")
        parts.loop.abort("a")
        gate.open()
        assert listener.end_of("a").finish_reason == "abort"
        parts.loop.abort("a")
        parts.loop.submit(spec(parts, "b", [6]))
        assert listener.end_of("b").finish_reason == "length"
        assert len(listener.of("a")) == 1

    def test_from_the_listener(self, parts: ScriptedEngine) -> None:
        recorder = Recorder()

        def listener(result: StepResult) -> None:
            parts.loop.abort("a")
            recorder(result)

        parts.loop.start(listener)
        parts.loop.submit(spec(parts, "a", [5], max_tokens=30))
        assert recorder.end_of("a").finish_reason == "abort"
        assert recorder.tokens("a") == answer([5], 1)
        parts.loop.stop()


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
        def run(self, plan: StepPlan) -> list[Any]:
            results = parts.runner.run(plan)
            return results if len(results) == 1 else [results[0], None, *results[2:]]

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
        def run(self, plan: StepPlan) -> list[Sampled]:
            return [
                Sampled(None, error="no usable logits") if chunk.sequence.spec.sequence_id == "bad" else sampled
                for chunk, sampled in zip(plan.chunks, parts.runner.run(plan), strict=True)
            ]

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
