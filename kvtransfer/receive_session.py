"""The receiving end of one transfer as a pure state machine: time and frames in, frames out. No socket, no tensors."""

from collections.abc import Sequence

from core.errors import TransferError
from kvtransfer.config import TransferConfig
from kvtransfer.frames import Abort, Begin, Commit, Control, Data, Done
from kvtransfer.states import Failure, Lifecycle, State
from kvtransfer.ticket import Committed, TransferOutcome


class ReceiveSession:
    """RESERVED until BEGIN, CONNECTING until the first block, SENDING until COMMIT, then DONE in the same breath.

    Args:
        transfer_id: 16 bytes.
        epoch: this reservation's number.
        blocks: to fill, by number, in the ticket's order; written by the caller, not here.
        block_bytes: bytes of one block.
        prompt_hash: what COMMIT must name.
        config: deadlines.
        now: the caller's clock, as in every other method.
    """

    def __init__(
        self,
        transfer_id: bytes,
        epoch: int,
        blocks: Sequence[int],
        block_bytes: int,
        prompt_hash: bytes,
        config: TransferConfig,
        now: float,
    ) -> None:
        self.transfer_id = transfer_id
        self.epoch = epoch
        self.life = Lifecycle(now)
        self.num_bytes = 0
        self._blocks = tuple(blocks)
        self._block_bytes = block_bytes
        self._prompt_hash = prompt_hash
        self._config = config
        self._received: set[int] = set()
        self._heard_at = now

    def on_begin(self, frame: Begin, now: float) -> None:
        """The sender holds the ticket. Raises TransferError when it was used before or is not this one; the caller aborts."""
        if self.life.state is not State.RESERVED:
            raise TransferError(f"ticket was used before; the transfer is {self.life.state.value}")
        self.life.advance(State.CONNECTING, now)
        self._heard_at = now
        # Checked after the step, as there is a writer now who must hear of it and drain.
        if frame.num_blocks != len(self._blocks):
            raise TransferError(f"ticket is for {len(self._blocks)} blocks, BEGIN says {frame.num_blocks}")

    def on_data(self, frame: Data, now: float) -> list[int]:
        """Blocks arrived.

        Returns:
            The blocks to write them to, in order; empty when the transfer is ending and nothing may be written.
        Raises:
            TransferError: an index out of range or seen before, or a wrong size; the caller aborts.
        """
        if not self.life.is_open:
            return []
        if self.life.state is State.RESERVED:
            raise TransferError("block before BEGIN")
        indices = range(frame.first_index, frame.first_index + len(frame.blocks))
        if indices.stop > len(self._blocks):
            raise TransferError(f"block {indices.stop - 1} of {len(self._blocks)}")
        if not self._received.isdisjoint(indices):
            raise TransferError(f"block sent twice in {indices.start}..{indices.stop - 1}")
        for part in frame.blocks:
            if len(part) != self._block_bytes:
                raise TransferError(f"block of {len(part)} bytes, not {self._block_bytes}")
        self._start(now)
        self._received.update(indices)
        self.num_bytes += frame.num_bytes
        return [self._blocks[index] for index in indices]

    def on_commit(self, frame: Commit, now: float) -> Committed | None:
        """The prompt is complete.

        Returns:
            What to adopt, or None when the transfer is ending.
        Raises:
            TransferError: blocks are missing or it is another prompt; the caller aborts.
        """
        if not self.life.is_open:
            return None
        if not frame.is_finished and len(self._received) != len(self._blocks):
            raise TransferError(f"COMMIT after {len(self._received)} of {len(self._blocks)} blocks")
        if frame.prompt_hash != self._prompt_hash:
            raise TransferError(
                f"COMMIT is for prompt {frame.prompt_hash.hex()[:16]}, reserved for {self._prompt_hash.hex()[:16]}"
            )
        self._start(now)
        self.life.advance(State.COMMITTED, now)
        return Committed(frame.first_token, frame.num_prompt_tokens, frame.prompt_hash, frame.is_finished)

    def finish(self, now: float) -> Done:
        """The caller adopted the prompt."""
        self.life.advance(State.DONE, now)
        return Done(self.transfer_id)

    def abort(self, result: Failure, reason: str, now: float) -> list[Control]:
        """End it: ABORT goes out, the blocks stay set aside until DRAINED. A second call is a no-op."""
        if not self.life.is_open:
            return []
        return self._enter_aborting(result, reason, [Abort(self.transfer_id, self.epoch, result, reason[:1024])], now)

    def on_abort(self, frame: Abort, now: float) -> None:
        """The sender ends it; its DRAINED follows."""
        if self.life.is_open:
            self._enter_aborting(frame.result, f"sender: {frame.reason}", [], now)

    def on_drained(self, now: float) -> None:
        """The sender sends nothing more of this transfer."""
        if self.life.is_open:
            self._enter_aborting("failed", "sender drained without COMMIT or ABORT", [], now)
        if self.life.state is State.ABORTING:
            self.life.advance(State.DRAINED, now)

    def on_alive(self, now: float) -> None:
        """The sender's heartbeat names this transfer: its prompt waits or computes."""
        self._heard_at = now

    def fence(self, reason: str, now: float) -> None:
        """The writer is dead or silent; the caller drops what still comes from it."""
        if not self.life.state.is_terminal:
            self.life.blame("failed", reason)
            self.life.advance(State.FAILED, now)

    def on_timer(self, now: float) -> list[Control]:
        """Enforce the current state's deadline."""
        config, state = self._config, self.life.state
        if state is State.RESERVED and now >= self.life.entered_at + config.reserve_timeout_s:
            return self.abort("expired", f"ticket unused for {config.reserve_timeout_s} s", now)
        if state in (State.CONNECTING, State.SENDING) and now >= self._heard_at + config.idle_timeout_s:
            return self.abort("failed", f"sender silent for {config.idle_timeout_s} s while {state.value}", now)
        if self.life.is_open and now >= self.life.opened_at + config.transfer_timeout_s:
            return self.abort("failed", f"not committed in {config.transfer_timeout_s} s", now)
        if state is State.ABORTING and now >= self.life.entered_at + config.drain_timeout_s:
            self.fence(f"no DRAINED for {config.drain_timeout_s} s", now)
        return []

    def outcome(self, now: float) -> TransferOutcome:
        """How it ended; call in a terminal state."""
        assert self.life.state.is_terminal
        assert self.life.result is not None
        return TransferOutcome(
            transfer_id=self.transfer_id,
            result=self.life.result,
            reason=self.life.reason,
            num_bytes=self.num_bytes,
            duration_s=now - self.life.opened_at,
        )

    def _start(self, now: float) -> None:
        self._heard_at = now
        if self.life.state is State.CONNECTING:
            self.life.advance(State.SENDING, now)

    def _enter_aborting(self, result: Failure, reason: str, frames: list[Control], now: float) -> list[Control]:
        has_writer = self.life.state is not State.RESERVED
        self.life.blame(result, reason)
        self.life.advance(State.ABORTING, now)
        if has_writer:
            return frames
        self.life.advance(State.DRAINED, now)  # nobody ever began: there is nothing to wait for
        return []
