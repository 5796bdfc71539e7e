"""Requests that wait for room: first come, first placed, unless a smaller one fits while the first does not.

A priority counts as time: one level up is as good as having come AGEING_S earlier. So a higher priority goes first among
those that come about the same time, and nobody waits for ever behind later ones.

States of a waiter: waiting -> placed | refused (never fits, no workers, waited too long, room full). Room is looked for
when something changed (a report, a release, a new waiter), never by polling.
"""

import asyncio
import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from core.clock import Clock, monotonic
from core.errors import CapacityError, InvalidRequestError, UnavailableError
from services.router.placement import Need, Placement, Refusal

# While the oldest waiter has waited less than this, smaller ones behind it may pass; after that nobody takes room it could
# use, so that a big request gets its room as running ones end.
PATIENCE_S = 2.0
AGEING_S = 5.0


class Choices(Protocol):
    """The workers at one moment; see `placement.Snapshot`."""

    def choose(self, need: Need, excluded: frozenset[str]) -> Placement | Refusal:
        """Where a request would run now."""

    def usable(self, need: Need, excluded: frozenset[str]) -> frozenset[str]:
        """Decode workers whose room would ever help the request."""


@dataclass(slots=True, eq=False)
class _Waiter:
    need: Need
    excluded: frozenset[str]
    since: float
    place_in_line: float
    on_placed: Callable[[Placement], None]
    future: asyncio.Future[None] = field(repr=False)
    orphaned_at: float | None = None  # since when no live worker could take it


class WaitingRoom:
    """The router's queue. Lives on one event loop.

    Args:
        snapshot: the workers now.
        max_queued: waiters at most.
        max_queue_s: longest wait.
        grace_s: how long a request waits for a live worker when there is none: one that was lost for a moment comes back,
            and a pause is better than an error.
        observe_decision: told the seconds each choice took.
        clock: for patience and the age of the oldest.
    """

    def __init__(
        self,
        snapshot: Callable[[], Choices],
        max_queued: int,
        max_queue_s: float,
        grace_s: float,
        observe_decision: Callable[[float], None],
        clock: Clock = monotonic,
    ) -> None:
        self._snapshot = snapshot
        self._max_queued = max_queued
        self._max_queue_s = max_queue_s
        self._grace_s = grace_s
        self._observe_decision = observe_decision
        self._clock = clock
        self._waiters: list[_Waiter] = []  # first in line first
        self.last_decision_s = 0.0

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens waiting."""
        return sum(waiter.need.num_prompt_tokens for waiter in self._waiters)

    @property
    def oldest_s(self) -> float:
        """How long the one that has waited longest has."""
        return self._clock() - min((waiter.since for waiter in self._waiters), default=self._clock())

    async def place(
        self,
        need: Need,
        excluded: frozenset[str],
        on_placed: Callable[[Placement], None],
        came_back_since: float | None = None,
        priority: int = 0,
    ) -> None:
        """Wait for room.

        Args:
            need: of the request.
            excluded: worker ids that failed it already.
            on_placed: called in the same turn as the choice, to count what it takes before the next one.
            came_back_since: for a request that was placed before and lost its place: when it first came. It waits where
                it would be in the line had it never left, and is not refused for a full room.
            priority: higher is sooner.
        Raises:
            CapacityError: the room is full, or no room came in time.
            InvalidRequestError: it would never fit.
            UnavailableError: there is no live worker for it.
        """
        if came_back_since is None and len(self._waiters) >= self._max_queued:
            raise CapacityError(
                f"{len(self._waiters)} requests are waiting, max_queued={self._max_queued}", self._retry_ms()
            )
        since = self._clock() if came_back_since is None else came_back_since
        place_in_line = since - priority * AGEING_S
        waiter = _Waiter(need, excluded, since, place_in_line, on_placed, asyncio.get_running_loop().create_future())
        bisect.insort(self._waiters, waiter, key=lambda other: other.place_in_line)
        if waiter is self._waiters[-1]:
            self._look([waiter])  # those before it were looked at when something last changed
        else:
            self.look()
        try:
            async with asyncio.timeout(self._max_queue_s):
                await waiter.future
        except TimeoutError:
            raise CapacityError(
                f"no worker had room for {need.max_total_tokens} tokens within {self._max_queue_s:.1f} s",
                self._retry_ms(),
            ) from None
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self.look()  # it may have held others up

    def look(self) -> None:
        """Place whoever can be placed. Never blocks."""
        self._look(list(self._waiters))

    def _look(self, waiters: list[_Waiter]) -> None:
        if not waiters:
            return
        choices = self._snapshot()
        refused: list[_Waiter] = []  # what is at least as big as one of these does not fit either
        kept_free = self._kept_free(choices)
        for waiter in waiters:
            if any(_is_smaller(other, waiter) for other in refused):
                continue
            started = time.perf_counter()
            is_first = waiter is self._waiters[0]
            choice = choices.choose(waiter.need, waiter.excluded if is_first else waiter.excluded | kept_free)
            if not isinstance(choice, Placement) and not is_first and kept_free:
                choice = Refusal.FULL if choices.usable(waiter.need, waiter.excluded) else choice
            self.last_decision_s = time.perf_counter() - started
            self._observe_decision(self.last_decision_s)
            if choice is not Refusal.NO_WORKERS:
                waiter.orphaned_at = None
            if choice is Refusal.FULL:
                refused.append(waiter)
                continue
            if choice is Refusal.NO_WORKERS and self._may_hope(waiter):
                continue
            self._waiters.remove(waiter)
            if waiter.future.done():
                continue  # cancelled in this very turn
            self._settle(waiter, choice)
            choices = self._snapshot()
            kept_free = self._kept_free(choices)

    def _may_hope(self, waiter: _Waiter) -> bool:
        """Whether to wait on for a worker to come back."""
        now = self._clock()
        if waiter.orphaned_at is None:
            waiter.orphaned_at = now
            asyncio.get_running_loop().call_later(self._grace_s + 0.01, self.look)  # should nothing change until then
        return now - waiter.orphaned_at < self._grace_s

    def _kept_free(self, choices: Choices) -> frozenset[str]:
        """Workers whose room belongs to the first in line once its patience is over."""
        first = self._waiters[0] if self._waiters else None
        if first is None or self._clock() - first.since < PATIENCE_S:
            return frozenset()
        return choices.usable(first.need, first.excluded)

    def _settle(self, waiter: _Waiter, choice: Placement | Refusal) -> None:
        if isinstance(choice, Placement):
            waiter.on_placed(choice)
            waiter.future.set_result(None)
        elif choice is Refusal.NEVER_FITS:
            text = f"prompt and answer of {waiter.need.max_total_tokens} tokens are {choice.value}"
            waiter.future.set_exception(InvalidRequestError("max_tokens", text))
        else:
            waiter.future.set_exception(UnavailableError(f"{choice.value} this request"))

    def _retry_ms(self) -> int:
        return int(min(max(self.oldest_s, 0.5), 30.0) * 1000)


def _is_smaller(waiter: _Waiter, other: _Waiter) -> bool:
    one, two = waiter.need, other.need
    fits_in = one.num_prompt_tokens <= two.num_prompt_tokens and one.max_total_tokens <= two.max_total_tokens
    return fits_in and waiter.excluded <= other.excluded
