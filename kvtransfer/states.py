"""The states of one transfer, the same on both ends, in order:

RESERVED    receiver: blocks are set aside, the ticket is on its way; sender: the ticket is in hand
CONNECTING  sender: the link to the receiver is not up yet; receiver: BEGIN came, no block yet
SENDING     blocks move, as the prompt is computed
COMMITTED   sender: COMMIT is out; receiver: COMMIT is verified
DONE        the receiver owns a complete prompt; both ends may reuse their blocks

ABORTING    from any state above: ABORT is out or in, frames may still be under way
DRAINED     the writer said that nothing more comes
FAILED      the other end is dead or silent and fenced: what still comes from it is dropped
"""

from collections.abc import Mapping
from enum import Enum
from typing import Literal

from core.errors import TransferError

Failure = Literal["aborted", "failed", "expired"]
"""Cancelled by a caller, broken, or out of time before anybody used or renewed it."""

Result = Literal["done"] | Failure
"""How a transfer ended; done means adopted by the receiver."""


class State(Enum):
    """Where one transfer stands."""

    RESERVED = "reserved"
    CONNECTING = "connecting"
    SENDING = "sending"
    COMMITTED = "committed"
    DONE = "done"
    ABORTING = "aborting"
    DRAINED = "drained"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing follows."""
        return not NEXT[self]


NEXT: Mapping[State, frozenset[State]] = {
    State.RESERVED: frozenset({State.CONNECTING, State.ABORTING, State.FAILED}),
    State.CONNECTING: frozenset({State.SENDING, State.ABORTING, State.FAILED}),
    State.SENDING: frozenset({State.COMMITTED, State.ABORTING, State.FAILED}),
    State.COMMITTED: frozenset({State.DONE, State.ABORTING, State.FAILED}),
    State.ABORTING: frozenset({State.DRAINED, State.FAILED}),
    State.DONE: frozenset(),
    State.DRAINED: frozenset(),
    State.FAILED: frozenset(),
}


class Lifecycle:
    """One transfer's state, when it was entered, and why the transfer ended. Moves only as `NEXT` allows."""

    def __init__(self, now: float) -> None:
        self.state = State.RESERVED
        self.opened_at = now
        self.entered_at = now
        self.result: Result | None = None
        self.reason = ""

    @property
    def is_open(self) -> bool:
        """Whether the transfer still may succeed."""
        return not self.state.is_terminal and self.state is not State.ABORTING

    def advance(self, state: State, now: float) -> None:
        """Enter `state`. Raises TransferError for a step the table does not have."""
        if state not in NEXT[self.state]:
            raise TransferError(f"transfer cannot go from {self.state.value} to {state.value}")
        self.state = state
        self.entered_at = now
        if state is State.DONE:
            self.blame("done", "")

    def blame(self, result: Result, reason: str) -> None:
        """Remember why the transfer ends; the first cause stays, what follows from it does not hide it."""
        if self.result is None:
            self.result, self.reason = result, reason
