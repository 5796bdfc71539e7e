"""The bytes of KV blocks that live on a device, for those who move them: through pinned host memory, beside the steps.

What goes out: a thread of its own copies blocks into a slot of pinned memory, on the outgoing stream, and waits until they are
there; the slot is lent until the reading is released. What comes in is put into a slot and copied on the incoming stream; the
next step waits for it on the device. Swapped blocks go through a slot of their own, in the stream of the steps.

Every buffer is allocated here, once. One that came from torch's allocator for each copy could be handed to a step while the
copy of another stream still uses it: the allocator knows only the stream in which it was asked.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from core.errors import TransferError
from core.sequence import require_blocks
from engine.gpu.device import Device, Mark, loss
from kernels.gpu.pack_blocks import pack_blocks, unpack_blocks

logger = logging.getLogger(__name__)

# Smaller blocks are gathered by a kernel, so that many take one copy; a larger one is worth a copy of its own.
_PACKED_BELOW_BYTES = 64 << 10
_READINGS_SHARE = 4  # so many users with a full share of the slots leave none to another
_MAX_COPY_S = 10.0  # longer than any copy takes that ends at all: one that does not is the end of the process
_CLOSED = "the KV memory was closed"


class DeviceBlocks:
    """A `core.sequence.BlockMemory` and `SwapMemory` over a cache on a device.

    `read`, `write` and `release` belong to one thread, the transfers' (`release` may also come from another); `before_step`,
    `copy_out` and `copy_in` to the engine's. The two never wait for each other.

    Readings do not wait for steps that were launched before them: some step always is in flight, and a transfer that waited
    for it would move one message in each. Blocks are read once the results of the step that computed them are known, so
    results must not be given before the device is done with that step, also when it samples nothing.

    Args:
        cache: [num_blocks, ...], contiguous, any dtype.
        device: where it lives.
        slot_bytes: of blocks that move at once; never less than one block. At least what one message carries.
        num_read_slots: readings that are there or on their way; more wait.
        num_write_slots: writes on their way to the device; one more waits in `write`.
        is_packed: whether blocks are gathered by a kernel before they are copied; None: if they are small. Triton's
            interpreter computes for one thread at a time, so the CPU in a GPU's place copies one by one.
    """

    def __init__(
        self,
        cache: Tensor,
        device: Device,
        slot_bytes: int = 1 << 20,
        num_read_slots: int = 16,
        num_write_slots: int = 8,
        is_packed: bool | None = None,
    ) -> None:
        self.num_blocks = len(cache)
        self.block_bytes = cache[0].nbytes
        self.max_read_blocks = max(1, slot_bytes // self.block_bytes)
        self.max_readings = max(1, num_read_slots // _READINGS_SHARE)
        if is_packed is None:
            is_packed = self.block_bytes < _PACKED_BELOW_BYTES and device.place.type != "cpu"
        self._device = device
        blocks = cache.view(self.num_blocks, -1).view(torch.uint8)
        self._incoming, self._outgoing, self._steps = (
            _Lane(blocks, self.max_read_blocks, is_packed, device) for _ in range(3)
        )
        slots = [
            _Slot(self.max_read_blocks, self.block_bytes, device) for _ in range(num_write_slots + num_read_slots + 1)
        ]
        self._swap_slot = slots.pop()
        self._write_slots = slots[:num_write_slots]
        self._turn = 0
        self._has_written = False  # since the last step
        self._free: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        for slot in slots[num_write_slots:]:
            self._free.put(slot)
        self._asked: queue.SimpleQueue[_DeviceReading | None] = queue.SimpleQueue()
        self._is_closed = False
        self.failure = ""
        # Compiles what there is to compile. The block gets its own bytes, before any step exists.
        first = [memoryview(bytearray(self.block_bytes))]
        self.copy_out([0], first)
        self.copy_in([0], first)
        self._reader = threading.Thread(target=self._read_all, name="kv-reader", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """End the thread; readings that are not ready fail. Call it when no transfer is left; a second call does nothing."""
        self._is_closed = True
        self._asked.put(None)
        self._free.put(None)  # it may be waiting for a slot
        self._reader.join(_MAX_COPY_S)
        if self._reader.is_alive():
            logger.error("a copy of KV blocks hangs on the device and is left behind")

    # Transfers

    def read(self, blocks: Sequence[int], on_ready: Callable[[], None]) -> "_DeviceReading":
        """See `core.sequence.BlockMemory`."""
        require_blocks(blocks, self.num_blocks)
        assert len(blocks) <= self.max_read_blocks, f"{len(blocks)} blocks at once, at most {self.max_read_blocks}"
        reading = _DeviceReading(tuple(blocks), on_ready, self._free.put)
        if self._is_closed:
            reading.is_ready, reading.error = True, _CLOSED
        else:
            self._asked.put(reading)
        return reading

    def write(self, blocks: Sequence[int], parts: Sequence[bytes | memoryview]) -> None:
        """See `core.sequence.BlockMemory`. Waits for the device only where all slots are on their way, and not for ever."""
        require_blocks(blocks, self.num_blocks)
        if self.failure:
            raise TransferError(self.failure)
        try:
            with torch.inference_mode(), self._device.incoming():
                for start in range(0, len(blocks), self.max_read_blocks):
                    piece = slice(start, start + self.max_read_blocks)
                    slot = self._write_slots[self._turn]
                    self._turn = (self._turn + 1) % len(self._write_slots)
                    if not slot.wait(_MAX_COPY_S):
                        self.failure = f"a copy of KV blocks to the device hangs: it takes more than {_MAX_COPY_S} s"
                        raise TransferError(self.failure)
                    slot.fill(parts[piece])
                    try:
                        self._incoming.scatter(blocks[piece], slot)
                    finally:  # after a failure, too, what was launched still reads the slot
                        slot.mark = self._device.mark(sleeps=True)
        except RuntimeError as error:  # what torch makes of any failure of a device
            self.failure = self.failure or loss(error)
            raise TransferError(f"KV blocks could not be written: {error}") from error
        finally:
            self._has_written = True

    def _read_all(self) -> None:
        while (reading := self._asked.get()) is not None:
            if reading.is_released:
                continue
            slot = self._free.get()
            if slot is None or self._is_closed:
                reading.finish(None, _CLOSED)
                break
            try:
                self._gather(reading.blocks, slot)
            except Exception as error:  # the thread must go on, or transfers would hang instead of fail
                logger.exception("KV blocks could not be read")
                if isinstance(error, RuntimeError):
                    self.failure = self.failure or loss(error)
                reading.finish(slot, str(error) or repr(error))
            else:
                reading.finish(slot, "")
        while not self._asked.empty():
            if (reading := self._asked.get()) is not None:
                reading.finish(None, _CLOSED)

    @torch.inference_mode()
    def _gather(self, blocks: Sequence[int], slot: "_Slot") -> None:
        with self._device.outgoing():
            self._device.wait_for_incoming()  # a block that has just been written is read as it then is
            try:
                self._outgoing.gather(blocks, slot)
            finally:  # after a failure, too, what was launched still writes to the slot
                self._device.mark(sleeps=True).wait()

    # The engine

    def before_step(self) -> None:
        """What is launched next, in the current stream, sees everything that was written before this call."""
        if self._has_written:
            self._has_written = False  # before waiting: a write from now on is seen now, or by the next step
            self._device.wait_for_incoming()

    @torch.inference_mode()
    def copy_out(self, blocks: Sequence[int], targets: Sequence[memoryview]) -> None:
        """See `core.sequence.SwapMemory`."""
        require_blocks(blocks, self.num_blocks)
        self.before_step()
        slot = self._swap_slot
        for start in range(0, len(blocks), self.max_read_blocks):
            piece = blocks[start : start + self.max_read_blocks]
            self._steps.gather(piece, slot)
            self._device.mark().wait()
            for target, part in zip(targets[start:], slot.parts[: len(piece)], strict=False):
                target[:] = part

    @torch.inference_mode()
    def copy_in(self, blocks: Sequence[int], sources: Sequence[memoryview]) -> None:
        """See `core.sequence.SwapMemory`."""
        require_blocks(blocks, self.num_blocks)
        self.before_step()  # what was written to these blocks for a sequence before must not come after
        slot = self._swap_slot
        for start in range(0, len(blocks), self.max_read_blocks):
            piece = slice(start, start + self.max_read_blocks)
            slot.fill(sources[piece])
            self._steps.scatter(blocks[piece], slot)
            self._device.mark().wait()


class _Slot:
    """Pinned memory for some blocks and their numbers; `mark` is where the device is done with it."""

    def __init__(self, max_blocks: int, block_bytes: int, device: Device) -> None:
        self.ids = device.host_buffer(4 * max_blocks).view(torch.int32)
        self.rows = device.host_buffer(max_blocks * block_bytes).view(max_blocks, block_bytes)
        self.row = list(self.rows)
        self.parts = [memoryview(row.numpy()) for row in self.row]
        self.mark: Mark | None = None
        self._ids, self._rows = self.ids.numpy(), self.rows.numpy()

    def fill(self, parts: Sequence[bytes | memoryview]) -> None:
        """Copy blocks in."""
        # numpy lets other threads go on while it copies: those that launch steps.
        for row, part in zip(self._rows, parts, strict=False):
            row[:] = np.frombuffer(part, np.uint8)

    def name(self, blocks: Sequence[int]) -> None:
        """Write their numbers."""
        self._ids[: len(blocks)] = blocks

    def wait(self, timeout_s: float) -> bool:
        """Block until the device is done with it; False: it is not, `timeout_s` later."""
        if self.mark is not None and self.mark.wait(timeout_s):
            self.mark = None
        return self.mark is None


class _Lane:
    """Copies between blocks and slots, in one stream: the buffers on the device are used in its order.

    Args:
        blocks: [num_blocks, block_bytes] uint8.
        max_blocks: of one copy.
        is_packed: whether a kernel gathers and scatters.
        device: of the blocks.
    """

    def __init__(self, blocks: Tensor, max_blocks: int, is_packed: bool, device: Device) -> None:
        self._blocks = blocks
        self._is_packed = is_packed
        if is_packed:
            self._ids = torch.empty(max_blocks, dtype=torch.int32, device=device.place)
            self._packed = torch.empty(max_blocks, blocks.shape[1], dtype=torch.uint8, device=device.place)

    def gather(self, blocks: Sequence[int], slot: _Slot) -> None:
        """Launch the copy of blocks into a slot."""
        if not self._is_packed:
            for row, block in zip(slot.row, blocks, strict=False):
                row.copy_(self._blocks[block], non_blocking=True)
            return
        packed = pack_blocks(self._blocks, self._send_ids(blocks, slot), out=self._packed[: len(blocks)])
        slot.rows[: len(blocks)].copy_(packed, non_blocking=True)

    def scatter(self, blocks: Sequence[int], slot: _Slot) -> None:
        """Launch the copy of a slot into blocks."""
        if not self._is_packed:
            for row, block in zip(slot.row, blocks, strict=False):
                self._blocks[block].copy_(row, non_blocking=True)
            return
        packed = self._packed[: len(blocks)]
        packed.copy_(slot.rows[: len(blocks)], non_blocking=True)
        unpack_blocks(packed, self._send_ids(blocks, slot), self._blocks)

    def _send_ids(self, blocks: Sequence[int], slot: _Slot) -> Tensor:
        slot.name(blocks)
        ids = self._ids[: len(blocks)]
        ids.copy_(slot.ids[: len(blocks)], non_blocking=True)
        return ids


class _DeviceReading:
    """A `core.sequence.Reading`: a slot that is lent."""

    def __init__(
        self, blocks: tuple[int, ...], on_ready: Callable[[], None], give_back: Callable[[_Slot], None]
    ) -> None:
        self.blocks = blocks
        self.is_ready = False
        self.is_released = False
        self.error = ""
        self.parts: Sequence[memoryview] = ()
        self._on_ready = on_ready
        self._give_back = give_back
        self._slot: _Slot | None = None
        self._lock = threading.Lock()

    def finish(self, slot: _Slot | None, error: str) -> None:
        """The blocks are in `slot`, or never will be."""
        with self._lock:
            is_wanted = not self.is_released
            self.error = error
            if slot is not None and is_wanted and not error:
                self.parts = slot.parts[: len(self.blocks)]
                self._slot, slot = slot, None
            self.is_ready = True
        if slot is not None:
            self._give_back(slot)
        if is_wanted:
            try:
                self._on_ready()
            except Exception:  # a bug of one caller must not end the thread
                logger.exception("a KV reading is ready, and whoever wanted it failed")

    def release(self) -> None:
        """See `core.sequence.Reading`."""
        with self._lock:
            self.is_released = True
            slot, self._slot = self._slot, None
            self.parts = ()
        if slot is not None:
            self._give_back(slot)
