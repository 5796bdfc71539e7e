"""The decode worker's end of KV transfer: reservations, the peers that fill them, and the only writer of their blocks.

The blocks of a transfer are written here and nowhere else, so a transfer is fenced by forgetting it: a late frame finds no
session, is dropped and counted.
"""

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from core.clock import Clock, monotonic
from core.errors import FingerprintError, FrameError, TransferError
from core.ids import new_transfer_id
from core.layout import Fingerprint
from core.sequence import BlockMemory, require_blocks
from kvtransfer.callbacks import every, notify, stop
from kvtransfer.config import TransferConfig
from kvtransfer.frames import (
    Abort,
    Alive,
    Begin,
    Bye,
    Commit,
    Control,
    Data,
    Drained,
    Hello,
    HelloOk,
    HelloRefused,
    Lease,
    Reset,
    decode,
    encode_control,
)
from kvtransfer.link import chunks
from kvtransfer.peer import Peer
from kvtransfer.receive_session import ReceiveSession
from kvtransfer.stats import TransferStats
from kvtransfer.ticket import Committed, Ticket, TransferOutcome
from kvtransfer.transport import Part, Socket, Transport

_MESSAGES_PER_TURN = 16  # then other tasks of the loop get theirs
_REMEMBERED = 4096  # ended transfers whose late frames are told apart from unknown ones


@dataclass(eq=False, slots=True)
class _Incoming:
    session: ReceiveSession
    on_end: Callable[[TransferOutcome], None]
    on_commit: Callable[[Committed], None]
    peer: Peer | None = None  # who said BEGIN


class KVReceiver:
    """Takes blocks into memory that the caller has set aside. Every method belongs to the loop's thread.

    The callbacks run on that thread too, possibly before `abort` returns, never before `open` does.

    Args:
        memory: this worker's blocks.
        transport: listens.
        fingerprint: what a sender's HELLO must equal.
        incarnation: this process's life, `core.ids.new_incarnation()`.
        config: deadlines and sizes.
        clock: seconds; only differences are used.
    """

    def __init__(
        self,
        memory: BlockMemory,
        transport: Transport,
        fingerprint: Fingerprint,
        incarnation: str,
        config: TransferConfig,
        clock: Clock = monotonic,
    ) -> None:
        self.stats = TransferStats()
        self._memory = memory
        self._transport = transport
        self._fingerprint = fingerprint
        self._incarnation = incarnation
        self._config = config
        self._clock = clock
        self._epochs = itertools.count(1)
        self._incoming: dict[bytes, _Incoming] = {}
        self._peers: dict[bytes, Peer] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()  # the last ones, oldest first
        self._socket: Socket | None = None
        self._endpoint = ""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def endpoint(self) -> str:
        """Where senders connect; in every ticket."""
        assert self._endpoint, "start first"
        return self._endpoint

    async def start(self, bind: str, advertise_host: str = "") -> None:
        """Listen.

        Args:
            bind: `tcp://host:port` (port 0 picks one), `ipc://path` or `inproc://*`.
            advertise_host: the host senders connect to, where `bind` names all interfaces.
        Raises:
            TransferError: the address cannot be used.
        """
        assert self._socket is None, "started twice"
        self._socket = self._transport.bind(bind)
        self._endpoint = self._socket.endpoint
        if advertise_host:
            self._endpoint = f"tcp://{advertise_host}:{self._endpoint.rpartition(':')[2]}"
        self._tasks = [
            asyncio.create_task(self._read(self._socket)),
            asyncio.create_task(every(self._config.tick_s, self.tick)),
        ]

    async def aclose(self) -> None:
        """Tell every sender, end every transfer (each `on_end` is called), close."""
        await stop(*self._tasks)
        self._tasks = []
        if self._socket is None:
            return
        for peer in self._peers.values():
            peer.outbox.append(Bye())
            peer.flush(self._socket)
        self._socket.close(linger_s=0.2)  # time for the goodbyes to leave
        self._socket = None
        for incoming in list(self._incoming.values()):
            incoming.session.fence("receiver closed", self._clock())
            self._settle(incoming)
        self._peers.clear()

    async def run(self) -> None:
        """Wait for the background tasks, which never end by themselves; raises what broke one. For a TaskGroup."""
        await asyncio.gather(*self._tasks)

    def peers(self) -> list[str]:
        """Incarnations of the senders that are connected and accepted."""
        return [peer.incarnation for peer in self._peers.values()]

    def open(
        self,
        blocks: Sequence[int],
        prompt_hash: bytes,
        on_end: Callable[[TransferOutcome], None],
        on_commit: Callable[[Committed], None],
    ) -> Ticket:
        """Reserve a transfer into `blocks`.

        Args:
            blocks: blocks to fill, in order, allocated by the caller; may be empty.
            prompt_hash: at most 64 bytes; a COMMIT for another prompt fails the transfer.
            on_end: called once, when the blocks may be reused (or, when done, are the caller's to use).
            on_commit: called before a successful `on_end`, when steps launched from then on see every block; may `abort`.
        Returns:
            The ticket for one sender.
        Raises:
            TransferError: the receiver is not running.
            IndexError: no such block.
        """
        if self._socket is None:
            raise TransferError("the receiver is not running")
        epoch = next(self._epochs)
        require_blocks(blocks, self._memory.num_blocks)  # a wrong number shows here, not when the frame comes
        session = ReceiveSession(
            new_transfer_id(), epoch, blocks, self._memory.block_bytes, prompt_hash, self._config, self._clock()
        )
        self._incoming[session.transfer_id] = _Incoming(session, on_end, on_commit)
        self.stats.opened()
        return Ticket(session.transfer_id, epoch, self.endpoint, len(blocks), round(self._config.lease_s * 1000))

    def abort(self, transfer_id: bytes, reason: str) -> None:
        """End a transfer on both sides. Its blocks may be reused once `on_end` is called. No-op once it ended."""
        incoming = self._incoming.get(transfer_id)
        if incoming is not None:
            self._after(incoming, incoming.session.abort("aborted", reason, self._clock()))

    def tick(self) -> None:
        """Enforce every deadline; the timer calls it, whether or not anything arrives."""
        now = self._clock()
        for incoming in list(self._incoming.values()):
            self._after(incoming, incoming.session.on_timer(now))
        for peer in list(self._peers.values()):
            if peer.is_unreachable:
                self._fence(peer, "sender unreachable")
            elif now >= peer.heard_at + self._config.peer_timeout_s:
                self._fence(peer, f"no frame from the sender for {self._config.peer_timeout_s} s")
            else:
                if now >= peer.heartbeat_at and not peer.outbox:
                    peer.heartbeat_at = now + self._config.heartbeat_s
                    lease_ms = round(self._config.lease_s * 1000)
                    peer.outbox.extend(Lease(lease_ms, ids) for ids in chunks([*peer.transfers]))
                peer.acknowledge(min_bytes=1)
                self._flush(peer)

    # Messages

    async def _read(self, socket: Socket) -> None:
        count = 0
        while True:
            address, parts = await socket.recv()
            self._on_message(address, parts)
            count += 1
            if count % _MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)

    def _on_message(self, address: bytes, parts: list[Part]) -> None:
        try:
            number, frame = decode(parts, self._config.max_control_bytes)
        except FrameError:
            self._drop("garbage")
            return
        peer = self._peers.get(address)
        if isinstance(frame, Hello):
            self._on_hello(address, number, frame)
        elif peer is None:
            self._drop("unknown_peer")
            self._answer_stranger(address, Reset())
        elif number < peer.number_in:
            self._drop("replayed")
        else:
            if number > peer.number_in:
                self._on_gap(peer)
            peer.number_in = number + 1
            peer.heard_at = self._clock()
            self._on_frame(peer, frame)
            self._flush(peer)

    def _on_hello(self, address: bytes, number: int, frame: Hello) -> None:
        try:
            self._fingerprint.require_equal(msgspec.convert(frame.fingerprint, Fingerprint))
        except (FingerprintError, msgspec.ValidationError) as error:
            self._drop("refused_hello")
            self._answer_stranger(address, HelloRefused(str(error)[:8192]))
            return
        now = self._clock()
        # The first heartbeat is half a period away: HELLO's own answer counts as one.
        peer = Peer(address, frame.name, frame.incarnation, now, now + self._config.heartbeat_s, number + 1)
        for other in list(self._peers.values()):
            if other.address == address or peer.replaces(other):
                self._fence(other, f"sender came back as incarnation {peer.incarnation}")
        self._peers[address] = peer
        peer.outbox.append(HelloOk(self._incarnation, self._config.window_bytes))
        self._flush(peer)

    def _on_gap(self, peer: Peer) -> None:
        self.stats.sequence_gaps += 1
        # Which transfer lost a frame is not known, so none of them may be trusted.
        for transfer_id in list(peer.transfers):
            incoming = self._incoming[transfer_id]
            self._after(incoming, incoming.session.abort("failed", "frames of the sender were lost", self._clock()))

    def _on_frame(self, peer: Peer, frame: Control | Data) -> None:
        match frame:
            case Data():
                peer.unacknowledged_bytes += frame.num_bytes
                self._on_transfer_frame(peer, frame)
                peer.acknowledge(min_bytes=self._config.window_bytes // 4)
            case Begin() | Commit() | Abort() | Drained():
                self._on_transfer_frame(peer, frame)
            case Alive():
                for transfer_id in peer.transfers.intersection(frame.transfers):
                    self._incoming[transfer_id].session.on_alive(self._clock())
            case Bye():
                self._fence(peer, "sender closed")
            case _:
                self._drop("unexpected")

    def _on_transfer_frame(self, peer: Peer, frame: Begin | Data | Commit | Abort | Drained) -> None:
        incoming = self._incoming.get(frame.transfer_id)
        if incoming is None:
            self._on_late_frame(peer, frame)
        elif frame.epoch != incoming.session.epoch:
            self._refuse(peer, frame, "wrong_epoch")
        elif incoming.peer is not None and incoming.peer is not peer:
            self._refuse(peer, frame, "wrong_peer")
        elif incoming.peer is None and not isinstance(frame, Begin | Abort):
            self._refuse(peer, frame, "no_begin")
        else:
            try:
                self._apply(peer, incoming, frame)
            except TransferError as error:
                self._drop("protocol")
                self._after(incoming, incoming.session.abort("failed", str(error), self._clock()))

    def _apply(self, peer: Peer, incoming: _Incoming, frame: Begin | Data | Commit | Abort | Drained) -> None:
        session, now = incoming.session, self._clock()
        match frame:
            case Begin():
                incoming.peer = peer
                peer.transfers.add(session.transfer_id)
                session.on_begin(frame, now)
            case Data():
                targets = session.on_data(frame, now)
                if targets:
                    self._memory.write(targets, frame.blocks)
                    self.stats.num_bytes += frame.num_bytes
                else:
                    self._drop("aborting")
            case Commit():
                committed = session.on_commit(frame, now)
                if committed is not None:
                    if not notify(incoming.on_commit, committed):
                        raise TransferError("the receiver could not adopt the prompt")
                    if session.life.is_open:  # otherwise the callback aborted it
                        peer.outbox.append(session.finish(now))
            case Abort():
                session.on_abort(frame, now)
            case Drained():
                session.on_drained(now)
        self._settle(incoming)

    def _on_late_frame(self, peer: Peer, frame: Begin | Data | Commit | Abort | Drained) -> None:
        if not isinstance(frame, Abort | Drained):  # those two end what has ended: nothing is wrong
            self._refuse(peer, frame, "ended_transfer" if frame.transfer_id in self._ended else "unknown_transfer")

    def _refuse(self, peer: Peer, frame: Begin | Data | Commit | Abort | Drained, why: str) -> None:
        self._drop(why)
        if isinstance(frame, Begin | Commit):
            peer.outbox.append(Abort(frame.transfer_id, frame.epoch, "failed", why.replace("_", " ")))

    def _drop(self, why: str) -> None:
        self.stats.frames_dropped[why] += 1

    # Sending and ending

    def _answer_stranger(self, address: bytes, frame: Control) -> None:
        assert self._socket is not None
        with contextlib.suppress(TransferError):  # one who is gone, or does not read, needs no answer
            self._socket.send(address, encode_control(frame, 0))

    def _flush(self, peer: Peer) -> None:
        if self._socket is not None:
            peer.flush(self._socket)

    def _after(self, incoming: _Incoming, frames: list[Control]) -> None:
        if incoming.peer is not None and frames:
            incoming.peer.outbox.extend(frames)
            self._flush(incoming.peer)
        self._settle(incoming)

    def _fence(self, peer: Peer, reason: str) -> None:
        self.stats.peers_lost += 1
        self._peers.pop(peer.address, None)
        for transfer_id in list(peer.transfers):
            incoming = self._incoming[transfer_id]
            incoming.session.fence(reason, self._clock())
            self._settle(incoming)

    def _settle(self, incoming: _Incoming) -> None:
        session = incoming.session
        if not session.life.state.is_terminal or self._incoming.pop(session.transfer_id, None) is None:
            return
        if incoming.peer is not None:
            incoming.peer.transfers.discard(session.transfer_id)
        outcome = session.outcome(self._clock())
        self._ended[session.transfer_id] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self.stats.ended(outcome)
        notify(incoming.on_end, outcome)
