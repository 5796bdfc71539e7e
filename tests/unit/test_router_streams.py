"""A worker's side of the Attach streams: one message per step and router, a heartbeat, one end."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from baton.v1 import worker_pb2
from services.common import router_streams
from services.common.router_streams import RouterStreams
from tests.eventually import eventually

Stream = AsyncGenerator[worker_pb2.StepBatch, None]


def update(name: str) -> worker_pb2.SequenceUpdate:
    return worker_pb2.SequenceUpdate(sequence_id=name)


class Worker:
    """Streams whose load counts the messages, and the routers it was told have left."""

    def __init__(self, heartbeat_s: float = 60.0) -> None:
        self.num_messages = 0
        self.left: list[str] = []
        self.streams = RouterStreams(self._load, self.left.append, heartbeat_s)

    def _load(self) -> worker_pb2.Load:
        self.num_messages += 1
        return worker_pb2.Load(running=self.num_messages)


async def read(stream: Stream) -> list[str]:
    async with asyncio.timeout(30):
        return [one.sequence_id for one in (await anext(stream)).updates]


async def test_the_first_message_comes_at_once_and_carries_the_load() -> None:
    worker = Worker()
    stream = worker.streams.attach("r")
    assert not worker.streams.is_attached("r")
    async with asyncio.timeout(30):
        first = await anext(stream)
    assert (first.load.running, list(first.updates)) == (1, [])
    assert worker.streams.is_attached("r")
    await stream.aclose()
    assert worker.left == ["r"]
    assert not worker.streams.is_attached("r")


async def test_what_gathers_while_a_message_leaves_goes_in_one_message_in_order() -> None:
    worker = Worker()
    stream = worker.streams.attach("r")
    await read(stream)
    worker.streams.publish("r", [update("a"), update("b")])
    worker.streams.publish("r", [update("c")])
    assert await read(stream) == ["a", "b", "c"]
    assert worker.num_messages == 2
    await stream.aclose()


async def test_each_router_gets_its_own_updates_only() -> None:
    worker = Worker()
    streams = {name: worker.streams.attach(name) for name in ("r1", "r2")}
    for stream in streams.values():
        await read(stream)
    worker.streams.publish("r1", [update("a")])
    worker.streams.publish("r2", [update("b")])
    worker.streams.publish("gone", [update("c")])
    assert await read(streams["r2"]) == ["b"]
    assert await read(streams["r1"]) == ["a"]
    for stream in streams.values():
        await stream.aclose()
    assert sorted(worker.left) == ["r1", "r2"]


async def test_silence_is_broken_by_a_heartbeat_and_an_announcement() -> None:
    worker = Worker(heartbeat_s=0.01)
    stream = worker.streams.attach("r")
    for _ in range(3):
        assert await read(stream) == []
    await stream.aclose()
    quiet = Worker()
    stream = quiet.streams.attach("r")
    await read(stream)
    quiet.streams.announce()
    assert await read(stream) == []
    await stream.aclose()


async def test_a_newer_stream_of_the_same_router_ends_the_older_one_and_its_requests_once() -> None:
    worker = Worker()
    older = worker.streams.attach("r")
    await read(older)
    worker.streams.publish("r", [update("old")])
    newer = worker.streams.attach("r")
    await read(newer)
    assert worker.left == ["r"], "what ran for the older stream ends with it"
    worker.streams.publish("r", [update("new")])
    assert await read(newer) == ["new"]
    assert await read(older) == ["old"], "what was queued still leaves"
    with pytest.raises(StopAsyncIteration):
        await read(older)
    assert worker.streams.is_attached("r"), "the older one's end is not the newer one's"
    assert worker.left == ["r"]
    await newer.aclose()
    assert worker.left == ["r", "r"]


async def test_a_router_that_does_not_read_is_detached_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_streams, "MAX_PENDING_UPDATES", 10)
    worker = Worker()
    stream = worker.streams.attach("r")
    await read(stream)
    worker.streams.publish("r", [update("a")] * 10)
    assert worker.left == []
    worker.streams.publish("r", [update("b")])
    assert worker.left == ["r"]
    worker.streams.publish("r", [update("lost")])
    with pytest.raises(StopAsyncIteration):
        await read(stream)
    assert worker.left == ["r"]


async def test_a_stream_cancelled_while_it_waits_detaches_once() -> None:
    worker = Worker()

    async def serve() -> None:
        stream = worker.streams.attach("r")
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()

    task = asyncio.create_task(serve())
    await eventually(lambda: worker.streams.is_attached("r"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert worker.left == ["r"]


async def test_close_ends_every_stream_after_what_is_queued() -> None:
    worker = Worker()
    stream = worker.streams.attach("r")
    await read(stream)
    worker.streams.publish("r", [update("last")])
    worker.streams.close()
    assert await read(stream) == ["last"]
    with pytest.raises(StopAsyncIteration):
        await read(stream)
    assert worker.left == ["r"]
