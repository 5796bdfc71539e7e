"""What a worker holds for each sequence, and the one path that gives it back.

A holding starts with blocks and the uses that keep them: "transfer" while the KV session may read or write them,
"engine" while a step may. Ending a use twice is harmless; when the last one ends the blocks return, whatever ended it:
the answer's end, a cancel, a deadline, a dead peer or a dead router.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from core.errors import CancelledError, CapacityError, DuplicateRequestError

Use = Literal["transfer", "engine"]

MAX_TOMBSTONES = 10_000
Detail = TypeVar("Detail")


class Blocks(Protocol):
    """The block pool, as far as the ledger needs it."""

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""

    @property
    def num_total(self) -> int:
        """All blocks."""

    def acquire(self, n: int) -> list[int]:
        """Take n or raise CapacityError."""

    def release(self, blocks: Sequence[int]) -> None:
        """Give back."""


@dataclass(slots=True, eq=False, kw_only=True)
class Holding(Generic[Detail]):
    """One sequence's share of the worker."""

    sequence_id: str
    router_id: str
    blocks: list[int]
    uses: set[Use]
    detail: Detail  # what only the worker's role knows
    num_published_tokens: int = 0
    has_ended: bool = False  # its router was told, or no longer cares
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class Ledger(Generic[Detail]):
    """Every holding of one worker. Lives on the event loop, which alone touches the pool.

    Args:
        pool: the worker's blocks.
        max_sequences: holdings at most; one more is refused.
        on_expire: called with a holding whose time is up; must end it.
        on_release: called after blocks returned.
    """

    def __init__(
        self,
        pool: Blocks,
        max_sequences: int,
        on_expire: Callable[[Holding[Detail]], None],
        on_release: Callable[[], None],
    ) -> None:
        self.pool = pool
        self.max_sequences = max_sequences
        self._on_expire = on_expire
        self._on_release = on_release
        self._holdings: dict[str, Holding[Detail]] = {}
        # Ids aborted before they came: an Abort may overtake the call it cancels.
        self._tombstones: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holdings)

    def __iter__(self) -> Iterator[Holding[Detail]]:
        return iter(list(self._holdings.values()))

    def get(self, sequence_id: str) -> Holding[Detail] | None:
        """The holding, while it lasts."""
        return self._holdings.get(sequence_id)

    def admit(
        self, sequence_id: str, router_id: str, num_blocks: int, timeout_s: float, uses: set[Use], detail: Detail
    ) -> Holding[Detail]:
        """Take blocks and a slot for a sequence; its deadline starts now.

        Raises:
            CapacityError: no slot or not enough blocks; nothing is held then.
            DuplicateRequestError: the id is held already.
            CancelledError: the id was aborted before it arrived.
        """
        if sequence_id in self._holdings:
            raise DuplicateRequestError(f"sequence {sequence_id} is already held")
        if self._tombstones.pop(sequence_id, self) is None:
            raise CancelledError(f"sequence {sequence_id} was aborted before it arrived")
        if len(self._holdings) >= self.max_sequences:
            raise CapacityError(f"{len(self._holdings)} sequences held, max_sequences={self.max_sequences}")
        holding = Holding(
            sequence_id=sequence_id,
            router_id=router_id,
            blocks=self.pool.acquire(num_blocks),
            uses=set(uses),
            detail=detail,
        )
        holding.timer = asyncio.get_running_loop().call_later(timeout_s, self._on_expire, holding)
        self._holdings[sequence_id] = holding
        return holding

    def end_use(self, holding: Holding[Detail], use: Use) -> None:
        """One use is over; with the last one everything returns."""
        holding.uses.discard(use)
        if not holding.uses and self._holdings.get(holding.sequence_id) is holding:
            del self._holdings[holding.sequence_id]
            if holding.timer is not None:
                holding.timer.cancel()
            self.pool.release(holding.blocks)
            self._on_release()

    def bury(self, sequence_id: str) -> None:
        """Remember an abort for an id that is not held, should the call it cancels still arrive."""
        self._tombstones[sequence_id] = None
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def of_router(self, router_id: str) -> list[Holding[Detail]]:
        """What one router's requests hold."""
        return [holding for holding in self._holdings.values() if holding.router_id == router_id]
