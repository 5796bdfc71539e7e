"""How messages move: one interface, one contract suite (tests/contract/test_transport.py), several implementations.

A message is a list of parts and arrives whole or not at all. Order holds within one connection; a broken connection may
lose messages, which the numbering of frames reveals. Nothing here knows what the bytes mean.
"""

from collections.abc import Sequence
from typing import Protocol

from core.errors import TransferError

Part = bytes | memoryview


class TransportFullError(TransferError):
    """No room for a message to that peer now, or no connection yet; the message was not taken, try again later."""


class PeerUnreachableError(TransferError):
    """No connection has this peer name any more."""


class SendHandle(Protocol):
    """Tells when a transport no longer reads the buffers of one message."""

    @property
    def done(self) -> bool:
        """Whether the buffers may change."""


class Released:
    """The handle of a message whose buffers were copied."""

    done = True


class Socket(Protocol):
    """One listening end (many peers, each with a name) or one connection (its only peer is b"")."""

    @property
    def endpoint(self) -> str:
        """The address others connect to, with the port that was chosen."""

    def send(self, peer: bytes, parts: Sequence[Part]) -> SendHandle:
        """Queue one message without waiting and without copying large parts.

        Raises:
            TransportFullError: no room now.
            PeerUnreachableError: a listening end has no such peer.
        """

    async def recv(self) -> tuple[bytes, list[Part]]:
        """Wait for the next message: (peer, parts). A listening end may answer that peer."""

    def close(self, linger_s: float = 0.0) -> None:
        """Close; unsent messages get `linger_s` to leave in the background. A pending `recv` is cancelled or never returns."""


class Transport(Protocol):
    """Makes sockets."""

    def bind(self, endpoint: str) -> Socket:
        """Listen. Raises TransferError when the address cannot be used."""

    def connect(self, endpoint: str) -> Socket:
        """Open a connection in the background; it need not exist yet, and comes back when the listener does."""
