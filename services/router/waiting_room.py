"""Requests that wait for room: first come, first placed, unless a smaller one fits while the first does not.

States of a waiter: waiting -> placed | refused (never fits, no workers, waited too long, room full). Room is looked for
when something changed (a report, a release, a new waiter), never by polling.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from core.clock import Clock, monotonic
from core.errors import CapacityError, InvalidRequestError, UnavailableError
from services.router.placement import Need, Placement, Refusal

# While the oldest waiter has waited less than this, smaller ones behind it may pass; after that nobody does, so that a big
# request gets its room as running ones end.
PATIENCE_S = 2.0

Choose = Callable[[Need, frozenset[str]], Placement | Refusal]


@dataclass(slots=True, eq=False)
class _Waiter:
    need: Need
    excluded: frozenset[str]
    since: float
    on_placed: Callable[[Placement], None]
    future: asyncio.Future[None] = field(repr=False)


class WaitingRoom:
    """The router's queue. Lives on one event loop.

    Args:
        choose: where a request may run now.
        max_queued: waiters at most.
        clock: for patience and the age of the oldest.
        observe_decision: told the seconds each choice took.
    """

    def __init__(
        self, choose: Choose, max_queued: int, observe_decision: Callable[[float], None], clock: Clock = monotonic
    ) -> None:
        self._choose = choose
        self._max_queued = max_queued
        self._observe_decision = observe_decision
        self._clock = clock
        self._waiters: list[_Waiter] = []
        self.last_decision_s = 0.0

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens waiting."""
        return sum(waiter.need.num_prompt_tokens for waiter in self._waiters)

    @property
    def oldest_s(self) -> float:
        """How long the first in line has waited."""
        return self._clock() - self._waiters[0].since if self._waiters else 0.0

    async def place(
        self, need: Need, excluded: frozenset[str], timeout_s: float, on_placed: Callable[[Placement], None]
    ) -> None:
        """Wait for room. `on_placed` is called in the same turn as the choice, to count what it takes before the next one.

        Raises:
            CapacityError: the room is full, or no room came within `timeout_s`.
            InvalidRequestError: it would never fit.
            UnavailableError: there is no live worker for it.
        """
        if len(self._waiters) >= self._max_queued:
            raise CapacityError(
                f"{len(self._waiters)} requests are waiting, max_queued={self._max_queued}", self._retry_ms()
            )
        waiter = _Waiter(need, excluded, self._clock(), on_placed, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            self.look()
            async with asyncio.timeout(timeout_s):
                await waiter.future
        except TimeoutError:
            raise CapacityError(
                f"no worker had room for {need.max_total_tokens} tokens within {timeout_s:.1f} s", self._retry_ms()
            ) from None
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self.look()  # it may have held others up

    def look(self) -> None:
        """Place whoever can be placed. Never blocks."""
        for waiter in list(self._waiters):
            started = time.perf_counter()
            choice = self._choose(waiter.need, waiter.excluded)
            self.last_decision_s = time.perf_counter() - started
            self._observe_decision(self.last_decision_s)
            if choice is Refusal.FULL:
                if self._clock() - waiter.since >= PATIENCE_S:
                    return
                continue
            self._waiters.remove(waiter)
            if waiter.future.done():
                continue  # cancelled in this very turn
            if isinstance(choice, Placement):
                waiter.on_placed(choice)
                waiter.future.set_result(None)
            elif choice is Refusal.NEVER_FITS:
                waiter.future.set_exception(
                    InvalidRequestError(
                        "max_tokens", f"prompt and answer of {waiter.need.max_total_tokens} tokens are {choice.value}"
                    )
                )
            else:
                waiter.future.set_exception(UnavailableError(f"{choice.value} this request"))

    def _retry_ms(self) -> int:
        return int(min(max(self.oldest_s, 0.5), 30.0) * 1000)
