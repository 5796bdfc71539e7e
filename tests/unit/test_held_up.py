"""A process whose own event loop was held up does not take its peers for dead."""

import asyncio
import time

import pytest

from core.layout import Fingerprint
from kvtransfer.callbacks import HELD_UP_S, every
from services.common.registry import Capacity, WorkerRecord
from services.router.fleet import SILENT_TURNS, RemoteWorker
from tests.eventually import eventually

RECORD = WorkerRecord(
    worker_id="decode@127.0.0.1:9",
    role="decode",
    incarnation="life",
    state="ready",
    endpoint="127.0.0.1:9",
    http_endpoint="127.0.0.1:10",
    fingerprint=Fingerprint(
        model="m",
        revision="",
        weights_hash="",
        dtype="float32",
        kv_dtype="float32",
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        block_tokens=16,
    ),
    capacity=Capacity(total_blocks=1, max_sequences=1, max_model_len=1, vocab_size=1),
)


async def test_a_router_that_was_held_up_waits_for_what_came_meanwhile() -> None:
    worker = RemoteWorker(RECORD)
    watch = asyncio.create_task(worker.watch_silence(0.06))
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251 (this is the hold-up: the loop does nothing for several silences)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not watch.done()
    for _ in range(2 * SILENT_TURNS):  # it speaks again: nobody is lost
        worker.has_spoken = True
        await asyncio.sleep(0.005)
    assert not watch.done()
    with pytest.raises(TimeoutError):  # and then says nothing at all
        await asyncio.wait_for(watch, timeout=30)
    await worker.channel.close(grace=None)


async def test_a_kv_end_that_was_held_up_reads_before_it_judges() -> None:
    order: list[str] = []
    timer = asyncio.create_task(every(0.01, lambda: order.append("deadlines")))
    await asyncio.sleep(0)
    time.sleep(HELD_UP_S + 0.1)  # noqa: ASYNC251 (the hold-up)
    asyncio.get_running_loop().call_later(0.001, order.append, "frames")  # what a reader finds once the loop turns
    await eventually(lambda: len(order) >= 2)
    timer.cancel()
    assert order[:2] == ["frames", "deadlines"]
