"""A sender whose memory brings bytes later, when the test says so: what waits for them, and what does not."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest

from core.errors import TransferError
from core.host_blocks import ByteBlocks
from kvtransfer.frames import Commit, Data, HelloOk
from kvtransfer.inproc import InprocTransport
from kvtransfer.late_blocks import LateBlocks
from kvtransfer.ticket import TransferOutcome
from tests.unit.kvtransfer_helpers import (
    BLOCK_BYTES,
    COMMITTED,
    CONFIG,
    FakeReceiver,
    Faults,
    LossyTransport,
    Pair,
    SlowHandle,
    eventually,
    fill,
    settle,
)


class Rig:
    """A connected pair and the readings that wait to be finished."""

    def __init__(self, pair: Pair, faults: Faults, transport: LossyTransport) -> None:
        self.pair = pair
        self.faults = faults
        self.transport = transport
        self.loading: list[Callable[[], None]] = []
        self.memory = LateBlocks(pair.num_blocks, BLOCK_BYTES, self.loading.append)
        pair.source = self.memory
        pair.sender = pair.make_sender("s1")

    async def finish(self, which: int = 0) -> None:
        """Make one reading ready, and let what follows from it happen."""
        self.loading.pop(which)()
        await settle()

    async def finish_all(self) -> None:
        while self.loading:
            await self.finish()

    def sent(self, kind: type[Data] | type[Commit]) -> list[Data | Commit]:
        return [frame for frame in self.faults.seen if isinstance(frame, kind)]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    faults = Faults()
    transport = LossyTransport(InprocTransport(), faults)
    pair = Pair(transport)
    rig = Rig(pair, faults, transport)
    async with pair:
        await pair.sender.connect(pair.receiver.endpoint)
        yield rig


async def test_readings_that_finish_in_any_order_fill_the_right_blocks(rig: Rig) -> None:
    content = [fill(rig.memory, block, seed=block) for block in (3, 1, 8, 9)]
    ends = rig.pair.open([0, 1, 2, 3])
    rig.pair.sender.push(ends.ticket.transfer_id, [3, 1, 8, 9], 0)
    rig.pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await settle()
    assert len(rig.loading) == 2, "one is read while the one before it is sent"
    await rig.finish(1)
    assert not rig.sent(Commit), "not before every block is out"
    await rig.finish()
    assert ends.results == ("done", "done")
    assert [bytes(rig.pair.target.view(block)) for block in range(4)] == content


async def test_a_transfer_with_nothing_to_read_is_not_held_up_by_one_that_reads(rig: Rig) -> None:
    slow, quick = rig.pair.open([0]), rig.pair.open([])
    rig.pair.sender.push(slow.ticket.transfer_id, [0], 0)
    await settle()
    rig.pair.sender.commit(quick.ticket.transfer_id, COMMITTED)
    await settle()
    assert quick.results == ("done", "done")
    await rig.pair.pass_time(CONFIG.idle_timeout_s - 1)
    assert not slow.both_ended, "heartbeats go on meanwhile"
    rig.pair.sender.commit(slow.ticket.transfer_id, COMMITTED)
    await rig.finish()
    assert slow.results == ("done", "done")


async def test_a_transfer_that_ends_gives_up_its_readings(rig: Rig) -> None:
    ends = rig.pair.open([0, 1, 2, 3])
    rig.pair.sender.push(ends.ticket.transfer_id, [0, 1, 2, 3], 0)
    await settle()
    assert rig.memory.num_open == 2
    rig.pair.receiver.abort(ends.ticket.transfer_id, "the client left")
    await settle()
    assert ends.results == ("aborted", "aborted")
    assert rig.memory.num_open == 0
    await rig.finish_all()
    assert not rig.sent(Data)


async def test_a_reading_that_fails_ends_its_transfer_only(rig: Rig) -> None:
    broken, other = rig.pair.open([0, 1, 2]), rig.pair.open([3])
    rig.pair.sender.push(broken.ticket.transfer_id, [0, 1, 2], 0)
    rig.pair.sender.push(other.ticket.transfer_id, [3], 0)
    rig.pair.sender.commit(other.ticket.transfer_id, COMMITTED)
    await settle()
    rig.memory.error = "the device is lost"
    await rig.finish()
    rig.memory.error = ""
    await rig.finish_all()
    await eventually(lambda: broken.both_ended and other.both_ended)
    assert broken.results == ("failed", "failed")
    assert "the device is lost" in broken.sent[0].reason
    assert "the device is lost" in broken.received[0].reason
    assert other.results == ("done", "done")
    assert rig.memory.num_open == 0


async def test_a_reading_that_never_comes_fails_its_transfer_by_the_deadline(rig: Rig) -> None:
    ends = rig.pair.open([0])
    rig.pair.sender.push(ends.ticket.transfer_id, [0], 0)
    rig.pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await rig.pair.pass_time(CONFIG.idle_timeout_s + 1)
    assert ends.results == ("failed", "failed")
    assert "nothing could be sent" in ends.sent[0].reason
    assert rig.memory.num_open == 0


async def test_what_the_memory_lends_is_kept_while_the_transport_reads_it(rig: Rig) -> None:
    rig.transport.slow_handle = handle = SlowHandle()
    ends = rig.pair.open([0, 1])
    rig.pair.sender.push(ends.ticket.transfer_id, [0, 1], 0)
    rig.pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await settle()
    await rig.finish()
    assert ends.results == ("done", "done"), "the receiver has every byte: the blocks are free"
    assert rig.memory.num_open == 1, "but what they were copied to is not"
    handle.done = True
    await eventually(lambda: rig.memory.num_open == 0)


async def test_what_was_sent_is_given_back_soon_without_any_traffic(rig: Rig) -> None:
    await rig.pair.sender.aclose()
    rig.pair.config = replace(CONFIG, tick_s=3600.0)
    rig.pair.sender = rig.pair.make_sender("s2")
    await rig.pair.sender.start()
    rig.transport.slow_handle = handle = SlowHandle()
    ends = rig.pair.open([0, 1])
    await settle()
    rig.pair.sender.tick()  # says HELLO, and is the last one
    await settle()
    rig.pair.sender.push(ends.ticket.transfer_id, [0], 0)
    await rig.finish()
    assert rig.memory.num_open == 1
    handle.done = True
    await eventually(lambda: rig.memory.num_open == 0, within_s=1.0)


async def test_a_closed_sender_keeps_what_its_sockets_still_read(rig: Rig) -> None:
    rig.transport.slow_handle = SlowHandle()  # until the socket is closed
    ends = rig.pair.open([0, 1])
    rig.pair.sender.push(ends.ticket.transfer_id, [0, 1], 0)
    await settle()
    await rig.finish()
    assert rig.memory.num_open == 1
    await rig.pair.sender.aclose()
    assert rig.memory.num_open == 0
    assert ends.sent[0].result == "failed"


async def test_a_link_that_is_no_longer_wanted_gives_back_what_it_sent(rig: Rig) -> None:
    rig.transport.slow_handle = handle = SlowHandle()
    handle.ends_with_socket = False  # set before anything happens: a link may be closed in any tick
    ends = rig.pair.open([0])
    rig.pair.sender.push(ends.ticket.transfer_id, [0], 0)
    rig.pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    rig.pair.sender.disconnect(rig.pair.receiver.endpoint)
    await settle()
    await rig.finish()
    await eventually(lambda: not rig.pair.sender._links)
    assert ends.results == ("done", "done")
    assert rig.memory.num_open == 1
    handle.done = True
    await eventually(lambda: rig.memory.num_open == 0)


async def test_bytes_that_are_being_read_count_against_the_window(rig: Rig) -> None:
    fake, sent = FakeReceiver(rig.pair), list[TransferOutcome]()
    ticket = replace(fake.ticket, num_blocks=20)
    rig.pair.sender.open(ticket, sent.append)
    rig.pair.sender.push(ticket.transfer_id, list(range(20)), 0)
    await fake.accept()  # and grants less than 4 blocks, never more
    await settle()
    for _ in range(4):
        await rig.finish_all()
        await rig.pair.pass_time(0.1)
    assert sum(len(frame.blocks) for frame in rig.sent(Data) if isinstance(frame, Data)) == 4
    assert rig.memory.num_open == 0, "nothing is read that may not be sent"


async def test_a_receiver_that_takes_nothing_leaves_readings_to_others(rig: Rig) -> None:
    rig.transport.slow_handle = SlowHandle()
    fake, sent = FakeReceiver(rig.pair), list[TransferOutcome]()
    ticket = replace(fake.ticket, num_blocks=8)
    rig.pair.sender.open(ticket, sent.append)
    rig.pair.sender.push(ticket.transfer_id, list(range(8)), 0)
    fake.peer, _ = await fake.socket.recv()
    fake.say(HelloOk("fake", 1 << 20))  # credit for everything
    await settle()
    await rig.finish_all()
    assert rig.memory.num_open == LateBlocks.max_readings < 3
    ends = rig.pair.open([0])
    rig.pair.sender.push(ends.ticket.transfer_id, [0], 0)
    rig.pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await settle()
    await rig.finish()
    assert ends.results == ("done", "done")
    rig.transport.slow_handle.done = True


class FullBlocks(ByteBlocks):
    """Takes so many writes, then fails."""

    num_left = 1

    def write(self, blocks: Sequence[int], parts: Sequence[bytes | memoryview]) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise TransferError("the device is lost")
        super().write(blocks, parts)


async def test_a_write_that_fails_ends_its_transfer_only(rig: Rig) -> None:
    rig.pair.target = memory = FullBlocks(rig.pair.num_blocks, BLOCK_BYTES)
    await rig.pair.receiver.aclose()
    rig.pair.receiver = rig.pair.make_receiver("r2")
    await rig.pair.receiver.start("inproc://*")
    broken, other = rig.pair.open([0, 1, 2]), rig.pair.open([3])
    await settle()
    rig.pair.sender.push(broken.ticket.transfer_id, [0, 1, 2], 0)
    await settle()
    await rig.finish_all()
    await eventually(lambda: broken.both_ended)
    assert broken.results == ("failed", "failed")
    assert "the device is lost" in broken.received[0].reason
    assert "the device is lost" in broken.sent[0].reason
    memory.num_left = 1
    rig.pair.sender.push(other.ticket.transfer_id, [3], 0)
    rig.pair.sender.commit(other.ticket.transfer_id, COMMITTED)
    await settle()
    await rig.finish_all()
    assert other.results == ("done", "done")


async def test_a_lost_connection_gives_up_its_readings_and_the_next_one_works(rig: Rig) -> None:
    ends = rig.pair.open([0, 1])
    rig.pair.sender.push(ends.ticket.transfer_id, [0, 1], 0)
    await settle()
    endpoint = rig.pair.receiver.endpoint
    await rig.pair.receiver.aclose()
    await eventually(lambda: ends.both_ended)
    assert rig.memory.num_open == 0
    await rig.finish_all()
    rig.pair.receiver = rig.pair.make_receiver("r2")
    await rig.pair.receiver.start(endpoint)
    await rig.pair.sender.connect(endpoint)
    content = fill(rig.memory, 5, seed=5)
    ends = rig.pair.open([9])
    rig.pair.sender.push(ends.ticket.transfer_id, [5], 0)
    rig.pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await settle()
    await rig.finish()
    assert ends.results == ("done", "done")
    assert bytes(rig.pair.target.view(9)) == content
