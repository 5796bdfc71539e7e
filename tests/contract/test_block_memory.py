"""The memories that the CPU can address, and the fake that answers later; `tests/gpu` has the one on a device."""

import threading
from collections.abc import Callable

import pytest
import torch

from core.host_blocks import ByteBlocks
from core.layout import KVLayout
from engine.kv_cache import KVCache
from kvtransfer.late_blocks import LateBlocks
from tests.contract.block_memory import AnyMemory, BlockMemoryContract

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_tokens=4, dtype="bfloat16")


def in_a_thread(finish: Callable[[], None]) -> None:
    threading.Thread(target=finish).start()


class TestHostMemory(BlockMemoryContract):
    @pytest.fixture(params=["KVCache", "ByteBlocks"])
    def memory(self, request: pytest.FixtureRequest) -> AnyMemory:
        makers: dict[str, Callable[[], AnyMemory]] = {
            "KVCache": lambda: KVCache(LAYOUT, 12, torch.device("cpu")),
            "ByteBlocks": lambda: ByteBlocks(20, 48),
        }
        return makers[request.param]()

    def test_a_reading_is_the_blocks_own_bytes_and_ready_at_once(self, memory: AnyMemory) -> None:
        reading = memory.read([3, 1], lambda: None)
        assert reading.is_ready
        memory.write([1], [b"\x07" * memory.block_bytes])
        assert bytes(reading.parts[1]) == b"\x07" * memory.block_bytes, "shared, not copied"


class TestLateMemory(BlockMemoryContract):
    @pytest.fixture
    def memory(self) -> AnyMemory:
        return LateBlocks(12, 48, in_a_thread)

    def test_what_is_given_back_is_overwritten(self, memory: AnyMemory) -> None:
        finish: list[Callable[[], None]] = []
        late = LateBlocks(2, 48, finish.append)
        reading = late.read([1], lambda: None)
        assert not reading.is_ready
        finish[0]()
        [part] = reading.parts
        reading.release()
        assert bytes(part) == b"\xee" * 48
