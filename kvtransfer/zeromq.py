"""ZeroMQ transport over `tcp://` and `ipc://`: a listening end is a ROUTER, a connection is a DEALER of its own.

Large parts are sent without a copy. Blocks of 256 KiB to 1 MiB move best; glibc's malloc settings matter more than any
ZeroMQ option.
"""

import asyncio
from collections.abc import Sequence

import zmq
import zmq.asyncio

from core.errors import TransferError
from kvtransfer.transport import Part, PeerUnreachableError, Released, SendHandle, Socket, TransportFullError

_COPY_BELOW_BYTES = 64 << 10  # below this a copy is cheaper than tracking the buffer


class ZmqTransport:
    """Sockets of one ZeroMQ context.

    Args:
        max_part_bytes: a peer that announces a longer part is disconnected before it is read.
        high_water_mark: messages queued to one peer before `send` refuses.
        heartbeat_s: connection-level heartbeat, so that a silently dropped connection is reopened.
    """

    def __init__(self, max_part_bytes: int = 64 << 20, high_water_mark: int = 1000, heartbeat_s: float = 1.0) -> None:
        self._context = zmq.asyncio.Context()
        self._max_part_bytes = max_part_bytes
        self._high_water_mark = high_water_mark
        self._heartbeat_ms = round(heartbeat_s * 1000)

    def bind(self, endpoint: str) -> Socket:
        """Listen on `tcp://host:port` (port 0 picks one) or `ipc://path`."""
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown peer is an error, not a silent drop
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting peer takes over from its dead connection
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise TransferError(f"cannot listen on {endpoint}: {error.strerror}") from error
        return _Router(socket)

    def connect(self, endpoint: str) -> Socket:
        """A connection of its own to `endpoint`, under a fresh name."""
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a connection that does not exist
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise TransferError(f"cannot connect to {endpoint}: {error.strerror}") from error
        return _Dealer(socket, endpoint)

    def close(self) -> None:
        """Close every socket and the context."""
        self._context.destroy()

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: self._high_water_mark,
            zmq.RCVHWM: self._high_water_mark,
            zmq.MAXMSGSIZE: self._max_part_bytes,
            zmq.HEARTBEAT_IVL: self._heartbeat_ms,
            zmq.HEARTBEAT_TIMEOUT: 3 * self._heartbeat_ms,
            zmq.HANDSHAKE_IVL: 5 * self._heartbeat_ms,
            zmq.RECONNECT_IVL: 50,
            zmq.RECONNECT_IVL_MAX: 1000,
            zmq.TCP_KEEPALIVE: 1,
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        return socket


class _Router:
    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.endpoint = endpoint.rstrip(b"\0").decode()

    def send(self, peer: bytes, parts: Sequence[Part]) -> SendHandle:
        return _send(self._socket, [peer, *parts])

    async def recv(self) -> tuple[bytes, list[Part]]:
        name, *parts = await self._socket.recv_multipart(copy=False)
        return name.bytes, [part.buffer for part in parts]

    def close(self, linger_s: float = 0.0) -> None:
        self._socket.close(linger=round(linger_s * 1000))


class _Dealer:
    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        self._socket = socket
        self.endpoint = endpoint

    def send(self, peer: bytes, parts: Sequence[Part]) -> SendHandle:  # noqa: ARG002 (there is one peer)
        return _send(self._socket, parts)

    async def recv(self) -> tuple[bytes, list[Part]]:
        return b"", [part.buffer for part in await self._socket.recv_multipart(copy=False)]

    def close(self, linger_s: float = 0.0) -> None:
        self._socket.close(linger=round(linger_s * 1000))


def _send(socket: zmq.asyncio.Socket, parts: Sequence[Part]) -> SendHandle:
    # Each large part carries its own tracker: send_multipart would report the last part's only.
    frames = [
        zmq.Frame(part, track=True, copy=False) if len(part) >= _COPY_BELOW_BYTES else zmq.Frame(part) for part in parts
    ]
    trackers = [frame.tracker for frame in frames if frame.tracker is not None]
    try:
        sending = socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        assert isinstance(sending, asyncio.Future), "with NOBLOCK the future is settled when the call returns"
        sending.result()
    except zmq.Again as error:
        raise TransportFullError("high-water mark reached, or no connection yet") from error
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            raise PeerUnreachableError("the peer's connection is gone") from error
        raise TransferError(f"send failed: {error.strerror}") from error
    return zmq.MessageTracker(*trackers) if trackers else Released()
