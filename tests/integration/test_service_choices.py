"""Several answers to a prompt and log-probabilities of prompts, through all services, alike over gRPC and HTTP."""

import asyncio
from collections import defaultdict
from typing import Any

import grpc
import pytest
from grpc import aio
from prometheus_client import generate_latest

from baton.v1 import inference_pb2 as pb
from core.sampling import choice_seed
from engine.scripted import ScriptedEngine, scripted_logprobs
from engine.sequence import Sequence
from services.common.options import RouterLimits
from services.router.http_edge import create_app
from tests.integration.conftest import MakeStack
from tests.local_client import Answered, generate
from tests.local_stack import RouterProcess, Stack
from tests.scripted_parts import BLOCK, CONTEXT, WAIT_S, eventually, expected, prompt_of
from tests.unit.http_edge_harness import client_of, events_of

PROMPT = prompt_of(6 * BLOCK + 4)
SAMPLED = {"temperature": 1.0, "seed": 5}


async def read(call: Any) -> dict[int, Answered]:
    """Every answer of a call by its index. Raises AioRpcError."""
    answers: defaultdict[int, Answered] = defaultdict(Answered)
    while isinstance(response := await call.read(), pb.GenerateResponse):
        answers[getattr(response, response.WhichOneof("event")).index].add(response)
    if await call.code() != grpc.StatusCode.OK:
        raise aio.AioRpcError(await call.code(), await call.initial_metadata(), await call.trailing_metadata())
    return dict(answers)


async def choices(router: RouterProcess, prompt: list[int] = PROMPT, **fields: Any) -> dict[int, Answered]:
    return await read(router.stub.Generate(generate(prompt, **fields), timeout=WAIT_S))


def tokens_of(prompt: list[int], n: int, num_tokens: int) -> dict[int, list[int]]:
    return {index: expected(prompt, num_tokens, seed=choice_seed(5, index)) for index in range(n)}


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
@pytest.mark.parametrize("n", [2, 4, 8])
async def test_many_calls_with_choices_at_once(make_stack: MakeStack, n: int, mode: Any) -> None:
    prefills = 0 if mode == "aggregated" else 1
    async with make_stack(prefills=prefills, limits=RouterLimits(mode=mode), num_blocks=256) as stack:
        prompts = [prompt_of(1 + 11 * seed, seed=seed) for seed in range(20)]
        calls = [
            choices(stack.router, prompt, n=n, max_tokens=seed % 4 + 1, **SAMPLED)
            for seed, prompt in enumerate(prompts)
        ]
        for seed, answers in enumerate(await asyncio.gather(*calls)):
            got = {index: answer.tokens for index, answer in answers.items()}
            assert got == tokens_of(prompts[seed], n, seed % 4 + 1)
            for answer in answers.values():
                assert answer.done is not None
                assert (answer.finish, answer.done.prompt_tokens) == ("length", len(prompts[seed]))
                assert answer.done.completion_tokens == len(answer.tokens)
        await stack.until_idle()


def ends_early(engine: ScriptedEngine) -> None:
    """The choice with index 2 says "ab!", the others go on with the alphabet."""

    def script(sequence: Sequence) -> int:
        is_third = sequence.spec.sampling.seed == choice_seed(5, 2)
        text = b"ab!defghijkl" if is_third else b"abcdefghijkl"
        return text[sequence.num_output_tokens]

    engine.runner.script = script


@pytest.mark.parametrize("stream", [False, True])
async def test_grpc_and_http_give_the_same_choices_and_one_ends_early(make_stack: MakeStack, stream: bool) -> None:
    async with make_stack(configure=ends_early) as stack, client_of(create_app(stack.router.router)) as client:
        sampling = {"n": 4, "max_tokens": 9, "stop": ["!", "zz"], **SAMPLED}
        over_grpc = await choices(stack.router, **sampling)
        assert {index: (each.text, each.finish) for index, each in over_grpc.items()} == {
            index: ("ab", "stop") if index == 2 else ("abcdefghi", "length") for index in range(4)
        }
        body = {"prompt": PROMPT, "stream": stream, "stream_options": {"include_usage": True}, **sampling}
        answer = await client.post("/v1/completions", json=body)
        events = events_of(answer.text)[:-1] if stream else [answer.json()]
        texts: defaultdict[int, str] = defaultdict(str)
        reasons = {}
        for choice in (choice for event in events for choice in event["choices"]):
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        assert {index: (texts[index], reasons[index]) for index in texts} == {
            index: (each.text, each.finish) for index, each in over_grpc.items()
        }
        usage = events[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 3 * 9 + 3)
        await stack.until_idle()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("way", ["abort", "cancel", "deadline"])
async def test_whatever_ends_a_call_ends_all_its_choices(stack: Stack, way: str, is_shared: bool) -> None:
    decode = stack.decodes[0]
    decode.gate.close()
    request = generate(PROMPT, request_id="all", n=4, max_tokens=100, **SAMPLED)
    call = stack.router.stub.Generate(request, timeout=4.0 if way == "deadline" else WAIT_S)
    await call.read()
    await eventually(lambda: decode.gate.is_holding)
    if is_shared:
        decode.gate.allow()
        await eventually(lambda: decode.num_held == 4)
    if way == "abort":
        assert (await stack.router.stub.Abort(pb.AbortRequest(request_id="all"))).found
        answers = await read(call)
        assert {index: answer.finish for index, answer in answers.items()} == dict.fromkeys(range(4), "abort")
    elif way == "cancel":
        call.cancel()
    else:
        with pytest.raises(aio.AioRpcError) as late:
            await read(call)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    decode.gate.open()
    await stack.until_idle()
    assert (await stack.router.answer(prompt=PROMPT)).tokens == expected(PROMPT, 8)


async def test_choices_keep_the_place_of_their_request_where_the_room_is_full(make_stack: MakeStack) -> None:
    limits = RouterLimits(max_queued=1)
    async with make_stack(limits=limits, max_sequences=2) as stack:
        answers = await choices(stack.router, n=8, max_tokens=6, **SAMPLED)
        assert {index: answer.tokens for index, answer in answers.items()} == tokens_of(PROMPT, 8, 6)
        await stack.until_idle()


async def test_a_prompt_counts_once_and_every_answer_for_itself(stack: Stack) -> None:
    await choices(stack.router, n=3, max_tokens=5, **SAMPLED)
    await stack.until_idle()
    text = generate_latest(stack.router.metrics).decode()
    for line in (
        f'vllm:prompt_tokens_total{{model_name="scripted"}} {len(PROMPT)}.0',
        'vllm:generation_tokens_total{model_name="scripted"} 15.0',
        'vllm:request_success_total{finished_reason="length",model_name="scripted"} 3.0',
    ):
        assert line in text, line


def in_order(entries: list[pb.TokenLogprobs], prompt: list[int], num_top: int) -> bool:
    given = [(each.chosen.token_id, [(top.token_id, top.logprob) for top in each.top]) for each in entries]
    return given == [(token, list(scripted_logprobs(token, num_top).top)) for token in prompt[1:]]


async def prompt_logprobs(router: RouterProcess, prompt: list[int], **fields: Any) -> list[pb.TokenLogprobs]:
    """Those of one call, which come before the first token of the answer and with index 0."""
    entries: list[pb.TokenLogprobs] = []
    tokens: list[int] = []
    async for response in router.stub.Generate(generate(prompt, **fields), timeout=WAIT_S):
        if response.chunk.prompt_logprobs:
            assert not tokens
            assert response.chunk.index == 0
        entries += response.chunk.prompt_logprobs
        tokens += response.chunk.token_ids
    return entries


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
async def test_prompt_logprobs_are_whole_whatever_is_cached(make_stack: MakeStack, mode: Any) -> None:
    prefills = 0 if mode == "aggregated" else 1
    async with make_stack(prefills=prefills, limits=RouterLimits(mode=mode)) as stack:
        for length in (1, 2, BLOCK, BLOCK + 1, 32, 33, 100, CONTEXT - 4):  # 32 is a step's most
            prompt = prompt_of(length)
            for num_top in (0, 3):
                for n in (1, 2):
                    entries = await prompt_logprobs(
                        stack.router, prompt, prompt_logprobs=num_top, n=n, max_tokens=2 + n, logprobs=1
                    )
                    assert in_order(entries, prompt, num_top), (length, num_top, n)
        assert await prompt_logprobs(stack.router, PROMPT) == []
        await stack.until_idle()


async def test_prompt_logprobs_come_once_though_a_worker_is_lost_half_way(make_stack: MakeStack) -> None:
    async with make_stack(prefills=2) as stack:
        for worker in stack.prefills:
            worker.gate.close()
        asked = asyncio.create_task(prompt_logprobs(stack.router, PROMPT, prompt_logprobs=2))
        await eventually(lambda: any(worker.gate.is_holding for worker in stack.prefills))
        (killed,) = (worker for worker in stack.prefills if worker.gate.is_holding)
        killed.gate.allow(2)
        answers = stack.router.router.attempts._answers
        await eventually(lambda: any(answer._num_prompt_logprobs == 64 for answer in answers.values()))
        await killed.kill()
        for worker in stack.prefills:
            worker.gate.open()
        assert in_order(await asked, PROMPT, 2)
        await stack.until_idle()


async def test_an_echo_with_logprobs_over_http_is_the_prompt_and_what_grpc_says_of_it(stack: Stack) -> None:
    prompt = list(b"To be, or not to be, that is the question: whether")
    over_grpc = await prompt_logprobs(stack.router, prompt, prompt_logprobs=2, max_tokens=1)
    async with client_of(create_app(stack.router.router)) as client:
        for given in (prompt, bytes(prompt).decode()):
            body = {"prompt": given, "echo": True, "max_tokens": 0, "logprobs": 2, "prompt_logprobs": 1}
            answer = (await client.post("/v1/completions", json=body)).json()
            (choice,) = answer["choices"]
            assert choice["text"] == bytes(prompt).decode()
            assert choice["logprobs"]["tokens"] == [chr(token) for token in prompt]
            assert choice["logprobs"]["token_logprobs"] == [None, *(each.chosen.logprob for each in over_grpc)]
            assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1] * (len(prompt) - 1)
            assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(prompt), 0)
    await stack.until_idle()


async def test_a_client_that_leaves_ends_every_choice_of_every_prompt(stack: Stack) -> None:
    decode = stack.decodes[0]
    decode.gate.close()
    async with client_of(create_app(stack.router.router)) as client:
        body = {"prompt": [prompt_of(20, seed) for seed in range(3)], "n": 4, "max_tokens": 50, "ignore_eos": True}
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: decode.num_held == 3)
        decode.gate.allow(3)
        await eventually(lambda: decode.num_held > 3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        decode.gate.open()
        await stack.until_idle()
    assert (await stack.router.answer(prompt=PROMPT)).tokens == expected(PROMPT, 8)
