"""Host memory for preempted sequences: what comes back, what it costs, and the choice between it and computing anew."""

import mmap
from collections.abc import Callable

import pytest

from core.clock import ManualClock
from core.host_blocks import ByteBlocks
from engine.host_swap import HostSwap, Rates, is_swap_cheaper
from engine.scripted import scripted_layout

LAYOUT = scripted_layout(4)
NUM_BLOCKS = 6


@pytest.fixture
def memory() -> ByteBlocks:
    """Each block is full of its own number."""
    memory = ByteBlocks(NUM_BLOCKS, LAYOUT.block_bytes)
    for block in range(NUM_BLOCKS):
        memory.view(block)[:] = bytes([block]) * LAYOUT.block_bytes
    return memory


def swap_of(
    memory: ByteBlocks, num_slots: float, on_copied: Callable[[int, float], None] = lambda *_: None
) -> HostSwap:
    return HostSwap(memory, int(num_slots * mmap.PAGESIZE), on_copied, ManualClock())


def blocks_of(memory: ByteBlocks) -> list[int]:
    """The number each block is full of."""
    assert all(len(set(memory.view(block))) == 1 for block in range(NUM_BLOCKS))
    return [memory.view(block)[0] for block in range(NUM_BLOCKS)]


def test_blocks_come_back_wherever_they_are_loaded(memory: ByteBlocks) -> None:
    swap = swap_of(memory, 3)
    slots = swap.save([4, 1, 5])
    assert (len(set(slots)), swap.num_free) == (3, 0)
    for block in range(NUM_BLOCKS):
        memory.view(block)[:] = bytes([99]) * LAYOUT.block_bytes
    swap.load(slots, [0, 3, 2])
    assert blocks_of(memory) == [4, 99, 5, 1, 99, 99]


def test_slots_are_used_again_and_hold_the_newest(memory: ByteBlocks) -> None:
    swap = swap_of(memory, 2)
    for block in (1, 2, 3):
        slots = swap.save([block, block])
        memory.view(0)[:] = bytes(LAYOUT.block_bytes)
        swap.load(slots[1:], [0])
        assert memory.view(0)[0] == block
        swap.drop(slots)
    assert swap.num_free == 2


@pytest.mark.parametrize("num_slots", [0, 0.9, 1.5])
def test_what_does_not_fit_is_not_saved_at_all(memory: ByteBlocks, num_slots: float) -> None:
    swap = swap_of(memory, num_slots)
    assert swap.save([0, 1]) == []
    assert swap.num_free == int(num_slots)
    assert swap.save([]) == []


def test_copies_are_timed(memory: ByteBlocks) -> None:
    clock, told = ManualClock(), []

    class SlowMemory(ByteBlocks):
        def view(self, block: int) -> memoryview:
            clock.advance(2.0)
            return super().view(block)

    slow = SlowMemory(NUM_BLOCKS, LAYOUT.block_bytes)
    swap = HostSwap(slow, 4 * mmap.PAGESIZE, lambda *copied: told.append(copied), clock)
    slots = swap.save([0, 1])
    swap.load(slots[:1], [3])
    swap.load([], [])
    assert told == [(2 * LAYOUT.block_bytes, 4.0), (LAYOUT.block_bytes, 2.0)]


def test_the_cheaper_way_is_taken_and_copying_counts_both_ways() -> None:
    rates = Rates(tokens_per_s=100.0, bytes_per_s=1000.0)
    assert is_swap_cheaper(num_tokens=100, num_bytes=499, rates=rates)  # 1 s of computing
    assert not is_swap_cheaper(num_tokens=100, num_bytes=500, rates=rates)
    assert not is_swap_cheaper(num_tokens=0, num_bytes=0, rates=rates)


def test_rates_follow_what_is_measured() -> None:
    rates = Rates(tokens_per_s=100.0, bytes_per_s=1000.0)
    for _ in range(50):
        rates.note_computed(600, 2.0)
        rates.note_copied(100, 0.01)
    assert rates.tokens_per_s == pytest.approx(300.0, rel=0.01)
    assert rates.bytes_per_s == pytest.approx(10_000.0, rel=0.01)
