"""The router's queue: first come first placed, small ones pass only while the head is patient, nobody is forgotten."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.clock import ManualClock
from core.errors import CapacityError, InvalidRequestError, UnavailableError
from services.router.placement import Need, Placement, Refusal
from services.router.waiting_room import AGEING_S, PATIENCE_S, WaitingRoom
from tests.eventually import eventually

HERE = Placement(decode="d", prefill="p")


class Workers:
    """Room in tokens that placements take; what the router's fleet is to the waiting room."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.are_alive = True

    def choose(self, need: Need, excluded: frozenset[str]) -> Placement | Refusal:
        if not self.are_alive or HERE.decode in excluded:
            return Refusal.NO_WORKERS
        if need.max_total_tokens > self.total:
            return Refusal.NEVER_FITS
        return HERE if need.max_total_tokens <= self.free else Refusal.FULL

    def usable(self, need: Need, excluded: frozenset[str]) -> frozenset[str]:
        is_usable = self.are_alive and need.max_total_tokens <= self.total
        return frozenset({HERE.decode}) - excluded if is_usable else frozenset()


class Queue:
    """A waiting room, its workers, and who was placed in which order."""

    def __init__(self, total: int, max_queued: int = 100, max_queue_s: float = 60.0, grace_s: float = 0.0) -> None:
        self.workers = Workers(total)
        self.clock = ManualClock()
        self.decisions: list[float] = []
        self.room = WaitingRoom(
            lambda: self.workers, max_queued, max_queue_s, grace_s, self.decisions.append, self.clock
        )
        self.placed: list[str] = []

    def ask(self, name: str, size: int, came_back_since: float | None = None, priority: int = 0) -> asyncio.Task[None]:
        need = Need(num_prompt_tokens=1, max_total_tokens=size)

        def take(placement: Placement) -> None:
            assert placement is HERE
            self.workers.free -= size
            assert self.workers.free >= 0, "placed without room"
            self.placed.append(name)

        return asyncio.create_task(self.room.place(need, frozenset(), take, came_back_since, priority), name=name)

    def give_back(self, size: int) -> None:
        self.workers.free += size
        self.room.look()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_waiters_are_placed_in_the_order_they_came() -> None:
    queue = Queue(total=1)
    tasks = [queue.ask(f"{number}", 1) for number in range(5)]
    await settle()
    assert queue.placed == ["0"]
    for number in range(1, 5):
        queue.give_back(1)
        assert queue.placed[-1] == f"{number}", "placed in the same turn as the room came"
    await asyncio.gather(*tasks)
    assert len(queue.room) == 0
    assert len(queue.decisions) >= 5


async def test_a_small_one_passes_a_big_head_only_while_the_head_is_patient() -> None:
    queue = Queue(total=10)
    queue.workers.free = 3
    big, small = queue.ask("big", 8), queue.ask("small", 2)
    await small
    assert queue.placed == ["small"]
    queue.clock.advance(PATIENCE_S)
    late = queue.ask("late", 1)
    await settle()
    assert queue.placed == ["small"], "one token is free, but the head has waited long enough"
    assert queue.room.oldest_s == PATIENCE_S
    queue.give_back(7)  # 8 free: the head first
    await big
    assert queue.placed == ["small", "big"]
    queue.give_back(8)
    await late
    assert queue.placed == ["small", "big", "late"]


async def test_nobody_starves_under_a_steady_stream_of_small_ones() -> None:
    queue = Queue(total=10)
    holders = [queue.ask(f"first{number}", 1) for number in range(10)]
    await settle()
    big = queue.ask("big", 10)
    tasks = []
    for step in range(100):
        tasks.append(queue.ask(f"small{step}", 1))
        queue.clock.advance(0.1)
        queue.give_back(1)
        await settle()
        if "big" in queue.placed:
            break
    assert "big" in queue.placed
    # While it was patient a small one took each free token; afterwards all ten had to come together.
    assert step <= 10 * (PATIENCE_S + 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(big, *holders, *tasks, return_exceptions=True)


async def test_a_full_room_refuses_at_once_and_says_when_to_come_again() -> None:
    queue = Queue(total=1, max_queued=2)
    holder = queue.ask("holder", 1)
    await holder
    waiting = [queue.ask(f"{number}", 1) for number in range(2)]
    await settle()
    queue.clock.advance(7.0)
    with pytest.raises(CapacityError, match="2 requests are waiting, max_queued=2") as refusal:
        await queue.ask("third", 1)
    assert refusal.value.retry_after_ms == 7000
    assert queue.room.num_tokens == 2
    queue.give_back(2)
    await asyncio.gather(*waiting)


async def test_one_that_lost_its_place_waits_where_it_would_be_and_is_never_refused_for_a_full_room() -> None:
    queue = Queue(total=1, max_queued=2)
    await queue.ask("holder", 1)
    queue.clock.advance(1.0)
    waiting = [queue.ask("second", 1)]
    await settle()
    queue.clock.advance(1.0)
    waiting += [queue.ask("third", 1), queue.ask("back", 1, came_back_since=0.5)]
    await settle()
    for _ in range(3):
        queue.give_back(1)
    assert queue.placed == ["holder", "back", "second", "third"]
    await asyncio.gather(*waiting)


async def test_what_never_fits_is_refused_at_once_even_behind_others() -> None:
    queue = Queue(total=4)
    await queue.ask("holder", 4)
    waiting = queue.ask("waiting", 4)
    await settle()
    with pytest.raises(InvalidRequestError, match=r"max_tokens: .*5 tokens"):
        await queue.ask("huge", 5)
    queue.give_back(4)
    await waiting


async def test_without_live_workers_everyone_is_refused() -> None:
    queue = Queue(total=1)
    await queue.ask("holder", 1)
    waiting = queue.ask("waiting", 1)
    await settle()
    queue.workers.are_alive = False
    queue.room.look()
    with pytest.raises(UnavailableError, match="no live worker"):
        await waiting


async def test_no_room_in_time_is_a_refusal_that_holds_nothing() -> None:
    queue = Queue(total=1, max_queue_s=0.01)
    await queue.ask("holder", 1)
    with pytest.raises(CapacityError, match="no worker had room for 1 tokens within"):
        await queue.ask("late", 1)
    assert len(queue.room) == 0
    queue.give_back(1)
    assert queue.placed == ["holder"]


async def test_a_head_that_leaves_lets_those_behind_it_go() -> None:
    queue = Queue(total=10)
    queue.workers.free = 3
    big = queue.ask("big", 8)
    await settle()
    queue.clock.advance(PATIENCE_S)
    small = queue.ask("small", 2)
    await settle()
    assert queue.placed == []
    big.cancel()
    await small
    with pytest.raises(asyncio.CancelledError):
        await big
    assert queue.placed == ["small"]
    assert len(queue.room) == 0


async def test_one_cancelled_in_the_turn_it_would_be_placed_takes_no_room() -> None:
    queue = Queue(total=1)
    await queue.ask("holder", 1)
    waiting = queue.ask("waiting", 1)
    await settle()
    waiting.cancel()
    queue.give_back(1)  # before the cancelled task has run
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert queue.placed == ["holder"]
    assert queue.workers.free == 1
    assert len(queue.room) == 0


@given(st.lists(st.integers(1, 6), min_size=1, max_size=20), st.integers(6, 12), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_every_waiter_is_placed_once_whatever_the_sizes(sizes: list[int], total: int, rng: random.Random) -> None:
    async def run() -> None:
        queue = Queue(total)
        tasks = {f"{number}": queue.ask(f"{number}", size) for number, size in enumerate(sizes)}
        await settle()
        returned: set[str] = set()
        while len(returned) < len(sizes):
            running = [name for name in queue.placed if name not in returned]
            assert running, "room is free and nobody gets it"
            name = rng.choice(running)
            returned.add(name)
            queue.clock.advance(rng.random())
            queue.give_back(sizes[int(name)])
            await settle()
        await asyncio.gather(*tasks.values())
        assert sorted(queue.placed) == sorted(tasks)
        assert queue.workers.free == total
        await eventually(lambda: len(queue.room) == 0)

    asyncio.run(run())


async def test_one_that_lost_its_place_waits_where_it_would_have_been() -> None:
    queue = Queue(total=4, max_queued=2)
    await queue.ask("holder", 4)
    first = queue.ask("first", 4)
    await settle()
    queue.clock.advance(1.0)
    second = queue.ask("second", 4)
    await settle()
    back = queue.ask("back", 4, came_back_since=0.5)  # the room is full, but it was in it
    await settle()
    for _ in range(3):
        queue.give_back(4)
    await asyncio.gather(first, back, second)
    assert queue.placed == ["holder", "first", "back", "second"]


async def test_an_impatient_head_holds_up_only_the_workers_it_could_use() -> None:
    class Two:
        """Worker a is full for all, worker b free."""

        def choose(self, _need: Need, excluded: frozenset[str]) -> Placement | Refusal:
            if "b" not in excluded:
                return Placement(decode="b")
            return Refusal.NO_WORKERS if "a" in excluded else Refusal.FULL

        def usable(self, _need: Need, excluded: frozenset[str]) -> frozenset[str]:
            return frozenset({"a", "b"}) - excluded

    clock = ManualClock()
    room = WaitingRoom(Two, 10, 60.0, 0.0, lambda _seconds: None, clock)
    placed: list[Placement] = []
    head = asyncio.create_task(room.place(Need(1, 2), frozenset({"b"}), placed.append))  # b failed it
    await settle()
    clock.advance(PATIENCE_S)
    await room.place(Need(1, 2), frozenset(), placed.append)
    assert placed == [Placement(decode="b")]
    head.cancel()
    with pytest.raises(asyncio.CancelledError):
        await head


async def test_a_worker_that_comes_back_in_time_costs_a_pause_and_no_error() -> None:
    queue = Queue(total=1, grace_s=2.0)
    queue.workers.are_alive = False
    waiting = queue.ask("waiting", 1)
    await settle()
    queue.clock.advance(1.9)
    queue.room.look()
    assert not waiting.done()
    queue.workers.are_alive = True
    queue.room.look()
    await waiting
    assert queue.placed == ["waiting"]


async def test_without_a_worker_the_wait_ends_with_the_grace_though_nothing_happens() -> None:
    queue = Queue(total=1, grace_s=0.02)
    queue.workers.are_alive = False
    waiting = queue.ask("waiting", 1)
    await settle()
    queue.clock.advance(0.02)  # and the room's own timer looks again
    with pytest.raises(UnavailableError, match="no live worker"):
        await asyncio.wait_for(waiting, timeout=30)


async def test_a_higher_priority_goes_first_and_waiting_makes_up_for_a_lower_one() -> None:
    queue = Queue(total=1)
    first = queue.ask("runs", 1)
    await settle()
    low = queue.ask("low", 1)
    await settle()
    high = queue.ask("high", 1, priority=1)
    await settle()
    queue.give_back(1)
    assert queue.placed == ["runs", "high"]
    queue.clock.advance(AGEING_S + 0.1)
    late = queue.ask("late and high", 1, priority=1)
    await settle()
    queue.give_back(1)
    assert queue.placed[-1] == "low", "it has waited longer than one level is worth"
    queue.give_back(1)
    await asyncio.gather(first, low, high, late)


async def test_a_steady_stream_of_high_priorities_starves_nobody() -> None:
    queue = Queue(total=1)
    queue.ask("runs", 1)
    await settle()
    queue.ask("low", 1)
    await settle()
    num_before = 0
    while "low" not in queue.placed:
        queue.ask(f"high {num_before}", 1, priority=3)
        await settle()
        queue.clock.advance(1.0)
        queue.give_back(1)
        num_before += 1
        assert num_before <= 3 * AGEING_S + 2
