"""Every supported architecture against transformers: the same weights give the same logits and the same greedy tokens."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from core.model_config import load_model_config
from core.sampling import SamplingParams
from core.sequence import SequenceSpec
from engine.batch import Decoder, build_batch
from engine.kv_cache import KVCache
from engine.load import load_runner
from engine.model import Model
from engine.native_model import MixedModel, NativeModel
from engine.plan import Chunk, StepPlan
from engine.sequence import Sequence
from engine.torch_runner import TorchRunner
from engine.weights import WeightReader
from tests.unit.native import native_ops

transformers = pytest.importorskip("transformers")

PROMPT_TOKENS = 45
NEW_TOKENS = 24
BLOCK_TOKENS = 4
SHAPE = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # transformers' class names start with it
    settings: dict[str, Any]


def rope(**params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1000.0, **params}}


CASES = [
    Case("llama", "Llama", {"tie_word_embeddings": False}),
    Case("llama-tied", "Llama", {"tie_word_embeddings": True}),
    Case("llama-one-head-each", "Llama", {"num_key_value_heads": 4}),
    Case("llama-one-kv-head", "Llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    Case("llama-head-dim", "Llama", {"head_dim": 24}),
    Case("llama-biases", "Llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama-llama3", "Llama", rope(**LLAMA3, original_max_position_embeddings=32)),
    Case("llama-linear", "Llama", rope(rope_type="linear", factor=4.0)),
    Case("llama-dynamic-inside", "Llama", rope(rope_type="dynamic", factor=2.0)),
    Case(
        "llama-dynamic-crossed-by-the-prompt",
        "Llama",
        rope(rope_type="dynamic", factor=4.0) | {"max_position_embeddings": 32},
    ),
    Case(
        "llama-dynamic-crossed-by-the-answer",
        "Llama",
        rope(rope_type="dynamic", factor=4.0) | {"max_position_embeddings": 52},
    ),
    Case("llama-yarn", "Llama", rope(**YARN)),
    Case("llama-yarn-tuned", "Llama", rope(**YARN, beta_fast=16, beta_slow=2, truncate=False, attention_factor=0.9)),
    Case("llama-yarn-mscale", "Llama", rope(**YARN, mscale=0.7, mscale_all_dim=1.1)),
    Case("mistral", "Mistral", {"sliding_window": None}),
    Case("mistral-window", "Mistral", {"sliding_window": 7, "head_dim": 24}),
    Case("qwen2", "Qwen2", {}),
    Case("qwen2-tied", "Qwen2", {"tie_word_embeddings": True}),
    Case("qwen2-window", "Qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    Case("qwen3", "Qwen3", {"head_dim": 24}),
    Case("qwen3-bias-tied", "Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    Case("smollm3", "SmolLM3", {"no_rope_layer_interval": 2}),
    Case("smollm3-window", "SmolLM3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 9}),
    Case("phi3", "Phi3", {}),
    Case("phi3-partial", "Phi3", rope(rope_type="default", partial_rotary_factor=0.5) | {"sliding_window": 11}),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_model(case: Case) -> Any:
    """A transformers model whose weights are large enough for every part to matter, norms and biases included."""
    config = getattr(transformers, f"{case.kind}Config")(**SHAPE | case.settings)
    torch.manual_seed(5)
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    return model


def prompt_ids() -> list[int]:
    return random.Random(3).choices(range(2, SHAPE["vocab_size"]), k=PROMPT_TOKENS)


def shuffled_table(num_blocks: int, num_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).sample(range(num_blocks), -(-num_tokens // BLOCK_TOKENS)))


def load(backend: str, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = load_model_config(folder)
    with WeightReader(folder, config, dtype) as reader:
        match backend:
            case "native":
                return NativeModel(config, reader, native_ops())
            case "mixed":
                return MixedModel(config, reader, native_ops())
            case "mixed deterministic":
                return MixedModel(config, reader, native_ops(), deterministic=True)
        return Model(config, reader, torch.device("cpu"))


def new_sequence(prompt: list[int], table: tuple[int, ...], prompt_logprobs: int | None = None) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, seed=0, prompt_logprobs=prompt_logprobs)
    return Sequence(
        SequenceSpec(sequence_id="s", prompt=tuple(prompt), sampling=sampling, eos_token_ids=(), block_table=table)
    )


def chunked_logits(model: Decoder, cache: torch.Tensor, prompt: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits of every prompt token, the prompt cut into pieces of these lengths (the last one takes the rest)."""
    sequence = new_sequence(prompt, shuffled_table(len(cache), len(prompt), seed=len(cuts)), prompt_logprobs=0)
    rows: list[torch.Tensor] = []
    while sequence.num_uncomputed_tokens:
        length = min(cuts[0] if len(cuts) == 1 else cuts.pop(0), sequence.num_uncomputed_tokens)
        batch = build_batch([Chunk(sequence, length)], BLOCK_TOKENS)
        rows.append(model.logits(model.forward(batch, cache)).rows.clone())
        sequence.num_computed_tokens += length
    return torch.cat(rows)


def greedy_tokens(runner: TorchRunner, prompt: list[int], num_blocks: int, chunk_tokens: int) -> list[int]:
    sequence = new_sequence(prompt, shuffled_table(num_blocks, len(prompt) + NEW_TOKENS, seed=9))
    while sequence.num_output_tokens < NEW_TOKENS:
        chunk = Chunk(sequence, min(chunk_tokens, sequence.num_uncomputed_tokens))
        sampled = runner.run(StepPlan((chunk,)))
        sequence.num_computed_tokens += chunk.num_tokens
        sequence.token_ids += [one.token_id for one in sampled if one.token_id is not None]
    return sequence.token_ids[len(prompt) :]


@pytest.mark.parametrize("backend", ["torch", "native", "mixed", "mixed deterministic"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: Case, backend: str, tmp_path: Path) -> None:
    reference = random_model(case)
    reference.save_pretrained(tmp_path)
    prompt = prompt_ids()
    inputs = torch.tensor([prompt])
    with torch.inference_mode():
        expected = reference(inputs).logits[0]
        answer = reference.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
    assert len(set(answer)) > 3, "an answer that repeats one token would prove little"

    model = load(backend, tmp_path)
    cache = KVCache(load_model_config(tmp_path).kv_layout(BLOCK_TOKENS, "float32"), 40, torch.device("cpu"))
    runner = TorchRunner(model, cache.tensor)
    first: torch.Tensor | None = None
    for cuts in ([PROMPT_TOKENS], [8], [1], [5, 1, 13, 4], [BLOCK_TOKENS * 3, 1]):
        cache.tensor.fill_(float("nan"))  # nothing but what was written may be read
        with torch.inference_mode():
            logits = chunked_logits(model, cache.tensor, prompt, list(cuts))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4, msg=lambda m, c=cuts: f"cut {c}: {m}")
        if backend in ("native", "mixed deterministic"):
            first = logits if first is None else first
            assert torch.equal(logits, first), f"cut {cuts}"
    for chunk_tokens in (PROMPT_TOKENS, 6):
        assert greedy_tokens(runner, prompt, cache.num_blocks, chunk_tokens) == answer


def test_a_sharded_folder_is_the_same_model(tmp_path: Path) -> None:
    reference = random_model(CASES[0])
    reference.save_pretrained(tmp_path / "whole")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    answers = [
        greedy_tokens(
            load_runner(tmp_path / name, model="m", dtype="float32", num_blocks=40, block_tokens=BLOCK_TOKENS).runner,
            prompt_ids(),
            40,
            16,
        )
        for name in ("whole", "shards")
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("backend", ["torch", "native", "mixed"])
def test_a_bfloat16_model_rounds_no_worse_than_transformers(backend: str, tmp_path: Path) -> None:
    reference = random_model(CASES[0]).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    prompt = prompt_ids()
    with torch.inference_mode():
        theirs = reference(torch.tensor([prompt])).logits[0].float()
        exact = reference.float()(torch.tensor([prompt])).logits[0]
    model = load(backend, tmp_path, torch.bfloat16)
    cache = KVCache(load_model_config(tmp_path).kv_layout(BLOCK_TOKENS, "bfloat16"), 40, torch.device("cpu"))
    with torch.inference_mode():
        ours = chunked_logits(model, cache.tensor, prompt, [8])
    # The native library's integers lose next to nothing; what is left is the KV's rounding.
    assert (ours - exact).norm() < (0.5 if backend == "native" else 1.1) * (theirs - exact).norm()
    assert (ours - exact).norm() < 0.05 * exact.norm()
