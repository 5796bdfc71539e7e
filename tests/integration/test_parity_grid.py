"""Where a request runs, and what is cached there, changes nothing: every sampling field, around block borders.

A tiny real model behind real services; one pair of workers serves two routers, of which one is told to run requests whole
in the decode worker. Each request is asked for four times: aggregated and disaggregated, cold and warm.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_engine
from engine.scheduler import StepLimits
from engine.scripted import VOCAB_SIZE
from services.common.engine_parts import EngineParts
from services.common.options import RouterLimits
from services.common.registry import Capacity
from tests.integration.conftest import MakeStack
from tests.local_client import Answered, generate
from tests.local_stack import Stack
from tests.scripted_parts import BLOCK, CONTEXT, EOS, MODEL, prompt_of
from tests.unit.tiny_model import write_tiny_model

LENGTHS = [1, 15, 16, 17, 32, 33, 63, 64, 65]
MAX_TOKENS = 12
RANDOM = {"temperature": 1.0, "seed": 77}
GRID: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7, "seed": 1},
    "negative seed": {"temperature": 1.3, "seed": -5},
    "top_p": {**RANDOM, "top_p": 0.6},
    "top_k": {**RANDOM, "top_k": 5},
    "min_p": {**RANDOM, "min_p": 0.1},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "presence_penalty": {**RANDOM, "presence_penalty": -1.0},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "max_tokens 1": {"max_tokens": 1},
    "max_tokens 2": {"max_tokens": 2},
    "min_tokens": {"min_tokens": 5, "logit_bias": {EOS: 100.0}},
    "stop": {"stop": ["a", "e", "\x01"]},
    "stop kept": {"stop": ["a", "e", "\x01"], "include_stop": True},
    "stop_token_ids": {"stop_token_ids": list(range(3, 120))},
    "stop_token_ids kept": {"stop_token_ids": list(range(3, 120)), "include_stop": True},
    "eos": {"logit_bias": {EOS: 100.0}},
    "ignore_eos": {"logit_bias": {EOS: 100.0}, "ignore_eos": True},
    "logprobs": {**RANDOM, "logprobs": 3},
    "logprobs of the chosen": {"logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "logit_bias": {"logit_bias": {7: 5.0, 9: -100.0}},
    "special tokens": {"skip_special_tokens": False},
    "n": {**RANDOM, "n": 3},
    "all": {
        "temperature": 0.9, "seed": 3, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "frequency_penalty": 0.3,
        "presence_penalty": 0.2, "repetition_penalty": 1.1, "logprobs": 2, "min_tokens": 3, "stop": ["zz"], "n": 2,
        "logit_bias": {11: 2.0}, "prompt_logprobs": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], EngineParts]:
    folder: Path = write_tiny_model(
        tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, eos_token_id=EOS
    )

    def load_one() -> EngineParts:
        built = build_engine(
            folder,
            model=MODEL,
            dtype="float32",
            device="cpu",
            block_tokens=BLOCK,
            num_blocks=400,
            kv_memory_bytes=0,
            threads=1,
            limits=StepLimits(max_batched_tokens=32, max_sequences=32),
        )
        return EngineParts(
            engine=built.engine,
            pool=built.pool,
            memory=built.memory,
            layout=built.layout,
            fingerprint=built.fingerprint,
            eos_token_ids=built.config.eos_token_ids,
            capacity=Capacity(
                total_blocks=400, max_sequences=64, max_model_len=CONTEXT, vocab_size=built.config.vocab_size
            ),
            max_cached_prompt_tokens=CONTEXT,
        )

    return load_one


@pytest.fixture
async def stack(make_stack: MakeStack, load: Callable[[], EngineParts]) -> AsyncIterator[Stack]:
    async with make_stack(load=load) as running:
        await running.start_router(RouterLimits(mode="aggregated"))
        await running.until_paired()
        yield running


async def answers(stack: Stack, router: int, request: Any) -> list[Answered]:
    """The choices of one request, by index."""
    choices = [Answered() for _ in range(request.sampling.n or 1)]
    prompt_logprobs = []
    async for response in stack.routers[router].stub.Generate(request):
        kind = response.WhichOneof("event")
        choices[getattr(response, kind).index].add(response)
        prompt_logprobs += response.chunk.prompt_logprobs
    choices[0].logprobs = [*prompt_logprobs, *choices[0].logprobs]
    return choices


def shown(choices: list[Answered]) -> list[tuple[Any, ...]]:
    """Everything a client can see of them but where and when they ran."""
    return [
        (
            choice.tokens,
            choice.text,
            choice.done.finish_reason,
            choice.done.matched_stop,
            choice.done.prompt_tokens,
            choice.done.completion_tokens,
            [(each.chosen.token_id, [top.token_id for top in each.top]) for each in choice.logprobs],
        )
        for choice in choices
        if choice.done is not None
    ]


def values(choices: list[Answered]) -> list[float]:
    return [each.chosen.logprob for choice in choices for each in choice.logprobs]


@pytest.mark.parametrize("fields", GRID.values(), ids=GRID)
async def test_aggregated_equals_disaggregated_cold_and_warm(stack: Stack, fields: dict[str, Any]) -> None:
    async def compare(num_tokens: int) -> None:
        prompt = prompt_of(num_tokens, num_tokens)
        seen = []
        for router in (0, 1):
            for temperature in ("cold", "warm"):
                request = generate(
                    prompt, cache_salt=f"router {router} {num_tokens}", **{"max_tokens": MAX_TOKENS, **fields}
                )
                choices = await answers(stack, router, request)
                first = choices[0].done
                assert first is not None
                assert first.path == ("aggregated" if router else "disaggregated")
                may_reuse = temperature == "warm" and "prompt_logprobs" not in fields
                assert first.cached_tokens == ((num_tokens - 1) // BLOCK * BLOCK if may_reuse else 0)
                seen.append(choices)
        for other in seen[1:]:
            assert shown(other) == shown(seen[0])
            assert values(other) == pytest.approx(values(seen[0]), abs=1e-4)
        num_tokens_of_first = len(seen[0][0].tokens)
        assert 1 <= num_tokens_of_first <= fields.get("max_tokens", MAX_TOKENS)

    await asyncio.gather(*(compare(num_tokens) for num_tokens in LENGTHS))
    await stack.until_idle()
