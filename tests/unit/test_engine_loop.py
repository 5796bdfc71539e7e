"""The contract of `core.sequence.Engine`, on the engine loop over a scripted runner."""

from collections.abc import Callable

import pytest

from core.sampling import SamplingParams
from core.sequence import SequenceSpec, StepResult
from engine.scripted import ScriptedEngine, StepGate
from engine.sequence import Sequence
from tests.engine_harness import EOS, Recorder, answer, spec

BUDGET = 8  # tokens in a step


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
