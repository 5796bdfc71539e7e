"""What the KV transfer tests share: a pair of ends over any transport, and a lossy network."""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from core.clock import Clock, ManualClock
from core.errors import FrameError
from core.host_blocks import ByteBlocks
from core.ids import new_transfer_id
from core.layout import Fingerprint
from kvtransfer.config import TransferConfig
from kvtransfer.frames import Begin, Control, Data, Hello, HelloOk, decode, encode_control, encode_data
from kvtransfer.late_blocks import LateBlocks
from kvtransfer.receiver import KVReceiver
from kvtransfer.sender import KVSender
from kvtransfer.ticket import Committed, Ticket, TransferOutcome
from kvtransfer.transport import Part, SendHandle, Socket, Transport

BLOCK_BYTES = 256
FINGERPRINT = Fingerprint(
    model="tiny",
    revision="1",
    weights_hash="w",
    dtype="float32",
    kv_dtype="float32",
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
    block_tokens=4,
)
PROMPT = b"prompt"
COMMITTED = Committed(first_token=7, num_prompt_tokens=9, prompt_hash=PROMPT)
CONFIG = TransferConfig(
    reconnect_s=0.001,
    tick_s=0.005,
    window_bytes=4 * BLOCK_BYTES,
    max_message_bytes=2 * BLOCK_BYTES,
)


async def eventually(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (any condition, with nothing to set an event)
            await asyncio.sleep(0.002)


async def settle() -> None:
    """Let an in-process pair deliver what is under way."""
    for _ in range(30):
        await asyncio.sleep(0)


def fill(memory: ByteBlocks, block: int, seed: int) -> bytes:
    """Give a block recognisable content."""
    content = random.Random(seed).randbytes(memory.block_bytes)
    memory.view(block)[:] = content
    return content


def late_blocks(num_blocks: int, block_bytes: int) -> LateBlocks:
    """Blocks whose readings become ready at the next turns of the loop."""
    return LateBlocks(num_blocks, block_bytes, lambda finish: asyncio.get_running_loop().call_soon(finish))


@dataclass
class Ends:
    """What both ends of one transfer reported."""

    ticket: Ticket
    received: list[TransferOutcome] = field(default_factory=list)
    sent: list[TransferOutcome] = field(default_factory=list)
    committed: list[Committed] = field(default_factory=list)

    @property
    def both_ended(self) -> bool:
        return bool(self.received) and bool(self.sent)

    @property
    def results(self) -> tuple[str, str]:
        assert len(self.received) == len(self.sent) == 1, (self.received, self.sent)
        return self.received[0].result, self.sent[0].result


@dataclass
class Pair:
    """One sender and one receiver. A manual clock moves only in `pass_time`, so a slow machine causes no timeout."""

    transport: Transport
    bind: str = "inproc://*"
    config: TransferConfig = CONFIG
    block_bytes: int = BLOCK_BYTES
    num_blocks: int = 32
    clock: Clock = field(default_factory=ManualClock)
    is_late: bool = False  # the sender's memory answers later, as a device does

    def __post_init__(self) -> None:
        self.source = (late_blocks if self.is_late else ByteBlocks)(self.num_blocks, self.block_bytes)
        self.target = ByteBlocks(self.num_blocks, self.block_bytes)
        self.receiver = self.make_receiver("r1")
        self.sender = self.make_sender("s1")

    def make_receiver(self, incarnation: str, fingerprint: Fingerprint = FINGERPRINT) -> KVReceiver:
        return KVReceiver(self.target, self.transport, fingerprint, incarnation, self.config, self.clock)

    def make_sender(self, incarnation: str, fingerprint: Fingerprint = FINGERPRINT, name: str = "p") -> KVSender:
        return KVSender(self.source, self.transport, fingerprint, incarnation, self.config, self.clock, name)

    async def __aenter__(self) -> "Pair":
        await self.receiver.start(self.bind)
        await self.sender.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sender.aclose()
        await self.receiver.aclose()
        assert not isinstance(self.source, LateBlocks) or self.source.num_open == 0, "a reading was kept"

    def reserve(self, blocks: Sequence[int], prompt_hash: bytes = PROMPT) -> Ends:
        ends = Ends(Ticket(bytes(16), 0, "", 0, 0))
        ends.ticket = self.receiver.open(blocks, prompt_hash, ends.received.append, ends.committed.append)
        return ends

    def open(self, blocks: Sequence[int], prompt_hash: bytes = PROMPT, **changes: Any) -> Ends:
        ends = self.reserve(blocks, prompt_hash)
        self.sender.open(replace(ends.ticket, **changes), ends.sent.append)
        return ends

    async def pass_time(self, seconds: float) -> None:
        """Let time go by in heartbeats, with every frame delivered in between."""
        assert isinstance(self.clock, ManualClock)
        steps = math.ceil(seconds / self.config.heartbeat_s)
        for _ in range(steps):
            self.clock.advance(seconds / steps)
            self.sender.tick()
            self.receiver.tick()
            await settle()

    async def transfer(self, source: Sequence[int], target: Sequence[int]) -> Ends:
        """A whole transfer; returns when both ends ended."""
        ends = self.open(target)
        self.sender.push(ends.ticket.transfer_id, source, 0)
        self.sender.commit(ends.ticket.transfer_id, COMMITTED)
        await eventually(lambda: ends.both_ended)
        return ends


class LossyTransport:
    """Passes messages on, or not: `fault` decides for each message a socket would send.

    Args:
        inner: the real transport.
        fault: called with the message's parts; "pass", "drop", "twice", or "hold" (it goes after the next one).
    """

    def __init__(self, inner: Transport, fault: Callable[[Sequence[Part]], str]) -> None:
        self._inner = inner
        self.fault = fault
        self.slow_handle: SlowHandle | None = None  # the handle of every data message, when set

    def bind(self, endpoint: str) -> Socket:
        return _LossySocket(self._inner.bind(endpoint), self)

    def connect(self, endpoint: str) -> Socket:
        return _LossySocket(self._inner.connect(endpoint), self)


class SlowHandle:
    """Says that buffers are still read until told otherwise, or until their socket closes."""

    done = False
    ends_with_socket = True


class _LossySocket:
    def __init__(self, inner: Socket, owner: LossyTransport) -> None:
        self._inner = inner
        self._owner = owner
        self._held: list[tuple[bytes, Sequence[Part]]] = []

    @property
    def endpoint(self) -> str:
        return self._inner.endpoint

    def send(self, peer: bytes, parts: Sequence[Part]) -> SendHandle:
        fault = self._owner.fault(parts)
        if fault in ("drop", "hold"):
            if fault == "hold":
                self._held.append((peer, [bytes(part) for part in parts]))
            return _Gone()
        handle = self._inner.send(peer, parts)
        if len(parts) > 1 and self._owner.slow_handle is not None:
            handle = self._owner.slow_handle
        if fault == "twice":
            self._inner.send(peer, parts)
        held, self._held = self._held, []
        for message in held:
            self._inner.send(*message)
        return handle

    async def recv(self) -> tuple[bytes, list[Part]]:
        return await self._inner.recv()

    def close(self, linger_s: float = 0.0) -> None:
        if self._owner.slow_handle is not None and self._owner.slow_handle.ends_with_socket:
            self._owner.slow_handle.done = True
        self._inner.close(linger_s)


class _Gone:
    done = True


class Faults:
    """Drops, doubles or holds back frames of one kind."""

    def __init__(self) -> None:
        self.kind: type[Control] | type[Data] | None = None
        self.fault = "pass"
        self.left = 0
        self.seen: list[Control | Data] = []

    def set(self, kind: type[Control] | type[Data], fault: str, times: int = 10**9) -> None:
        self.kind, self.fault, self.left = kind, fault, times

    def __call__(self, parts: Sequence[Part]) -> str:
        try:
            _, frame = decode(parts, 1 << 16)
        except FrameError:
            return "pass"
        self.seen.append(frame)
        if self.kind is not None and isinstance(frame, self.kind) and self.left > 0:
            self.left -= 1
            return self.fault
        return "pass"


class Stranger:
    """Speaks frames to a receiver without a KVSender's manners."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self.number = 0

    async def hello(self, incarnation: str = "stranger", name: str = "") -> None:
        self.say(Hello(name, incarnation, {key: getattr(FINGERPRINT, key) for key in FINGERPRINT.__slots__}))
        await self.socket.recv()

    def say(self, frame: Control) -> None:
        self.socket.send(b"", encode_control(frame, self.number))
        self.number += 1


class FakeReceiver:
    """Accepts a sender and says only what it is told to."""

    def __init__(self, pair: Pair) -> None:
        self.socket = pair.transport.bind("inproc://*")
        self.ticket = Ticket(new_transfer_id(), 1, self.socket.endpoint, 0, 15_000)
        self.number = 0

    async def accept(self) -> None:
        self.peer, _ = await self.socket.recv()
        self.say(HelloOk("fake", 1000))

    def say(self, frame: Control) -> None:
        self.socket.send(self.peer, encode_control(frame, self.number))
        self.number += 1


def begin_of(ticket: Ticket) -> Begin:
    return Begin(ticket.transfer_id, ticket.epoch, ticket.num_blocks)


async def say_data(
    stranger: Stranger, ticket: Ticket, first: int, blocks: list[bytes], epoch: int | None = None
) -> None:
    data = Data(ticket.transfer_id, ticket.epoch if epoch is None else epoch, first, blocks)
    stranger.socket.send(b"", encode_data(data, stranger.number, checksum=False))
    stranger.number += 1
    await settle()


BLOCK = b"x" * BLOCK_BYTES
