import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import CapacityError, ConfigError
from engine.block_pool import BlockPool


def test_acquire_is_all_or_nothing_and_names_both_numbers() -> None:
    pool = BlockPool(4)
    pool.acquire(3)
    with pytest.raises(CapacityError, match="need 2 KV blocks, 1 of 4 are free"):
        pool.acquire(2)
    assert pool.num_free == 1
    assert len(pool.acquire(1)) == 1


def test_the_block_free_for_longest_is_reused_first() -> None:
    pool = BlockPool(3)
    first, second, third = pool.acquire(3)
    pool.release([third, first])
    pool.release([second])
    assert pool.acquire(3) == [third, first, second]


def test_nothing_can_be_acquired_and_released() -> None:
    pool = BlockPool(1)
    assert pool.acquire(0) == []
    pool.release([])
    assert pool.num_free == pool.num_total == 1


@pytest.mark.parametrize("wrong", [0, 7, -1])  # released already, out of range, negative
def test_releasing_what_is_not_held_is_our_bug(wrong: int) -> None:
    pool = BlockPool(2)
    pool.release(pool.acquire(1))
    with pytest.raises(AssertionError, match=f"block {wrong} "):
        pool.release([wrong])
    pool.check()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks=0"):
        BlockPool(0)


@given(num_blocks=st.integers(1, 20), wishes=st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=50))
def test_no_block_is_lost_or_given_twice(num_blocks: int, wishes: list[tuple[int, bool]]) -> None:
    pool = BlockPool(num_blocks)
    held: list[list[int]] = []
    for size, releases in wishes:
        if releases and held:
            pool.release(held.pop(size % len(held)))
        elif size <= pool.num_free:
            held.append(pool.acquire(size))
        else:
            with pytest.raises(CapacityError):
                pool.acquire(size)
        blocks = [block for group in held for block in group]
        assert len(blocks) == len(set(blocks)) == num_blocks - pool.num_free
        pool.check()
