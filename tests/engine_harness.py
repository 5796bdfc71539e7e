"""What tests of an engine share: a listener that can be waited for, sequences, and loops that a test acts on."""

import mmap
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache

from core.clock import ManualClock
from core.sampling import SamplingParams
from core.sequence import SequenceOutput, SequenceSpec, StepResult
from engine.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.plan import StepPlan
from engine.scheduler import Room, StepLimits, plan_step
from engine.scripted import DIGEST_BYTES, ScriptedEngine, expected_tokens, slot_bytes
from engine.sequence import Sequence

EOS = 2
WAIT_S = 200.0  # kernels may be interpreted, on a busy machine


class Recorder:
    """A listener that keeps every result and lets a test wait for one."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.threads: set[str] = set()
        self._outputs: defaultdict[str, list[SequenceOutput]] = defaultdict(list)
        self._changed = threading.Condition()

    def __call__(self, result: StepResult) -> None:
        with self._changed:
            self.results.append(result)
            for output in result.outputs:
                self._outputs[output.sequence_id].append(output)
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()

    def of(self, sequence_id: str) -> list[SequenceOutput]:
        return list(self._outputs[sequence_id])

    def has_ended(self, sequence_id: str) -> bool:
        return any(output.has_ended for output in self._outputs[sequence_id][-1:])

    def tokens(self, sequence_id: str) -> list[int]:
        return [token for output in self.of(sequence_id) for token in output.token_ids]

    def total(self, name: str) -> int:
        """Of one number over all steps."""
        return sum(getattr(result, name) for result in self.results)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), f"never came; {len(self.results)} results"

    def end_of(self, sequence_id: str) -> SequenceOutput:
        """The output that ended it, once it has; and nothing came after."""
        self.wait_for(lambda: self.has_ended(sequence_id))
        outputs = self.of(sequence_id)
        assert [output.has_ended for output in outputs] == [False] * (len(outputs) - 1) + [True]
        return outputs[-1]


def spec(
    parts: ScriptedEngine,
    name: str,
    prompt: Iterable[int],
    *,
    prefill_only: bool = False,
    priority: int = 0,
    hash_seed: bytes | None = b"tests",
    **sampling: object,
) -> SequenceSpec:
    """A sequence; its blocks may be shared unless `hash_seed` is None."""
    params = SamplingParams(**{"max_tokens": 3, "temperature": 0.0, "seed": 0, **sampling})  # type: ignore[arg-type]
    return SequenceSpec(
        sequence_id=name,
        prompt=tuple(prompt),
        sampling=params,
        eos_token_ids=(EOS,),
        prefill_only=prefill_only,
        priority=priority,
        hash_seed=hash_seed,
    )


Act = Callable[[EngineLoop, int, list[Sequence]], None]


def acting_loop(parts: ScriptedEngine, limits: StepLimits, act: Act, *, swap_blocks: int = 0) -> EngineLoop:
    """A loop over the same parts with somebody who acts in the engine's thread before each step.

    Args:
        parts: of the engine.
        limits: of one step.
        act: called with the loop, the number of steps before this one and the live sequences.
        swap_blocks: how many blocks of preempted sequences host memory holds.
    """
    num_steps = 0

    def plan(sequences: Iterable[Sequence], limits: StepLimits, room: Room, block_tokens: int) -> StepPlan:
        nonlocal num_steps
        live = list(sequences)
        act(loop, num_steps, live)
        step = plan_step(live, limits, room, block_tokens)
        num_steps += bool(step.chunks)
        return step

    memory = (parts.memory, swap_blocks * mmap.PAGESIZE) if swap_blocks else None  # a block of these tests is smaller
    loop = EngineLoop(
        parts.runner, limits, parts.pool, parts.layout.block_tokens, swap_memory=memory, plan=plan, clock=ManualClock()
    )
    return loop


def nothing(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
    """Nobody acts."""


def serve(
    parts: ScriptedEngine,
    specs: Iterable[SequenceSpec],
    limits: StepLimits,
    act: Act = nothing,
    *,
    swap_blocks: int = 0,
) -> Recorder:
    """Run sequences that come all at once, until they have ended and every block is back."""
    names, waiting, listener = [], list(specs), Recorder()

    def submit_then_act(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        while waiting:
            names.append(waiting[0].sequence_id)
            loop.submit(waiting.pop(0))
        act(loop, num_steps, live)

    loop = acting_loop(parts, limits, submit_then_act, swap_blocks=swap_blocks)
    loop.start(listener)
    listener.wait_for(lambda: bool(names) and all(listener.has_ended(name) for name in names))
    loop.stop()
    assert_all_returned(parts.pool, listener)
    return listener


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


@cache
def content(token_ids: tuple[int, ...]) -> bytes:
    """The KV of these tokens, as a scripted runner writes it in the scripted layout."""
    if not token_ids:
        return b""
    before = content(token_ids[:-1])
    return before + slot_bytes(before[-DIGEST_BYTES:], token_ids[-1], DIGEST_BYTES)


def fill(parts: ScriptedEngine, token_ids: Iterable[int], blocks: list[int], first: int = 0) -> None:
    """Put the KV of these tokens into their blocks, from the block `first` on, as a transfer does."""
    kv = content(tuple(token_ids))
    for index in range(first, len(blocks)):
        part = kv[index * parts.memory.block_bytes : (index + 1) * parts.memory.block_bytes]
        parts.memory.view(blocks[index])[: len(part)] = part
