"""KV blocks that the CPU can address: everything `core.sequence` asks of a memory, given the bytes of each block."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.sequence import Reading, require_blocks


@dataclass(slots=True)  # not frozen: that takes twice the time to make, once per message
class HostReading:
    """The blocks' own bytes, not copied: a `core.sequence.Reading` that is ready at once and holds nothing."""

    parts: Sequence[memoryview]
    is_ready: bool = True
    error: str = ""

    def release(self) -> None:
        """The blocks themselves are held by whoever reads them."""


class HostBlocks(ABC):
    """A `core.sequence.BlockMemory` and `SwapMemory`; any thread may call it, for different blocks at a time."""

    num_blocks: int
    block_bytes: int
    max_readings: int | None = None
    failure = ""  # this memory is that of the process

    @property
    def max_read_blocks(self) -> int:
        """Most blocks of one reading."""
        return self.num_blocks

    @abstractmethod
    def view(self, block: int) -> memoryview:
        """The writable bytes of one block, shared, not copied. Raises IndexError when there is no such block."""

    def read(self, blocks: Sequence[int], on_ready: Callable[[], None]) -> Reading:  # noqa: ARG002 (ready at once)
        """See `BlockMemory`."""
        return HostReading([self.view(block) for block in blocks])

    def write(self, blocks: Sequence[int], parts: Sequence[bytes | memoryview]) -> None:
        """See `BlockMemory`."""
        require_blocks(blocks, self.num_blocks)
        for block, part in zip(blocks, parts, strict=True):
            self.view(block)[:] = part

    def copy_out(self, blocks: Sequence[int], targets: Sequence[memoryview]) -> None:
        """See `SwapMemory`."""
        require_blocks(blocks, self.num_blocks)
        for block, target in zip(blocks, targets, strict=True):
            target[:] = self.view(block)

    def copy_in(self, blocks: Sequence[int], sources: Sequence[memoryview]) -> None:
        """See `SwapMemory`."""
        self.write(blocks, sources)

    def close(self) -> None:  # noqa: B027 (not abstract: there is nothing to let go of)
        """See `core.sequence.BlockMemory`; the bytes move by themselves."""


class ByteBlocks(HostBlocks):
    """Blocks in one bytearray; the fake of `core.sequence.BlockMemory`.

    Args:
        num_blocks: how many.
        block_bytes: bytes of one block.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._bytes = memoryview(bytearray(num_blocks * block_bytes))

    def view(self, block: int) -> memoryview:
        """The writable bytes of one block, shared, not copied. Raises IndexError when there is no such block."""
        require_blocks((block,), self.num_blocks)
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]
