"""Which KV blocks are free. Numbers only: the bytes live in the memory of a runner."""

from collections.abc import Iterable

from core.errors import CapacityError, ConfigError


class BlockPool:
    """KV blocks by number. Invariant: each block is free or held, never both; `check()` asserts it.

    One owner, no lock: the asyncio loop of a worker's service. It acquires every block a sequence may ever write before
    it submits the sequence, and releases them after the output that ended it. So the engine's thread never allocates, a
    running sequence can never run out of blocks, and nothing is ever preempted.

    Args:
        num_blocks: blocks in the memory; they are named 0 to num_blocks - 1.
    Raises:
        ConfigError: `num_blocks` is below 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks}: a worker needs at least 1 KV block; give it more KV memory")
        self._free = dict.fromkeys(range(num_blocks))  # a dict is an ordered free list with O(1) removal
        self._held: set[int] = set()
        self._num_total = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `acquire` can give now."""
        return len(self._free)

    @property
    def num_total(self) -> int:
        """Blocks, free and held."""
        return self._num_total

    def acquire(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks, or none; the one that has been free longest comes first.

        Raises:
            CapacityError: fewer are free; nothing was taken.
        """
        assert num_blocks >= 0, f"acquire({num_blocks})"
        if num_blocks > len(self._free):
            raise CapacityError(f"need {num_blocks} KV blocks, {len(self._free)} of {self._num_total} are free")
        blocks = [block for block, _ in zip(self._free, range(num_blocks), strict=False)]
        for block in blocks:
            del self._free[block]
        self._held.update(blocks)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give back blocks that `acquire` gave; releasing one twice is our bug and asserts."""
        for block in blocks:
            assert block in self._held, f"block {block} is released but not held"
            self._held.remove(block)
            self._free[block] = None

    def check(self) -> None:
        """Assert the invariant; for tests and for the end of a drain."""
        assert self._held.isdisjoint(self._free), f"free and held: {sorted(self._held & self._free.keys())}"
        assert self._held | self._free.keys() == set(range(self._num_total)), "a block is neither free nor held"
