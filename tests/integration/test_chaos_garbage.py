"""Garbage on every listening port, and connections that die in silence: nothing is executed, nothing dies."""

import asyncio
import os
import pickle
import random
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from core.layout import PROTOCOL_VERSION
from kvtransfer.frames import MAGIC, Hello, HelloRefused, encode_control
from kvtransfer.frames import decode as decode_frame
from services.common.registry import Registry
from tests.chaos import Cluster, Node, ask_once
from tests.eventually import eventually_async
from tests.scripted_parts import fingerprint

pytestmark = [pytest.mark.xdist_group("chaos"), pytest.mark.timeout(120)]


class Exploit:
    """Unpickled, it creates a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._marker}",)


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("garbage"), step_ms=1.0) as cluster:
        yield cluster


@pytest.fixture
async def cluster(shared_cluster: Cluster) -> Cluster:
    if not shared_cluster.nodes:
        await shared_cluster.start("router", "prefill", "decode")
    await shared_cluster.settled()
    return shared_cluster


def garbage(marker: Path) -> list[bytes]:
    """Payloads that have broken servers before."""
    rng = random.Random(5)
    exploit = pickle.dumps(Exploit(marker))
    zmtp = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL" + bytes(16) + b"\x00" + bytes(31)
    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    return [
        b"",
        b"\x00",
        rng.randbytes(64),
        rng.randbytes(100_000),
        exploit,
        struct.pack("!I", len(exploit)) + exploit,
        b"\xff" * 4096,
        http2 + b"\xff\xff\xff\x00\x00\x00\x00\x00\x00",  # a frame of 16 MiB that never comes
        http2 + rng.randbytes(4096),
        zmtp + b"\x02" + struct.pack("!Q", 2**63 - 1),  # a message of 8 EiB
        zmtp + b"\x00" + b"\xff" + exploit,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"*1000000000\r\n$5\r\n",
    ]


async def throw(endpoint: str, payload: bytes) -> None:
    """Send bytes and go away, whether or not the other end liked them."""
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with suppress(OSError):
        writer.write(payload)
        await writer.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await reader.read(1 << 16)
    writer.close()


async def kv_endpoint(cluster: Cluster) -> str:
    registry = Registry.from_url(cluster.valkey.url)
    records = await registry.workers()
    await registry.aclose()
    (endpoint,) = [record.kv_endpoint for record in records if record.kv_endpoint]
    return endpoint


async def everything_is_as_before(cluster: Cluster, marker: Path) -> None:
    outcome = await ask_once(cluster.of("router")[0], seed=99)
    assert outcome.is_answered, outcome.details
    for node in cluster.nodes:
        assert (await node.get("/healthz")).status_code == 200, node.role
    assert not await asyncio.to_thread(marker.exists), "a payload was executed"
    await cluster.blocks_return()


async def test_random_bytes_on_every_port(cluster: Cluster, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    kv = (await kv_endpoint(cluster)).removeprefix("tcp://")
    endpoints = [kv, *(address for node in cluster.nodes for address in node.endpoints.values())]
    assert len(endpoints) == 7
    throws = [throw(endpoint, payload) for endpoint in endpoints for payload in garbage(marker)]
    canaries = [ask_once(cluster.of("router")[0], seed) for seed in range(5)]
    outcomes = await asyncio.gather(*canaries, *throws)
    assert all(outcome is None or outcome.is_answered for outcome in outcomes)
    await everything_is_as_before(cluster, marker)


async def dropped(decode: Node) -> float:
    return await decode.metric("baton_kv_frames_dropped_total")


async def test_garbage_in_well_formed_messages_on_the_kv_socket(cluster: Cluster, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    (decode,) = cluster.of("decode")
    before = await dropped(decode)
    exploit = pickle.dumps(Exploit(marker))
    hello = {"type": "hello", "name": "", "incarnation": "x", "fingerprint": {"model": "another"}}
    messages: list[list[bytes]] = [
        [b""],
        [exploit],
        [exploit, exploit],
        [bytes(8)],
        [b"\xff" * 64, b"\xff" * 64],
        [random.Random(1).randbytes(200)] * 3,
        [msgspec.msgpack.encode(hello)],
        [msgspec.msgpack.encode({"type": "commit"})],
        [b"\xdd\xff\xff\xff\xff"],  # a msgpack list of four billion
        [b"\x81" * 50_000],  # nested without end
        [b"x" * 1_000_000],
        [bytes(32), *[b"y" * 100_000] * 5],
        [b"z"] * 500,
    ]
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(await kv_endpoint(cluster))
    for message in messages:
        await socket.send_multipart(message)

    async def all_counted() -> bool:
        return await dropped(decode) >= before + len(messages)

    await eventually_async(all_counted, what="every frame dropped and counted")
    socket.close()
    context.term()
    await everything_is_as_before(cluster, marker)


async def test_another_protocol_version_is_refused_on_the_wire_and_by_the_fingerprint(
    cluster: Cluster, tmp_path: Path
) -> None:
    (decode,) = cluster.of("decode")
    before = await dropped(decode)
    newer = asdict(fingerprint(protocol_version=PROTOCOL_VERSION + 1))
    (hello,) = encode_control(Hello("", "new", newer), 0)
    other_wire = bytearray(hello)
    other_wire[len(MAGIC)] += 1  # the version follows the magic
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(await kv_endpoint(cluster))
    await socket.send(bytes(other_wire))
    await socket.send(hello)
    async with asyncio.timeout(30):
        _, refusal = decode_frame(await socket.recv_multipart(), 1 << 16)
    assert isinstance(refusal, HelloRefused)
    assert f"protocol_version: {PROTOCOL_VERSION} here, {PROTOCOL_VERSION + 1} there" in refusal.reason
    assert await decode.metric("baton_kv_frames_dropped_total", reason="refused_hello") > 0
    assert await dropped(decode) >= before + 2
    socket.close()
    context.term()
    await everything_is_as_before(cluster, tmp_path / "never")


async def test_a_pickle_in_redis_is_only_a_record_that_cannot_be_read(cluster: Cluster, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    registry = Registry.from_url(cluster.valkey.url)
    client = registry._client
    await client.sadd("baton:default:workers", "evil")
    fields = ("role", "incarnation", "state", "endpoint", "http_endpoint", "kv_endpoint", "fingerprint", "capacity")
    payload = pickle.dumps(Exploit(marker), protocol=0).decode()
    await client.hset("baton:default:worker:evil", mapping=dict.fromkeys(fields, payload))
    await everything_is_as_before(cluster, marker)
    assert len(await registry.workers()) == 2
    await client.delete("baton:default:worker:evil")
    await registry.aclose()
