"""Settings of KV transfer: one frozen object, equal or different on the two ends; every wait has its deadline here."""

from dataclasses import dataclass, fields

from core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Durations in seconds on each side's own monotonic clock; sizes in bytes."""

    # One deadline per state.
    reserve_timeout_s: float = 10.0  # receiver, RESERVED: a ticket nobody used
    connect_timeout_s: float = 5.0  # sender, CONNECTING: the link is not up; also the wait of `connect`
    idle_timeout_s: float = 10.0  # CONNECTING and SENDING: the other end no longer speaks of this transfer
    commit_timeout_s: float = 10.0  # sender, COMMITTED: no DONE since the last progress
    transfer_timeout_s: float = 600.0  # from open to COMMIT, however alive both ends are: a caller forgot it
    drain_timeout_s: float = 2.0  # ABORTING: no DRAINED; the writer is fenced then
    # The lease that keeps the sender's blocks, and the heartbeats that extend it.
    lease_s: float = 15.0
    heartbeat_s: float = 0.5
    peer_timeout_s: float = 5.0  # no frame at all from a peer: it is dead
    reconnect_s: float = 0.1  # pause before a broken link is opened again
    tick_s: float = 0.02  # how often the timer task looks at every deadline
    # Flow control.
    window_bytes: int = 16 << 20  # unacknowledged bytes a receiver grants to one sender
    max_message_bytes: int = 1 << 20  # blocks are batched into messages up to this; never less than one block
    max_control_bytes: int = 64 << 10  # a longer control frame is refused before it is decoded
    checksum: bool = False  # CRC-32 of every data message; about 1 GB/s on one core

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "checksum" and not value > 0:
                raise ConfigError(f"{field.name}={value}: must be above 0")
        if self.peer_timeout_s <= 2 * self.heartbeat_s:
            raise ConfigError(
                f"peer_timeout_s={self.peer_timeout_s}: must be above two heartbeats of {self.heartbeat_s} s,"
                " or one late heartbeat kills a healthy peer"
            )
        if self.lease_s <= self.peer_timeout_s:
            raise ConfigError(
                f"lease_s={self.lease_s}: must be above peer_timeout_s={self.peer_timeout_s},"
                " so that a dead peer is named as such before its leases run out"
            )
