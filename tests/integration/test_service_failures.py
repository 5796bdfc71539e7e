"""Workers and links that fail: answers go on elsewhere exactly where they stopped, or end with a status. Nothing leaks."""

import asyncio
import math
import time
from typing import Any

import grpc
import pytest
from grpc import aio

from core.errors import InternalError
from services.common.options import RouterLimits
from services.common.worker_host import MAX_HANG_S
from tests.integration.conftest import MakeStack
from tests.local_client import Answered, collect, generate
from tests.local_stack import Stack, Worker
from tests.scripted_parts import eventually, expected, prompt_of

PROMPT = prompt_of(100)


async def let_run(stack: Stack) -> None:
    for worker in stack.workers:
        worker.gate.open()


def busy(workers: list[Worker]) -> Worker:
    """The one that holds the request."""
    return next(worker for worker in workers if worker.num_held)


async def hold(stack: Stack, phase: str) -> tuple[Any, Answered]:
    """A request that is in `phase`, and what its client has so far."""
    gates = stack.prefills if phase == "prefill" else stack.decodes
    for worker in gates:
        worker.gate.close()
    if phase == "transfer":
        for worker in stack.prefills:
            worker.transport.mode = "drop"  # BEGIN and all: this transfer never gets anywhere
    call = stack.router.stub.Generate(generate(PROMPT, max_tokens=20, logprobs=0), timeout=20.0)
    answered = Answered()
    if phase != "prefill":
        answered.add(await call.read())
    if phase == "decode":
        worker = busy(stack.decodes)
        for _ in range(5):
            worker.gate.allow()
            answered.add(await call.read())
    await eventually(lambda: any(worker.num_held for worker in gates))
    return call, answered


CASES = [("prefill", "prefill"), ("transfer", "prefill"), ("transfer", "decode"), ("decode", "decode")]


@pytest.mark.parametrize(("phase", "victim"), CASES)
async def test_a_killed_worker_is_replaced_by_another(make_stack: MakeStack, phase: str, victim: str) -> None:
    async with make_stack(prefills=2, decodes=2) as stack:
        call, answered = await hold(stack, phase)
        killed = busy(stack.prefills if victim == "prefill" else stack.decodes)
        for worker in stack.workers:  # before the kill: what goes on elsewhere may do so while the kill is awaited
            if worker is not killed:
                worker.transport.release()
                worker.gate.open()
        await killed.kill()
        await collect(call, answered)
        assert answered.tokens == expected(PROMPT, 20)
        assert [entry.chosen.token_id for entry in answered.logprobs] == answered.tokens
        assert answered.finish == "length"
        assert answered.done is not None
        assert (answered.done.prompt_tokens, answered.done.completion_tokens) == (100, 20)
        assert killed.worker_id not in (answered.done.prefill_worker, answered.done.decode_worker)
        await stack.until_idle()


@pytest.mark.parametrize(("phase", "victim"), CASES)
async def test_without_another_worker_the_answer_ends_unavailable(
    make_stack: MakeStack, phase: str, victim: str
) -> None:
    async with make_stack() as stack:
        call, answered = await hold(stack, phase)
        killed = busy(stack.prefills if victim == "prefill" else stack.decodes)
        await killed.kill()
        with pytest.raises(aio.AioRpcError) as failed:
            await collect(call, answered)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        assert answered.done is None
        assert answered.tokens == expected(PROMPT, len(answered.tokens))
        for worker in stack.workers:
            worker.transport.mode = "drop" if worker is killed else "pass"
        await let_run(stack)
        await stack.until_idle(15.0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_step_that_fails_ends_its_own_requests_only(stack: Stack, role: str) -> None:
    bad, good = prompt_of(50, seed=1), prompt_of(50, seed=2)

    def fail(plan: Any) -> Exception | None:
        mine = any(list(chunk.sequence.spec.prompt) == bad for chunk in plan.chunks)
        return ValueError("secret prompt") if mine else None

    worker = stack.prefills[0] if role == "prefill" else stack.decodes[0]
    worker.engine.runner.fail_when = fail
    with pytest.raises(aio.AioRpcError) as failed:
        await stack.router.answer(prompt=bad)
    assert failed.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (failed.value.details() or "")
    assert (await stack.router.answer(prompt=good)).tokens == expected(good, 8)
    await stack.until_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["crashes", "hangs", "loses its memory"])
async def test_a_worker_that_is_of_no_use_any_more_ends_and_another_goes_on(
    make_stack: MakeStack, role: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_stack(prefills=2, decodes=2) as stack:
        workers = stack.prefills if role == "prefill" else stack.decodes
        for worker in workers:
            worker.gate.close()
        call = asyncio.create_task(stack.router.answer(prompt=PROMPT, max_tokens=20))
        await eventually(lambda: any(worker.gate.is_holding for worker in workers))
        ended = next(worker for worker in workers if worker.gate.is_holding)
        if how == "crashes":
            monkeypatch.setattr(ended.engine.loop, "_step_started", -math.inf)
        elif how == "hangs":
            monkeypatch.setattr(ended.engine.loop, "_step_started", time.monotonic() - MAX_HANG_S - 1)
        else:
            monkeypatch.setattr(ended.engine.memory, "failure", "the device is lost", raising=False)
        for worker in workers:
            if worker is not ended:
                worker.gate.open()
        assert (await call).tokens == expected(PROMPT, 20)
        ended.gate.open()  # a thread of this process, too
        assert ended.task is not None
        await asyncio.wait([ended.task])
        with pytest.RaisesGroup(pytest.RaisesExc(InternalError, match="crashed|hangs|lost"), flatten_subgroups=True):
            await ended.task
        await stack.until_idle()


async def test_after_a_cut_transfer_the_next_ones_succeed(stack: Stack) -> None:
    stack.prefills[0].gate.close()
    call = asyncio.create_task(stack.router.answer(prompt=PROMPT))
    await eventually(lambda: stack.prefills[0].gate.is_holding)
    stack.prefills[0].transport.mode = "drop"
    stack.prefills[0].gate.allow(2)
    await eventually(lambda: stack.prefills[0].gate.is_holding)
    stack.prefills[0].transport.mode = "pass"  # a gap in the numbering: the receiver gives the transfer up
    stack.prefills[0].gate.open()
    assert (await call).tokens == expected(PROMPT, 8)
    for index in range(50):
        prompt = prompt_of(40, index)
        assert (await stack.router.answer(prompt=prompt)).tokens == expected(prompt, 8)
    await stack.until_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_restarts_at_its_address_serves_again(make_stack: MakeStack, role: str) -> None:
    async with make_stack() as stack:
        for index in range(6):
            old = (stack.prefills if role == "prefill" else stack.decodes)[-1]
            await old.kill()
            stack.workers.remove(old)
            new = await stack.start_worker(role, port=int(old.endpoint.rpartition(":")[2]))
            assert new.worker_id == old.worker_id
            await stack.until_paired()
            prompt = prompt_of(40, index)
            assert (await stack.router.answer(prompt=prompt)).tokens == expected(prompt, 8)
            await stack.until_idle()


async def test_a_flapping_worker_leaves_no_account_behind(make_stack: MakeStack) -> None:
    places = {"max_sequences": 8}  # fewer than there are requests
    async with make_stack(prefills=2, decodes=2, limits=RouterLimits(max_attempts=10), **places) as stack:
        for worker in stack.workers:
            worker.engine.runner.step_s = 0.001
        is_over = False
        lowest = 0

        async def watch() -> None:
            nonlocal lowest
            while not is_over:
                for view in (*stack.router.router.fleet.views("prefill"), *stack.router.router.fleet.views("decode")):
                    lowest = min(lowest, view.free_sequences)
                await asyncio.sleep(0.001)

        async def one(index: int) -> None:
            prompt = prompt_of(30, index)
            answered = await stack.router.answer(prompt=prompt, max_tokens=30)
            assert answered.tokens == expected(prompt, 30)

        watching = asyncio.create_task(watch())
        load = [asyncio.create_task(one(index)) for index in range(60)]
        for _ in range(3):
            flapping = stack.decodes[-1]
            await flapping.kill()
            stack.workers.remove(flapping)
            await stack.start_worker("decode", port=int(flapping.endpoint.rpartition(":")[2]), **places)
        await asyncio.gather(*load)
        is_over = True
        await watching
        await stack.until_idle()
        assert lowest >= 0


async def test_a_worker_that_leaves_while_called_is_not_the_clients_cancel(make_stack: MakeStack) -> None:
    """The record vanishes and the channel closes under a call: another worker takes the request."""
    async with make_stack(prefills=2, decodes=2) as stack:
        fleet = stack.router.router.fleet
        for index in range(6):
            prompt = prompt_of(10, index)
            call = asyncio.create_task(stack.router.answer(prompt=prompt))
            async with asyncio.timeout(30):
                while not any(worker.inflight for worker in fleet):  # noqa: ASYNC110 (lasts a turn of the loop)
                    await asyncio.sleep(0)
            victim = next(worker for worker in fleet if worker.inflight)
            fleet._workers.pop(victim.worker_id)
            fleet._tasks.pop(victim.worker_id).cancel()
            answered = await call
            assert answered.tokens == expected(prompt, 8)
            await eventually(lambda: len(list(fleet)) == 4 and all(worker.state == "ready" for worker in fleet))
        await stack.until_idle()
