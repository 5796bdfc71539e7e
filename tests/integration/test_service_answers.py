"""Answers through all three services equal what the tokens' KV says they must be."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from grpc import aio

from engine.scripted import ScriptedEngine
from engine.sequence import Sequence
from kvtransfer.transport import Transport
from kvtransfer.zeromq import ZmqTransport
from services.common.options import RouterLimits
from tests.integration.conftest import MakeStack
from tests.local_stack import Stack, running_stack
from tests.scripted_parts import BLOCK, CONTEXT, EOS, Valkey, expected, prompt_of

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 8 * BLOCK + 1, CONTEXT - 1)


def says(*texts: bytes) -> Callable[[ScriptedEngine], None]:
    """Configure a worker to answer these bytes, one token each, and EOS after them."""
    answer = [*b"".join(texts), EOS]

    def script(sequence: Sequence) -> int:
        return answer[min(sequence.num_output_tokens, len(answer) - 1)]

    def configure(engine: ScriptedEngine) -> None:
        engine.runner.script = script

    return configure


@pytest.fixture(params=["inproc", "ipc", "tcp", "aggregated"])
async def any_stack(
    request: pytest.FixtureRequest, shared_valkey: Valkey, make_stack: MakeStack
) -> AsyncIterator[Stack]:
    """The same stack over every transport, and without one."""
    if request.param == "inproc":
        async with make_stack() as stack:
            yield stack
    elif request.param == "aggregated":
        async with make_stack(prefills=0, limits=RouterLimits(mode="aggregated")) as stack:
            yield stack
    else:
        made: list[ZmqTransport] = []

        def make() -> Transport:
            made.append(ZmqTransport())
            return made[-1]

        with tempfile.TemporaryDirectory() as folder:
            bind = f"ipc://{Path(folder)}/kv" if request.param == "ipc" else "tcp://127.0.0.1:0"
            async with running_stack(shared_valkey, make, bind=lambda: bind) as stack:
                yield stack
            for transport in made:
                transport.close()


async def test_every_length_gives_the_right_tokens(any_stack: Stack) -> None:
    for length in LENGTHS:
        for max_tokens in (1, 2, BLOCK):
            if length + max_tokens > CONTEXT:
                continue
            prompt = prompt_of(length)
            answered = await any_stack.router.answer(prompt=prompt, max_tokens=max_tokens)
            assert answered.tokens == expected(prompt, max_tokens), (length, max_tokens)
            assert answered.finish == "length"
            assert answered.done is not None
            assert (answered.done.prompt_tokens, answered.done.completion_tokens) == (length, max_tokens)
            timings = answered.done.timings
            parts = [getattr(timings, field.name) for field in timings.DESCRIPTOR.fields if field.number <= 8]
            assert min(parts) >= 0, timings
            assert sum(parts) == pytest.approx(timings.e2e_ms, rel=0.02)
            assert 0 < timings.ttft_ms <= timings.e2e_ms
    await any_stack.until_idle()


async def test_many_at_once_do_not_mix(any_stack: Stack) -> None:
    async def one(index: int) -> None:
        prompt = prompt_of(1 + index * 5 % 60, seed=index)
        temperature = float(index % 2)
        answered = await any_stack.router.answer(
            prompt=prompt, max_tokens=1 + index % 20, temperature=temperature, seed=index, logprobs=index % 3
        )
        assert answered.tokens == expected(prompt, 1 + index % 20, seed=index if temperature else None)
        assert [entry.chosen.token_id for entry in answered.logprobs] == answered.tokens
        assert {len(entry.top) for entry in answered.logprobs} == {index % 3}

    await asyncio.gather(*(one(index) for index in range(40)))
    await any_stack.until_idle()


@pytest.mark.parametrize(("length", "max_tokens"), [(CONTEXT, 1), (CONTEXT + 1, 1), (CONTEXT - 1, 2), (1, CONTEXT)])
async def test_beyond_the_context_is_refused_with_the_numbers(stack: Stack, length: int, max_tokens: int) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        await stack.router.answer(prompt=prompt_of(length), max_tokens=max_tokens)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    details = refused.value.details() or ""
    assert all(str(number) in details for number in (length, CONTEXT)), details
    await stack.until_idle()


async def test_without_max_tokens_the_answer_fills_the_context(stack: Stack) -> None:
    answered = await stack.router.answer(text="x" * (CONTEXT - 3), max_tokens=None)
    assert answered.tokens == expected(b"x" * (CONTEXT - 3), 3)
    assert answered.finish == "length"


async def test_a_first_token_that_ends_the_answer(make_stack: MakeStack) -> None:
    async with make_stack(configure=says(b"")) as stack:
        answered = await stack.router.answer(prompt=prompt_of(40))
        assert (answered.tokens, answered.text, answered.finish) == ([EOS], "", "stop")
        assert answered.done is not None
        assert answered.done.matched_stop == str(EOS)
        goes_on = await stack.router.answer(prompt=prompt_of(40), ignore_eos=True, max_tokens=3)
        assert (goes_on.tokens, goes_on.finish) == ([EOS] * 3, "length")
        await stack.until_idle()


async def test_first_tokens_that_are_stops(stack: Stack) -> None:
    prompt = prompt_of(40)
    first, second, third = expected(prompt, 3)
    by_id = await stack.router.answer(prompt=prompt, stop_token_ids=[first])
    assert (by_id.tokens, by_id.text, by_id.finish) == ([first], "", "stop")
    later = await stack.router.answer(prompt=prompt, stop_token_ids=[first, second, third], min_tokens=2)
    assert (later.tokens, later.finish) == ([first, second], "stop")
    await stack.until_idle()


TEXT = "Grüße, 日本語 🙂👩‍👩‍👧 end"


async def test_characters_split_over_tokens_are_never_torn(make_stack: MakeStack) -> None:
    async with make_stack(configure=says(TEXT.encode())) as stack:
        whole = await stack.router.answer(prompt=prompt_of(20), max_tokens=100)
        assert (whole.text, whole.finish) == (TEXT, "stop")
        for max_tokens in range(1, len(TEXT.encode())):
            cut = await stack.router.answer(prompt=prompt_of(20), max_tokens=max_tokens)
            assert cut.text == TEXT.encode()[:max_tokens].decode(errors="ignore")
        await stack.until_idle()


@pytest.mark.parametrize("stop", ["G", "ß", "本語", "🙂", " end", "end"])
async def test_stop_strings_across_tokens_never_leak(make_stack: MakeStack, stop: str) -> None:
    async with make_stack(configure=says(TEXT.encode())) as stack:
        answered = await stack.router.answer(prompt=prompt_of(20), max_tokens=100, stop=["never", stop])
        assert answered.text == TEXT[: TEXT.index(stop)]
        assert answered.finish == "stop"
        assert answered.done is not None
        assert answered.done.matched_stop == stop
        assert answered.done.completion_tokens == len(TEXT[: TEXT.index(stop) + len(stop)].encode())
        kept = await stack.router.answer(prompt=prompt_of(20), max_tokens=100, stop=[stop], include_stop=True)
        assert kept.text == TEXT[: TEXT.index(stop) + len(stop)]
        await stack.until_idle()


async def test_seeds_decide_and_defaults_differ(stack: Stack) -> None:
    prompt = prompt_of(5)
    for seed in (0, 1, -(2**63), 2**63 - 1):
        answered = await stack.router.answer(prompt=prompt, temperature=0.7, seed=seed)
        assert answered.tokens == expected(prompt, 8, seed=seed)
    unseeded = [tuple((await stack.router.answer(prompt=prompt, temperature=0.7)).tokens) for _ in range(3)]
    assert len(set(unseeded)) == 3


async def test_text_and_chat_become_the_tokens_they_read_as(stack: Stack) -> None:
    text = await stack.router.answer(text=" \n")
    assert text.tokens == expected(b" \n", 8)
    chat = await stack.router.answer(chat={"messages": [{"role": "user", "content": "hi"}]})
    assert chat.tokens == expected(b"user:hi\n", 8)
