"""Random submits, aborts and steps: each sequence ends once, with the right tokens, and no block is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from core.sequence import SequenceOutput, SequenceSpec
from engine.scheduler import StepLimits
from engine.scripted import StepGate, scripted_engine
from tests.engine_harness import Recorder, answer, spec


class Driver:
    """Random operations on one engine, one step at a time, against what must hold after each."""

    def __init__(self) -> None:
        limits = StepLimits(max_batched_tokens=8, max_sequences=3)
        self.parts = scripted_engine(num_blocks=6, limits=limits)
        self.gate = self.parts.runner.gate = StepGate()
        self.recorder = Recorder()
        self.specs: dict[str, SequenceSpec] = {}
        self.aborted: set[str] = set()
        self.ended: dict[str, SequenceOutput] = {}
        self.num_seen = 0
        self.parts.loop.start(self.recorder)

    def submit(self, prompt_tokens: int, max_tokens: int, prefill_only: bool) -> None:
        name = f"s{len(self.specs)}"
        prompt = [len(self.specs) % 3, *range(prompt_tokens - 1)]  # some are the same
        self.specs[name] = spec(self.parts, name, prompt, max_tokens=max_tokens, prefill_only=prefill_only)
        self.parts.loop.submit(self.specs[name])
        self.gate.wait_until_holding()

    def abort(self, index: int) -> None:
        names = [*self.specs, "unknown"]
        name = names[index % len(names)]
        if name not in self.ended:
            self.aborted.add(name)
        self.parts.loop.abort(name)

    def step(self) -> None:
        if not self.gate.is_holding:
            return
        self.gate.allow()
        self.recorder.wait_for(lambda: len(self.recorder.results) > self.num_seen)
        for result in self.recorder.results[self.num_seen :]:
            self.num_seen += 1
            for output in result.outputs:
                assert output.sequence_id not in self.ended
                if output.has_ended:
                    self.ended[output.sequence_id] = output
                    self.parts.pool.release(output.block_table)
        if len(self.ended) < len(self.specs):
            self.gate.wait_until_holding()

    def finish(self) -> None:
        """Step until all have ended, and look at every answer."""
        while len(self.ended) < len(self.specs):
            self.step()
        self.parts.loop.stop()
        self.parts.pool.check()
        assert self.parts.pool.num_free == self.parts.pool.num_total
        for name, one in self.specs.items():
            end = self.recorder.end_of(name)
            assert (end.finish_reason == "abort") == (name in self.aborted)
            max_tokens = 1 if one.prefill_only else one.sampling.max_tokens
            assert max_tokens is not None
            tokens = self.recorder.tokens(name)
            assert tokens == answer(one.prompt, max_tokens)[: len(tokens)]
            assert len(tokens) < max_tokens if name in self.aborted else len(tokens) == max_tokens


operations = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 6), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 40)),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(operations, min_size=20, max_size=100))
def test_whatever_happens_each_sequence_ends_once_with_the_right_tokens(script: list[tuple[object, ...]]) -> None:
    driver = Driver()
    try:
        for name, *arguments in script:
            getattr(driver, str(name))(*arguments)
        driver.finish()
    finally:
        driver.gate.open()
        driver.parts.loop.stop()
