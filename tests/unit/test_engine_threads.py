"""A service's threads and the engine's on one pool: no wake-up is lost, nobody waits for ever, every block comes back."""

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest

from core.errors import CapacityError
from core.hashing import hash_blocks
from core.layout import growth_blocks
from core.sequence import SequenceSpec
from engine.loop import EngineLoop
from engine.scheduler import StepLimits
from engine.scripted import ScriptedEngine, expected_tokens, scripted_engine, scripted_layout
from engine.sequence import Sequence
from tests.engine_harness import EOS, WAIT_S, Recorder, acting_loop, assert_all_returned, fill, nothing, spec

BLOCK = 4
PROMPTS = [list(range(start, start + length)) for start, length in ((10, 5), (40, 16), (70, 23), (70, 12))]
LIMITS = StepLimits(max_batched_tokens=16, max_sequences=8)


def expected(prompt: Iterable[int], num_tokens: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, layout=scripted_layout(BLOCK), eos_token_ids=(EOS,))


@pytest.mark.parametrize("num_held", [0, 4])  # the rest is promised away
def test_a_release_by_another_thread_wakes_an_engine_that_waits_for_room(num_held: int) -> None:
    parts, listener, has_looked = scripted_engine(num_blocks=4, layout=scripted_layout(BLOCK)), Recorder(), Event()

    def look(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        if live:
            has_looked.set()

    loop = acting_loop(parts, LIMITS, look)
    loop.start(listener)
    for number in range(50):
        blocks = parts.pool.acquire(num_held, promise=4 - num_held).blocks
        has_looked.clear()
        loop.submit(spec(parts, f"s{number}", [number] * 9, max_tokens=1))
        assert has_looked.wait(WAIT_S)
        parts.pool.release(blocks, promise=4 - num_held)  # just before it falls asleep, or after
        assert listener.end_of(f"s{number}").finish_reason == "length"
    loop.stop()
    assert_all_returned(parts.pool, listener)


class Service:
    """Does what a worker's event loop does, at random: submits, aborts, reserves, adopts, releases."""

    def __init__(self, number: int, parts: ScriptedEngine, loop: EngineLoop, listener: Recorder) -> None:
        self.rng = random.Random(number)
        self.number, self.parts, self.loop, self.listener = number, parts, loop, listener
        self.sent: dict[str, SequenceSpec] = {}
        self.aborted: set[str] = set()

    def run(self) -> None:
        for count in range(150):
            self.act(f"t{self.number}-{count}")

    def act(self, name: str) -> None:
        one = spec(
            self.parts,
            name,
            self.rng.choice(PROMPTS),
            max_tokens=self.rng.randint(2, 12),
            priority=self.rng.randrange(2),
        )
        if self.rng.random() < 0.6:
            self.send(one)
        else:
            self.transfer(one)
        if self.sent and self.rng.random() < 0.1:
            aborted = self.rng.choice(list(self.sent))
            self.aborted.add(aborted)
            self.loop.abort(aborted)
        if self.rng.random() < 0.2:
            self.listener.wait_for(lambda: all(self.listener.has_ended(sent) for sent in self.sent))

    def transfer(self, one: SequenceSpec) -> None:
        num_tokens = len(one.prompt)
        assert one.sampling.max_tokens is not None
        promise = growth_blocks(num_tokens, num_tokens + one.sampling.max_tokens, BLOCK)
        try:
            hashes = hash_blocks(b"tests", one.prompt, BLOCK)
            blocks, num_cached = self.parts.pool.admit(-(-num_tokens // BLOCK), hashes, promise)
        except CapacityError:
            return
        fill(self.parts, one.prompt, blocks, num_cached)
        if self.rng.random() < 0.2:  # it fails
            self.parts.pool.release(blocks, promise)
            return
        self.parts.pool.share(blocks)
        output = tuple(expected(one.prompt, 1))
        self.send(
            replace(
                one,
                block_table=tuple(blocks),
                num_promised_blocks=promise,
                num_computed_tokens=num_tokens,
                output=output,
            )
        )
        self.parts.pool.release(blocks)

    def send(self, one: SequenceSpec) -> None:
        self.sent[one.sequence_id] = one
        self.loop.submit(one)


@pytest.mark.parametrize("swap_blocks", [0, 20])
def test_threads_that_share_a_pool_with_an_engine(swap_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.layout.GROWTH_BLOCKS", 1)
    parts, listener = scripted_engine(num_blocks=16, layout=scripted_layout(BLOCK)), Recorder()
    loop = acting_loop(parts, LIMITS, nothing, swap_blocks=swap_blocks)
    loop.start(listener)
    services = [Service(number, parts, loop, listener) for number in range(3)]
    with ThreadPoolExecutor() as threads:
        for running in [threads.submit(service.run) for service in services]:
            running.result()
    for service in services:
        for name, one in service.sent.items():
            end = listener.end_of(name)
            assert one.sampling.max_tokens is not None
            answer = expected(one.prompt, one.sampling.max_tokens)[len(one.output) :]
            tokens = listener.tokens(name)
            assert tokens == answer[: len(tokens)]
            assert end.finish_reason == "length" or name in service.aborted
            assert len(tokens) == len(answer) or end.finish_reason == "abort"
    loop.stop()
    assert listener.total("num_preemptions") > 0
    assert_all_returned(parts.pool, listener)
