"""What the engine does to the block pool for its sequences: start, grow, publish, preempt, end. The engine's thread only."""

from array import array

from engine.block_pool import BlockPool
from engine.host_swap import HostSwap, Rates, is_swap_cheaper
from engine.plan import StepPlan
from engine.sequence import Sequence


class Holdings:
    """Carries out what a plan says about blocks.

    Copying takes long, and the pool is also the event loop's: `save` and `load` want it free, `apply` held.

    Args:
        pool: the worker's blocks.
        block_tokens: tokens in one block.
        swap: where preempted sequences may wait; None: they are always computed anew.
        rates: what the choice between the two goes by.
    """

    def __init__(self, pool: BlockPool, block_tokens: int, swap: HostSwap | None, rates: Rates) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._swap = swap
        self._rates = rates

    def save(self, plan: StepPlan) -> None:
        """Copy out what those that must yield have computed, where that is cheaper than to compute it again."""
        if self._swap is None:
            return
        for sequence in plan.preempted:
            used = sequence.block_table[: -(-sequence.num_computed_tokens // self._block_tokens)]
            num_bytes = len(used) * self._swap.block_bytes
            if is_swap_cheaper(sequence.num_computed_tokens, num_bytes, self._rates):
                sequence.swap_slots = self._swap.save(used)

    def load(self, plan: StepPlan) -> None:
        """Copy back what those that start had computed, but for what they found cached."""
        for sequence in [start.sequence for start in plan.starts if start.sequence.swap_slots]:
            assert self._swap is not None, "there are slots"
            missing = slice(sequence.num_published_blocks, len(sequence.swap_slots))
            self._swap.load(sequence.swap_slots[missing], sequence.block_table[missing])
            self._drop_swapped(sequence)

    def apply(self, plan: StepPlan) -> tuple[int, int]:
        """Give and take blocks for a plan, in the same transaction as it was made or with every newcomer kept out since.

        Returns:
            Known tokens of the sequences that started for the first time, and how many of them were found cached.
        """
        self._pool.keep(plan.num_kept_blocks)
        for sequence in plan.preempted:
            self._preempt(sequence)
        num_looked_up = num_found = 0
        for start in plan.starts:
            self._start(start.sequence, start.num_promised_blocks)
            if not start.sequence.num_preemptions:
                num_looked_up += len(start.sequence.token_ids)
                num_found += start.sequence.num_cached_tokens
        for chunk in plan.chunks:
            self._grow(chunk.sequence, chunk.sequence.num_computed_tokens + chunk.num_tokens)
        return num_looked_up, num_found

    def skip_cached(self, sequence: Sequence) -> int:
        """Let a prompt go on behind the blocks that another sequence has computed meanwhile; returns their tokens."""
        if sequence.num_unconfirmed_tokens:
            return 0  # what it is computing now lies before
        if sequence.spec.block_table and not sequence.num_preemptions:
            return 0  # its blocks came from elsewhere, and may be somebody else's as well
        hashes = sequence.reusable_hashes(self._block_tokens)
        block, offset = divmod(sequence.num_computed_tokens, self._block_tokens)
        if offset or block >= len(hashes):
            return 0
        num_cached = self._pool.find(hashes[block:])[0]
        for index in range(block, block + num_cached):
            sequence.block_table[index] = self._pool.exchange(sequence.block_table[index], hashes[index])
        sequence.num_computed_tokens += num_cached * self._block_tokens
        if not sequence.num_preemptions:
            sequence.num_cached_tokens += num_cached * self._block_tokens
        sequence.num_published_blocks = max(sequence.num_published_blocks, block + num_cached)
        return num_cached * self._block_tokens

    def publish(self, sequence: Sequence) -> None:
        """Let others find the blocks that are computed now."""
        num_full = sequence.num_confirmed_tokens // self._block_tokens
        if num_full <= sequence.num_published_blocks:
            return
        hashes = sequence.hashes(self._block_tokens)
        num_full = min(num_full, len(hashes))
        for index in range(sequence.num_published_blocks, num_full):
            block, is_in_use = sequence.block_table[index], sequence.num_unconfirmed_tokens > 0
            sequence.block_table[index] = self._pool.publish(block, hashes[index], is_in_use=is_in_use)
        sequence.num_published_blocks = max(sequence.num_published_blocks, num_full)

    def end(self, sequence: Sequence) -> None:
        """Let go of everything a sequence has, but the blocks of one that is handed over: its last output gives them away."""
        table, promise = sequence.block_table, sequence.num_promised_blocks
        sequence.block_table, sequence.num_promised_blocks = array("i"), 0
        self._drop_swapped(sequence)
        self._pool.release(() if sequence.spec.prefill_only else table, promise)

    def _start(self, sequence: Sequence, num_promised_blocks: int) -> None:
        hashes = sequence.reusable_hashes(self._block_tokens)
        num_blocks = -(-len(sequence.token_ids) // self._block_tokens)
        acquired = self._pool.acquire(num_blocks, hashes, num_promised_blocks)
        sequence.block_table, sequence.num_promised_blocks = array("i", acquired.blocks), num_promised_blocks
        num_cached_tokens = acquired.num_cached * self._block_tokens
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_cached_tokens)
        sequence.num_published_blocks = acquired.num_cached
        if not sequence.num_preemptions:  # what it finds later is its own
            sequence.num_cached_tokens = num_cached_tokens

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.block_table) * self._block_tokens < num_tokens:
            is_promised = sequence.num_promised_blocks > 0
            sequence.block_table.append(self._pool.grow(is_promised))
            sequence.num_promised_blocks -= is_promised

    def _preempt(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        if not sequence.swap_slots:
            sequence.num_computed_tokens = 0
        self._pool.release(sequence.block_table, sequence.num_promised_blocks)
        sequence.block_table, sequence.num_promised_blocks, sequence.num_published_blocks = array("i"), 0, 0

    def _drop_swapped(self, sequence: Sequence) -> None:
        if sequence.swap_slots:
            assert self._swap is not None, "there are slots"
            self._swap.drop(sequence.swap_slots)
            sequence.swap_slots = []
