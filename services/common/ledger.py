"""What a worker holds for each sequence, and the one path that gives it back.

A holding has uses: "transfer" while the KV session may read or write its blocks, "engine" while the engine has the
sequence. Its blocks are those of the transfer (the engine holds its own) and return when that has ended; its slot returns
with the last use. Ending a use twice is harmless, whatever ended it: the answer's end, a cancel, a deadline, a dead peer or
a dead router.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from core.errors import CancelledError, CapacityError, DuplicateRequestError

Use = Literal["transfer", "engine"]

MAX_TOMBSTONES = 10_000
Detail = TypeVar("Detail")


class Blocks(Protocol):
    """The block pool, as far as a service needs it; see `engine.block_pool.BlockPool`."""

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, those with cached content included."""

    @property
    def num_cached(self) -> int:
        """Of them: those with cached content."""

    @property
    def num_admissible(self) -> int:
        """Blocks a newcomer could have."""

    @property
    def num_total(self) -> int:
        """All blocks."""

    def admit(self, num_blocks: int, hashes: Sequence[bytes], promise: int) -> tuple[list[int], int]:
        """Hold blocks, cached ones first, or raise CapacityError; returns them and how many are cached."""

    def require(self, num_blocks: int, hashes: Sequence[bytes], promise: int) -> None:
        """Raise CapacityError where `admit` would."""

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks once more."""

    def release(self, blocks: Sequence[int], promise: int = 0) -> None:
        """Give back."""


class Claim(NamedTuple):
    """What a sequence needs of the pool to begin."""

    num_blocks: int  # for its known tokens
    hashes: Sequence[bytes]  # of those blocks that may be found cached
    promise: int  # blocks set aside for its growth


@dataclass(slots=True, eq=False, kw_only=True)
class Holding(Generic[Detail]):
    """One sequence's share of the worker."""

    sequence_id: str
    router_id: str
    blocks: list[int]  # held for the transfer
    num_cached_blocks: int  # of them: the first ones, whose KV was here already
    num_promised_blocks: int  # set aside for its growth, until the engine has them
    uses: set[Use]
    detail: Detail  # what only the worker's role knows
    num_published_tokens: int = 0
    has_ended: bool = False  # its router was told, or no longer cares
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class Ledger(Generic[Detail]):
    """Every holding of one worker. Lives on the event loop; the pool it shares with the engine's thread.

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
        self, sequence_id: str, router_id: str, claim: Claim, timeout_s: float, uses: set[Use], detail: Detail
    ) -> Holding[Detail]:
        """Take a slot for a sequence, and blocks if a transfer will write them; its deadline starts now.

        Where the engine will find the blocks itself, room for them is only looked for: a sequence that would wait for it
        had better wait at its router, which may know another worker.

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
        blocks: list[int] = []
        num_cached = promise = 0
        if "engine" in uses:
            self.pool.require(*claim)
        else:
            blocks, num_cached = self.pool.admit(*claim)
            promise = claim.promise
        holding = Holding(
            sequence_id=sequence_id,
            router_id=router_id,
            blocks=blocks,
            num_cached_blocks=num_cached,
            num_promised_blocks=promise,
            uses=set(uses),
            detail=detail,
        )
        holding.timer = asyncio.get_running_loop().call_later(timeout_s, self._on_expire, holding)
        self._holdings[sequence_id] = holding
        return holding

    def end_use(self, holding: Holding[Detail], use: Use) -> None:
        """One use is over; with the transfer the blocks return, with the last one the slot."""
        holding.uses.discard(use)
        if "transfer" not in holding.uses:
            blocks, promise = holding.blocks, holding.num_promised_blocks
            holding.blocks, holding.num_promised_blocks = [], 0
            self.pool.release(blocks, promise)
        if not holding.uses and self._holdings.get(holding.sequence_id) is holding:
            del self._holdings[holding.sequence_id]
            if holding.timer is not None:
                holding.timer.cancel()
            self._on_release()

    def bury(self, sequence_id: str) -> None:
        """Remember an abort for an id that is not held, should the call it cancels still arrive."""
        self._tombstones[sequence_id] = None
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def of_router(self, router_id: str) -> list[Holding[Detail]]:
        """What one router's requests hold."""
        return [holding for holding in self._holdings.values() if holding.router_id == router_id]
