"""Where the blocks of preempted sequences wait: host memory of a fixed size, and the choice between it and computing anew."""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.sequence import SwapMemory

_SMOOTHING = 0.2  # weight of the newest measurement


@dataclass(slots=True)
class Rates:
    """How fast this worker computes known tokens and copies blocks: measured as it does either."""

    tokens_per_s: float = 1000.0
    bytes_per_s: float = 2e9

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens."""
        self.tokens_per_s += _SMOOTHING * (num_tokens / seconds - self.tokens_per_s)

    def note_copied(self, num_bytes: int, seconds: float) -> None:
        """Blocks were copied."""
        self.bytes_per_s += _SMOOTHING * (num_bytes / seconds - self.bytes_per_s)


def is_swap_cheaper(num_tokens: int, num_bytes: int, rates: Rates) -> bool:
    """Whether copying a sequence's blocks out and back takes less time than computing its tokens again."""
    return 2 * num_bytes / rates.bytes_per_s < num_tokens / rates.tokens_per_s


class HostSwap:
    """Slots of one block each. Only the engine's thread uses it.

    Memory is taken from the system when a slot is first written and given back when it is dropped.

    Args:
        memory: the blocks.
        max_bytes: of host memory; less than one block: nothing is ever swapped.
        on_copied: told (bytes, seconds) of each copy.
        clock: for those seconds.
    """

    def __init__(
        self,
        memory: SwapMemory,
        max_bytes: int,
        on_copied: Callable[[int, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._on_copied = on_copied
        self._clock = clock
        self._stride = -(-memory.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # so that a slot's pages are its own
        num_slots = max_bytes // self._stride
        self._free = list(range(num_slots - 1, -1, -1))
        size = max(num_slots, 1) * self._stride
        self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = memoryview(self._pages)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._memory.block_bytes

    @property
    def num_free(self) -> int:
        """Slots nobody has."""
        return len(self._free)

    def save(self, blocks: Sequence[int]) -> list[int]:
        """Copy blocks out; returns their slots, or none when there are not enough."""
        if len(blocks) > len(self._free):
            return []
        slots = [self._free.pop() for _ in blocks]
        started = self._clock()
        self._memory.copy_out(blocks, [self._slot(slot) for slot in slots])
        self._note(len(blocks), started)
        return slots

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots back, into as many blocks."""
        started = self._clock()
        self._memory.copy_in(blocks, [self._slot(slot) for slot in slots])
        self._note(len(blocks), started)

    def drop(self, slots: Sequence[int]) -> None:
        """Give slots back."""
        for slot in slots:
            self._pages.madvise(mmap.MADV_DONTNEED, slot * self._stride, self._stride)
        self._free += slots

    def _slot(self, slot: int) -> memoryview:
        start = slot * self._stride
        return self._bytes[start : start + self._memory.block_bytes]

    def _note(self, num_blocks: int, started: float) -> None:
        elapsed = self._clock() - started
        if num_blocks and elapsed > 0:
            self._on_copied(num_blocks * self._memory.block_bytes, elapsed)
