"""The whole model through the GPU path, beside transformers: every family, chunking and attention of a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from core.model_config import load_model_config
from engine.gpu.device import Device, find_device
from engine.gpu.model import GpuLimits, GpuModel
from engine.weights import WeightReader
from tests.unit.test_architectures import (
    BLOCK_TOKENS,
    CASES,
    Case,
    chunked_logits,
    prompt_ids,
    random_model,
)

pytestmark = pytest.mark.usefixtures("unchecked_overflows")

# One for each thing that a family does otherwise; the others differ in numbers only, and run with the slow tests.
QUICK = (
    "llama-biases",
    "llama-dynamic-crossed-by-the-prompt",
    "llama-yarn",
    "qwen2-window",
    "qwen3",
    "smollm3",
    "phi3-partial",
)
NUM_TOKENS = 37  # past every window, and past where angles begin to depend on the length
LIMITS = GpuLimits(max_batched_tokens=64, max_sequences=8, max_context_tokens=128, block_tokens=BLOCK_TOKENS)


def load_gpu_model(
    folder: Path, device: Device, dtype: torch.dtype = torch.float32, *, deterministic: bool = False
) -> GpuModel:
    config = load_model_config(folder)
    with WeightReader(folder, config, dtype) as reader:
        return GpuModel(config, reader, device, LIMITS, deterministic=deterministic)


def poisoned_cache(folder: Path, dtype: str, place: torch.device, num_blocks: int = 40) -> torch.Tensor:
    layout = load_model_config(folder).kv_layout(BLOCK_TOKENS, dtype)
    shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, layout.head_dim)
    return torch.full(shape, float("nan"), dtype=getattr(torch, dtype), device=place)


def cases(*quick: str) -> list[Any]:
    """Those named, and the others marked slow."""
    return [pytest.param(one, id=one.name, marks=() if one.name in quick else pytest.mark.slow) for one in CASES]


@pytest.mark.parametrize("case", cases(*QUICK))
def test_logits_are_those_of_transformers(
    case: Case, tmp_path: Path, device: torch.device, poisoned_empty: None
) -> None:
    check_logits(case, tmp_path, device, [(5, 1, 13)], deterministic=False)


@pytest.mark.parametrize("case", cases("qwen2-window"))
def test_deterministic_logits_are_too_and_the_same_bits_however_a_prompt_is_cut(
    case: Case, tmp_path: Path, device: torch.device, poisoned_empty: None
) -> None:
    check_logits(case, tmp_path, device, [(NUM_TOKENS,), (5, 1, 13)], deterministic=True)


@torch.inference_mode()
def check_logits(
    case: Case, tmp_path: Path, device: torch.device, all_cuts: list[tuple[int, ...]], *, deterministic: bool
) -> None:
    """The prompt in pieces of these lengths, the last one taking the rest, over a cache of NaN."""
    reference = random_model(case)
    reference.save_pretrained(tmp_path)
    prompt = prompt_ids()[:NUM_TOKENS]
    expected = reference(torch.tensor([prompt])).logits[0]
    model = load_gpu_model(tmp_path, find_device(device), deterministic=deterministic)
    first: torch.Tensor | None = None
    for cuts in all_cuts:
        cache = poisoned_cache(tmp_path, "float32", device)
        logits = chunked_logits(model, cache, prompt, list(cuts)).cpu()
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4, msg=lambda m, c=cuts: f"cut {c}: {m}")
        first = logits if first is None else first
        if deterministic:
            assert torch.equal(logits, first), f"cut {cuts}"
