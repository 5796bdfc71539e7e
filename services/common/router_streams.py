"""A worker's side of the Attach streams: every engine step leaves in one message per router.

A stream's life: attached -> (replaced by a newer one of the same router | ended | overrun) -> detached. Whatever the
end, the service is told once and aborts what it ran for that router: a request lives no longer than its router's stream.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from baton.v1 import worker_pb2

logger = logging.getLogger(__name__)

MAX_PENDING_UPDATES = 65_536  # a router that far behind is gone in all but name


class _Mailbox:
    def __init__(self) -> None:
        self.updates: list[worker_pb2.SequenceUpdate] = []
        self.wake = asyncio.Event()
        self.is_closed = False


class RouterStreams:
    """Mailboxes of the attached routers. Lives on one event loop.

    Args:
        load: called for each message: what the worker reports of itself.
        on_detach: called once when a router's last stream ends, with its id.
        heartbeat_s: a message leaves at least this often, so that silence means death.
    """

    def __init__(
        self, load: Callable[[], worker_pb2.Load], on_detach: Callable[[str], None], heartbeat_s: float = 0.5
    ) -> None:
        self._load = load
        self._on_detach = on_detach
        self._heartbeat_s = heartbeat_s
        self._mailboxes: dict[str, _Mailbox] = {}

    def is_attached(self, router_id: str) -> bool:
        """Whether the router listens now."""
        return router_id in self._mailboxes

    def publish(self, router_id: str, updates: list[worker_pb2.SequenceUpdate]) -> None:
        """Queue one step's updates for a router; dropped when it is gone. Never blocks.

        A router that does not read until MAX_PENDING_UPDATES are waiting is detached.
        """
        mailbox = self._mailboxes.get(router_id)
        if mailbox is None:
            return
        mailbox.updates += updates
        mailbox.wake.set()
        if len(mailbox.updates) > MAX_PENDING_UPDATES:
            logger.error("router %s does not read: %d updates waiting; detached", router_id, len(mailbox.updates))
            mailbox.updates.clear()
            self._close(router_id, mailbox)

    def announce(self) -> None:
        """Send the current load to every router now, e.g. when room became free."""
        for mailbox in self._mailboxes.values():
            mailbox.wake.set()

    async def attach(self, router_id: str) -> AsyncGenerator[worker_pb2.StepBatch, None]:
        """Yield what is published for `router_id` until the stream ends. The first message comes at once."""
        older = self._mailboxes.get(router_id)
        if older is not None:
            self._close(router_id, older)
        mailbox = self._mailboxes[router_id] = _Mailbox()
        mailbox.wake.set()
        try:
            while mailbox.updates or not mailbox.is_closed:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await mailbox.wake.wait()
                except TimeoutError:
                    pass  # nothing new: the heartbeat carries the load alone
                mailbox.wake.clear()
                updates, mailbox.updates = mailbox.updates, []
                yield worker_pb2.StepBatch(updates=updates, load=self._load())
        finally:
            if not mailbox.is_closed:
                self._close(router_id, mailbox)

    def close(self) -> None:
        """End every stream after what is queued has left."""
        for router_id, mailbox in list(self._mailboxes.items()):
            self._close(router_id, mailbox)

    def _close(self, router_id: str, mailbox: _Mailbox) -> None:
        mailbox.is_closed = True
        mailbox.wake.set()
        del self._mailboxes[router_id]
        self._on_detach(router_id)
