"""Whoever ends a request, in whatever phase: both pools, the engines, the router and Redis are as before."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from grpc import aio

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from services.common.options import RouterLimits
from tests.integration.conftest import MakeStack
from tests.local_client import collect, generate
from tests.local_stack import Stack
from tests.scripted_parts import CONTEXT, eventually, expected, prompt_of

PROMPT = prompt_of(100)  # four chunks of 32 tokens
TIMES = 50

Reach = Callable[[Stack, Callable[..., Any]], Awaitable[Any]]


def close_gates(stack: Stack) -> None:
    for worker in stack.workers:
        worker.gate.close()


def let_go(stack: Stack) -> None:
    for worker in stack.workers:
        worker.transport.release()
        worker.gate.open()


# A phase must be reached before the deadline strikes; how long that takes depends on the machine.
DEADLINES_S = (0.5, 2.0, 8.0, 30.0)


async def soon(condition: Callable[[], bool]) -> None:
    """As `eventually`, without letting a moment pass unseen."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (the states looked for last for one turn of the loop)
            await asyncio.sleep(0)


async def queued(stack: Stack, start: Callable[..., Any]) -> Any:
    """No room: another request holds every block."""
    stack.decodes[0].gate.close()
    blocker = stack.router.stub.Generate(generate(prompt_of(3), max_tokens=CONTEXT - 3))
    await blocker.read()
    call = start()
    await soon(lambda: stack.router.router.num_queued == 1)
    asyncio.get_running_loop().call_later(0.6, blocker.cancel)
    return call


async def sent_to_decode(stack: Stack, start: Callable[..., Any]) -> Any:
    close_gates(stack)
    call = start()
    await soon(lambda: any(worker.inflight for worker in stack.router.router.fleet))
    return call


async def reserved(stack: Stack, start: Callable[..., Any]) -> Any:
    close_gates(stack)
    call = start()
    await soon(lambda: stack.decodes[0].num_held == 1)
    return call


async def sent_to_prefill(stack: Stack, start: Callable[..., Any]) -> Any:
    close_gates(stack)
    call = start()
    await soon(lambda: stack.prefills[0].num_held == 1)
    return call


def chunk(number: int) -> Reach:
    async def in_chunk(stack: Stack, start: Callable[..., Any]) -> Any:
        close_gates(stack)
        call = start()
        for _ in range(number):
            await soon(lambda: stack.prefills[0].gate.is_holding)
            stack.prefills[0].gate.allow()
        await soon(lambda: stack.prefills[0].gate.is_holding)
        return call

    return in_chunk


async def transferring(stack: Stack, start: Callable[..., Any]) -> Any:
    call = await chunk(2)(stack, start)
    stack.prefills[0].transport.mode = "hold"
    stack.prefills[0].gate.open()
    await call.read()  # the first token comes before the transfer ends
    assert stack.prefills[0].transport.num_held
    return call


async def committed(stack: Stack, start: Callable[..., Any]) -> Any:
    call = await chunk(2)(stack, start)
    stack.decodes[0].transport.mode = "hold"  # its DONE does not arrive
    stack.prefills[0].gate.open()
    await soon(lambda: stack.decodes[0].gate.is_holding)
    return call


async def decoding(stack: Stack, start: Callable[..., Any]) -> Any:
    stack.decodes[0].gate.close()
    call = start()
    for _ in range(3):
        await call.read()
        stack.decodes[0].gate.allow()
    await soon(lambda: stack.decodes[0].gate.is_holding)
    return call


PHASES: dict[str, Reach] = {
    "queued": queued,
    "sent to decode": sent_to_decode,
    "reserved": reserved,
    "sent to prefill": sent_to_prefill,
    "first chunk": chunk(0),
    "second chunk": chunk(1),
    "third chunk": chunk(2),
    "last chunk": chunk(3),
    "transferring": transferring,
    "committed": committed,
    "decoding": decoding,
}
phases = pytest.mark.parametrize("phase", PHASES)


@pytest.fixture
async def stack(make_stack: MakeStack) -> AsyncIterator[Stack]:
    async with make_stack(num_blocks=16) as running:  # one request of the whole context
        yield running


async def require_canary(stack: Stack) -> None:
    answered = await stack.router.answer(prompt=PROMPT)
    assert answered.tokens == expected(PROMPT, 8)
    await stack.until_idle()


@phases
async def test_a_client_that_leaves_frees_everything(stack: Stack, phase: str) -> None:
    for index in range(TIMES):  # each with a new prompt: one whose blocks are cached has fewer chunks
        request = generate(prompt_of(100, index), max_tokens=100)
        call = await PHASES[phase](stack, lambda request=request: stack.router.stub.Generate(request))
        call.cancel()
        if phase == "queued":
            await eventually(lambda: stack.router.router.num_queued == 0)
            stack.decodes[0].gate.open()
        let_go(stack)
        await eventually(lambda: all(worker.is_idle for worker in stack.workers) and stack.router.is_idle, 20.0)
    await stack.until_idle()
    await require_canary(stack)


async def test_an_abort_that_comes_before_its_sequence_tells_routers_that_the_room_is_free(stack: Stack) -> None:
    """A router counts the blocks of what it has sent until the worker's next report, up to a heartbeat later."""
    host = stack.decodes[0].host
    assert host is not None
    host.streams._heartbeat_s = 600.0
    async with asyncio.timeout(30.0), aclosing(host.streams.attach("another router")) as reports:
        await anext(reports)
        host.abort(["not there yet"])
        assert (await anext(reports)).load.free_blocks == 16


@phases
async def test_an_abort_ends_the_stream_and_frees_everything(stack: Stack, phase: str) -> None:
    call = await PHASES[phase](
        stack, lambda: stack.router.stub.Generate(generate(PROMPT, max_tokens=100, request_id="r"))
    )
    reply = await stack.router.stub.Abort(pb.AbortRequest(request_id="r"))
    assert reply.found
    answered = await collect(call)
    assert answered.finish == "abort"
    assert answered.done is not None
    timings = answered.done.timings
    parts = [getattr(timings, field.name) for field in timings.DESCRIPTOR.fields if field.number <= 8]
    assert min(parts) >= 0, timings
    assert sum(parts) == pytest.approx(timings.e2e_ms, rel=0.02)
    let_go(stack)
    await require_canary(stack)
    assert not (await stack.router.stub.Abort(pb.AbortRequest(request_id="r"))).found


async def reach_in_time(stack: Stack, phase: str, start: Callable[[], Any]) -> Any:
    """The call in that phase; None where its deadline was sooner."""
    calls: list[Any] = []

    def start_one() -> Any:
        calls.append(start())
        return calls[0]

    reaching = asyncio.create_task(PHASES[phase](stack, start_one))
    while not reaching.done() and not (calls and calls[0].done()):  # noqa: ASYNC110 (as in `soon`)
        await asyncio.sleep(0)
    if calls and calls[0].done():
        reaching.cancel()
        await asyncio.wait([reaching])
        return None
    return await reaching


@phases
async def test_a_deadline_frees_everything(stack: Stack, phase: str) -> None:
    for timeout_s in DEADLINES_S:
        request = generate(prompt_of(100, int(timeout_s)), max_tokens=100)
        call = await reach_in_time(
            stack, phase, lambda r=request, t=timeout_s: stack.router.stub.Generate(r, timeout=t)
        )
        if call is not None:
            assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        let_go(stack)
        await stack.until_idle()
        if call is not None:
            break
    else:
        pytest.fail(f"{phase} was never reached in time")
    await require_canary(stack)


@phases
async def test_the_routers_own_deadline_has_the_same_status(make_stack: MakeStack, phase: str) -> None:
    for timeout_s in DEADLINES_S:
        async with make_stack(num_blocks=16, limits=RouterLimits(request_timeout_s=timeout_s)) as stack:
            call = await reach_in_time(
                stack, phase, lambda stack=stack: stack.router.stub.Generate(generate(PROMPT, max_tokens=100))
            )
            if call is not None:
                with pytest.raises(aio.AioRpcError) as late:
                    await collect(call)
                assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            let_go(stack)
            await stack.until_idle()
            if call is not None:
                return
    pytest.fail(f"{phase} was never reached in time")


async def test_cancels_at_any_moment(make_stack: MakeStack) -> None:
    async with make_stack() as stack:
        for worker in stack.workers:
            worker.engine.runner.step_s = 0.001
        generator = random.Random(7)

        async def one(index: int) -> None:
            prompt = prompt_of(generator.randint(1, 100), index)
            call = stack.router.stub.Generate(generate(prompt, max_tokens=generator.randint(1, 20)))
            asyncio.get_running_loop().call_later(generator.random() * 0.04, call.cancel)
            try:
                answered = await collect(call)
            except asyncio.CancelledError:
                return
            assert answered.tokens == expected(prompt, len(answered.tokens))

        for start in range(0, 120, 6):
            await asyncio.gather(*(one(start + index) for index in range(6)))
        await stack.until_idle()
        await require_canary(stack)


@pytest.mark.parametrize("who", ["client", "stall timeout", "abort", "deadline"])
async def test_a_client_that_does_not_read_is_let_go(make_stack: MakeStack, who: str) -> None:
    async with make_stack(stall_timeout_s=0.3 if who == "stall timeout" else 60.0) as stack:
        # A window so small that an answer fills it: the router's write waits.
        options = [
            ("grpc.http2.lookahead_bytes", 4096),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        async with aio.insecure_channel(stack.router.target, options=options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = generate(prompt_of(2), max_tokens=CONTEXT - 2, logprobs=20, request_id="r")
            call = stub.Generate(request, timeout=4.0 if who == "deadline" else None)
            await soon(lambda: not stack.router.is_idle)
            router = stack.router.router
            if who != "stall timeout":
                await eventually(lambda: any(answer.has_ended for answer in router.attempts._answers.values()))
            if who == "client":
                call.cancel()
            elif who == "abort":
                await stack.router.stub.Abort(pb.AbortRequest(request_id="r"))
                call.cancel()
            await stack.until_idle()
            if who == "stall timeout":
                with pytest.raises(aio.AioRpcError) as cut:
                    await collect(call)
                assert "not read for" in (cut.value.details() or "")
