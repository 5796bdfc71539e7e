"""Sender and receiver over real sockets and a real clock: restarts, cut and black-holed connections, garbage on the port."""

import asyncio
import contextlib
import pickle
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import uvloop
import zmq

from core.clock import monotonic
from core.errors import TransferError
from kvtransfer.config import TransferConfig
from kvtransfer.receiver import KVReceiver
from kvtransfer.zeromq import ZmqTransport
from tests.unit.kvtransfer_helpers import COMMITTED, Ends, Pair, eventually, fill

BLOCK_BYTES = 96 << 10  # above the size that ZeroMQ copies
LONG_S = 60.0  # both ends live in one loop: while it stands still nothing is sent, and neither is to give the other up
REAL = TransferConfig(
    reserve_timeout_s=LONG_S,
    heartbeat_s=0.1,
    connect_timeout_s=LONG_S,
    peer_timeout_s=LONG_S,
    lease_s=2 * LONG_S,
    idle_timeout_s=LONG_S,
    commit_timeout_s=LONG_S,
    drain_timeout_s=1.0,
    reconnect_s=0.01,
    tick_s=0.005,
    window_bytes=4 * BLOCK_BYTES,
)
QUICK = replace(REAL, reserve_timeout_s=5.0, peer_timeout_s=1.5, lease_s=3.0, idle_timeout_s=2.0, commit_timeout_s=5.0)


class Proxy:
    """A TCP relay that can cut its connections, or keep them and pass nothing on."""

    def __init__(self) -> None:
        self.is_black_hole = False
        self.delivered_bytes = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def aclose(self) -> None:
        self.cut()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, there_writer]
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(64 << 10):
                await wait_until(lambda: not self.is_black_hole)
                sink.write(data)
                await sink.drain()
                self.delivered_bytes += len(data)
        sink.transport.abort()


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (any condition, with nothing to set an event)
        await asyncio.sleep(0.002)


@pytest.fixture(params=[False, True], ids=["", "late"])
def is_late(request: pytest.FixtureRequest) -> bool:
    """Whether the sender's memory answers later, as a device does."""
    return bool(request.param)


@pytest.fixture
async def pair(request: pytest.FixtureRequest, is_late: bool) -> AsyncIterator[Pair]:
    """A pair by a real clock, with the config that a test names."""
    transport = ZmqTransport(max_part_bytes=1 << 20)
    config = getattr(request, "param", REAL)
    async with Pair(transport, "tcp://127.0.0.1:0", config, BLOCK_BYTES, clock=monotonic, is_late=is_late) as pair:
        await pair.sender.connect(pair.receiver.endpoint)
        yield pair
    transport.close()


@pytest.fixture
async def proxy(pair: Pair) -> AsyncIterator[Proxy]:
    proxy = Proxy()
    await proxy.start(pair.receiver.endpoint)
    pair.sender.disconnect(pair.receiver.endpoint)
    await eventually(lambda: pair.sender.peers() == [])
    await pair.sender.connect(proxy.endpoint)
    yield proxy
    await proxy.aclose()


def open_through(pair: Pair, proxy: Proxy, num_blocks: int) -> Ends:
    ends = pair.reserve(list(range(num_blocks)))
    pair.sender.open(replace(ends.ticket, endpoint=proxy.endpoint), ends.sent.append)
    return ends


async def finish(pair: Pair, ends: Ends, num_blocks: int) -> tuple[str, str]:
    pair.sender.push(ends.ticket.transfer_id, list(range(num_blocks)), 0)
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await eventually(lambda: ends.both_ended)
    return ends.results


async def restart_receiver(pair: Pair, incarnation: str) -> KVReceiver:
    endpoint = pair.receiver.endpoint
    await pair.receiver.aclose()
    pair.receiver = pair.make_receiver(incarnation)
    async with asyncio.timeout(30):
        while True:
            try:
                await pair.receiver.start(endpoint)
                return pair.receiver
            except TransferError:  # the old listener is still closing
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("pair", [replace(REAL, reserve_timeout_s=0.2)], indirect=True, ids=[""])
async def test_the_timer_alone_frees_what_nobody_used(pair: Pair) -> None:
    ends = pair.reserve([0, 1])
    await eventually(lambda: bool(ends.received))
    assert ends.received[0].result == "expired"


async def test_a_receiver_restarted_twenty_times_on_one_port_serves_the_first_request_after(pair: Pair) -> None:
    for life in range(20):
        ends = pair.open([0])
        await restart_receiver(pair, f"r-{life}")
        await eventually(lambda ends=ends: ends.both_ended)
        await pair.sender.connect(pair.receiver.endpoint)
        fill(pair.source, 3, seed=life)
        assert (await pair.transfer([3], [9])).results == ("done", "done")
        assert pair.target.view(9) == pair.source.view(3)


async def test_a_sender_restarted_twenty_times_serves_the_first_request_after(pair: Pair) -> None:
    for life in range(20):
        pair.open([0])
        await pair.sender.aclose()
        pair.sender = pair.make_sender(f"s-{life}")
        await pair.sender.start()
        await pair.sender.connect(pair.receiver.endpoint)
        assert (await pair.transfer([3], [9])).results == ("done", "done")
    assert len(pair.receiver.peers()) == 1
    await eventually(lambda: pair.receiver.stats.num_inflight == 0)


async def test_one_cut_connection_fails_one_transfer_and_the_pair_recovers(pair: Pair, proxy: Proxy) -> None:
    ends = open_through(pair, proxy, 16)
    pair.sender.push(ends.ticket.transfer_id, list(range(8)), 0)
    await eventually(lambda: proxy.delivered_bytes > 2 * BLOCK_BYTES)
    proxy.cut()
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("failed", "failed")
    await pair.sender.connect(proxy.endpoint)
    for _ in range(50):
        ends = open_through(pair, proxy, 4)
        assert await finish(pair, ends, 4) == ("done", "done")


@pytest.mark.parametrize("pair", [QUICK], indirect=True, ids=[""])
async def test_a_black_hole_is_noticed_and_left_behind(pair: Pair, proxy: Proxy) -> None:
    ends = open_through(pair, proxy, 16)
    content = fill(pair.source, 0, seed=1)
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    await eventually(lambda: bytes(pair.target.view(0)) == content)
    proxy.is_black_hole = True
    pair.sender.push(ends.ticket.transfer_id, list(range(1, 16)), 1)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("failed", "failed")
    proxy.is_black_hole = False
    await pair.sender.connect(proxy.endpoint)
    ends = open_through(pair, proxy, 16)
    assert await finish(pair, ends, 16) == ("done", "done")


@pytest.mark.parametrize("pair", [QUICK], indirect=True, ids=[""])
async def test_blocks_are_held_until_the_socket_lets_go_of_them(pair: Pair, proxy: Proxy) -> None:
    ends = open_through(pair, proxy, 16)
    await eventually(lambda: pair.receiver.peers() != [])
    proxy.is_black_hole = True
    pair.sender.push(ends.ticket.transfer_id, list(range(16)), 0)
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    link = pair.sender._links[proxy.endpoint]
    outgoing = link._outgoing[ends.ticket.transfer_id]
    await eventually(lambda: bool(ends.sent))
    assert all(handle.done for handle in outgoing.handles)
    # What was already on the wire comes late: into blocks that are no longer this transfer's.
    await eventually(lambda: bool(ends.received))
    before = bytes(pair.target.view(15))
    proxy.is_black_hole = False
    await pair.sender.connect(proxy.endpoint)
    ends = open_through(pair, proxy, 1)
    assert await finish(pair, ends, 1) == ("done", "done")
    assert bytes(pair.target.view(15)) == before


async def test_garbage_on_the_port_disturbs_nobody(pair: Pair) -> None:
    host, _, port = pair.receiver.endpoint.removeprefix("tcp://").rpartition(":")
    ends = pair.open(list(range(8)))
    pair.sender.push(ends.ticket.transfer_id, [0, 1, 2, 3], 0)
    huge = b"\xff" + bytes(8) + b"\x01\x7f" + struct.pack("!Q", 2 << 30)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), huge, b"\xff\x00"):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 2000
        stranger.connect(pair.receiver.endpoint)
        messages = [[pickle.dumps(print)], [b""], [b"\0" * 40] * 5, [b"BTKV" + bytes(40)], [bytes(1 << 20)]]
        for message in messages:
            stranger.send_multipart(message)
        await eventually(lambda: pair.receiver.stats.frames_dropped["garbage"] == len(messages))
        stranger.send(bytes((1 << 20) + 1))  # longer than any block: libzmq drops the connection
    pair.sender.push(ends.ticket.transfer_id, [4, 5, 6, 7], 4)
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("done", "done")


async def test_a_sending_burst_loses_nothing_and_queues_no_more_than_the_window(pair: Pair) -> None:
    many = [pair.open([index]) for index in range(32)]
    for index, ends in enumerate(many):
        fill(pair.source, index, seed=index)
        pair.sender.push(ends.ticket.transfer_id, [index], 0)
        pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    connection = pair.sender._links[pair.receiver.endpoint]._connection
    assert connection is not None
    assert connection.in_flight_bytes <= REAL.window_bytes + REAL.max_message_bytes
    await eventually(lambda: all(ends.both_ended for ends in many))
    assert {ends.results for ends in many} == {("done", "done")}
    assert pair.receiver.stats.sequence_gaps == pair.sender.stats.sequence_gaps == 0
    assert all(pair.target.view(index) == pair.source.view(index) for index in range(32))


def test_uvloop_drives_the_same_sockets(is_late: bool) -> None:
    async def transfer() -> tuple[str, str]:
        transport = ZmqTransport()
        async with Pair(transport, "tcp://127.0.0.1:0", block_bytes=BLOCK_BYTES, is_late=is_late) as pair:
            await pair.sender.connect(pair.receiver.endpoint)
            results = [(await pair.transfer(list(range(32)), list(range(32)))).results for _ in range(5)]
        transport.close()
        assert len(set(results)) == 1
        return results[0]

    assert uvloop.run(transfer()) == ("done", "done")
