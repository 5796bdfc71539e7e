"""One sender's connection to one receiver: HELLO, numbering, credit, heartbeats, and the transfers that use it.

The connection is opened again by itself after it broke: with a new socket, so that nothing queued before survives, and a
new HELLO. Transfers that had begun fail with it; those that had not yet begun use the next one.

A message of blocks goes through three hands: the session gives their numbers while there is credit, the memory brings their
bytes (at once, or later from a device), the transport sends them. A few messages are brought while others are sent; control
frames wait for none of them. What the memory lends for a message is given back when the transport has let go of it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from core.clock import Clock
from core.errors import FingerprintError, FrameError, TransferError
from core.sequence import BlockMemory
from kvtransfer.callbacks import notify, stop
from kvtransfer.config import TransferConfig
from kvtransfer.connection import Connection
from kvtransfer.frames import (
    Abort,
    Ack,
    Alive,
    Bye,
    Commit,
    Control,
    Data,
    Done,
    Drained,
    Hello,
    HelloOk,
    HelloRefused,
    Lease,
    Reset,
    decode,
)
from kvtransfer.outgoing import Loader, Outgoing, Work
from kvtransfer.send_session import SendSession
from kvtransfer.states import State
from kvtransfer.stats import TransferStats
from kvtransfer.transport import Part, Released, Socket, Transport, TransportFullError

logger = logging.getLogger(__name__)

LINGER_S = 0.2  # for the goodbyes of a closing link to leave

_MESSAGES_PER_TURN = 64  # then other tasks of the loop get theirs
_LETTING_GO_S = 0.001  # how often a transport is asked whether it let go of readings that others may be waiting for


class SenderLink:
    """See the module. All methods belong to the loop's thread.

    Args:
        endpoint: the receiver's.
        transport: opens the sockets.
        memory: the blocks.
        hello: what to introduce ourselves with.
        config, clock, stats: shared with the other links of the worker.
        on_gone: told each transfer id that ended, before its caller is.
    """

    def __init__(
        self,
        endpoint: str,
        transport: Transport,
        memory: BlockMemory,
        hello: Hello,
        config: TransferConfig,
        clock: Clock,
        stats: TransferStats,
        on_gone: Callable[[bytes], None],
    ) -> None:
        self.endpoint = endpoint
        self.is_accepted = False
        self.is_wanted = False  # somebody called connect; otherwise it goes with its last transfer
        self.error: TransferError | None = None  # refused: no further attempt
        self.settled = asyncio.Event()  # accepted or refused
        self._transport = transport
        self._hello = hello
        self._config = config
        self._clock = clock
        self._stats = stats
        self._on_gone = on_gone
        self._outgoing: dict[bytes, Outgoing] = {}
        self._connection: Connection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: dict[bytes, Outgoing] = {}  # has something to send; first in line first
        self._loop = asyncio.get_running_loop()
        self._loader = Loader(memory, config.max_message_bytes, self._on_reading)
        self._poll: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no transfer uses this link."""
        return not self._outgoing

    async def run(self) -> None:
        """Keep the connection until refused or cancelled."""
        while self.error is None:
            try:
                socket = self._transport.connect(self.endpoint)
            except TransferError as error:
                self._refuse(error)
                return
            now = self._clock()
            self._connection = Connection(socket, heard_at=now, heartbeat_at=now)
            self._connection.control.append(self._hello)
            self._reader = asyncio.create_task(self._read(socket))
            try:
                await asyncio.wait([self._reader])
            finally:
                await stop(self._reader)
                self._connection = None
                socket.close()
            if not self._reader.cancelled():
                self._reader.result()  # only a bug gets here; let it be seen
            self._settle_all()
            await asyncio.sleep(self._config.reconnect_s)

    def close(self, reason: str) -> None:
        """End every transfer and say goodbye. The owner cancels `run` afterwards."""
        now = self._clock()
        for outgoing in list(self._outgoing.values()):
            self._after(outgoing, outgoing.session.abort("failed", reason, now))
        if self._connection is not None:
            self._connection.control.append(Bye())
            self.flush()
            self._connection.socket.close(linger_s=LINGER_S)
            self._connection = None
        self._loader.drop()
        for outgoing in list(self._outgoing.values()):
            outgoing.session.on_link_lost(reason, now)
            self._finish(outgoing)

    def add(self, outgoing: Outgoing) -> None:
        """Carry one more transfer."""
        self._outgoing[outgoing.session.transfer_id] = outgoing
        if self.is_accepted:
            self._after(outgoing, [outgoing.session.begin(self._clock())])
            self.flush()
        elif self.error is not None:
            outgoing.session.on_link_lost(str(self.error), self._clock())  # the next tick tells the caller

    def update(self, transfer_id: bytes, step: Callable[[SendSession, float], list[Control]]) -> None:
        """Apply `step` to a transfer and send what follows from it."""
        outgoing = self._outgoing[transfer_id]
        self._after(outgoing, step(outgoing.session, self._clock()))
        self.flush()
        self._settle(outgoing)

    def tick(self) -> None:
        """Enforce every deadline."""
        now = self._clock()
        for outgoing in list(self._outgoing.values()):
            self._after(outgoing, outgoing.session.on_timer(now))
            life = outgoing.session.life
            is_late = life.state.is_terminal and now >= life.entered_at + self._config.drain_timeout_s
            if is_late and self._connection is not None and not outgoing.is_settled():
                self._break("blocks of an ended transfer are stuck in the transport")  # a closed socket lets go of them
        connection = self._connection
        if connection is not None and now >= connection.heard_at + self._config.peer_timeout_s:
            self._break(f"no frame from {self.endpoint} for {self._config.peer_timeout_s} s")
        elif connection is not None and self.is_accepted and now >= connection.heartbeat_at and not connection.control:
            connection.heartbeat_at = now + self._config.heartbeat_s
            connection.control.extend(Alive(ids) for ids in chunks([*self._outgoing]))
        self.flush()
        self._settle_all()

    def flush(self) -> None:
        """Send what credit, memory and transport allow; the rest goes at the next ACK, tick, or when its bytes are there."""
        self.let_go()
        self._loader.drop(lambda work: not work.outgoing.session.life.is_open)
        connection = self._connection
        if connection is None:
            return
        with contextlib.suppress(TransportFullError):
            self._send_controls(connection)
            while (work := self._next_work(connection)) is not None:
                self._send_work(connection, work)
                self._send_controls(connection)
        if self._loader.lends_scarcely and self._poll is None:
            self._poll = self._loop.call_later(_LETTING_GO_S, self._on_poll)

    def let_go(self) -> bool:
        """Give back what the transport has let go of, also after `close`. Returns whether that is all that was sent."""
        return self._loader.let_go()

    def _on_reading(self) -> None:
        """A reading is ready; a thread of the memory says so."""
        with contextlib.suppress(RuntimeError):  # the loop ended meanwhile, and every transfer with it
            self._loop.call_soon_threadsafe(self.flush)

    def _on_poll(self) -> None:
        self._poll = None
        self.flush()

    # Sending

    def _send_controls(self, connection: Connection) -> None:
        while connection.control:
            self._send_control(connection, connection.control[0])
            connection.control.popleft()

    def _send_control(self, connection: Connection, frame: Control) -> None:
        connection.send_control(frame)
        if isinstance(frame, Drained) and frame.transfer_id in self._outgoing:
            self._outgoing[frame.transfer_id].session.on_drained_sent(self._clock())

    def _next_work(self, connection: Connection) -> Work | None:
        """Something that can be sent now; until there is, take from the sessions what may be taken."""
        while (work := self._loader.ready()) is None:
            if not self._loader.has_room or not connection.has_credit(self._loader.num_bytes) or not self._take():
                return None
        return work

    def _take(self) -> bool:
        while self._ready:
            transfer_id = next(iter(self._ready))
            outgoing = self._ready.pop(transfer_id)
            if outgoing.session.has_work:
                # To the end of the line: transfers share the link message by message.
                self._ready[transfer_id] = outgoing
                self._loader.take(outgoing, outgoing.session.take(self._loader.max_blocks, self._clock()))
                return True
        return False

    def _send_work(self, connection: Connection, work: Work) -> None:
        outgoing, session, item, reading = work.outgoing, work.outgoing.session, work.item, work.reading
        if isinstance(item, Commit):
            connection.send_control(item)
            self._loader.sent(work, Released())
            return
        assert reading is not None, "a run has one"
        if reading.error:
            self._after(
                outgoing, session.abort("failed", f"KV blocks could not be read: {reading.error}", self._clock())
            )
            self._loader.drop(lambda other: other.outgoing is outgoing)
            return
        frame = Data(session.transfer_id, session.ticket.epoch, item.first_index, reading.parts)
        self._loader.sent(work, connection.send_data(frame, self._config.checksum))
        self._stats.num_bytes += frame.num_bytes
        session.on_sent(frame.num_bytes, self._clock())
        if session.has_work:  # its COMMIT may have waited for this
            self._ready.setdefault(session.transfer_id, outgoing)

    # Receiving

    async def _read(self, socket: Socket) -> None:
        count = 0
        while True:
            _, parts = await socket.recv()
            self._on_message(parts)
            count += 1
            if count % _MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)

    def _on_message(self, parts: list[Part]) -> None:
        try:
            number, frame = decode(parts, self._config.max_control_bytes)
        except FrameError:
            self._stats.frames_dropped["garbage"] += 1
            return
        connection, now = self._connection, self._clock()
        if connection is None:
            return  # broken; the reader ends at its next await
        if isinstance(frame, Reset | Bye):
            self._break(f"{self.endpoint} closed or forgot this connection")
            return
        if number < connection.number_in:
            self._stats.frames_dropped["replayed"] += 1
            return
        if number > connection.number_in:
            self._stats.sequence_gaps += 1
            for outgoing in list(self._outgoing.values()):
                self._after(outgoing, outgoing.session.abort("failed", "frames of the receiver were lost", now))
        connection.number_in = number + 1
        connection.heard_at = now
        self._on_frame(connection, frame, now)
        self.flush()

    def _on_frame(self, connection: Connection, frame: Control | Data, now: float) -> None:
        match frame:
            case HelloOk():
                self._accept(connection, frame, now)
            case HelloRefused():
                self._refuse(FingerprintError(f"{self.endpoint} refused us: {frame.reason}"))
            case Ack():
                connection.acknowledge(frame.number)
            case Lease():
                for transfer_id in frame.transfers:
                    if transfer_id in self._outgoing:
                        self._outgoing[transfer_id].session.on_lease(frame.lease_ms, now)
            case Done() | Abort():
                outgoing = self._outgoing.get(frame.transfer_id)
                if outgoing is None:
                    return  # it crossed our own end of the transfer
                if isinstance(frame, Done):
                    outgoing.session.on_done(now)
                elif frame.epoch == outgoing.session.ticket.epoch:
                    self._after(outgoing, outgoing.session.on_abort(frame, now))
                else:
                    self._stats.frames_dropped["wrong_epoch"] += 1
                self.flush()
                self._settle(outgoing)
            case _:
                self._stats.frames_dropped["unexpected"] += 1

    def _accept(self, connection: Connection, frame: HelloOk, now: float) -> None:
        self.is_accepted = True
        connection.window_bytes = frame.window_bytes
        self.settled.set()
        for outgoing in self._outgoing.values():
            if outgoing.session.life.state is State.CONNECTING:
                self._after(outgoing, [outgoing.session.begin(now)])

    def _refuse(self, error: TransferError) -> None:
        logger.error("KV link refused: %s", error)
        self.error = error
        self.settled.set()
        self._lose(str(error), list(self._outgoing.values()))

    def _break(self, reason: str) -> None:
        self._stats.peers_lost += self.is_accepted
        self.settled.clear()
        # Those still CONNECTING have sent nothing and may use the next connection, until their own deadline.
        begun = [out for out in self._outgoing.values() if out.session.life.state is not State.CONNECTING]
        self._lose(reason, begun)

    def _lose(self, reason: str, victims: list[Outgoing]) -> None:
        self.is_accepted = False
        self._connection = None
        self._ready.clear()
        self._loader.drop()
        if self._reader is not None:
            self._reader.cancel()  # `run` then closes the socket and opens another
        for outgoing in victims:
            outgoing.session.on_link_lost(reason, self._clock())
            self._settle(outgoing)

    # Ending

    def _after(self, outgoing: Outgoing, frames: list[Control]) -> None:
        if frames and (self._connection is None or not self.is_accepted):
            outgoing.session.on_link_lost("no connection", self._clock())
        elif self._connection is not None:
            self._connection.control.extend(frames)
        if outgoing.session.has_work:
            self._ready.setdefault(outgoing.session.transfer_id, outgoing)

    def _settle_all(self) -> None:
        for outgoing in list(self._outgoing.values()):
            self._settle(outgoing)

    def _settle(self, outgoing: Outgoing) -> None:
        if outgoing.is_settled():
            self._finish(outgoing)

    def _finish(self, outgoing: Outgoing) -> None:
        if self._outgoing.pop(outgoing.session.transfer_id, None) is None:
            return
        self._ready.pop(outgoing.session.transfer_id, None)
        outcome = outgoing.session.outcome(self._clock())
        self._stats.ended(outcome)
        self._on_gone(outcome.transfer_id)
        notify(outgoing.on_end, outcome)


def chunks(transfers: list[bytes]) -> list[list[bytes]]:
    """Split ids into lists that fit one frame; one empty list when there are none, as a heartbeat is due anyway."""
    return [transfers[start : start + 1000] for start in range(0, max(len(transfers), 1), 1000)]
