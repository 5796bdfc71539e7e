"""What tests of an engine share: a listener that can be waited for, and sequences with their blocks reserved."""

import threading
from collections.abc import Callable, Iterable

from core.sampling import SamplingParams
from core.sequence import SequenceOutput, SequenceSpec, StepResult
from engine.block_pool import BlockPool
from engine.scripted import ScriptedEngine, expected_tokens

EOS = 2
WAIT_S = 10.0


class Recorder:
    """A listener that keeps every result and lets a test wait for one."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def __call__(self, result: StepResult) -> None:
        with self._changed:
            self.results.append(result)
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()

    def of(self, sequence_id: str) -> list[SequenceOutput]:
        return [o for result in list(self.results) for o in result.outputs if o.sequence_id == sequence_id]

    def tokens(self, sequence_id: str) -> list[int]:
        return [token for output in self.of(sequence_id) for token in output.token_ids]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), f"never came; {len(self.results)} results"

    def end_of(self, sequence_id: str) -> SequenceOutput:
        """The output that ended it, once it has; and nothing came after."""
        self.wait_for(lambda: any(output.has_ended for output in self.of(sequence_id)))
        outputs = self.of(sequence_id)
        assert [output.has_ended for output in outputs] == [False] * (len(outputs) - 1) + [True]
        return outputs[-1]


def spec(
    parts: ScriptedEngine, name: str, prompt: Iterable[int], *, prefill_only: bool = False, **sampling: object
) -> SequenceSpec:
    """A sequence whose blocks may be shared."""
    params = SamplingParams(**{"max_tokens": 3, "temperature": 0.0, "seed": 0, **sampling})  # type: ignore[arg-type]
    prompt = tuple(prompt)
    assert params.max_tokens is not None
    return SequenceSpec(
        sequence_id=name,
        prompt=prompt,
        sampling=params,
        eos_token_ids=(EOS,),
        prefill_only=prefill_only,
        hash_seed=b"tests",
    )


def assert_all_returned(pool: BlockPool, listener: Recorder) -> None:
    """Every block is back, once whoever got those of prefill_only sequences has released them."""
    for result in listener.results:
        for output in result.outputs:
            if output.has_ended:
                pool.release(output.block_table)
    pool.check()
    assert (pool.num_free, pool.num_available) == (pool.num_total, pool.num_total)


def answer(prompt: Iterable[int], num_tokens: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, eos_token_ids=(EOS,))
