"""Block memory that answers later, as a device does: what waits for it is tested without one."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from core.host_blocks import ByteBlocks
from core.sequence import require_blocks


class LateBlocks(ByteBlocks):
    """Blocks that are copied into one of a few slots to be read, later; a slot that is given back is overwritten.

    Args:
        num_blocks: how many.
        block_bytes: bytes of one block.
        soon: is given what makes one reading ready, to call it soon, from any thread, in any order.
        num_slots: readings that may have a slot; more wait for one to be given back.
        max_read_blocks: of one reading.
    """

    max_readings = 2

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        soon: Callable[[Callable[[], None]], object],
        num_slots: int = 3,
        max_read_blocks: int = 4,
    ) -> None:
        super().__init__(num_blocks, block_bytes)
        self.error = ""  # what readings get instead of bytes while it is set
        self._max_read_blocks = max_read_blocks
        self._soon = soon
        self._free = [memoryview(bytearray(max_read_blocks * block_bytes)) for _ in range(num_slots)]
        self._open: set[LateReading] = set()
        self._waiting: deque[LateReading] = deque()  # for a slot; they are open too
        self._lock = threading.RLock()

    @property
    def max_read_blocks(self) -> int:
        """Most blocks of one reading."""
        return self._max_read_blocks

    @property
    def num_open(self) -> int:
        """Readings that have not been released."""
        return len(self._open)

    def read(self, blocks: Sequence[int], on_ready: Callable[[], None]) -> "LateReading":
        """See `core.sequence.BlockMemory`."""
        require_blocks(blocks, self.num_blocks)
        assert len(blocks) <= self._max_read_blocks, f"{len(blocks)} blocks at once"
        reading = LateReading(self, blocks, on_ready)
        with self._lock:
            self._open.add(reading)
            self._waiting.append(reading)
            self._begin()
        return reading

    def finish(self, reading: "LateReading") -> None:
        """Copy a reading's blocks, unless nobody wants them any more."""
        with self._lock:
            slot = reading.slot
            if slot is None:
                return
            parts = [slot[start : start + self.block_bytes] for start in range(0, len(slot), self.block_bytes)]
            for part, block in zip(parts, reading.blocks, strict=False):
                part[:] = self.view(block)
            reading.parts, reading.error = parts[: len(reading.blocks)], self.error
            reading.is_ready = True
        reading.on_ready()

    def give_back(self, reading: "LateReading") -> None:
        """Whoever began a reading is done with it."""
        with self._lock:
            if reading not in self._open:
                return
            self._open.remove(reading)
            if reading.slot is None:
                self._waiting.remove(reading)
            else:
                reading.slot[:] = b"\xee" * len(reading.slot)
                self._free.append(reading.slot)
                reading.slot, reading.parts = None, ()
            self._begin()

    def _begin(self) -> None:
        while self._waiting and self._free:
            reading = self._waiting.popleft()
            reading.slot = self._free.pop()
            self._soon(lambda reading=reading: self.finish(reading))  # type: ignore[misc]


class LateReading:
    """A `core.sequence.Reading`."""

    def __init__(self, memory: LateBlocks, blocks: Sequence[int], on_ready: Callable[[], None]) -> None:
        self.is_ready = False
        self.error = ""
        self.parts: Sequence[memoryview] = ()
        self.blocks = blocks
        self.on_ready = on_ready
        self.slot: memoryview | None = None
        self._memory = memory

    def release(self) -> None:
        """See `core.sequence.Reading`."""
        self._memory.give_back(self)
