"""One sender's connection to one receiver: HELLO, numbering, credit, heartbeats, and the transfers that use it.

The connection is opened again by itself after it broke: with a new socket, so that nothing queued before survives, and a
new HELLO. Transfers that had begun fail with it; those that had not yet begun use the next one.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from core.clock import Clock
from core.errors import FingerprintError, FrameError, TransferError
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
from kvtransfer.send_session import Run, SendSession
from kvtransfer.states import State
from kvtransfer.stats import TransferStats
from kvtransfer.ticket import TransferOutcome
from kvtransfer.transport import Part, SendHandle, Socket, Transport, TransportFullError

logger = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 64  # then other tasks of the loop get theirs


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


class SenderLink:
    """See the module. All methods belong to the loop's thread.

    Args:
        endpoint: the receiver's.
        transport: opens the sockets.
        block_bytes: bytes of one block.
        hello: what to introduce ourselves with.
        config, clock, stats: shared with the other links of the worker.
        on_gone: told each transfer id that ended, before its caller is.
    """

    def __init__(
        self,
        endpoint: str,
        transport: Transport,
        block_bytes: int,
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
        self._max_blocks = max(1, config.max_message_bytes // block_bytes)  # in one message
        self._hello = hello
        self._config = config
        self._clock = clock
        self._stats = stats
        self._on_gone = on_gone
        self._outgoing: dict[bytes, Outgoing] = {}
        self._connection: Connection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: dict[bytes, Outgoing] = {}  # has something to send; first in line first
        self._work: tuple[Outgoing, Run | Commit] | None = None  # taken from a session, not yet sent

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
            self._connection.socket.close(linger_s=0.2)
            self._connection = None
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
        """Send what credit and transport allow; the rest goes at the next ACK or tick."""
        connection = self._connection
        if connection is None:
            return
        try:
            while connection.control:
                self._send_control(connection, connection.control[0])
                connection.control.popleft()
            while connection.has_credit and self._next_work():
                self._send_work(connection)
        except TransportFullError:
            return

    # Sending

    def _send_control(self, connection: Connection, frame: Control) -> None:
        connection.send_control(frame)
        if isinstance(frame, Drained) and frame.transfer_id in self._outgoing:
            self._outgoing[frame.transfer_id].session.on_drained_sent(self._clock())

    def _next_work(self) -> bool:
        if self._work is not None and self._work[0].session.life.is_open:
            return True
        self._work = None
        while self._ready and self._work is None:
            transfer_id = next(iter(self._ready))
            outgoing = self._ready.pop(transfer_id)
            if outgoing.session.has_work:
                self._work = (outgoing, outgoing.session.take(self._max_blocks, self._clock()))
                # To the end of the line: transfers share the link message by message.
                self._ready[transfer_id] = outgoing
        return self._work is not None

    def _send_work(self, connection: Connection) -> None:
        assert self._work is not None
        outgoing, work = self._work
        if isinstance(work, Commit):
            connection.send_control(work)
        else:
            session = outgoing.session
            frame = Data(session.transfer_id, session.ticket.epoch, work.first_index, work.blocks)
            handle = connection.send_data(frame, self._config.checksum)
            if not handle.done:
                outgoing.handles.append(handle)
            session.num_bytes += frame.num_bytes
            self._stats.num_bytes += frame.num_bytes
        self._work = None

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
        self._work = None
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
