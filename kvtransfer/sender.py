"""The prefill worker's end of KV transfer: links to receivers, and the transfers opened on them."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict

from core.clock import Clock, monotonic
from core.errors import TransferError
from core.layout import Fingerprint
from core.sequence import BlockMemory, require_blocks
from kvtransfer.callbacks import every, stop
from kvtransfer.config import TransferConfig
from kvtransfer.frames import Hello
from kvtransfer.link import LINGER_S, SenderLink
from kvtransfer.outgoing import Outgoing
from kvtransfer.send_session import SendSession
from kvtransfer.stats import TransferStats
from kvtransfer.ticket import Committed, Ticket, TransferOutcome
from kvtransfer.transport import Transport


class KVSender:
    """Pushes finished blocks to receivers. Every method belongs to the loop's thread and, unless async, returns at once.

    `on_end` runs on that thread too, possibly before `push`, `commit` or `abort` return, never before `open` does.

    Args:
        memory: this worker's blocks; those pushed stay as they are until `on_end`.
        transport: opens connections.
        fingerprint: compared by the receiver at HELLO.
        incarnation: this process's life, `core.ids.new_incarnation()`.
        config: deadlines and sizes.
        clock: seconds; only differences are used.
        name: the worker's stable name; a receiver fences its former incarnation at once instead of after a timeout.
    """

    def __init__(
        self,
        memory: BlockMemory,
        transport: Transport,
        fingerprint: Fingerprint,
        incarnation: str,
        config: TransferConfig,
        clock: Clock = monotonic,
        name: str = "",
    ) -> None:
        self.stats = TransferStats()
        self._memory = memory
        self._transport = transport
        self._hello = Hello(name, incarnation, asdict(fingerprint))
        self._config = config
        self._clock = clock
        self._links: dict[str, SenderLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._transfers: dict[bytes, SenderLink] = {}
        self._closed: list[SenderLink] = []  # whose sockets may still read what the memory lent
        self._timer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the timer that enforces deadlines."""
        assert self._timer is None, "started twice"
        self._timer = asyncio.create_task(every(self._config.tick_s, self.tick))

    async def aclose(self) -> None:
        """Abort every transfer (each `on_end` is called), tell the receivers, close."""
        tasks = [*self._tasks.values()] + ([self._timer] if self._timer is not None else [])
        self._timer = None
        for link in list(self._links.values()):
            link.close("sender closed")
            self._closed.append(link)
        self._links.clear()
        self._tasks.clear()
        await stop(*tasks)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5 * LINGER_S):
                while not self._have_closed():  # noqa: ASYNC110 (a transport has no event for it)
                    await asyncio.sleep(0.005)

    async def run(self) -> None:
        """Wait for the timer, which never ends by itself; raises what broke it. For the service's TaskGroup."""
        assert self._timer is not None, "start first"
        await self._timer

    async def connect(self, endpoint: str) -> None:
        """Connect and shake hands; returns at once when that is done already. The link repairs itself from then on.

        Raises:
            FingerprintError: the receiver's blocks are of another kind; names each field and both values.
            TransferError: no answer within `connect_timeout_s`; a background attempt goes on until `disconnect`.
        """
        link = self._link(endpoint)
        link.is_wanted = True
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await link.settled.wait()
        except TimeoutError:
            raise TransferError(f"no answer from {endpoint} in {self._config.connect_timeout_s} s") from None
        if link.error is not None:
            raise link.error

    def disconnect(self, endpoint: str) -> None:
        """Forget a receiver that left; the link closes after its last transfer."""
        if endpoint in self._links:
            self._links[endpoint].is_wanted = False

    def peers(self) -> list[str]:
        """Endpoints that are connected and accepted."""
        return [endpoint for endpoint, link in self._links.items() if link.is_accepted]

    def open(self, ticket: Ticket, on_end: Callable[[TransferOutcome], None]) -> None:
        """Announce a transfer to the receiver, before its prompt is computed.

        Args:
            ticket: used once.
            on_end: called once, when the pushed blocks may be reused.
        Raises:
            TransferError: the ticket is in use, or the sender is not running.
        """
        if self._timer is None:
            raise TransferError("the sender is not running")
        if ticket.transfer_id in self._transfers:
            raise TransferError(f"ticket {ticket.transfer_id.hex()} is in use")
        link = self._link(ticket.endpoint)
        self._transfers[ticket.transfer_id] = link
        self.stats.opened()
        link.add(Outgoing(SendSession(ticket, self._config, self._clock()), on_end))

    def push(self, transfer_id: bytes, blocks: Sequence[int], first_index: int) -> None:
        """Send blocks that are final, in the background: the steps that computed them are done. No-op once it ended.

        Args:
            transfer_id: an opened ticket's.
            blocks: this worker's block numbers.
            first_index: place of the first one in the ticket's list; the others follow it.
        Raises:
            IndexError: no such block.
        """
        require_blocks(blocks, self._memory.num_blocks)  # a wrong number shows here, in the caller
        if transfer_id in self._transfers:
            self._transfers[transfer_id].update(
                transfer_id, lambda session, now: session.push(blocks, first_index, now)
            )

    def commit(self, transfer_id: bytes, committed: Committed) -> None:
        """Complete the transfer after what was pushed. Missing blocks fail it at once. No-op once it ended."""
        if transfer_id in self._transfers:
            self._transfers[transfer_id].update(transfer_id, lambda session, now: session.commit(committed, now))

    def abort(self, transfer_id: bytes, reason: str) -> None:
        """End the transfer on both sides; `on_end` follows. No-op once it ended."""
        if transfer_id in self._transfers:
            self._transfers[transfer_id].update(transfer_id, lambda session, now: session.abort("aborted", reason, now))

    def tick(self) -> None:
        """Enforce every deadline; the timer calls it."""
        self._have_closed()
        for endpoint, link in list(self._links.items()):
            link.tick()
            task = self._tasks[endpoint]
            if link.is_idle and (link.error is not None or not link.is_wanted):
                link.close("not used")
                self._closed.append(link)
                task.cancel()
                del self._links[endpoint], self._tasks[endpoint]
            elif task.done() and link.error is None:
                task.result()  # a bug in the link; stops the timer and with it `run`

    def _link(self, endpoint: str) -> SenderLink:
        link = self._links.get(endpoint)
        # A refused link is tried anew, as the receiver may have been replaced; not before its last transfer has ended.
        if link is not None and (link.error is None or not link.is_idle):
            return link
        link = SenderLink(
            endpoint,
            self._transport,
            self._memory,
            self._hello,
            self._config,
            self._clock,
            self.stats,
            self._drop,
        )
        self._links[endpoint] = link
        self._tasks[endpoint] = asyncio.create_task(link.run())
        return link

    def _have_closed(self) -> bool:
        """Whether the transport let go of everything on the links that were closed."""
        self._closed = [link for link in self._closed if not link.let_go()]
        return not self._closed

    def _drop(self, transfer_id: bytes) -> None:
        self._transfers.pop(transfer_id, None)
