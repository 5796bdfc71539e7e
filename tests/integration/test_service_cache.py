"""Prefix caches and preemption as a client sees them: what is computed, what travels, what is reported, what comes out."""

import asyncio
import random
import re

import httpx
import pytest

from services.common.ledger import Claim
from services.common.options import RouterLimits
from tests.integration.conftest import MakeStack
from tests.local_client import Answered, generate
from tests.local_stack import Stack, Worker
from tests.scripted_parts import BLOCK, CONTEXT, eventually, expected, prompt_of


async def counter(worker: Worker, name: str) -> float:
    """A metric's value as its process serves it; 0 when it has none yet."""
    async with httpx.AsyncClient(timeout=30.0) as client:
        text = (await client.get(f"http://{worker.http}/metrics")).text
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
    return sum(map(float, values))


def cached_tokens(answered: Answered) -> int:
    assert answered.done is not None
    return answered.done.cached_tokens


async def ask(stack: Stack, prompt: list[int], **fields: object) -> Answered:
    """One whole answer, which must be right; nothing of it is left."""
    max_tokens = int(str(fields.setdefault("max_tokens", 4)))
    answered = await stack.router.answer(prompt=prompt, **fields)
    assert answered.tokens == expected(prompt, max_tokens)
    await stack.until_idle()
    return answered


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 127, 128, 129])
async def test_cold_warm_and_one_token_more_around_block_borders(stack: Stack, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    assert cached_tokens(await ask(stack, prompt)) == 0
    warm = await ask(stack, prompt)
    assert cached_tokens(warm) == (num_tokens - 1) // BLOCK * BLOCK <= num_tokens - 1
    assert cached_tokens(await ask(stack, [*prompt, 9])) == num_tokens // BLOCK * BLOCK
    longer = [*prompt, *expected(prompt, 4), 11]  # the next turn of a chat: prefill never saw the answer's tokens
    assert cached_tokens(await ask(stack, longer)) == num_tokens // BLOCK * BLOCK


@pytest.mark.parametrize("warm", ["neither", "prefill", "decode", "both"])
async def test_cached_tokens_are_those_prefill_did_not_compute(stack: Stack, warm: str) -> None:
    prompt = prompt_of(100)
    if warm != "neither":
        await ask(stack, prompt)
    if warm == "prefill":
        stack.decodes[0].engine.pool.clear_cache()
    if warm == "decode":
        stack.prefills[0].engine.pool.clear_cache()
    computed = await counter(stack.prefills[0], "vllm:prompt_tokens_total")
    sent = await counter(stack.prefills[0], "baton_kv_transfer_bytes_total")
    answered = await ask(stack, prompt)
    computed = await counter(stack.prefills[0], "vllm:prompt_tokens_total") - computed
    assert cached_tokens(answered) == (96 if warm in ("prefill", "both") else 0) == 100 - computed
    num_sent = (await counter(stack.prefills[0], "baton_kv_transfer_bytes_total") - sent) / (8 * BLOCK)
    assert num_sent == (1 if warm in ("decode", "both") else 7)
    assert await counter(stack.decodes[0], "vllm:prompt_tokens_total") == 0


@pytest.mark.parametrize("num_here", [1, 3, 7])  # of eight blocks, cached at decode
@pytest.mark.parametrize("num_there", [0, 2, 8])  # and at prefill
async def test_only_the_tail_that_decode_lacks_travels(stack: Stack, num_here: int, num_there: int) -> None:
    prompt = prompt_of(8 * BLOCK)
    prefill = stack.prefills[0]
    await ask(stack, prompt[: num_here * BLOCK], max_tokens=2)
    prefill.engine.pool.clear_cache()
    if num_there:
        await ask(stack, prompt[: num_there * BLOCK], max_tokens=1)  # which decode does not adopt
    before = await counter(prefill, "baton_kv_transfer_bytes_total")
    answered = await ask(stack, prompt)
    sent = (await counter(prefill, "baton_kv_transfer_bytes_total") - before) / (8 * BLOCK)
    assert sent == 8 - num_here
    assert cached_tokens(answered) == min(num_there, 7) * BLOCK


async def test_a_prompt_that_decode_has_whole_still_completes(stack: Stack) -> None:
    prompt = prompt_of(4 * BLOCK)
    for number in range(200):
        answered = await stack.router.answer(prompt=prompt, max_tokens=3)
        assert answered.tokens == expected(prompt, 3)
        assert cached_tokens(answered) == (3 * BLOCK if number else 0)
    await stack.until_idle()
    for worker in stack.workers:
        assert await counter(worker, "baton_kv_leases_expired_total") == 0


async def test_a_cached_block_that_many_transfers_hold_counts_once(stack: Stack) -> None:
    prompt, decode = prompt_of(64), stack.decodes[0]
    await ask(stack, prompt)
    assert decode.host is not None
    total, ledger = decode.engine.pool.num_total, decode.host.ledger
    shared = decode.engine.pool.num_cached
    hashes = list(decode.engine.pool._by_hash)  # in the order of the prompt
    holdings = [
        ledger.admit(f"s{number}", "router", Claim(shared, hashes, 0), 60.0, {"transfer"}, None)
        for number in range(total)
    ]
    async with httpx.AsyncClient(timeout=30.0) as client:
        text = (await client.get(f"http://{decode.http}/metrics")).text
    for state, count in (("free", total - shared), ("cached", 0), ("used", 0), ("reserved", shared)):
        assert f'baton_kv_blocks{{pool="decode",state="{state}"}} {count}.0' in text
    for holding in holdings:
        ledger.end_use(holding, "transfer")


async def test_another_salt_or_none_shares_nothing(stack: Stack) -> None:
    prompt = prompt_of(100)
    for salt in ("", "one", "two", "base", "model"):
        assert cached_tokens(await ask(stack, prompt, cache_salt=salt)) == 0
        assert cached_tokens(await ask(stack, prompt, cache_salt=salt)) == 96


@pytest.mark.parametrize("has_own_tail", [False, True])
async def test_many_identical_prompts_at_once_are_computed_once(stack: Stack, has_own_tail: bool) -> None:
    shared = prompt_of(6 * BLOCK + 3)
    prompts = [[*shared, *([20 + index] * 5 if has_own_tail else [])] for index in range(24)]
    stack.prefills[0].gate.close()
    asked = [asyncio.create_task(stack.router.answer(prompt=prompt, max_tokens=6)) for prompt in prompts]
    await eventually(lambda: stack.prefills[0].num_held >= 8)
    stack.prefills[0].gate.open()
    answers = await asyncio.gather(*asked)
    assert [answer.tokens for answer in answers] == [expected(prompt, 6) for prompt in prompts]
    await stack.until_idle()
    computed = await counter(stack.prefills[0], "vllm:prompt_tokens_total")
    tail = len(prompts[0]) - 6 * BLOCK
    assert computed == 6 * BLOCK + 24 * tail, "the shared blocks once, each tail for itself"


async def test_choices_of_one_request_share_the_prompts_blocks(stack: Stack) -> None:
    prompt = prompt_of(8 * BLOCK + 1)
    responses = [
        response
        async for response in stack.router.stub.Generate(
            generate(prompt, n=8, temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
        )
    ]
    done = {each.done.index: each.done for each in responses if each.WhichOneof("event") == "done"}
    assert sorted(done) == list(range(8))
    assert [done[index].cached_tokens for index in range(8)] == [0] + [8 * BLOCK] * 7
    sent = await counter(stack.prefills[0], "baton_kv_transfer_bytes_total") / (8 * BLOCK)
    assert sent == 9 + 7, "siblings bring their last block only"
    await stack.until_idle()


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
async def test_a_decode_pool_that_is_too_small_preempts_and_changes_no_token(
    make_stack: MakeStack, mode: str, swap_bytes: int
) -> None:
    limits = RouterLimits(mode=mode)  # type: ignore[arg-type]
    # 4 tokens a block: 64 tokens are set aside at admission, answers of 200 outgrow them; the pool holds 3 whole answers.
    async with make_stack(num_blocks=160, block_tokens=4, limits=limits, swap_bytes=swap_bytes) as stack:
        prompts = [prompt_of(10 + index, index) for index in range(16)]
        decode = stack.decodes[0]
        decode.gate.close()
        asked = [asyncio.create_task(stack.router.answer(prompt=each, max_tokens=200)) for each in prompts]
        await eventually(lambda: decode.num_held >= 4)  # so many cannot all end without a preemption
        decode.gate.open()
        answers = await asyncio.gather(*asked)
        assert [answer.tokens for answer in answers] == [expected(prompt, 200) for prompt in prompts]
        await stack.until_idle()
        num_preemptions = await counter(decode, "vllm:num_preemptions_total")
        assert 0 < num_preemptions <= 16 * 4


async def test_cancelling_whatever_a_small_pool_does_leaves_nothing(make_stack: MakeStack) -> None:
    generator = random.Random(3)
    async with make_stack(num_blocks=160, block_tokens=4, swap_bytes=1 << 20) as stack:

        async def one(index: int) -> None:
            prompt = [*prompt_of(12, index % 3), *prompt_of(6, index)]
            call = stack.router.stub.Generate(generate(prompt, max_tokens=CONTEXT - 18))
            asyncio.get_running_loop().call_later(generator.random() * 1.5, call.cancel)
            tokens: list[int] = []
            try:
                async for response in call:
                    tokens += response.chunk.token_ids
            except asyncio.CancelledError:
                pass
            assert tokens == expected(prompt, len(tokens))

        for start in range(0, 60, 20):
            await asyncio.gather(*(one(start + index) for index in range(20)))
        await stack.until_idle()
        for worker in stack.workers:
            worker.engine.pool.check()


async def test_a_higher_priority_overtakes_in_the_engine(make_stack: MakeStack) -> None:
    async with make_stack(num_blocks=64, max_batched_tokens=16) as stack:
        prefill = stack.prefills[0]
        prefill.gate.close()
        first = asyncio.create_task(stack.router.answer(prompt=prompt_of(200, 1), max_tokens=2))
        await eventually(lambda: prefill.gate.is_holding)
        order: list[str] = []

        async def ask_as(name: str, seed: int, priority: int) -> None:
            async for response in stack.router.stub.Generate(
                generate(prompt_of(64, seed), max_tokens=2, priority=priority)
            ):
                if response.chunk.token_ids and name not in order:
                    order.append(name)

        low = asyncio.create_task(ask_as("low", 2, 0))
        await eventually(lambda: prefill.num_held == 2)
        high = asyncio.create_task(ask_as("high", 3, 5))
        await eventually(lambda: prefill.num_held == 3)
        prefill.gate.open()
        await asyncio.gather(first, low, high)
        assert order == ["high", "low"]
