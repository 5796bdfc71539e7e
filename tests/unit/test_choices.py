"""Answers that run side by side: when they start, how they end together, and that nothing is left of them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from baton.v1 import worker_pb2
from core.clock import ManualClock
from core.errors import DeadlineError, InternalError, UnavailableError
from core.sampling import SamplingParams, choice_seed
from services.router.answer import Answer, Marks
from services.router.api import Chunk, Done
from services.router.choices import Choices, choice_sampling, merged
from services.router.detokenizer import Detokenizer
from services.router.placement import Placement

BYTES = [bytes([token]) for token in range(256)]
PAIR = Placement(decode="d", prefill="p")


class Running:
    """Choices whose answers are fed by the test; `started` has the indices of those that run, in order."""

    def __init__(self, n: int, **sampling: object) -> None:
        clock = ManualClock()
        params = SamplingParams(**{"max_tokens": 9, "seed": 0, **sampling})  # type: ignore[arg-type]
        detokenizers = [Detokenizer(BYTES, set(), strip_first_space=False) for _ in range(n)]
        self.answers = [
            Answer((1,), choice_sampling(params, i), each, Marks(0.0), clock, index=i)
            for i, each in enumerate(detokenizers)
        ]
        self.choices = Choices(self.answers)
        self.started: list[int] = []
        self.ended: list[int] = []

    async def run(self, answer: Answer) -> AsyncGenerator[Chunk | Done, None]:
        self.started.append(answer.index)
        answer.placement = PAIR
        answer.queued_since = 5.0
        try:
            async for event in answer.events():
                yield event
        finally:
            self.ended.append(answer.index)

    def say(self, index: int, first: int, text: str, finish: str = "") -> None:
        update = worker_pb2.SequenceUpdate(
            first_index=first, token_ids=text.encode(), finish_reason=finish, has_ended=bool(finish), matched_stop_id=-1
        )
        self.answers[index].on_update(update)


async def drive(running: Running) -> list[Chunk | Done]:
    async with asyncio.timeout(30):
        return [event async for event in running.choices.events(running.run)]


async def turns() -> None:
    """Let every task that can run come to rest."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_others_start_when_the_first_has_its_second_token() -> None:
    running = Running(3)
    events = asyncio.create_task(drive(running))
    running.say(0, 0, "a")
    await turns()
    assert running.started == [0]
    running.say(0, 1, "b")
    await turns()
    assert running.started == [0, 1, 2]
    assert [answer.preferred for answer in running.answers] == [None, PAIR, PAIR]
    assert running.answers[2].queued_since == 5.0
    for index in (2, 0, 1):
        running.say(index, 2 if index == 0 else 0, "z", "length")
    parts = await events
    assert [part.index for part in parts if isinstance(part, Done)] == [2, 0, 1]
    texts = ["".join(p.text for p in parts if isinstance(p, Chunk) and p.index == index) for index in range(3)]
    assert texts == ["abz", "z", "z"]


async def test_the_others_start_when_the_first_ends_with_one_token() -> None:
    running = Running(2)
    events = asyncio.create_task(drive(running))
    running.say(0, 0, "a", "length")
    await turns()
    assert running.started == [0, 1]
    running.say(1, 0, "b", "stop")
    done = [(part.index, part.finish_reason) for part in await events if isinstance(part, Done)]
    assert done == [(0, "length"), (1, "stop")]


async def test_a_choice_that_meets_a_stop_string_ends_alone() -> None:
    running = Running(2, stop=("x",))
    events = asyncio.create_task(drive(running))
    running.say(0, 0, "ab")
    await turns()
    running.say(1, 0, "x")
    running.say(0, 2, "c", "length")
    done = [(part.index, part.finish_reason, part.matched_stop) for part in await events if isinstance(part, Done)]
    assert done == [(1, "stop", "x"), (0, "length", "")]


@pytest.mark.parametrize("with_second_token", [False, True])
async def test_an_abort_ends_all_and_those_not_begun_too(with_second_token: bool) -> None:
    running = Running(3)
    events = asyncio.create_task(drive(running))
    running.say(0, 0, "ab" if with_second_token else "a")
    await turns()
    running.choices.cancel()
    done = [(part.index, part.finish_reason) for part in await events if isinstance(part, Done)]
    assert sorted(done) == [(0, "abort"), (1, "abort"), (2, "abort")]


@pytest.mark.parametrize("with_second_token", [False, True])
async def test_a_failure_of_all_is_raised_once(with_second_token: bool) -> None:
    running = Running(3)
    events = asyncio.create_task(drive(running))
    running.say(0, 0, "ab" if with_second_token else "a")
    await turns()
    running.choices.fail(DeadlineError("late"))
    with pytest.raises(DeadlineError, match="late"):
        await events
    assert sorted(running.ended) == sorted(running.started)


async def test_one_that_fails_ends_the_others() -> None:
    running = Running(3)
    events = asyncio.create_task(drive(running))
    running.say(0, 0, "ab")
    await turns()
    running.answers[1].fail(UnavailableError("lost"))
    with pytest.raises(UnavailableError, match="lost"):
        await events
    assert sorted(running.ended) == [0, 1, 2]


async def test_leaving_early_ends_all() -> None:
    running = Running(2)
    events = running.choices.events(running.run)
    running.say(0, 0, "ab")
    assert isinstance(await anext(events), Chunk)
    await events.aclose()
    assert sorted(running.ended) == sorted(running.started)


def test_each_choice_has_its_own_seed_and_the_first_asks_for_the_prompt_s_logprobs() -> None:
    params = SamplingParams(seed=7, prompt_logprobs=2, logprobs=1)
    made = [choice_sampling(params, index) for index in range(3)]
    assert made[0] is params
    assert [each.seed for each in made] == [7, choice_seed(7, 1), choice_seed(7, 2)]
    assert [each.prompt_logprobs for each in made] == [2, None, None]
    assert [each.logprobs for each in made] == [1, 1, 1]


async def test_merging_passes_everything_on_and_holds_up_what_nobody_reads() -> None:
    made = [0, 0]

    async def source(index: int) -> AsyncGenerator[int, None]:
        for number in range(50):
            made[index] += 1
            yield number

    items = merged([lambda: source(0), lambda: source(1)], max_concurrent=2)
    taken = [await anext(items)]
    await turns()
    assert sum(made) <= 6, "two in the queue, one in each hand, and what was taken"
    taken += [item async for item in items]
    for index in (0, 1):
        assert [number for source_index, number in taken if source_index == index] == list(range(50))


async def test_a_source_that_is_cancelled_from_within_is_a_failure_not_silence() -> None:
    async def fine() -> AsyncGenerator[int, None]:
        yield 1
        await asyncio.Event().wait()

    async def broken() -> AsyncGenerator[int, None]:
        yield 2
        raise asyncio.CancelledError

    async def take_all() -> None:
        async for _ in merged([fine, broken], max_concurrent=2):
            pass

    with pytest.raises(InternalError, match="cancelled from within"):
        async with asyncio.timeout(30):
            await take_all()


async def test_cancelling_the_reader_cancels_it_and_its_sources() -> None:
    closed: list[int] = []

    async def endless(index: int) -> AsyncGenerator[int, None]:
        try:
            yield index
            await asyncio.Event().wait()
        finally:
            closed.append(index)

    async def take_all() -> None:
        async with aclosing(merged([lambda: endless(0), lambda: endless(1)], max_concurrent=2)) as items:
            async for _ in items:
                pass

    reader = asyncio.create_task(take_all())
    await turns()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert sorted(closed) == [0, 1]
