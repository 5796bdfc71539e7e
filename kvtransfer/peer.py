"""What a receiver knows of one sender's connection: who it is, both numberings, credit to give back, what to send."""

from collections import deque
from dataclasses import dataclass, field

from kvtransfer.frames import Ack, Control, encode_control
from kvtransfer.transport import PeerUnreachableError, Socket, TransportFullError

_MAX_WAITING = 10_000  # frames for a peer that does not read; more would only be memory lost


@dataclass(eq=False, slots=True)
class Peer:
    """One accepted connection. Another incarnation, or a new connection of the same, is another peer."""

    address: bytes  # the transport's name of the connection
    worker: str  # the sender's stable name; may be empty
    incarnation: str
    heard_at: float
    heartbeat_at: float
    number_in: int
    number_out: int = 0
    unacknowledged_bytes: int = 0
    is_unreachable: bool = False
    transfers: set[bytes] = field(default_factory=set)
    outbox: deque[Control] = field(default_factory=deque)

    def replaces(self, other: "Peer") -> bool:
        """Whether `other` is a former life, or a former connection, of the same worker."""
        return self.incarnation == other.incarnation or (self.worker != "" and self.worker == other.worker)

    def acknowledge(self, min_bytes: int) -> None:
        """Give credit back when at least `min_bytes` were taken since the last time."""
        if self.unacknowledged_bytes >= min_bytes:
            self.outbox.append(Ack(self.number_in - 1))
            self.unacknowledged_bytes = 0

    def flush(self, socket: Socket) -> None:
        """Send what the transport takes; the rest waits for the next tick. Never waits itself, so no peer slows another."""
        try:
            while self.outbox:
                socket.send(self.address, encode_control(self.outbox[0], self.number_out))
                self.number_out += 1
                self.outbox.popleft()
        except TransportFullError:
            self.is_unreachable = len(self.outbox) > _MAX_WAITING
        except PeerUnreachableError:
            self.is_unreachable = True  # the next tick fences it, outside whatever is going on now
