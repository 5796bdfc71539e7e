"""The block pool: what is given, shared, found again and evicted, and what is promised meanwhile."""

import random
from collections import Counter

import pytest

from core.errors import CapacityError, ConfigError
from engine.block_pool import BlockPool

A, B, C = b"a", b"b", b"c"  # hashes of a prefix of three blocks


def fill(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Blocks with that content, held."""
    acquired = pool.acquire(len(hashes), hashes)
    return [pool.publish(block, known) for block, known in zip(acquired.blocks, hashes, strict=True)]


def test_acquire_is_all_or_nothing_and_names_both_numbers() -> None:
    pool = BlockPool(4)
    pool.acquire(3)
    with pytest.raises(CapacityError, match="need 2 KV blocks, 1 of 4 are available"):
        pool.acquire(2)
    assert pool.num_free == 1
    assert len(pool.acquire(1).blocks) == 1


def test_the_block_free_for_longest_is_reused_first() -> None:
    pool = BlockPool(3)
    first, second, third = pool.acquire(3).blocks
    pool.release([first, third])  # tail first
    pool.release([second])
    assert pool.acquire(3).blocks == [third, first, second]


def test_nothing_can_be_acquired_and_released() -> None:
    pool = BlockPool(1)
    assert pool.acquire(0) == ([], 0)
    pool.release([])
    assert pool.num_free == pool.num_total == 1


@pytest.mark.parametrize("wrong", [0, 7, -1])  # released already, out of range, negative
def test_releasing_what_is_not_held_is_our_bug(wrong: int) -> None:
    pool = BlockPool(2)
    pool.release(pool.acquire(1).blocks)
    with pytest.raises(AssertionError, match=f"block {wrong} "):
        pool.release([wrong])
    pool.check()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks=0"):
        BlockPool(0)


def test_published_blocks_are_found_while_held_and_after() -> None:
    pool = BlockPool(4)
    table = fill(pool, [A, B])
    assert pool.find([A, B, C]) == (2, 0)
    pool.release(table)
    assert pool.find([A, B, C]) == (2, 2)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    again = pool.acquire(3, [A, B, C])
    assert again.blocks[:2] == table
    assert again.num_cached == 2
    pool.check()


def test_nothing_is_found_behind_a_hole() -> None:
    pool = BlockPool(4)
    pool.release(fill(pool, [A, B, C]))
    assert pool.find([b"other", B, C]) == (0, 0)
    assert pool.acquire(3, [b"other", B, C]).num_cached == 0


def test_an_unpublished_block_is_found_by_nobody() -> None:
    pool = BlockPool(4)
    pool.acquire(2, [A, B])
    assert pool.find([A, B]) == (0, 0)
    assert pool.acquire(2, [A, B]).num_cached == 0


def test_a_shared_block_stays_until_the_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    table = fill(pool, [A, B])
    other = pool.acquire(2, [A, B])
    pool.share(table)
    assert other.blocks == table
    assert pool.count_freed(table) == 0
    pool.release(table)
    pool.release(table)
    assert pool.num_free == 1
    assert pool.count_freed(table) == 2
    pool.release(table)
    assert pool.num_free == 3


def test_two_holders_free_together_what_neither_frees_alone() -> None:
    pool = BlockPool(3)
    first, second = [*fill(pool, [A]), *pool.acquire(1).blocks], fill(pool, [A])
    assert (pool.count_freed(first), pool.count_freed(second), pool.count_freed(first + second)) == (1, 0, 2)


def test_worthless_blocks_go_first_then_tails_before_heads_and_the_longest_unused_prefix_first() -> None:
    pool = BlockPool(6)
    old, new = fill(pool, [A, B]), fill(pool, [b"x", b"y"])
    pool.release(old)
    pool.release(new)
    assert pool.acquire(2).blocks == [4, 5]
    evicted = [pool.acquire(1).blocks[0] for _ in range(4)]
    assert evicted == [old[1], old[0], new[1], new[0]]
    assert pool.find([A]) == pool.find([b"x"]) == (0, 0)


def test_a_use_makes_a_prefix_the_newest() -> None:
    pool = BlockPool(3)
    pool.release(fill(pool, [A]))
    pool.release(fill(pool, [B]))
    pool.release(fill(pool, [C]))
    pool.release(pool.acquire(1, [A]).blocks)
    pool.acquire(2)
    assert pool.find([A]) == (1, 1)


def test_a_head_outlives_all_its_tails() -> None:
    pool = BlockPool(4)
    first, second = fill(pool, [A, b"1"]), fill(pool, [A, b"2"])
    assert first[0] == second[0]
    pool.release(first)
    pool.release(second)
    pool.acquire(3)  # one worthless block, and both tails
    assert pool.find([A]) == (1, 1)


def test_the_same_content_is_held_once() -> None:
    pool = BlockPool(4)
    first, second = pool.acquire(1, [A]).blocks, pool.acquire(1, [A]).blocks
    assert [pool.publish(first[0], A), pool.publish(second[0], A)] == [first[0], first[0]]
    assert pool.num_free == 3
    pool.release(first)
    pool.release(first)
    pool.check()


def test_publishing_what_nobody_holds_any_more_takes_no_free_block() -> None:
    pool = BlockPool(3)
    first = fill(pool, [A])
    arriving = pool.acquire(1, promise=1).blocks  # computed elsewhere before the first was published
    pool.share(arriving)  # a transfer and the engine hold it
    pool.release(first)
    assert pool.publish(arriving[0], A) == arriving[0]
    pool.check()
    assert (pool.num_free, pool.num_cached, pool.num_available) == (2, 0, 1)
    pool.release(arriving)
    pool.release(arriving, promise=1)
    assert pool.acquire(1, [A]) == (arriving, 1)


def test_a_block_that_is_not_computed_is_exchanged_for_one_that_is() -> None:
    pool = BlockPool(3)
    own, first = pool.acquire(1).blocks, fill(pool, [A])
    assert pool.exchange(own[0], A) == first[0]
    assert pool.num_free == 2
    pool.release(first)
    own = pool.acquire(1).blocks
    pool.release(first)
    assert pool.exchange(own[0], A) == first[0]  # held by nobody
    assert pool.num_free == 2
    pool.share(first)
    with pytest.raises(AssertionError, match="not the holder's own"):
        pool.exchange(first[0], A)


def test_what_is_promised_to_one_is_not_available_to_others() -> None:
    pool = BlockPool(5)
    pool.acquire(1, promise=3)
    assert (pool.num_free, pool.num_available) == (4, 1)
    with pytest.raises(CapacityError, match="need 2 KV blocks, 1 of 5"):
        pool.acquire(1, promise=1)
    table = [pool.grow(True)]
    assert pool.num_available == 1
    table.append(pool.grow(False))
    with pytest.raises(CapacityError, match="no KV block of 5 is available"):
        pool.grow(False)
    pool.release(table, promise=2)
    assert pool.num_available == 4
    with pytest.raises(AssertionError, match="1 blocks given up, 0 promised"):
        pool.release((), promise=1)
    pool.check()


def test_cached_blocks_that_nobody_holds_count_as_taken_by_who_finds_them() -> None:
    pool = BlockPool(4)
    pool.release(fill(pool, [A, B]))
    pool.acquire(1, promise=2)  # one block is left, and two are cached
    with pytest.raises(CapacityError, match="need 3 KV blocks, 1 of 4 are available"):
        pool.acquire(3, [A, B])
    pool.check()


def test_newcomers_leave_what_is_kept() -> None:
    pool = BlockPool(6)
    pool.keep(4)
    assert (pool.num_available, pool.num_admissible) == (6, 2)
    for refused in (pool.admit, pool.require):
        with pytest.raises(CapacityError, match="need 3 KV blocks, 2 of 6 are available"):
            refused(2, promise=1)
    pool.admit(2)
    assert len(pool.acquire(4).blocks) == 4
    assert pool.num_admissible == 0


def test_a_forgotten_cache_keeps_what_is_held() -> None:
    pool = BlockPool(3)
    held = fill(pool, [A])
    pool.release(fill(pool, [B]))
    pool.clear_cache()
    assert pool.find([A]) == pool.find([B]) == (0, 0)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.release(held)
    assert (pool.num_free, pool.num_cached) == (3, 0)
    pool.check()


def test_whoever_waits_for_room_hears_of_every_release() -> None:
    pool = BlockPool(2)
    seen: list[int] = []
    pool.when_room(lambda: seen.append(pool.num_available))
    blocks = pool.acquire(1, promise=1).blocks
    pool.release(blocks)
    pool.release((), promise=1)
    pool.release(())
    assert seen == [1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_operations_keeps_every_count(seed: int) -> None:
    """Against a dictionary of who holds what."""
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(1, 12))
    prefixes = [[bytes([prefix, depth]) for depth in range(4)] for prefix in range(3)]
    held: list[tuple[list[int], int]] = []  # tables and promises
    for _ in range(2_000):
        action = rng.choice(["acquire", "acquire", "grow", "share", "release", "release"])
        index = rng.randrange(len(held)) if held else None
        if action == "acquire":
            hashes = rng.choice(prefixes)[: rng.randint(0, 4)]
            num_blocks, promise = len(hashes) + rng.randint(0, 2), rng.randint(0, 2)
            num_cached, num_idle = pool.find(hashes)
            fits = num_blocks - num_cached + num_idle + promise <= pool.num_available
            try:
                table, _ = pool.acquire(num_blocks, hashes, promise)
            except CapacityError:
                assert not fits
            else:
                assert fits
                for depth, block_hash in enumerate(hashes):
                    table[depth] = pool.publish(table[depth], block_hash)
                held.append((table, promise))
        elif index is not None and action == "grow":
            table, promise = held[index]
            if promise or pool.num_available:
                table.append(pool.grow(promise > 0))
                held[index] = (table, max(promise - 1, 0))
        elif index is not None and action == "share":
            pool.share(held[index][0])
            held.append((list(held[index][0]), 0))
        elif index is not None:
            pool.release(*held.pop(index))
        pool.check()
        references = Counter(block for table, _ in held for block in table)
        assert pool.num_free == pool.num_total - len(references)
        assert pool.num_available == pool.num_free - sum(promise for _, promise in held)
        assert pool.count_freed(list(references)) == sum(count == 1 for count in references.values())
