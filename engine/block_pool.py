"""Which KV blocks are free, who shares the others, and what they hold. Numbers only: the bytes live in a runner's memory.

A block is free (nobody holds it, its content is worthless), held (one reference or more) or cached (nobody holds it, but
its content is known by hash and it can be held again). Cached blocks are given out last, the longest unused first.
Whoever holds a published block holds all blocks before it too, and a table is released tail first, so a cached block
always goes before its head. (All but one kind: an open transfer may outlive the sequence whose head was exchanged for an
equal one. A hole that leaves is harmless: `find` stops at it.)
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple

from core.errors import CapacityError, ConfigError


class Acquired(NamedTuple):
    """Blocks given for a sequence: the first `num_cached` hold what they should already."""

    blocks: list[int]
    num_cached: int


class BlockPool:
    """Reference counts, hashes and promises of KV blocks.

    Two threads use it, the service's event loop and the engine's: every method is atomic, and `with pool:` makes several
    calls one transaction. Blocks may be promised, by number and not by name, to a sequence that will grow: what is
    promised to one is not available to others. `check()` asserts the invariants.

    Args:
        num_blocks: blocks in the memory; they are named 0 to num_blocks - 1.
    Raises:
        ConfigError: `num_blocks` is below 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks}: a worker needs at least 1 KV block; give it more KV memory")
        self._lock = threading.RLock()
        self._num_total = num_blocks
        self._free = dict.fromkeys(range(num_blocks))  # a dict is an ordered free list with O(1) removal
        self._references: dict[int, int] = {}  # of held blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks, first to go first
        self._hash_of: dict[int, bytes] = {}  # of published blocks, held or cached
        self._by_hash: dict[bytes, int] = {}
        self._num_promised = 0
        self._num_kept = 0
        self._on_room: Callable[[], None] = lambda: None

    def __enter__(self) -> "BlockPool":
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    @property
    def num_total(self) -> int:
        """All blocks."""
        return self._num_total

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those with cached content included."""
        with self._lock:
            return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content could be used again."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Free blocks that are not promised."""
        with self._lock:
            return self.num_free - self._num_promised

    @property
    def num_admissible(self) -> int:
        """Available blocks that are not kept for a sequence the engine has waiting; see `keep`."""
        with self._lock:
            return max(self.num_available - self._num_kept, 0)

    def when_room(self, on_room: Callable[[], None]) -> None:
        """Have `on_room` called, in whatever thread, after each release."""
        self._on_room = on_room

    def keep(self, num_blocks: int) -> None:
        """Set how many available blocks `admit` leaves: what the engine's first waiting sequence needs."""
        self._num_kept = num_blocks

    def admit(self, num_blocks: int, hashes: Sequence[bytes] = (), promise: int = 0) -> Acquired:
        """`acquire`, for a newcomer: what is kept for a sequence that waits is not touched."""
        with self._lock:
            return self._acquire(num_blocks, hashes, promise, self.num_admissible)

    def acquire(self, num_blocks: int, hashes: Sequence[bytes] = (), promise: int = 0) -> Acquired:
        """Hold `num_blocks` blocks, or none: cached ones for as many leading `hashes` as are found, fresh ones after.

        Args:
            num_blocks: at least `len(hashes)`.
            hashes: of the sequence's first full blocks, in order.
            promise: blocks set aside for the sequence's growth; `grow` takes them, `release` gives up the rest.
        Raises:
            CapacityError: fewer are available; nothing was taken.
        """
        with self._lock:
            return self._acquire(num_blocks, hashes, promise, self.num_available)

    def _acquire(self, num_blocks: int, hashes: Sequence[bytes], promise: int, available: int) -> Acquired:
        assert num_blocks >= len(hashes), f"acquire({num_blocks}) with {len(hashes)} hashes"
        cached = self._find(hashes)
        self._require(num_blocks, cached, promise, available)
        for block in cached:
            self._hold(block)
        fresh = [self._take() for _ in range(num_blocks - len(cached))]
        self._num_promised += promise
        return Acquired(cached + fresh, len(cached))

    def require(self, num_blocks: int, hashes: Sequence[bytes] = (), promise: int = 0) -> None:
        """Raise CapacityError where `admit` would; takes nothing."""
        with self._lock:
            self._require(num_blocks, self._find(hashes), promise, self.num_admissible)

    def find(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """How many leading `hashes` are cached, and how many of those blocks nobody holds. Changes nothing."""
        with self._lock:
            cached = self._find(hashes)
            return len(cached), self._count_idle(cached)

    def grow(self, is_promised: bool) -> int:
        """One more block: out of the caller's promise, or an available one.

        Raises:
            CapacityError: it was not promised and none is available.
        """
        with self._lock:
            if is_promised:
                assert self._num_promised > 0, "more blocks grown than promised"
                self._num_promised -= 1
            elif self.num_available < 1:
                raise CapacityError(f"no KV block of {self._num_total} is available")
            return self._take()

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more that somebody holds."""
        with self._lock:
            for block in blocks:
                assert block in self._references, f"block {block} is shared but not held"
                self._references[block] += 1

    def publish(self, block: int, block_hash: bytes, *, is_in_use: bool = False) -> int:
        """Say what a held block holds, once it is computed; its head is published already.

        Args:
            block, block_hash: what holds what.
            is_in_use: a step that was launched reads the block, so it must stay the holder's: where somebody else holds
                the same content, this copy remains unknown.

        Returns:
            The block to use from now on: another one if somebody holds the same content. The reference moves to it.
        """
        with self._lock:
            assert block in self._references, f"block {block} is published but not held"
            known = self._by_hash.get(block_hash)
            if known == block:
                return block
            if known in self._references:
                return block if is_in_use else self._exchange(block, known)
            assert block not in self._hash_of, f"block {block} is published under two hashes"
            if known is not None:  # nobody holds it: it gives way, since to hold it might take what is promised
                del self._idle[known], self._hash_of[known]
                self._free[known] = None
            self._hash_of[block] = block_hash
            self._by_hash[block_hash] = block
            return block

    def exchange(self, block: int, block_hash: bytes) -> int:
        """Hold the block that `find` has found for a hash, instead of one that is not computed yet; returns it."""
        with self._lock:
            assert self._references.get(block) == 1, f"block {block} is exchanged but not the holder's own"
            return self._exchange(block, self._by_hash[block_hash])

    def _exchange(self, block: int, known: int) -> int:
        self._hold(known)
        self._drop(block)
        return known

    def release(self, blocks: Sequence[int], promise: int = 0) -> None:
        """Give back one reference to each block of a table, in the table's order, and what was promised beyond them.

        Releasing more often than holding is our bug and asserts.
        """
        with self._lock:
            for block in reversed(blocks):
                self._drop(block)
            assert promise <= self._num_promised, f"{promise} blocks given up, {self._num_promised} promised"
            self._num_promised -= promise
        if blocks or promise:
            self._on_room()

    def count_freed(self, blocks: Iterable[int]) -> int:
        """How many of these blocks would be free if each were released as often as it is named."""
        with self._lock:
            return sum(self._references.get(block) == count for block, count in Counter(blocks).items())

    def clear_cache(self) -> None:
        """Forget what every block holds; held ones stay held."""
        with self._lock:
            self._free.update(self._idle)
            self._idle.clear()
            self._hash_of.clear()
            self._by_hash.clear()

    def check(self) -> None:
        """Assert the invariants; for tests and for the end of a drain."""
        with self._lock:
            held, free, idle = self._references.keys(), self._free.keys(), self._idle.keys()
            assert len(held) + len(free) + len(idle) == self._num_total, "a block is in two states or in none"
            assert held | free | idle == set(range(self._num_total)), "a block is in two states or in none"
            assert all(count > 0 for count in self._references.values()), "a held block without a reference"
            assert idle <= self._hash_of.keys(), "a cached block without a hash"
            assert not free & self._hash_of.keys(), "a free block with a hash"
            assert {h: b for b, h in self._hash_of.items()} == self._by_hash, "two blocks of one hash"
            assert 0 <= self._num_promised <= self.num_free, f"{self._num_promised} promised, {self.num_free} free"

    def _require(self, num_blocks: int, cached: Sequence[int], promise: int, available: int) -> None:
        needed = num_blocks - len(cached) + self._count_idle(cached) + promise
        if needed > available:
            raise CapacityError(f"need {needed} KV blocks, {available} of {self._num_total} are available")

    def _find(self, hashes: Sequence[bytes]) -> list[int]:
        cached = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            cached.append(block)
        return cached

    def _count_idle(self, blocks: Sequence[int]) -> int:
        return sum(block in self._idle for block in blocks)

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self._references[block] = self._references.get(block, 0) + 1

    def _take(self) -> int:
        """Any free block, one with worthless content first; the caller has made sure that there is one."""
        block: int
        if self._free:
            block = next(iter(self._free))
            del self._free[block]
        else:
            block, _ = self._idle.popitem(last=False)
            del self._by_hash[self._hash_of.pop(block)]
        self._references[block] = 1
        return block

    def _drop(self, block: int) -> None:
        count = self._references.get(block, 0)
        assert count > 0, f"block {block} is released but not held"
        if count > 1:
            self._references[block] = count - 1
            return
        del self._references[block]
        if block in self._hash_of:
            self._idle[block] = None
        else:
            self._free[block] = None
