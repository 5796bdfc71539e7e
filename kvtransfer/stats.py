"""Counters of one end of KV transfer, read by metrics."""

from collections import Counter
from dataclasses import dataclass, field

from kvtransfer.ticket import TransferOutcome


@dataclass(slots=True)
class TransferStats:
    """Totals since the start; `frames_dropped` by reason, `transfers` by result."""

    transfers: Counter[str] = field(default_factory=Counter)
    frames_dropped: Counter[str] = field(default_factory=Counter)
    num_inflight: int = 0
    num_bytes: int = 0
    duration_s: float = 0.0  # summed over the transfers that are done
    leases_expired: int = 0  # nobody used the ticket, or renewed the lease, in time
    sequence_gaps: int = 0  # holes in a peer's numbering: frames were lost
    peers_lost: int = 0  # closed, restarted, unreachable, or silent for too long

    def opened(self) -> None:
        """Count a transfer that began."""
        self.num_inflight += 1

    def ended(self, outcome: TransferOutcome) -> None:
        """Count a transfer that ended."""
        self.num_inflight -= 1
        self.transfers[outcome.result] += 1
        self.leases_expired += outcome.result == "expired"
        if outcome.is_done:
            self.duration_s += outcome.duration_s
