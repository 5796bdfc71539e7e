"""One life of a sender's socket: numbering both ways, control frames in line, and the credit the receiver granted."""

from collections import deque
from dataclasses import dataclass, field

from kvtransfer.frames import Control, Data, encode_control, encode_data
from kvtransfer.transport import SendHandle, Socket


@dataclass(eq=False, slots=True)
class Connection:
    """Dies with its socket; nothing of it is carried over to the next one."""

    socket: Socket
    heard_at: float  # when the last frame came
    heartbeat_at: float  # when the next heartbeat is due
    number_in: int = 0
    number_out: int = 0
    window_bytes: int = 0  # no data before the receiver granted some
    in_flight_bytes: int = 0
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)  # (number, bytes) not acknowledged yet
    control: deque[Control] = field(default_factory=deque)  # goes before any data

    def has_credit(self, loading_bytes: int) -> bool:
        """Whether one more data message may go. It may overshoot: a block larger than the window must still move.

        Args:
            loading_bytes: that will be sent before it.
        """
        return self.in_flight_bytes + loading_bytes < self.window_bytes

    def send_control(self, frame: Control) -> None:
        """Send one frame. Raises TransportFullError; the frame then still is to be sent."""
        self.socket.send(b"", encode_control(frame, self.number_out))
        self.number_out += 1

    def send_data(self, frame: Data, checksum: bool) -> SendHandle:
        """Send blocks on credit. Raises TransportFullError; the blocks then still are to be sent."""
        handle = self.socket.send(b"", encode_data(frame, self.number_out, checksum))
        self.in_flight.append((self.number_out, frame.num_bytes))
        self.in_flight_bytes += frame.num_bytes
        self.number_out += 1
        return handle

    def acknowledge(self, number: int) -> None:
        """The receiver took every message up to `number`."""
        while self.in_flight and self.in_flight[0][0] <= number:
            self.in_flight_bytes -= self.in_flight.popleft()[1]
