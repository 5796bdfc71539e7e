"""How long a call takes on the device: medians of many, with inputs that its cache does not hold.

Calls are captured into one CUDA graph and replayed, as a decode step is served: what is measured is the device's time, not
Python's. Several sets of inputs take turns, and every captured call keeps an output of its own, so that what one call reads
or writes is out of the second-level cache when it is its turn again; sets too small for that measure latency, not bandwidth.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]

ROTATED_BYTES = 256 << 20  # of all sets: five times the second-level cache of an H200
MAX_SETS = 64
_REPLAY_S = 1e-3  # the least that one replay should take, so that its start does not count
_CALL_S = 2e-6  # what no kernel is faster than
_MIN_SAMPLES, _MAX_SAMPLES = 5, 50
_HOST_CALLS = 50  # fewer than the launches that a stream's queue takes before it blocks


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one call, in seconds."""

    median_s: float
    p25_s: float
    p75_s: float
    num_samples: int
    host_s: float  # until the call returns, with the device still at it
    is_graph: bool  # else the device may have waited for Python

    @classmethod
    def of(cls, samples: Sequence[float], host_s: float, is_graph: bool) -> "Timing":
        """Medians of samples; at least one."""
        quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        return cls(quartiles[1], quartiles[0], quartiles[2], len(samples), host_s, is_graph)


def num_sets(set_bytes: int) -> int:
    """How many sets of inputs take turns: those that the cache cannot hold, two where one alone is that large."""
    return max(2, min(MAX_SETS, math.ceil(ROTATED_BYTES / max(set_bytes, 1))))


def num_rounds(num_calls: int, expected_s: float) -> int:
    """How often one replay goes through all calls."""
    return math.ceil(_REPLAY_S / (num_calls * max(expected_s, _CALL_S)))


class Clock(Protocol):
    """Something that times calls."""

    def time(self, calls: Sequence[Call], expected_s: float, budget_s: float) -> Timing:
        """Time calls that take turns.

        Args:
            calls: the same work on different memory.
            expected_s: what one should take at best.
            budget_s: what may be spent on samples, about.
        """


class HostClock:
    """Where there is no device: the time until the call returns, of the first two."""

    def time(self, calls: Sequence[Call], expected_s: float, budget_s: float) -> Timing:  # noqa: ARG002
        """Time calls that take turns."""
        samples: list[float] = []
        began = time.perf_counter()
        while not samples or (time.perf_counter() - began < budget_s and len(samples) < _MAX_SAMPLES):
            for call in calls[:2]:
                before = time.perf_counter()
                call()
                samples.append(time.perf_counter() - before)
        return Timing.of(samples, statistics.median(samples), is_graph=False)


class DeviceClock:
    """Times by the device's own events; CUDA and ROCm alike."""

    def time(self, calls: Sequence[Call], expected_s: float, budget_s: float) -> Timing:
        """Time calls that take turns. A call that cannot be captured is timed as Python launches it."""
        for call in calls:  # compile, allocate
            call()
        torch.cuda.synchronize()
        host_s = _host_s(calls)
        rounds = num_rounds(len(calls), expected_s)
        replay = _capture(calls, rounds)
        is_graph = replay is not None
        if replay is None:
            replay = _in_turn(calls, rounds)
        replay()
        (first,) = _samples(replay, 1)
        count = max(_MIN_SAMPLES, min(_MAX_SAMPLES, int(budget_s / max(first, 1e-9))))
        per_call = [sample / (rounds * len(calls)) for sample in _samples(replay, count)]
        return Timing.of(per_call, host_s, is_graph)


def _host_s(calls: Sequence[Call]) -> float:
    samples = []
    for number in range(_HOST_CALLS):
        before = time.perf_counter()
        calls[number % len(calls)]()
        samples.append(time.perf_counter() - before)
    torch.cuda.synchronize()
    return statistics.median(samples)


def _capture(calls: Sequence[Call], rounds: int) -> Callable[[], None] | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                kept = [call() for call in calls]  # an output freed at once would be the next one's memory
                del kept
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def _in_turn(calls: Sequence[Call], rounds: int) -> Callable[[], None]:
    def replay() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    return replay


def _samples(replay: Callable[[], None], count: int) -> list[float]:
    """Seconds of each of `count` replays."""
    events = [(_event(), _event()) for _ in range(count)]
    for begin, end in events:
        begin.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
