"""Real services whose engines take the GPU path: blocks leave one device, arrive on another, and change no token."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.layout import Fingerprint
from core.model_config import load_model_config
from engine.block_pool import BlockPool
from engine.gpu.device import find_device
from engine.gpu.load import load_gpu
from engine.gpu.model import GpuLimits
from engine.loop import EngineLoop
from engine.scheduler import StepLimits
from engine.scripted import VOCAB_SIZE
from engine.weights import WeightReader
from services.common.engine_parts import EngineParts
from services.common.options import RouterLimits
from services.common.registry import Capacity
from tests.integration.conftest import MakeStack, make_stack, shared_valkey
from tests.local_client import Answered, collect, generate
from tests.local_stack import Stack
from tests.scripted_parts import BLOCK, CONTEXT, EOS, MODEL, prompt_of
from tests.unit.tiny_model import write_tiny_model

__all__ = ["make_stack", "shared_valkey"]

pytestmark = pytest.mark.usefixtures("unchecked_overflows")

NUM_BLOCKS = 60
LIMITS = StepLimits(max_batched_tokens=32, max_sequences=4)
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "head_dim": 16}


@pytest.fixture(autouse=True)
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter computes for one thread at a time; here are two engines."""
    if device.type == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        run, lock = InterpretedFunction.run, threading.Lock()

        def run_alone(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return run(*args, **kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", run_alone)


@pytest.fixture
async def stack(make_stack: MakeStack, tmp_path: Path, device: torch.device) -> AsyncIterator[Stack]:
    """A prefill and a decode worker, a router that splits requests, and one that does not."""
    folder = write_tiny_model(
        tmp_path, vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, eos_token_id=EOS, **SMALL
    )

    def load() -> EngineParts:
        config = load_model_config(folder)
        layout = config.kv_layout(BLOCK, "float32")
        with WeightReader(folder, config, torch.float32) as reader:
            gpu = load_gpu(
                config,
                reader,
                find_device(device),
                layout,
                GpuLimits(max_batched_tokens=32, max_sequences=4, max_context_tokens=CONTEXT, block_tokens=BLOCK),
                num_blocks=NUM_BLOCKS,
                kv_memory_bytes=None,
                memory_share=0.5,
                deterministic=False,
                quantization=None,
            )
        gpu.runner.warm_up()
        pool = BlockPool(NUM_BLOCKS)
        return EngineParts(
            engine=EngineLoop(gpu.runner, LIMITS, pool, BLOCK, swap_memory=(gpu.blocks, 1 << 20)),
            pool=pool,
            memory=gpu.blocks,
            layout=layout,
            fingerprint=Fingerprint(
                model=MODEL,
                revision="",
                weights_hash="tiny",
                dtype="float32",
                kv_dtype="float32",
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                block_tokens=BLOCK,
            ),
            eos_token_ids=config.eos_token_ids,
            capacity=Capacity(
                total_blocks=NUM_BLOCKS, max_sequences=8, max_model_len=CONTEXT, vocab_size=config.vocab_size
            ),
            max_cached_prompt_tokens=CONTEXT,
        )

    async with make_stack(load=load) as running:
        await running.start_router(RouterLimits(mode="aggregated"))
        await running.until_paired()
        yield running


@pytest.mark.timeout(300)
async def test_disaggregated_equals_aggregated_cold_and_warm(stack: Stack) -> None:
    async def ask(router: int, num_tokens: int, **sampling: Any) -> Answered:
        salt = f"{router} {num_tokens} {sorted(sampling)}"
        request = generate(prompt_of(num_tokens, num_tokens), cache_salt=salt, max_tokens=5, **sampling)
        return await collect(stack.routers[router].stub.Generate(request))

    for num_tokens, sampling in (
        (1, {}),
        (BLOCK + 1, {"temperature": 0.9, "seed": 4, "top_p": 0.9}),
        (3 * BLOCK, {"logprobs": 2}),
    ):
        answers = [await ask(router, num_tokens, **sampling) for router in (0, 0, 1, 1)]
        assert len({tuple(answer.tokens) for answer in answers}) == 1
        assert len(answers[0].tokens) == 5
        assert [answer.done.path for answer in answers if answer.done] == ["disaggregated"] * 2 + ["aggregated"] * 2
        warm = (num_tokens - 1) // BLOCK * BLOCK
        assert [answer.done.cached_tokens for answer in answers if answer.done] == [0, warm, 0, warm]
    await stack.until_idle()
