"""What the GPU engine asks of a device: CUDA and ROCm through torch.cuda, and the CPU, where Triton's interpreter computes.

The CPU stands in for a GPU in tests: every launch is done when it returns, and a captured step is simply run again.
"""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from core.clock import monotonic

_POLL_S = 5e-5  # torch waits for an event without end only

# What torch and Triton say when a kernel failed: nothing computes on that device any more until the process is another one.
_LOST = re.compile(r"(CUDA|HIP) error|Triton Error \[(CUDA|HIP)\]")
# But not where memory was asked for and there was none.
_FULL = re.compile(r"out of memory|ALLOC_FAILED", re.IGNORECASE)


class Mark(Protocol):
    """A place in the order of what a device does."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block the calling thread until everything launched before is done; False: it is not, `timeout_s` later."""


class Device(Protocol):
    """One device. Steps go to the default stream, from the engine's thread; copies of KV to two streams of their own.

    The default stream waits for what comes in, at each step; for what goes out it never does.
    """

    @property
    def place(self) -> torch.device:
        """Where tensors live."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, zeros, that the device copies from and to while the CPU goes on."""

    def mark(self, *, sleeps: bool = False) -> Mark:
        """Here, in the current stream. With `sleeps`, who waits for it leaves the core to others, and wakes a little late."""

    def incoming(self) -> AbstractContextManager[object]:
        """The calling thread's launches inside go to the stream for what comes to the device; always the same one."""

    def outgoing(self) -> AbstractContextManager[object]:
        """As `incoming`, for what leaves it: another stream, that no other ever waits for."""

    def wait_for_incoming(self) -> None:
        """What is launched from here on, in the current stream, begins after what `incoming` has been given so far."""

    def send(self, values: Sequence[int]) -> Tensor:
        """[n] int32 with these values, for what is launched next; the calling thread does not wait for the device."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats the launches of `run` with one call, on the same memory; `run` is called too."""

    def memory(self) -> tuple[int, int, int]:
        """Bytes: (free, total, held by tensors of this process and by torch for its next ones)."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Most bytes that tensors take at once while `run` computes, beyond those alive before."""

    def enter_thread(self) -> None:
        """Let the calling thread compute: what the device keeps for each thread is made now."""


class CudaDevice:
    """A CUDA or ROCm device. Implements `Device`."""

    def __init__(self, place: torch.device) -> None:
        self.place = torch.device("cuda", place.index or 0)
        torch.cuda.set_device(self.place)
        # Before the steps' kernels where both could begin: copies are short, and somebody waits for each.
        self._incoming = torch.cuda.Stream(self.place, priority=-1)  # type: ignore[no-untyped-call]
        self._outgoing = torch.cuda.Stream(self.place, priority=-1)  # type: ignore[no-untyped-call]
        # Of our own: what cuBLAS keeps for a stream must outlive every graph captured in it, and goes with the first that ends.
        self._capturing = torch.cuda.Stream(self.place)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # of memory, shared by all captures: only one of them runs at a time

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self, *, sleeps: bool = False) -> Mark:
        event = _Event(torch.cuda.Event(blocking=sleeps), self.place)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def incoming(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._incoming)

    def outgoing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._outgoing)

    def wait_for_incoming(self) -> None:
        torch.cuda.current_stream(self.place).wait_stream(self._incoming)

    def send(self, values: Sequence[int]) -> Tensor:
        # Torch keeps pinned memory until what reads it is done.
        return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(self.place, non_blocking=True)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self.place)
        self._capturing.wait_stream(current)
        with torch.cuda.stream(self._capturing):
            run()  # compiles, and lets cuBLAS choose kernels and take its memory: none of it can be captured
        current.wait_stream(self._capturing)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._capturing):
            run()
        self._pool = graph.pool()
        return graph.replay

    def memory(self) -> tuple[int, int, int]:
        return *torch.cuda.mem_get_info(self.place), torch.cuda.memory_reserved(self.place)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.place)
        before = torch.cuda.memory_allocated(self.place)
        torch.cuda.reset_peak_memory_stats(self.place)
        run()
        torch.cuda.synchronize(self.place)
        most = torch.cuda.max_memory_allocated(self.place)
        torch.cuda.empty_cache()  # what loading and `run` left in it counts as free again
        return most - before

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.place)
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]


class _Event:
    def __init__(self, event: torch.cuda.Event, place: torch.device) -> None:
        self._event = event
        self._place = place

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._place))

    def wait(self, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            self._event.synchronize()
            return True
        deadline = monotonic() + timeout_s
        while True:
            is_done: bool = self._event.query()  # type: ignore[no-untyped-call]
            if is_done or monotonic() >= deadline:
                return is_done
            time.sleep(_POLL_S)


class HostDevice:
    """The CPU in a GPU's place; kernels run in Triton's interpreter. Implements `Device`.

    Args:
        num_bytes: of memory to pretend.
        held_bytes: of them that this process has taken.
    """

    def __init__(self, num_bytes: int = 1 << 30, held_bytes: int = 0) -> None:
        self.place = torch.device("cpu")
        self._num_bytes = num_bytes
        self._held_bytes = held_bytes

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def mark(self, *, sleeps: bool = False) -> Mark:  # noqa: ARG002 (nobody waits)
        return _Reached()

    def incoming(self) -> AbstractContextManager[object]:
        return nullcontext()

    def outgoing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait_for_incoming(self) -> None:
        """Every launch is done when it returns."""

    def send(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def memory(self) -> tuple[int, int, int]:
        return self._num_bytes - self._held_bytes, self._num_bytes, self._held_bytes

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return self._num_bytes // 4

    def enter_thread(self) -> None:
        """Nothing is kept for a thread."""


class _Reached:
    def wait(self, timeout_s: float | None = None) -> bool:  # noqa: ARG002 (nothing to wait for)
        return True


def loss(error: RuntimeError) -> str:
    """Why the device will never compute again; empty when this is an error that it survives."""
    is_loss = _LOST.search(str(error)) and not _FULL.search(str(error))
    return f"the device is lost: {str(error).splitlines()[0]}" if is_loss else ""


def find_device(place: torch.device) -> Device:
    """The device of a name: "cuda", "cuda:1"; "cpu" for the interpreter."""
    return CudaDevice(place) if place.type == "cuda" else HostDevice()
