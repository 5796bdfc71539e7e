"""What travels beside the frames: the ticket before a transfer, the commit inside it, the outcome after it."""

from dataclasses import dataclass

from core.errors import TransferError
from kvtransfer.states import Result


@dataclass(frozen=True, slots=True)
class Ticket:
    """A receiver's promise to take one prompt's blocks; goes decode -> router -> prefill."""

    transfer_id: bytes  # 16 random bytes
    epoch: int  # this reservation's number at the receiver; a frame with another one is dropped
    endpoint: str  # where the receiver listens
    num_blocks: int  # blocks to send; 0 when the receiver holds the whole prefix
    lease_ms: int  # how long the sender keeps its blocks without a heartbeat; a duration, never a time of day

    def __post_init__(self) -> None:
        if len(self.transfer_id) != 16:
            raise TransferError(f"ticket: transfer_id of {len(self.transfer_id)} bytes, not 16")
        for name, value, limit in (
            ("epoch", self.epoch, 2**63),
            ("num_blocks", self.num_blocks, 2**31),
            ("lease_ms", self.lease_ms, 2**31),
        ):
            if not 0 <= value < limit:
                raise TransferError(f"ticket: {name}={value} is not in [0, {limit})")


@dataclass(frozen=True, slots=True)
class Committed:
    """What COMMIT says of the prompt whose blocks are complete."""

    first_token: int
    num_prompt_tokens: int
    prompt_hash: bytes  # must equal what the receiver reserved for
    is_finished: bool = False  # the first token ended the answer: nothing to adopt, blocks may be missing

    def __post_init__(self) -> None:
        if len(self.prompt_hash) > 64:
            raise TransferError(f"prompt_hash of {len(self.prompt_hash)} bytes, at most 64")
        if not 0 <= self.first_token < 2**31 or not 0 <= self.num_prompt_tokens < 2**31:
            raise TransferError(f"first_token={self.first_token}, num_prompt_tokens={self.num_prompt_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOutcome:
    """How one transfer ended at this end. Once it is handed out, the blocks may be reused."""

    transfer_id: bytes
    result: Result
    reason: str  # empty when done
    num_bytes: int  # block bytes handed to the transport, or written
    duration_s: float  # from open to end

    @property
    def is_done(self) -> bool:
        """Whether the receiver owns the prompt."""
        return self.result == "done"
