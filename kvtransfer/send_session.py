"""The sending end of one transfer as a pure state machine: time and frames in, frames out. No socket, no tensors."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.config import TransferConfig
from kvtransfer.frames import MAX_BLOCKS_PER_MESSAGE, Abort, Begin, Commit, Control, Drained
from kvtransfer.states import Failure, Lifecycle, State
from kvtransfer.ticket import Committed, Ticket, TransferOutcome


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks, by number, that go into consecutive places of the ticket's list."""

    first_index: int
    blocks: tuple[int, ...]


class SendSession:
    """CONNECTING until `begin`, SENDING until `take` gives COMMIT, COMMITTED until DONE comes.

    Runs may be sent in any order; COMMIT is given when the last of them has been.

    Args:
        ticket: the receiver's promise; its lease starts now.
        config: deadlines.
        now: the caller's clock, as in every other method.
    """

    def __init__(self, ticket: Ticket, config: TransferConfig, now: float) -> None:
        self.ticket = ticket
        self.life = Lifecycle(now)
        self.life.advance(State.CONNECTING, now)
        self.num_bytes = 0
        self._config = config
        self._lease_until = now + ticket.lease_ms / 1000
        self._progress_at = now
        self._pushed: set[int] = set()
        self._waiting: deque[tuple[int, int]] = deque()  # (index in the ticket's list, block)
        self._num_unsent_runs = 0  # taken, and not sent yet
        self._commit: Committed | None = None

    @property
    def transfer_id(self) -> bytes:
        """The ticket's."""
        return self.ticket.transfer_id

    @property
    def has_work(self) -> bool:
        """Whether `take` would give something."""
        if self.life.state is not State.SENDING:
            return False
        return bool(self._waiting) or (self._commit is not None and self._num_unsent_runs == 0)

    def begin(self, now: float) -> Begin:
        """The link is up: announce the transfer."""
        self.life.advance(State.SENDING, now)
        self._progress_at = now
        return Begin(self.transfer_id, self.ticket.epoch, self.ticket.num_blocks)

    def push(self, blocks: Sequence[int], first_index: int, now: float) -> list[Control]:
        """Queue computed blocks. One outside the ticket or given twice aborts: the receiver must hear of it at once."""
        if not self.life.is_open:
            return []
        indices = range(first_index, first_index + len(blocks))
        if first_index < 0 or indices.stop > self.ticket.num_blocks:
            return self.abort(
                "failed", f"push of blocks {indices.start}..{indices.stop - 1} of {self.ticket.num_blocks}", now
            )
        if self._commit is not None or not self._pushed.isdisjoint(indices):
            return self.abort("failed", f"blocks from {first_index} pushed twice or after the commit", now)
        if not self._waiting:
            self._progress_at = now
        self._pushed.update(indices)
        self._waiting.extend(zip(indices, blocks, strict=True))
        return []

    def commit(self, committed: Committed, now: float) -> list[Control]:
        """Send COMMIT after the last queued block. Missing blocks abort instead; a second commit is ignored."""
        if not self.life.is_open or self._commit is not None:
            return []
        if not committed.is_finished and len(self._pushed) != self.ticket.num_blocks:
            return self.abort("failed", f"commit with {len(self._pushed)} of {self.ticket.num_blocks} blocks", now)
        if not self._waiting:
            self._progress_at = now
        self._commit = committed
        return []

    def take(self, max_blocks: int, now: float) -> Run | Commit:
        """The next thing to send; call only while `has_work`.

        Args:
            max_blocks: blocks in one message.
        """
        assert self.has_work
        self._progress_at = now
        if not self._waiting:
            assert self._commit is not None
            self.life.advance(State.COMMITTED, now)
            done = self._commit
            return Commit(
                self.transfer_id,
                self.ticket.epoch,
                done.first_token,
                done.num_prompt_tokens,
                done.prompt_hash,
                done.is_finished,
            )
        first, block = self._waiting.popleft()
        blocks = [block]
        limit = min(max_blocks, MAX_BLOCKS_PER_MESSAGE)
        while self._waiting and len(blocks) < limit and self._waiting[0][0] == first + len(blocks):
            blocks.append(self._waiting.popleft()[1])
        self._num_unsent_runs += 1
        return Run(first, tuple(blocks))

    def on_sent(self, num_bytes: int, now: float) -> None:
        """A run that was taken has been handed to the transport."""
        self._num_unsent_runs -= 1
        self.num_bytes += num_bytes
        self._progress_at = now

    def abort(self, result: Failure, reason: str, now: float) -> list[Control]:
        """End at once: ABORT, then DRAINED, as nothing queued here is sent any more. A second call is a no-op."""
        if not self.life.is_open:
            return []
        self._enter_aborting(result, reason, now)
        return [Abort(self.transfer_id, self.ticket.epoch, result, reason[:1024]), self._drained()]

    def on_abort(self, frame: Abort, now: float) -> list[Control]:
        """The receiver ends it: answer DRAINED."""
        if not self.life.is_open:
            return []
        self._enter_aborting(frame.result, f"receiver: {frame.reason}", now)
        return [self._drained()]

    def on_done(self, now: float) -> None:
        """The receiver adopted the prompt. Ignored unless COMMIT is out: then it answers something else."""
        if self.life.state is State.COMMITTED:
            self.life.advance(State.DONE, now)

    def on_lease(self, lease_ms: int, now: float) -> None:
        """A heartbeat that names this transfer. Never shortens the lease."""
        self._lease_until = max(self._lease_until, now + lease_ms / 1000)

    def on_drained_sent(self, now: float) -> None:
        """DRAINED has been handed to the transport."""
        if self.life.state is State.ABORTING:
            self.life.advance(State.DRAINED, now)

    def on_link_lost(self, reason: str, now: float) -> None:
        """The connection is closed, with everything that was queued on it."""
        if not self.life.state.is_terminal:
            self.life.blame("failed", reason)
            self._waiting.clear()
            self.life.advance(State.FAILED, now)

    def on_timer(self, now: float) -> list[Control]:
        """Enforce the current state's deadline."""
        config, state = self._config, self.life.state
        if state is State.ABORTING:
            if now >= self.life.entered_at + config.drain_timeout_s:
                self.life.advance(State.FAILED, now)
            return []
        if state.is_terminal:
            return []
        if now >= self._lease_until:
            return self.abort("expired", f"lease ran out while {state.value}", now)
        if state is not State.COMMITTED and now >= self.life.opened_at + config.transfer_timeout_s:
            return self.abort("failed", f"not committed in {config.transfer_timeout_s} s", now)
        if state is State.CONNECTING and now >= self.life.entered_at + config.connect_timeout_s:
            return self.abort("failed", f"no connection to {self.ticket.endpoint}", now)
        is_idle = now >= self._progress_at + config.idle_timeout_s
        if state is State.SENDING and is_idle and (self.has_work or self._num_unsent_runs > 0):
            return self.abort("failed", f"nothing could be sent for {config.idle_timeout_s} s", now)
        if state is State.COMMITTED and now >= self._progress_at + config.commit_timeout_s:
            return self.abort("failed", f"no DONE for {config.commit_timeout_s} s after COMMIT", now)
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

    def _enter_aborting(self, result: Failure, reason: str, now: float) -> None:
        self.life.blame(result, reason)
        self._waiting.clear()
        self.life.advance(State.ABORTING, now)

    def _drained(self) -> Drained:
        return Drained(self.transfer_id, self.ticket.epoch)
