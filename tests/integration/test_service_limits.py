"""Redis that goes away, rooms that are full, workers that do not match, processes that drain."""

import asyncio
import time

import grpc
import pytest
from grpc import aio

from core.errors import ConfigError
from services.common.options import RouterLimits
from services.common.registry import COMMAND_TIMEOUT_S
from services.common.worker_process import run_worker
from services.router import waiting_room
from tests.integration.conftest import MakeStack
from tests.local_client import collect, generate
from tests.local_stack import Stack
from tests.scripted_parts import BLOCK, CONTEXT, Valkey, eventually, expected, prompt_of


async def ask(stack: Stack, index: int, router: int = 0, **fields: object) -> None:
    """One answer, which must be right."""
    prompt = prompt_of(30, index)
    answered = await stack.routers[router].answer(prompt=prompt, **{"max_tokens": 10, **fields})
    assert answered.tokens == expected(prompt, 10)


def status(error: pytest.ExceptionInfo[aio.AioRpcError]) -> grpc.StatusCode:
    return error.value.code()


async def test_an_outage_of_redis_hurts_nobody(make_stack: MakeStack, own_valkey: Valkey) -> None:
    async with make_stack(own_valkey) as stack:
        stack.decodes[0].gate.close()
        running = [asyncio.create_task(ask(stack, index)) for index in range(5)]
        await eventually(lambda: stack.decodes[0].num_held == 5)
        own_valkey.stop()
        stack.decodes[0].gate.open()
        await asyncio.gather(*running)
        until = time.monotonic() + 6.0  # past the workers' TTL
        durations_s = []
        while time.monotonic() < until:
            started = time.monotonic()
            await ask(stack, int(started * 1000) % 1000, request_id="reused")
            durations_s.append(time.monotonic() - started)
            await asyncio.sleep(0.05)
        # But for the machine itself, which may stand still once or twice.
        assert sorted(durations_s)[-3] < 1.5 * COMMAND_TIMEOUT_S, "one failure, and then no time"
        own_valkey.start()
        await eventually(lambda: len(own_valkey.client.smembers(f"baton:{stack.cluster}:workers")) == 2, 20.0)
        await ask(stack, 1)
        await stack.until_idle()


@pytest.mark.parametrize("damage", ["flush", "one hash", "the set", "script cache"])
async def test_lost_keys_are_written_again(make_stack: MakeStack, own_valkey: Valkey, damage: str) -> None:
    async with make_stack(own_valkey) as stack:
        client, prefix = own_valkey.client, f"baton:{stack.cluster}:"
        hashes = {f"{prefix}worker:{worker.worker_id}" for worker in stack.workers}
        stack.decodes[0].gate.close()
        running = asyncio.create_task(ask(stack, 0))
        await eventually(lambda: stack.decodes[0].gate.is_holding)
        for _ in range(2):
            match damage:
                case "flush":
                    client.flushall()
                case "one hash":
                    client.delete(min(hashes))
                case "the set":
                    client.delete(f"{prefix}workers")
                case "script cache":
                    client.script_flush()

            def is_healed() -> bool:
                assert not stack.router.router.why_unready()  # all along
                return hashes <= set(client.keys(f"{prefix}worker:*")) and len(client.smembers(f"{prefix}workers")) == 2

            await eventually(is_healed, 15.0)
        stack.decodes[0].gate.open()
        await running
        await ask(stack, 1)
        await stack.until_idle()


async def test_an_id_in_flight_is_refused_by_every_router_until_it_ends(make_stack: MakeStack) -> None:
    async with make_stack(routers=2) as stack:
        stack.decodes[0].gate.close()
        first = asyncio.create_task(ask(stack, 0, request_id="same"))
        await eventually(lambda: stack.decodes[0].gate.is_holding)
        for router in (0, 1):
            with pytest.raises(aio.AioRpcError) as refused:
                await ask(stack, 1, router, request_id="same")
            assert status(refused) == grpc.StatusCode.ALREADY_EXISTS
        stack.decodes[0].gate.open()
        await first
        for _ in range(5):
            await ask(stack, 2, request_id="same")
        call = stack.router.stub.Generate(generate(prompt_of(30), request_id="same"))
        await call.read()
        call.cancel()
        await eventually(lambda: stack.router.is_idle)
        await ask(stack, 3, request_id="same")
        await stack.until_idle()
        await ask(stack, 4, 1, request_id="same")
        await stack.until_idle()


async def test_more_than_fits_waits_and_all_end(make_stack: MakeStack) -> None:
    async with make_stack(num_blocks=9, routers=2) as stack:  # three requests of 40 tokens
        await asyncio.gather(*(ask(stack, index, index % 2) for index in range(24)))
        await stack.until_idle()


async def test_small_requests_pass_a_big_one_that_waits(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_room, "PATIENCE_S", 3600.0)
    async with make_stack(num_blocks=16) as stack:
        stack.decodes[0].gate.close()
        holder = asyncio.create_task(ask(stack, 0))
        await eventually(lambda: stack.decodes[0].num_held == 1)
        big = asyncio.create_task(stack.router.answer(prompt=prompt_of(2), max_tokens=CONTEXT - 2))
        await eventually(lambda: stack.router.router.num_queued == 1)
        small = asyncio.create_task(ask(stack, 1))
        await eventually(lambda: stack.decodes[0].num_held == 2)
        stack.decodes[0].gate.open()
        await asyncio.gather(holder, small)
        assert (await big).tokens == expected(prompt_of(2), CONTEXT - 2)
        await stack.until_idle()


async def test_a_full_room_refuses_and_says_when_to_come_back(make_stack: MakeStack) -> None:
    async with make_stack(num_blocks=3, limits=RouterLimits(max_queued=2, max_queue_s=3.0)) as stack:
        stack.decodes[0].gate.close()
        holder = asyncio.create_task(ask(stack, 0))
        await eventually(lambda: stack.decodes[0].num_held == 1)
        waiting = [asyncio.create_task(ask(stack, index)) for index in (1, 2)]
        await eventually(lambda: stack.router.router.num_queued == 2)
        with pytest.raises(aio.AioRpcError) as refused:
            await ask(stack, 3)
        assert status(refused) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(refused.value.trailing_metadata())["retry-after-ms"]) > 0
        for task in waiting:  # their turn never comes
            with pytest.raises(aio.AioRpcError) as late:
                await task
            assert status(late) == grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(aio.AioRpcError) as never:
            await stack.router.answer(prompt=prompt_of(40), max_tokens=10)
        assert status(never) == grpc.StatusCode.INVALID_ARGUMENT
        stack.decodes[0].gate.open()
        await holder
        await stack.until_idle()


@pytest.mark.parametrize(
    ("block_tokens", "changes", "values"),
    [
        (2 * BLOCK, {}, ("block_tokens", "16", "32")),
        (BLOCK, {"dtype": "bfloat16"}, ("dtype", "float32", "bfloat16")),
        (BLOCK, {"weights_hash": "other"}, ("weights_hash", "w here", "other")),
        (BLOCK, {"model": "other"}, ("model", "scripted", "other")),
    ],
)
async def test_workers_of_another_kind_are_never_paired(
    make_stack: MakeStack,
    caplog: pytest.LogCaptureFixture,
    block_tokens: int,
    changes: dict[str, str],
    values: tuple[str, ...],
) -> None:
    async with make_stack(prefills=0) as stack:
        await stack.start_worker("prefill", block_tokens=block_tokens, changes=changes)
        await eventually(lambda: "is refused" in caplog.text)
        message = next(record.getMessage() for record in caplog.records if "is refused" in record.getMessage())
        assert all(value in message for value in values), message
        with pytest.raises(aio.AioRpcError) as refused:
            await ask(stack, 0)
        assert status(refused) == grpc.StatusCode.UNAVAILABLE
        assert stack.router.router.why_unready()
        assert stack.decodes[0].is_idle
        await stack.start_worker("prefill")
        await stack.until_ready()
        await ask(stack, 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_draining_worker_finishes_and_takes_nothing_new(make_stack: MakeStack, role: str) -> None:
    async with make_stack(prefills=2, decodes=2) as stack:
        workers = stack.prefills if role == "prefill" else stack.decodes
        for worker in workers:
            worker.gate.close()
        running = [asyncio.create_task(ask(stack, index)) for index in range(6)]
        await eventually(lambda: sum(worker.num_held for worker in workers) == 6)
        leaving = workers[0]
        assert leaving.num_held
        draining = asyncio.create_task(leaving.drain())
        await eventually(lambda: any(worker.state == "draining" for worker in stack.router.router.fleet))
        held = leaving.num_held
        running += [asyncio.create_task(ask(stack, 10 + index)) for index in range(4)]
        await eventually(lambda: sum(worker.num_held for worker in workers) == 10)
        assert leaving.num_held == held
        assert not draining.done()
        for worker in workers:
            worker.gate.open()
        await asyncio.gather(*running)
        async with asyncio.timeout(30):
            await draining
        await ask(stack, 20)
        await stack.until_idle()


async def test_a_draining_router_finishes_and_takes_nothing_new(stack: Stack) -> None:
    stack.decodes[0].gate.close()
    running = asyncio.create_task(ask(stack, 0))
    await eventually(lambda: stack.decodes[0].gate.is_holding)
    draining = asyncio.create_task(stack.router.router.drain(10.0))
    await eventually(lambda: stack.router.router.is_draining)
    with pytest.raises(aio.AioRpcError) as refused:
        await ask(stack, 1)
    assert status(refused) == grpc.StatusCode.UNAVAILABLE
    assert not draining.done()
    stack.decodes[0].gate.open()
    await asyncio.gather(running, draining)
    assert not stack.request_keys()


async def test_a_router_that_stops_waiting_ends_queued_and_running_requests(make_stack: MakeStack) -> None:
    async with make_stack(num_blocks=3) as stack:
        stack.decodes[0].gate.close()
        calls = [stack.router.stub.Generate(generate(prompt_of(30), max_tokens=10)) for _ in range(2)]
        await eventually(lambda: stack.decodes[0].num_held == 1 and stack.router.router.num_queued == 1)
        await stack.router.router.drain(0.1)
        for call in calls:
            with pytest.raises(aio.AioRpcError) as ended:
                await collect(call)
            assert status(ended) == grpc.StatusCode.UNAVAILABLE
        stack.decodes[0].gate.open()
        await stack.until_idle()


async def test_a_worker_that_cannot_be_built_says_so_and_ends(shared_valkey: Valkey) -> None:
    stack = Stack(shared_valkey, lambda: pytest.fail("no transport"), lambda: "", None)  # type: ignore[arg-type]

    async def build(*_: object) -> None:
        await asyncio.sleep(0)
        raise ConfigError("no such model")

    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup) as failed:
            await run_worker("decode", stack.options(), stack.registry(), build, asyncio.Event(), print)  # type: ignore[arg-type]
    assert failed.group_contains(ConfigError, match="no such model")
