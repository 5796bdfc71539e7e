"""Sender and receiver together, in process and over ZeroMQ: the happy path and every rule of the protocol."""

from collections.abc import AsyncIterator

import pytest

from kvtransfer.inproc import InprocTransport
from kvtransfer.transport import Transport
from kvtransfer.zeromq import ZmqTransport
from tests.unit.kvtransfer_helpers import COMMITTED, Pair, eventually, fill


@pytest.fixture(params=["inproc", "tcp", "ipc", "late inproc", "late tcp"])
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    transport: Transport
    memory, _, kind = request.param.rpartition(" ")
    is_late = memory == "late"
    if kind == "inproc":
        async with Pair(InprocTransport(), is_late=is_late) as pair:
            yield pair
        return
    bind = "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{tmp_path_factory.mktemp('kv')}/s"
    transport = ZmqTransport()
    try:
        # Blocks above ZeroMQ's copy threshold: the path without a copy is the one under test.
        async with Pair(transport, bind, block_bytes=96 << 10, is_late=is_late) as pair:
            yield pair
    finally:
        transport.close()


async def test_blocks_arrive_in_the_ticket_order_whatever_their_numbers(pair: Pair) -> None:
    await pair.sender.connect(pair.receiver.endpoint)
    content = [fill(pair.source, block, seed=block) for block in (5, 3, 9, 0, 31)]
    ends = await pair.transfer([5, 3, 9, 0, 31], [7, 30, 1, 2, 4])
    assert ends.results == ("done", "done")
    assert ends.committed == [COMMITTED]
    assert [bytes(pair.target.view(block)) for block in (7, 30, 1, 2, 4)] == content
    assert ends.sent[0].num_bytes == ends.received[0].num_bytes == 5 * pair.block_bytes


async def test_chunks_move_while_the_next_one_is_computed(pair: Pair) -> None:
    ends = pair.open(list(range(10)))
    for chunk in range(5):
        blocks = [2 * chunk, 2 * chunk + 1]
        content = [fill(pair.source, block, seed=block) for block in blocks]
        pair.sender.push(ends.ticket.transfer_id, blocks, 2 * chunk)
        await eventually(lambda content=content, b=blocks: [bytes(pair.target.view(x)) for x in b] == content)
    assert not ends.received
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("done", "done")


async def test_nothing_to_send_still_completes_the_protocol(pair: Pair) -> None:
    ends = await pair.transfer([], [])
    assert ends.results == ("done", "done")
    assert ends.committed == [COMMITTED]
    assert pair.sender.stats.leases_expired == 0
