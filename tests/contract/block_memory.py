"""What every block memory owes KV transfer, and the engine where it swaps; classes of tests for each memory to inherit."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.sequence import BlockMemory, Reading, SwapMemory

WITHIN_S = 30.0


class AnyMemory(BlockMemory, SwapMemory, Protocol):
    """What each of them is."""


class Asked:
    """A reading and whether its memory said that it is ready."""

    def __init__(self, memory: BlockMemory, blocks: Sequence[int]) -> None:
        self.num_calls = 0
        self._called = threading.Event()
        self.reading: Reading = memory.read(blocks, self._on_ready)
        self.was_ready = self.reading.is_ready

    def _on_ready(self) -> None:
        self.num_calls += 1
        self._called.set()

    def error(self) -> str:
        """What became of it, once it is ready."""
        if not self.was_ready:
            assert self._called.wait(WITHIN_S), "not ready, and nobody says so"
        assert self.reading.is_ready
        return self.reading.error

    def wait(self) -> list[bytes]:
        """What was read, once it is there."""
        error = self.error()
        assert not error, error
        return [bytes(part) for part in self.reading.parts]


def read(memory: BlockMemory, blocks: Sequence[int]) -> list[bytes]:
    """The bytes of blocks, read in as many pieces as it takes."""
    content: list[bytes] = []
    for start in range(0, len(blocks), memory.max_read_blocks):
        asked = Asked(memory, blocks[start : start + memory.max_read_blocks])
        content += asked.wait()
        asked.reading.release()
    return content


def some_bytes(memory: BlockMemory, seed: int, num_blocks: int = 1) -> list[bytes]:
    return [random.Random(f"{seed}.{index}").randbytes(memory.block_bytes) for index in range(num_blocks)]


@contextmanager
def a_wrong_number_is_refused() -> Iterator[None]:
    with pytest.raises(IndexError, match="block"):
        yield


class BlockMemoryContract:
    """Needs a fixture `memory` of at least 12 blocks, that nobody else uses."""

    def test_what_is_written_is_read_whatever_the_order(self, memory: AnyMemory) -> None:
        content = some_bytes(memory, 1, 3)
        memory.write([7, 0, 11], content)
        assert read(memory, [11, 7, 11, 0]) == [content[2], content[0], content[2], content[1]]

    def test_other_blocks_stay_as_they_are(self, memory: AnyMemory) -> None:
        everything = range(memory.num_blocks)
        before = some_bytes(memory, 2, memory.num_blocks)
        memory.write(everything, before)
        [new] = some_bytes(memory, 3)
        memory.write([4], [new])
        assert read(memory, everything) == [*before[:4], new, *before[5:]]

    def test_parts_may_change_once_they_are_written(self, memory: AnyMemory) -> None:
        content = some_bytes(memory, 4, 6)
        buffers = [bytearray(part) for part in content]
        for block, buffer in enumerate(buffers):
            memory.write([block], [memoryview(buffer)])
            buffer[:] = bytes(len(buffer))
        assert read(memory, range(6)) == content

    def test_nothing_is_moved_when_nothing_is_asked_for(self, memory: AnyMemory) -> None:
        memory.write([], [])
        memory.copy_out([], [])
        memory.copy_in([], [])
        assert read(memory, []) == []

    def test_a_number_that_does_not_exist_moves_nothing(self, memory: AnyMemory) -> None:
        content = some_bytes(memory, 5, 2)
        memory.write([0, 1], content)
        for wrong in (-1, memory.num_blocks, 1 << 40):
            with a_wrong_number_is_refused():
                memory.read([0, wrong], lambda: None)
            with a_wrong_number_is_refused():
                memory.write([0, wrong], [bytes(memory.block_bytes)] * 2)
            with a_wrong_number_is_refused():
                memory.copy_in([0, wrong], [memoryview(bytes(memory.block_bytes))] * 2)
            target = bytearray(memory.block_bytes)
            with a_wrong_number_is_refused():
                memory.copy_out([0, wrong], [memoryview(target)] * 2)
            assert not any(target)
        assert read(memory, [0, 1]) == content

    def test_readings_keep_their_own_bytes_while_they_are_open(self, memory: AnyMemory) -> None:
        content = some_bytes(memory, 6, 8)
        memory.write(range(8), content)
        asked = [Asked(memory, [block]) for block in range(min(8, memory.max_readings or 8))]
        for block in reversed(range(len(asked))):
            assert asked[block].wait() == [content[block]]
        assert [one.wait()[0] for one in asked] == content[: len(asked)]
        assert all(one.num_calls == 1 or (one.num_calls == 0 and one.was_ready) for one in asked)
        for one in asked:
            one.reading.release()

    def test_readings_without_room_come_in_turn(self, memory: AnyMemory) -> None:
        content = some_bytes(memory, 7, 12)
        memory.write(range(12), content)
        asked = [Asked(memory, [number % 12]) for number in range(50)]
        for number, one in enumerate(asked):
            assert one.wait() == [content[number % 12]]
            one.reading.release()
            one.reading.release()

    def test_a_reading_nobody_wants_takes_no_room(self, memory: AnyMemory) -> None:
        content = some_bytes(memory, 8, 2)
        memory.write([0, 1], content)
        for _ in range(50):  # some before they are ready, some after
            Asked(memory, [0]).reading.release()
        one = Asked(memory, [1])
        assert one.wait() == [content[1]]
        one.reading.release()

    def test_as_many_blocks_as_one_reading_takes(self, memory: AnyMemory) -> None:
        blocks = [number % memory.num_blocks for number in range(memory.max_read_blocks)]
        everything = some_bytes(memory, 9, memory.num_blocks)
        memory.write(range(memory.num_blocks), everything)
        asked = Asked(memory, blocks)
        assert asked.wait() == [everything[block] for block in blocks]
        asked.reading.release()

    def test_blocks_are_swapped_out_and_back_elsewhere(self, memory: AnyMemory) -> None:
        content = some_bytes(memory, 10, 12)
        memory.write(range(12), content)
        saved = [bytearray(memory.block_bytes) for _ in range(12)]
        order = [5, 11, 0, 3, 7, 1, 10, 2, 9, 4, 8, 6]
        memory.copy_out(order, [memoryview(buffer) for buffer in saved])
        assert [bytes(buffer) for buffer in saved] == [content[block] for block in order]
        memory.copy_in(range(12), [memoryview(buffer) for buffer in saved])
        for buffer in saved:
            buffer[:] = bytes(len(buffer))
        assert read(memory, range(12)) == [content[block] for block in order]

    @settings(max_examples=15, deadline=None, suppress_health_check=[*HealthCheck])
    @given(st.lists(st.tuples(st.sampled_from("wwrrio"), st.lists(st.integers(0, 11), unique=True)), max_size=25))
    def test_any_order_of_moves_is_that_of_a_list(self, memory: AnyMemory, moves: list[tuple[str, list[int]]]) -> None:
        expected = some_bytes(memory, 0, 12)
        memory.write(range(12), expected)
        for seed, (move, blocks) in enumerate(moves):
            content = some_bytes(memory, seed, len(blocks))
            if move == "r":
                assert read(memory, blocks) == [expected[block] for block in blocks]
            elif move == "o":
                targets = [bytearray(memory.block_bytes) for _ in blocks]
                memory.copy_out(blocks, [memoryview(target) for target in targets])
                assert [bytes(target) for target in targets] == [expected[block] for block in blocks]
            else:
                put: Callable[[Sequence[int], Sequence[memoryview]], None] = (
                    memory.write if move == "w" else memory.copy_in
                )
                put(blocks, [memoryview(part) for part in content])
                for block, part in zip(blocks, content, strict=True):
                    expected[block] = part
        assert read(memory, range(12)) == expected
