"""Bad input over gRPC: a precise status, and nothing reaches a worker. And what a router tells about itself."""

import asyncio
import math
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import generate_latest

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from services.common.options import RouterLimits
from services.router.main import serve
from tests.eventually import eventually_async
from tests.local_client import collect, generate
from tests.local_stack import Stack
from tests.scripted_parts import CONTEXT, EOS, MODEL, eventually, expected, prompt_of, served_model

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
INVALID: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"text": ""}),
    ("prompt", {"prompt": []}),
    ("chat", {"chat": {"messages": []}}),
    ("token_ids", {"prompt": prompt_of(CONTEXT + 1)}),
    ("prompt", {"text": "x" * 100_000}),
    ("token_ids", {"prompt": [256]}),
    ("token_ids", {"prompt": [2**32 - 1]}),
    ("stop_token_ids", {"prompt": [3], "stop_token_ids": [256]}),
    ("temperature", {"prompt": [3], "temperature": math.nan}),
    ("temperature", {"prompt": [3], "temperature": math.inf}),
    ("temperature", {"prompt": [3], "temperature": -1.0}),
    ("top_p", {"prompt": [3], "top_p": math.nan}),
    ("top_p", {"prompt": [3], "top_p": 0.0}),
    ("min_p", {"prompt": [3], "min_p": math.nan}),
    ("min_p", {"prompt": [3], "min_p": -0.1}),
    ("top_k", {"prompt": [3], "top_k": -1}),
    ("max_tokens", {"prompt": [3], "max_tokens": 0}),
    ("max_tokens", {"prompt": [3], "max_tokens": -5}),
    ("min_tokens", {"prompt": [3], "min_tokens": 9}),
    ("logprobs", {"prompt": [3], "logprobs": 21}),
    ("stop", {"prompt": [3], "stop": [""]}),
    ("stop", {"prompt": [3], "stop": ["x"] * 17}),
    ("request_id", {"prompt": [3], "request_id": "no spaces"}),
    ("request_id", {"prompt": [3], "request_id": "x" * 129}),
    ("lora_name", {"prompt": [3], "lora_name": "a"}),
    ("cache_salt", {"prompt": [3], "cache_salt": "a" * 257}),
    ("priority", {"prompt": [3], "priority": -101}),
    ("priority", {"prompt": [3], "priority": 101}),
    ("slo", {"prompt": [3], "slo": {"ttft_ms": 1.0}}),
    ("session_id", {"prompt": [3], "session_id": "a"}),
    ("frequency_penalty", {"prompt": [3], "frequency_penalty": 2.1}),
    ("presence_penalty", {"prompt": [3], "presence_penalty": math.nan}),
    ("repetition_penalty", {"prompt": [3], "repetition_penalty": 0.0}),
    ("repetition_penalty", {"prompt": [3], "repetition_penalty": math.nan}),
    ("n", {"prompt": [3], "n": 0}),
    ("n", {"prompt": [3], "n": -1}),
    ("n", {"prompt": [3], "n": 17}),
    ("prompt_logprobs", {"prompt": [3], "prompt_logprobs": 21}),
    ("logit_bias", {"prompt": [3], "logit_bias": {1: 101.0}}),
    ("logit_bias", {"prompt": [3], "logit_bias": {1: math.nan}}),
    *(("logit_bias", {"prompt": [3], "logit_bias": {1: 1.0, bad: 1.0}}) for bad in (256, 257, 2**31, 2**32 - 1)),
    ("json_schema", {"prompt": [3], "json_schema": "{}"}),
    ("regex", {"prompt": [3], "regex": "a"}),
    ("grammar", {"prompt": [3], "grammar": "a"}),
    ("choice", {"prompt": [3], "choice": {"values": ["a"]}}),
]


async def test_bad_input_is_refused_by_name_and_reaches_no_worker(stack: Stack) -> None:
    for worker in stack.workers:
        worker.gate.close()  # a step would be seen
    for field, request in INVALID:
        with pytest.raises(aio.AioRpcError) as refused:
            await stack.router.answer(**request)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, (field, refused.value)
        details = refused.value.details() or ""
        assert details.partition(":")[0].removeprefix("sampling.") == field, (field, details)
    with pytest.raises(aio.AioRpcError) as refused:
        await collect(stack.router.stub.Generate(pb.GenerateRequest()))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(aio.AioRpcError) as refused:
        await stack.router.answer(prompt=[3], model="other")
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert "'other'" in (refused.value.details() or "")
    assert MODEL in (refused.value.details() or "")
    assert not any(worker.num_held or worker.gate.is_holding for worker in stack.workers)
    for worker in stack.workers:
        worker.gate.open()
    # What asks for nothing is no feature.
    neutral = {"n": 1, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    answered = await stack.router.answer(prompt=[3], model=MODEL, **neutral)
    assert answered.tokens == expected([3], 8)
    await stack.until_idle()


async def test_a_canary_beside_bad_input_stays_correct(stack: Stack) -> None:
    canary, answers = prompt_of(20), 0

    async def sing() -> None:
        nonlocal answers
        while True:
            assert (await stack.router.answer(prompt=canary)).tokens == expected(canary, 8)
            answers += 1

    singing = asyncio.create_task(sing())
    for _ in range(3):
        before = answers
        for _, request in INVALID:
            with pytest.raises(aio.AioRpcError):
                await stack.router.answer(**request)
        await eventually(lambda before=before: singing.done() or answers > before)
    assert not singing.done(), singing.exception()
    singing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await singing
    await stack.until_idle()


async def test_huge_metadata_and_messages_are_refused_and_a_canary_lives(stack: Stack) -> None:
    for _ in range(3):
        async with aio.insecure_channel(stack.router.target) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(aio.AioRpcError) as refused:
                await collect(stub.Generate(generate([3]), metadata=(("x-junk", "y" * 10_000_000),), timeout=30.0))
            assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
            with pytest.raises(aio.AioRpcError) as refused:
                await collect(stub.Generate(generate(text="y" * 20_000_000), timeout=30.0))
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        canary = prompt_of(20)
        assert (await stack.router.answer(prompt=canary)).tokens == expected(canary, 8)
    await stack.until_idle()


async def test_questions_about_the_model_and_the_workers(stack: Stack) -> None:
    stub = stack.router.stub
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.max_model_len, list(info.eos_token_ids)) == (MODEL, CONTEXT, [EOS])
    ids = (await stub.Tokenize(pb.TokenizeRequest(text="é!"))).token_ids
    assert bytes(ids).decode() == "é!"
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "é!"
    with pytest.raises(aio.AioRpcError) as refused:
        await stub.Detokenize(pb.DetokenizeRequest(token_ids=[999]))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    loads = await stub.GetLoads(pb.GetLoadsRequest())
    assert {(load.role, load.state, load.free_blocks) for load in loads.workers} == {
        ("prefill", "ready", 64),
        ("decode", "ready", 64),
    }


async def test_metrics_after_a_run(stack: Stack) -> None:
    await stack.router.answer(prompt=prompt_of(40), max_tokens=10)
    await stack.until_idle()
    stack.router.router.refresh_metrics()
    text = generate_latest(stack.router.metrics).decode()
    for line in (
        f'vllm:prompt_tokens_total{{model_name="{MODEL}"}} 40.0',
        f'vllm:generation_tokens_total{{model_name="{MODEL}"}} 10.0',
        'finished_reason="length"',
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "baton_router_queue_depth 0.0",
        "baton_router_decision_seconds_count",
        'path="disaggregated"',
        'baton_ttft_part_seconds_count{part="prefill"} 1.0',
    ):
        assert line in text, line
    async with httpx.AsyncClient(verify=False, timeout=30.0) as client:
        for worker in stack.workers:
            text = (await client.get(f"http://{worker.http}/metrics")).text
            num_cached = {"prefill": 2, "decode": 3}[worker.role]  # full blocks of 40 and of 49 computed tokens
            for state, count in (("free", 64 - num_cached), ("cached", num_cached), ("used", 0), ("reserved", 0)):
                assert f'baton_kv_blocks{{pool="{worker.role}",state="{state}"}} {count}.0' in text
            assert 'baton_kv_transfers_total{outcome="done"' in text
            assert "vllm:kv_cache_usage_perc" in text
            assert (await client.get(f"http://{worker.http}/readyz")).status_code == 200


async def test_a_whole_router_process_serves_health_and_reflection_and_drains(stack: Stack) -> None:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    process = asyncio.create_task(serve(stack.options(), RouterLimits(), served_model(), stop, ready.set_result))
    endpoint = (await ready).split()[0].removeprefix("grpc=")
    async with aio.insecure_channel(endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def is_serving() -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest())
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async def is_draining() -> bool:
            return not await is_serving()

        await eventually_async(is_serving)
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([listing])):
            names = {service.name for service in response.list_services_response.service}
        assert names >= {"baton.v1.Inference", "grpc.health.v1.Health"}
        stack.decodes[0].gate.close()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate(prompt_of(30)))
        first = await call.read()
        stop.set()
        await eventually_async(is_draining)
        assert not process.done()
        stack.decodes[0].gate.open()
        rest = await collect(call)
        assert [*first.chunk.token_ids, *rest.tokens] == expected(prompt_of(30), 8)
        async with asyncio.timeout(30):
            await process
    await eventually(lambda: not stack.request_keys())
