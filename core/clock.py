"""Time as an argument: durations only, never a wall clock, so tests move it by hand."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds on a clock that never goes back. Comparable only inside one process."""

monotonic: Clock = time.monotonic


class ManualClock:
    """A clock that moves when told; the fake that ships with `Clock`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`."""
        assert seconds >= 0, f"time went back by {seconds}"
        self.now += seconds
