"""Blocks on a device: what every block memory owes, and what steps, transfers and failures of the device add to it."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from core.errors import TransferError
from engine.gpu.device import Device, HostDevice, Mark, find_device
from engine.gpu.memory import DeviceBlocks
from kvtransfer.inproc import InprocTransport
from kvtransfer.zeromq import ZmqTransport
from tests.contract.block_memory import WITHIN_S, AnyMemory, Asked, BlockMemoryContract, read, some_bytes
from tests.unit.kvtransfer_helpers import COMMITTED, Pair, eventually, settle

SHAPE = (3, 2, 2, 4, 8)  # of a block: layers, k/v, heads, tokens, dim
BLOCK_BYTES = 3 * 2 * 2 * 4 * 8 * 2
SLOT_BYTES = 3 * BLOCK_BYTES + 1


def cache_of(num_blocks: int, place: torch.device) -> torch.Tensor:
    return torch.full((num_blocks, *SHAPE), torch.nan, dtype=torch.bfloat16, device=place)


@pytest.fixture
def gpu(device: torch.device) -> Device:
    return find_device(device)


class TestDeviceMemory(BlockMemoryContract):
    @pytest.fixture(params=[False, True], ids=["one by one", "packed"])
    def memory(self, request: pytest.FixtureRequest, gpu: Device) -> Iterator[AnyMemory]:
        memory = DeviceBlocks(cache_of(12, gpu.place), gpu, SLOT_BYTES, 5, 2, is_packed=request.param)
        yield memory
        memory.close()


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_step_sees_what_was_written_before_it(gpu: Device, is_packed: bool) -> None:
    cache = cache_of(9, gpu.place)
    memory = DeviceBlocks(cache, gpu, SLOT_BYTES, is_packed=is_packed)
    for turn in range(20):
        content = some_bytes(memory, turn, 5)
        memory.write([8, 2, 0, 5, 3], content)
        memory.before_step()
        computed = cache.view(torch.uint8).view(9, -1)[[8, 2, 0, 5, 3]]  # launched, and not waited for by the host
        assert [bytes(row.numpy()) for row in computed.cpu()] == content
    assert cache[[1, 4, 6, 7]].isnan().all()
    memory.close()


@pytest.mark.parametrize("is_packed", [False, True])
def test_making_it_leaves_the_cache_as_it_is(gpu: Device, is_packed: bool) -> None:
    cache = torch.randn((2, *SHAPE), dtype=torch.float32, device=gpu.place)
    before = cache.clone()
    DeviceBlocks(cache, gpu, is_packed=is_packed).close()
    assert torch.equal(cache, before)


def test_one_block_is_moved_where_a_slot_would_be_smaller(gpu: Device) -> None:
    memory = DeviceBlocks(cache_of(3, gpu.place), gpu, slot_bytes=1, num_read_slots=1, num_write_slots=1)
    assert (memory.max_read_blocks, memory.max_readings) == (1, 1)
    content = some_bytes(memory, 1, 3)
    memory.write([0, 1, 2], content)
    assert read(memory, [2, 0, 1]) == [content[2], content[0], content[1]]
    memory.close()


# A device that is slow, or fails


class BusyDevice(HostDevice):
    """Says in which stream everything is, and holds marks of one stream until told."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, threading.Event] = {}
        self.failing: Exception | None = None
        self.waits: list[str] = []  # the stream that waited for what comes in
        self.is_waited_for = threading.Event()  # some mark that is held
        self._local = threading.local()

    @property
    def stream(self) -> str:
        return getattr(self._local, "stream", "steps")

    def hold(self, stream: str) -> threading.Event:
        return self.held.setdefault(stream, threading.Event())

    @contextmanager
    def _in(self, stream: str) -> Iterator[None]:
        before, self._local.stream = self.stream, stream
        try:
            yield
        finally:
            self._local.stream = before

    def incoming(self) -> AbstractContextManager[object]:
        return self._in("incoming")

    def outgoing(self) -> AbstractContextManager[object]:
        return self._in("outgoing")

    def wait_for_incoming(self) -> None:
        self.waits.append(self.stream)

    def mark(self, *, sleeps: bool = False) -> Mark:
        if self.failing is not None and self.stream != "steps":
            raise self.failing
        return Held(self.held.get(self.stream), self.is_waited_for)


class Held:
    def __init__(self, event: threading.Event | None, is_waited_for: threading.Event) -> None:
        self._event = event
        self._is_waited_for = is_waited_for

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._event is None:
            return True
        self._is_waited_for.set()
        is_done = self._event.wait(WITHIN_S if timeout_s is None else timeout_s)
        assert is_done or timeout_s is not None
        return is_done


@pytest.fixture
def busy() -> BusyDevice:
    return BusyDevice()


@pytest.fixture
def memory(busy: BusyDevice) -> Iterator[DeviceBlocks]:
    memory = DeviceBlocks(cache_of(8, busy.place), busy, SLOT_BYTES, 2, 2)
    busy.waits.clear()
    yield memory
    memory.close()


def test_a_reading_is_ready_when_the_device_is_done(memory: DeviceBlocks, busy: BusyDevice) -> None:
    [content] = some_bytes(memory, 1)
    memory.write([3], [content])
    done = busy.hold("outgoing")
    first, second = Asked(memory, [3]), Asked(memory, [3])
    assert busy.is_waited_for.wait(WITHIN_S)
    assert not first.reading.is_ready
    assert not second.reading.is_ready
    done.set()
    assert first.wait() == second.wait() == [content]
    assert busy.waits == ["outgoing", "outgoing"], "the steps wait for no reading"


def test_what_is_not_wanted_while_it_is_read_is_not_announced(memory: DeviceBlocks, busy: BusyDevice) -> None:
    done = busy.hold("outgoing")
    given_up = [Asked(memory, [0]) for _ in range(5)]
    assert busy.is_waited_for.wait(WITHIN_S)
    for one in given_up:
        one.reading.release()
    done.set()
    last = Asked(memory, [0])
    last.wait()
    last.reading.release()
    assert [one.num_calls for one in given_up] == [0] * 5
    assert all(list(one.reading.parts) == [] for one in given_up)


def test_a_write_waits_for_the_device_only_when_every_slot_is_on_its_way(
    memory: DeviceBlocks, busy: BusyDevice
) -> None:
    done = busy.hold("incoming")
    content = some_bytes(memory, 1, 3)
    for block in range(2):
        memory.write([block], [content[block]])
    third = threading.Thread(target=memory.write, args=([2], [content[2]]))
    third.start()
    third.join(0.05)
    assert third.is_alive()
    done.set()
    third.join(WITHIN_S)
    assert read(memory, [0, 1, 2]) == content


def test_a_step_waits_only_when_something_came_since_the_last(memory: DeviceBlocks, busy: BusyDevice) -> None:
    memory.before_step()
    assert busy.waits == []
    memory.write([0], some_bytes(memory, 1))
    memory.before_step()
    memory.before_step()
    assert busy.waits == ["steps"]
    memory.write([0], some_bytes(memory, 1))
    memory.copy_in([0], [memoryview(part) for part in some_bytes(memory, 2)])
    assert busy.waits == ["steps", "steps"], "a block is not overwritten by what came before"


LOST = RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize("failure", [LOST, RuntimeError("out of luck"), KeyError("a bug")])
def test_a_failure_fails_readings_and_the_next_ones_go_on(
    memory: DeviceBlocks, busy: BusyDevice, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    busy.failing = failure
    failed = [Asked(memory, [0]) for _ in range(5)]
    for one in failed:
        assert one.error() == str(failure)
        assert list(one.reading.parts) == []
        one.reading.release()
    busy.failing = None
    one = Asked(memory, [1])
    one.wait()
    one.reading.release()
    assert "could not be read" in caplog.text
    assert memory.failure == (f"the device is lost: {LOST}" if failure is LOST else "")


@pytest.mark.parametrize("failure", [LOST, RuntimeError("out of luck")])
def test_a_write_that_fails_is_an_error_of_its_transfer(
    memory: DeviceBlocks, busy: BusyDevice, failure: Exception
) -> None:
    busy.failing = failure
    with pytest.raises(TransferError, match=str(failure)):
        memory.write([0], some_bytes(memory, 1))
    assert memory.failure == (f"the device is lost: {LOST}" if failure is LOST else "")


def test_a_copy_that_hangs_fails_its_transfer_and_then_the_process(
    memory: DeviceBlocks, busy: BusyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.gpu.memory._MAX_COPY_S", 0.01)
    done = busy.hold("incoming")
    for block in range(2):  # as many as are on their way at once
        memory.write([block], some_bytes(memory, 1))
    assert not memory.failure
    for _ in range(2):
        with pytest.raises(TransferError, match="hangs"):
            memory.write([2], some_bytes(memory, 1))
    assert "hangs" in memory.failure, "what the process ends with"
    done.set()


@pytest.fixture
def failing_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("engine.gpu.memory._Lane.scatter", fail)
    monkeypatch.setattr("engine.gpu.memory._Lane.gather", fail)


def test_a_slot_of_a_failed_reading_is_free_once_the_device_is_done_with_it(
    memory: DeviceBlocks, busy: BusyDevice, failing_half_way: None
) -> None:
    done = busy.hold("outgoing")
    reading = Asked(memory, [0])
    assert busy.is_waited_for.wait(WITHIN_S)
    assert not reading.reading.is_ready
    done.set()
    assert "out of luck" in reading.error()


def test_a_slot_of_a_failed_write_is_free_once_the_device_is_done_with_it(
    memory: DeviceBlocks, busy: BusyDevice, failing_half_way: None
) -> None:
    def write() -> None:
        with pytest.raises(TransferError, match="out of luck"):
            memory.write([0], some_bytes(memory, 1))

    done = busy.hold("incoming")
    for _ in range(2):
        write()
    third = threading.Thread(target=write)
    third.start()
    assert busy.is_waited_for.wait(WITHIN_S)
    assert third.is_alive()
    done.set()
    third.join(WITHIN_S)
    assert not third.is_alive()


def test_closing_fails_what_is_not_ready(busy: BusyDevice) -> None:
    memory = DeviceBlocks(cache_of(4, busy.place), busy, SLOT_BYTES, num_read_slots=1)
    held = Asked(memory, [0])
    held.wait()
    waiting = [Asked(memory, [0]) for _ in range(3)]
    memory.close()
    memory.close()
    for one in (*waiting, Asked(memory, [0])):
        assert "closed" in one.error()
    assert [one.num_calls for one in waiting] == [1, 1, 1]
    assert "kv-reader" not in [thread.name for thread in threading.enumerate()]


def test_one_that_is_told_may_fail_without_ending_the_others(
    memory: DeviceBlocks, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ValueError("a bug of the caller")

    memory.read([0], broken)
    one = Asked(memory, [0])
    one.wait()
    one.reading.release()
    assert "a bug of the caller" in caplog.text


# Transfers


@pytest.fixture(params=["inproc", "tcp"])
async def pair(request: pytest.FixtureRequest, gpu: Device) -> AsyncIterator[Pair]:
    is_tcp = request.param == "tcp"
    transport = ZmqTransport() if is_tcp else InprocTransport()
    pair = Pair(transport, "tcp://127.0.0.1:0" if is_tcp else "inproc://*")
    make: Callable[[], DeviceBlocks] = lambda: DeviceBlocks(cache_of(32, gpu.place), gpu, SLOT_BYTES, 4, 2)  # noqa: E731
    pair.source, pair.target = make(), make()  # type: ignore[assignment]
    pair.receiver, pair.sender = pair.make_receiver("r1"), pair.make_sender("s1")
    async with pair:
        await pair.sender.connect(pair.receiver.endpoint)
        yield pair
    for memory in (pair.source, pair.target):
        memory.close()  # type: ignore[attr-defined]
    if is_tcp:
        transport.close()  # type: ignore[union-attr]


async def test_blocks_go_from_device_to_device(pair: Pair) -> None:
    content = some_bytes(pair.source, 1, 32)
    pair.source.write(range(32), content)
    targets = [31 - block for block in range(32)]
    for _ in range(3):
        ends = await pair.transfer(range(32), targets)
        assert ends.results == ("done", "done")
    await eventually(lambda: not pair.sender._links[pair.receiver.endpoint]._loader.lends_scarcely)
    assert read(pair.target, targets) == content


async def test_many_transfers_at_once_and_some_that_end_early(pair: Pair) -> None:
    content = some_bytes(pair.source, 1, 32)
    pair.source.write(range(32), content)
    all_ends = []
    for number in range(8):
        ends = pair.open(range(4 * number, 4 * number + 4))
        pair.sender.push(ends.ticket.transfer_id, range(4 * number, 4 * number + 4), 0)
        all_ends.append(ends)
    await settle()
    for number, ends in enumerate(all_ends):
        if number % 3 == 1:
            pair.sender.abort(ends.ticket.transfer_id, "the client left")
        else:
            pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await eventually(lambda: all(ends.both_ended for ends in all_ends))
    for number, ends in enumerate(all_ends):
        blocks = range(4 * number, 4 * number + 4)
        assert ends.results == (("aborted", "aborted") if number % 3 == 1 else ("done", "done"))
        assert number % 3 == 1 or read(pair.target, blocks) == content[blocks.start : blocks.stop]
