"""What every transport owes KV transfer, run over each of them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from core.errors import TransferError
from kvtransfer.inproc import InprocTransport
from kvtransfer.transport import Part, PeerUnreachableError, SendHandle, Socket, Transport, TransportFullError
from kvtransfer.zeromq import ZmqTransport

_WITHIN_S = 20.0


@dataclass
class Kit:
    transport: Transport
    address: str  # free port or name
    capacity: int

    def unused_address(self) -> str:
        """Where nobody listens or ever did."""
        if not self.address.startswith("tcp"):
            return self.address.replace("*", "unused")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    async def listen(self, endpoint: str) -> Socket:
        """Bind, also to an address that was in use a moment ago."""
        async with asyncio.timeout(_WITHIN_S):
            while True:
                try:
                    return self.transport.bind(endpoint)
                except TransferError:
                    await asyncio.sleep(0.01)


@pytest.fixture(params=["inproc", "tcp", "ipc"])
async def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kit]:
    if request.param == "inproc":
        yield Kit(InprocTransport(capacity=10), "inproc://*", 10)
        return
    transport = ZmqTransport(max_part_bytes=1 << 20, high_water_mark=10)
    address = "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path_factory.mktemp('t')}/s"
    yield Kit(transport, address, 10)
    transport.close()


async def send(sender: Socket, parts: list[Part], peer: bytes = b"") -> SendHandle:
    """Send as soon as there is a connection and room."""
    async with asyncio.timeout(_WITHIN_S):
        while True:
            try:
                return sender.send(peer, parts)
            except TransportFullError:
                await asyncio.sleep(0.005)


def send_until_full(sender: Socket, peer: bytes, part_bytes: int) -> list[SendHandle]:
    """Send numbered messages until one is refused; the handles of those that were taken."""
    handles: list[SendHandle] = []
    for number in range(100_000):
        try:
            handles.append(sender.send(peer, [b"%d" % number, bytes(part_bytes)]))
        except TransportFullError:
            return handles
    raise AssertionError("the transport takes messages without limit")


async def receive(receiver: Socket) -> tuple[bytes, list[bytes]]:
    async with asyncio.timeout(_WITHIN_S):
        peer, parts = await receiver.recv()
    return peer, [bytes(part) for part in parts]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not condition():  # noqa: ASYNC110 (any condition, with nothing to set an event)
            await asyncio.sleep(0.005)


async def test_a_message_arrives_whole_and_can_be_answered(kit: Kit) -> None:
    listener = kit.transport.bind(kit.address)
    connection = kit.transport.connect(listener.endpoint)
    large = bytes(range(256)) * 1024  # above the size that ZeroMQ copies
    await send(connection, [b"head", b"", large, memoryview(large)[5:9]])
    peer, parts = await receive(listener)
    assert parts == [b"head", b"", large, large[5:9]]
    await send(listener, [b"answer"], peer)
    assert await receive(connection) == (b"", [b"answer"])
    connection.close()
    listener.close()


async def test_order_holds_and_peers_are_told_apart(kit: Kit) -> None:
    listener = kit.transport.bind(kit.address)
    connections = [kit.transport.connect(listener.endpoint) for _ in range(3)]
    got: dict[bytes, list[bytes]] = {}
    for number in range(30):
        for index, connection in enumerate(connections):
            await send(connection, [b"%d" % index, b"%d" % number])
        for _ in connections:
            peer, (index_part, number_part) = await receive(listener)
            got.setdefault(peer + index_part, []).append(number_part)
    assert list(got.values()) == [[b"%d" % number for number in range(30)]] * 3
    for end in (*connections, listener):
        end.close()


async def test_a_buffer_may_change_once_the_handle_says_so(kit: Kit) -> None:
    listener = kit.transport.bind(kit.address)
    connection = kit.transport.connect(listener.endpoint)
    await send(connection, [b"hello"])
    await receive(listener)
    buffers = [bytearray(b"a" * (512 << 10)) for _ in range(8)]
    handles = [connection.send(b"", [b"head", memoryview(buffer), b"tail"]) for buffer in buffers]
    for buffer, handle in zip(buffers, handles, strict=True):
        if handle.done:
            buffer[:] = b"b" * len(buffer)
    for _ in buffers:
        assert (await receive(listener))[1] == [b"head", b"a" * (512 << 10), b"tail"]
    await until(lambda: all(handle.done for handle in handles))
    connection.close()
    listener.close()


async def test_closing_a_connection_lets_go_of_unsent_buffers(kit: Kit) -> None:
    listener = kit.transport.bind(kit.address)
    connection = kit.transport.connect(listener.endpoint)
    await send(connection, [b"hello"])
    await receive(listener)
    handles = send_until_full(connection, b"", 512 << 10)
    connection.close()
    await until(lambda: all(handle.done for handle in handles))
    listener.close()


async def test_a_listener_that_does_not_exist_yet_is_waited_for(kit: Kit) -> None:
    endpoint = kit.unused_address()
    connection = kit.transport.connect(endpoint)
    with pytest.raises(TransportFullError):
        connection.send(b"", [b"too early"])
    listener = await kit.listen(endpoint)
    await send(connection, [b"now"])
    assert (await receive(listener))[1] == [b"now"]
    connection.close()
    listener.close()


async def test_a_restarted_listener_is_found_again_twenty_times(kit: Kit) -> None:
    listener = kit.transport.bind(kit.address)
    endpoint = listener.endpoint
    for life in range(20):
        connection = kit.transport.connect(endpoint)
        await send(connection, [b"%d" % life])
        peer, parts = await receive(listener)
        assert parts == [b"%d" % life]
        await send(listener, [b"ok"], peer)
        assert (await receive(connection))[1] == [b"ok"]
        listener.close()
        listener = await kit.listen(endpoint)
        connection.close()
    listener.close()


async def test_a_full_queue_refuses_and_loses_nothing(kit: Kit) -> None:
    listener = kit.transport.bind(kit.address)
    connection = kit.transport.connect(listener.endpoint)
    await send(connection, [b"hello"])
    peer, _ = await receive(listener)
    taken = len(send_until_full(listener, peer, 32 << 10))
    assert taken >= kit.capacity
    for number in range(taken):
        assert (await receive(connection))[1][0] == b"%d" % number
    await send(listener, [b"again"], peer)
    assert (await receive(connection))[1] == [b"again"]
    connection.close()
    listener.close()


async def test_one_full_peer_does_not_hold_up_another(kit: Kit) -> None:
    listener = kit.transport.bind(kit.address)
    slow, quick = (kit.transport.connect(listener.endpoint) for _ in range(2))
    await send(slow, [b"hello"])
    slow_peer, _ = await receive(listener)
    await send(quick, [b"hello"])
    quick_peer, _ = await receive(listener)
    send_until_full(listener, slow_peer, 32 << 10)
    listener.send(quick_peer, [b"through"])
    assert (await receive(quick))[1] == [b"through"]
    for end in (slow, quick, listener):
        end.close()


async def test_a_peer_that_left_is_an_error_not_a_silent_loss(kit: Kit) -> None:
    listener = kit.transport.bind(kit.address)
    connection = kit.transport.connect(listener.endpoint)
    await send(connection, [b"hello"])
    peer, _ = await receive(listener)
    connection.close()

    def is_gone() -> bool:
        try:
            listener.send(peer, [b"anyone?"])
        except PeerUnreachableError:
            return True
        return False

    await until(is_gone)
    with pytest.raises(PeerUnreachableError):
        listener.send(b"never-seen", [b"anyone?"])
    listener.close()


async def test_an_address_in_use_is_refused_by_name(kit: Kit) -> None:
    if kit.address.startswith("ipc"):
        pytest.skip("a second listener on an ipc path takes it over: that is how a restarted process gets it back")
    listener = kit.transport.bind(kit.address)
    with pytest.raises(TransferError, match=listener.endpoint):
        kit.transport.bind(listener.endpoint)
    listener.close()
