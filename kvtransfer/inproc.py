"""In-process transport: every service test runs on them in milliseconds."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.errors import TransferError
from kvtransfer.transport import Part, PeerUnreachableError, Released, Socket, TransportFullError

_Message = tuple[bytes, list[Part]]


@dataclass(eq=False)
class _Inbox:
    """Messages that wait for one socket. At most `capacity` from one peer."""

    capacity: int
    queue: asyncio.Queue[_Message] = field(default_factory=asyncio.Queue)
    waiting: dict[bytes, int] = field(default_factory=dict)

    def put(self, sender: bytes, parts: Sequence[Part]) -> None:
        if self.waiting.get(sender, 0) >= self.capacity:
            raise TransportFullError(f"{self.capacity} messages wait already")
        self.waiting[sender] = self.waiting.get(sender, 0) + 1
        # Copied here: as on a network, what the sender does to its buffer later does not change the message.
        self.queue.put_nowait((sender, [bytes(part) for part in parts]))

    async def get(self) -> _Message:
        sender, parts = await self.queue.get()
        self.waiting[sender] -= 1
        return sender, parts


class InprocTransport:
    """Endpoints `inproc://name` inside one event loop; `inproc://*` picks a free name.

    Args:
        capacity: messages that may wait for a socket from one peer before `send` refuses.
    """

    def __init__(self, capacity: int = 1000) -> None:
        self._capacity = capacity
        self._listeners: dict[str, _Listener] = {}
        self._names = itertools.count()

    def bind(self, endpoint: str) -> Socket:
        """Listen on `endpoint`. Raises TransferError when it is taken."""
        if endpoint == "inproc://*":
            endpoint = f"inproc://{next(self._names)}"
        if endpoint in self._listeners:
            raise TransferError(f"cannot listen on {endpoint}: in use")
        listener = _Listener(endpoint, _Inbox(self._capacity), self._listeners)
        self._listeners[endpoint] = listener
        return listener

    def connect(self, endpoint: str) -> Socket:
        """A connection to whoever listens on `endpoint`, now or later."""
        name = next(self._names).to_bytes(8, "big")
        return _Connection(endpoint, name, _Inbox(self._capacity), self._listeners)


@dataclass(eq=False)
class _Listener:
    endpoint: str
    inbox: _Inbox
    listeners: dict[str, "_Listener"]
    peers: dict[bytes, _Inbox] = field(default_factory=dict)

    def send(self, peer: bytes, parts: Sequence[Part]) -> Released:
        if peer not in self.peers:
            raise PeerUnreachableError(f"no peer {peer.hex()} on {self.endpoint}")
        self.peers[peer].put(b"", parts)
        return Released()

    async def recv(self) -> _Message:
        return await self.inbox.get()

    def close(self, linger_s: float = 0.0) -> None:  # noqa: ARG002 (messages are delivered the moment they are sent)
        self.listeners.pop(self.endpoint, None)
        self.peers.clear()


@dataclass(eq=False)
class _Connection:
    endpoint: str
    name: bytes
    inbox: _Inbox
    listeners: dict[str, _Listener]

    def send(self, peer: bytes, parts: Sequence[Part]) -> Released:  # noqa: ARG002 (there is one peer)
        listener = self.listeners.get(self.endpoint)
        if listener is None:
            raise TransportFullError(f"nobody listens on {self.endpoint}")
        listener.peers[self.name] = self.inbox
        listener.inbox.put(self.name, parts)
        return Released()

    async def recv(self) -> _Message:
        return await self.inbox.get()

    def close(self, linger_s: float = 0.0) -> None:  # noqa: ARG002 (as above)
        listener = self.listeners.get(self.endpoint)
        if listener is not None:
            listener.peers.pop(self.name, None)
