"""What the GPU engine asks of a device: CUDA and ROCm through torch.cuda, and the CPU, where Triton's interpreter computes.

The CPU stands in for a GPU in tests: every launch is done when it returns, and a captured step is simply run again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Programs of the kernels that loop over a work list, for each multiprocessor: enough that some load while others compute.
_PROGRAMS_PER_MULTIPROCESSOR = 4


class Mark(Protocol):
    """A place in the order of what a device does."""

    def is_reached(self) -> bool:
        """Whether everything launched before is done."""

    def wait(self) -> None:
        """Block the calling thread until it is."""


class Captured(NamedTuple, Generic[T]):
    """A sequence of launches that can be repeated with one call, on the same memory."""

    replay: Callable[[], None]
    result: T  # what the launches write, the same tensors each time


class Device(Protocol):
    """One device. Steps go to the default stream, from the engine's thread; copies of KV to two streams of their own.

    The default stream waits for what comes in, at each step; for what goes out it never does.
    """

    @property
    def place(self) -> torch.device:
        """Where tensors live."""

    @property
    def num_programs(self) -> int:
        """Programs of a kernel that loops over a work list: as many as run at once. Never depends on the work."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, zeros, that the device copies from and to while the CPU goes on."""

    def mark(self) -> Mark:
        """Here, in the current stream."""

    def incoming(self) -> AbstractContextManager[object]:
        """The calling thread's launches inside go to the stream for what comes to the device; always the same one."""

    def outgoing(self) -> AbstractContextManager[object]:
        """As `incoming`, for what leaves it: another stream, that no other ever waits for."""

    def wait_for_incoming(self) -> None:
        """What is launched from here on, in the current stream, begins after what `incoming` has been given so far."""

    def capture(self, run: Callable[[], Tensor]) -> Captured[Tensor]:
        """Record the launches of `run`, after running it once."""

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Most bytes that tensors take at once while `run` computes, beyond those alive before."""

    def enter_thread(self) -> None:
        """Let the calling thread compute: what the device keeps for each thread is made now."""


class CudaDevice:
    """A CUDA or ROCm device. Implements `Device`."""

    def __init__(self, place: torch.device) -> None:
        self.place = torch.device("cuda", place.index or 0)
        torch.cuda.set_device(self.place)
        multiprocessors = torch.cuda.get_device_properties(self.place).multi_processor_count
        self.num_programs = multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
        # Before the steps' kernels where both could begin: copies are short, and somebody waits for each.
        self._incoming = torch.cuda.Stream(self.place, priority=-1)  # type: ignore[no-untyped-call]
        self._outgoing = torch.cuda.Stream(self.place, priority=-1)  # type: ignore[no-untyped-call]
        # Of our own: what cuBLAS keeps for a stream must outlive every graph captured in it, and goes with the first that ends.
        self._capturing = torch.cuda.Stream(self.place)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # of memory, shared by all captures: only one of them runs at a time

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Mark:
        event = _Event(torch.cuda.Event(), self.place)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def incoming(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._incoming)

    def outgoing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._outgoing)

    def wait_for_incoming(self) -> None:
        torch.cuda.current_stream(self.place).wait_stream(self._incoming)

    def capture(self, run: Callable[[], Tensor]) -> Captured[Tensor]:
        current = torch.cuda.current_stream(self.place)
        self._capturing.wait_stream(current)
        with torch.cuda.stream(self._capturing):
            run()  # compiles, and lets cuBLAS choose kernels and take its memory: none of it can be captured
        current.wait_stream(self._capturing)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._capturing):
            result = run()
        self._pool = graph.pool()
        return Captured(graph.replay, result)

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.place)

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

    def is_reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class HostDevice:
    """The CPU in a GPU's place; kernels run in Triton's interpreter. Implements `Device`.

    Args:
        num_bytes: of memory to pretend.
        num_programs: of kernels that loop over a work list.
    """

    def __init__(self, num_bytes: int = 1 << 30, num_programs: int = 3) -> None:
        self.place = torch.device("cpu")
        self.num_programs = num_programs
        self._num_bytes = num_bytes

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def mark(self) -> Mark:
        return _Reached()

    def incoming(self) -> AbstractContextManager[object]:
        return nullcontext()

    def outgoing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait_for_incoming(self) -> None:
        """Every launch is done when it returns."""

    def capture(self, run: Callable[[], Tensor]) -> Captured[Tensor]:
        result = run()
        return Captured(lambda: _copy_into(result, run()), result)

    def memory(self) -> tuple[int, int]:
        return self._num_bytes, self._num_bytes

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return self._num_bytes // 4

    def enter_thread(self) -> None:
        """Nothing is kept for a thread."""


class _Reached:
    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


def _copy_into(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def find_device(place: torch.device) -> Device:
    """The device of a name: "cuda", "cuda:1"; "cpu" for the interpreter."""
    return CudaDevice(place) if place.type == "cuda" else HostDevice()
