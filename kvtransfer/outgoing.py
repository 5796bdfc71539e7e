"""Between a link's sessions and its socket: messages whose blocks are on their way from the memory, and those sent of which
the transport may still read.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from core.sequence import BlockMemory, Reading
from kvtransfer.frames import Commit
from kvtransfer.send_session import Run, SendSession
from kvtransfer.states import State
from kvtransfer.ticket import TransferOutcome
from kvtransfer.transport import SendHandle

_MAX_WORK = 2  # messages taken and not sent: one is brought from the memory while the one before it goes out


@dataclass(eq=False, slots=True)
class Outgoing:
    """One transfer on a link, with the buffers the transport may still read."""

    session: SendSession
    on_end: Callable[[TransferOutcome], None]
    handles: list[SendHandle] = field(default_factory=list)

    def is_settled(self) -> bool:
        """Whether the transfer ended and its blocks may be reused."""
        self.handles = [handle for handle in self.handles if not handle.done]
        # DONE means that the receiver has every byte; otherwise a queued message may still be read from our blocks.
        return self.session.life.state is State.DONE or (self.session.life.state.is_terminal and not self.handles)


@dataclass(eq=False, slots=True)
class Work:
    """Taken from a session, not yet sent."""

    outgoing: Outgoing
    item: Run | Commit
    reading: Reading | None  # of a run

    @property
    def is_ready(self) -> bool:
        """Whether it can be sent, or never will be."""
        return self.reading is None or self.reading.is_ready


class Loader:
    """What one link has taken from its sessions. All methods belong to the loop's thread.

    Args:
        memory: the blocks.
        max_message_bytes: of blocks in one message.
        on_ready: called from any thread when something has become ready.
    """

    def __init__(self, memory: BlockMemory, max_message_bytes: int, on_ready: Callable[[], None]) -> None:
        self.max_blocks = min(memory.max_read_blocks, max(1, max_message_bytes // memory.block_bytes))  # in one message
        self._memory = memory
        self._on_ready = on_ready
        self._work: list[Work] = []
        self._sent: deque[tuple[SendHandle, Reading]] = deque()

    @property
    def has_room(self) -> bool:
        """Whether one more item may be taken."""
        if len(self._work) >= _MAX_WORK:
            return False
        limit = self._memory.max_readings
        return limit is None or len(self._work) + len(self._sent) < limit

    @property
    def num_bytes(self) -> int:
        """Block bytes that were taken and not sent."""
        num_blocks = 0
        for work in self._work:
            if isinstance(work.item, Run):
                num_blocks += len(work.item.blocks)
        return num_blocks * self._memory.block_bytes

    @property
    def lends_scarcely(self) -> bool:
        """Whether others may wait for what the transport has not let go of."""
        return bool(self._sent) and self._memory.max_readings is not None

    def ready(self) -> Work | None:
        """The first one that can be sent."""
        for work in self._work:
            if work.is_ready:
                return work
        return None

    def take(self, outgoing: Outgoing, item: Run | Commit) -> None:
        """Begin to bring an item's bytes."""
        reading = self._memory.read(item.blocks, self._on_ready) if isinstance(item, Run) else None
        self._work.append(Work(outgoing, item, reading))

    def sent(self, work: Work, handle: SendHandle) -> None:
        """The transport has an item; what was lent for it is given back when it lets go."""
        self._work.remove(work)
        if work.reading is None:
            return
        if handle.done:
            work.reading.release()
        else:
            work.outgoing.handles.append(handle)
            self._sent.append((handle, work.reading))

    def drop(self, is_dropped: Callable[[Work], bool] = lambda _: True) -> None:
        """Forget what will not be sent."""
        kept: list[Work] = []
        for work in self._work:
            if not is_dropped(work):
                kept.append(work)
            elif work.reading is not None:
                work.reading.release()
        self._work = kept

    def let_go(self) -> bool:
        """Give back what the transport has let go of. Returns whether that is all that was sent."""
        while self._sent and self._sent[0][0].done:  # in the order in which they were sent
            self._sent.popleft()[1].release()
        return not self._sent
