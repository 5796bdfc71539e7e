"""The runner on a tiny model: batches mixed in any way give what each sequence gives alone; the cache's bytes."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import ConfigError, FingerprintError, ModelError
from core.layout import KVLayout
from core.sampling import SamplingParams
from core.sequence import SequenceSpec
from engine.backend import resolve_dtype
from engine.batch import build_batch
from engine.kv_cache import KVCache
from engine.load import LoadedModel, load_runner
from engine.plan import Chunk, Sampled, StepPlan
from engine.sequence import Sequence
from kernels.linear import is_native
from tests.unit.native import built_library
from tests.unit.tiny_model import tiny_weights, write_tiny_model

BLOCK_TOKENS = 4
CPU = torch.device("cpu")


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    return load(write_tiny_model(tmp_path))


def load(folder: Path, **changes: Any) -> LoadedModel:
    settings = {"model": "tiny", "dtype": "float32", "block_tokens": BLOCK_TOKENS, "num_blocks": 64}
    return load_runner(folder, **settings | changes)


def sequences(count: int, num_blocks: int = 64, **sampling: Any) -> list[Sequence]:
    """Sequences of 1, 8, 15, ... prompt tokens over shuffled blocks that no other one has."""
    rng = random.Random(4)
    free = rng.sample(range(num_blocks), num_blocks)
    made = []
    for number in range(count):
        prompt = tuple(rng.choices(range(101), k=1 + 7 * number))
        need = -(-(len(prompt) + 12) // BLOCK_TOKENS)
        table, free = tuple(free[:need]), free[need:]
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "seed": number} | sampling)
        spec = SequenceSpec(
            sequence_id=f"s{number}", prompt=prompt, sampling=params, eos_token_ids=(), block_table=table
        )
        made.append(Sequence(spec))
    return made


def step(loaded: LoadedModel, chunks: list[Chunk]) -> None:
    """Run one plan and apply it, as the engine's loop does."""
    sampled = loaded.runner.run(StepPlan(tuple(chunks)))
    for chunk, one in zip(chunks, sampled, strict=True):
        chunk.sequence.num_computed_tokens += chunk.num_tokens
        if one.token_id is not None:
            chunk.sequence.token_ids.append(one.token_id)


def answer(sequence: Sequence) -> list[int]:
    return sequence.token_ids[len(sequence.spec.prompt) :]


def run_alone(loaded: LoadedModel, batch: list[Sequence]) -> list[list[int]]:
    for sequence in batch:
        while sequence.num_output_tokens < 12:
            step(loaded, [Chunk(sequence, sequence.num_uncomputed_tokens)])
    return [answer(sequence) for sequence in batch]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_any_mixture_of_decodes_and_chunks_gives_what_each_sequence_gives_alone(
    loaded: LoadedModel, sampling: dict[str, Any]
) -> None:
    expected = run_alone(loaded, sequences(5, **sampling))
    assert len({tuple(tokens) for tokens in expected}) == 5
    loaded.cache.fill_(float("nan"))
    rng = random.Random(8)
    batch = sequences(5, **sampling)
    while active := [sequence for sequence in batch if sequence.num_output_tokens < 12]:
        chosen = rng.sample(active, rng.randint(1, len(active)))
        chunks = [Chunk(sequence, rng.randint(1, sequence.num_uncomputed_tokens)) for sequence in chosen]
        step(loaded, sorted(chunks, key=lambda chunk: chunk.num_tokens > 1))
    assert [answer(sequence) for sequence in batch] == expected


def test_a_chunk_that_does_not_reach_the_end_samples_nothing(loaded: LoadedModel) -> None:
    [_, sequence] = sequences(2)
    assert loaded.runner.run(StepPlan((Chunk(sequence, 3),))) == [Sampled(None)]
    assert loaded.runner.run(StepPlan()) == []


def test_recomputing_prompt_and_answer_goes_on_as_before(loaded: LoadedModel) -> None:
    [*_, expected] = run_alone(loaded, sequences(3))
    [*_, sequence] = sequences(3)
    sequence.token_ids += expected[:5]  # as after a preemption: known tokens, no KV
    loaded.cache.fill_(float("nan"))
    while sequence.num_output_tokens < 12:
        step(loaded, [Chunk(sequence, min(4, sequence.num_uncomputed_tokens))])
    assert answer(sequence) == expected


def test_kv_moved_as_bytes_into_other_blocks_of_another_cache_goes_on_as_before(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    sender, receiver = load(folder), load(folder, num_blocks=20)
    sender.fingerprint.require_equal(receiver.fingerprint)
    [*_, expected] = run_alone(sender, sequences(3))
    [*_, source] = sequences(3)
    step(sender, [Chunk(source, source.num_uncomputed_tokens)])
    table = tuple(range(19, 19 - len(source.spec.block_table), -1))
    for here, there in zip(source.spec.block_table, table, strict=True):
        receiver.memory.view(there)[:] = bytes(sender.memory.view(here))
    target = Sequence(
        SequenceSpec(
            sequence_id="moved",
            prompt=source.spec.prompt,
            sampling=source.spec.sampling,
            eos_token_ids=(),
            block_table=table,
            num_computed_tokens=source.num_computed_tokens,
            output=tuple(answer(source)),
        )
    )
    while target.num_output_tokens < 12:
        step(receiver, [Chunk(target, 1)])
    assert answer(target) == expected


def test_a_broken_model_is_refused_at_the_warm_up(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["model.norm.weight"][0] = float("nan")
    loaded = load(write_tiny_model(tmp_path, weights))
    with pytest.raises(ModelError, match="no usable logits"):
        loaded.runner.warm_up()


def test_warm_up_changes_no_answer(loaded: LoadedModel) -> None:
    expected = run_alone(loaded, sequences(2))
    loaded.runner.warm_up()
    assert run_alone(loaded, sequences(2)) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_loads_and_decodes(tmp_path: Path, dtype: str) -> None:
    loaded = load(write_tiny_model(tmp_path), dtype=dtype)
    assert loaded.fingerprint.dtype == loaded.layout.dtype == dtype
    assert all(0 <= token < 101 for tokens in run_alone(loaded, sequences(2)) for token in tokens)


def test_auto_is_the_checkpoints_dtype_where_that_is_fast() -> None:
    library, bf16, f16, f32 = Path("a-library"), torch.bfloat16, torch.float16, torch.float32
    assert [resolve_dtype("auto", CPU, stored, library) for stored in (bf16, f16, f32)] == [
        "bfloat16",
        "float16",
        "float32",
    ]
    assert resolve_dtype("auto", CPU, bf16, None) == ("bfloat16" if is_native(bf16, CPU) else "float32")
    assert resolve_dtype("float16", CPU, bf16, None) == "float16"
    with pytest.raises(ConfigError, match="dtype=int8"):
        resolve_dtype("int8", CPU, f32, library)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_are_close_smaller_and_told_apart(tmp_path: Path, quantization: str) -> None:
    built_library()
    folder = write_tiny_model(tmp_path / "64", hidden_size=64, num_attention_heads=8)
    full, small = load(folder), load(folder, quantization=quantization)
    logits = []
    for loaded in (full, small):
        [*_, sequence] = sequences(4, prompt_logprobs=0)
        batch = build_batch([Chunk(sequence, sequence.num_uncomputed_tokens)], BLOCK_TOKENS)
        logits.append(loaded.model.logits(loaded.model.forward(batch, loaded.cache)).rows)
    off = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0.0 < off < {"int8": 0.05, "int4": 0.7}[quantization]  # random weights: as hard as it gets
    with pytest.raises(FingerprintError, match="weights_hash"):
        small.fingerprint.require_equal(full.fingerprint)
    with pytest.raises(ConfigError, match=f"quantization={quantization}.*48 inputs"):
        load(write_tiny_model(tmp_path / "48"), quantization=quantization)


def test_memory_is_turned_into_blocks_and_limits_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    block_bytes = 2 * 2 * 2 * BLOCK_TOKENS * 8 * 4
    loaded = load(folder, num_blocks=None, kv_memory_bytes=10 * block_bytes + 1)
    assert (loaded.memory.num_blocks, loaded.layout.block_bytes) == (10, block_bytes)
    with pytest.raises(ConfigError, match=f"0 KV blocks of {block_bytes} bytes"):
        load(folder, num_blocks=None, kv_memory_bytes=block_bytes - 1)
    with pytest.raises(ConfigError, match="do not fit"):
        load(folder, num_blocks=2**45)
    with pytest.raises(ConfigError, match="either"):
        load(folder, kv_memory_bytes=1000)
    with pytest.raises(ConfigError, match="threads=0"):
        load(folder, threads=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_view_is_the_bytes_of_one_block(dtype: str) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_tokens=4, dtype=dtype)
    cache = KVCache(layout, 5, CPU)
    assert cache.block_bytes == len(cache.view(0)) == layout.block_bytes
    cache.tensor[3].fill_(1.0)
    assert bytes(cache.view(3)) == cache.tensor[3].flatten().view(torch.uint8).numpy().tobytes()
    assert bytes(cache.view(2)) == bytes(cache.view(4)) == bytes(layout.block_bytes)
    cache.view(4)[:] = bytes(cache.view(3))
    assert torch.equal(cache.tensor[4], cache.tensor[3])
    for block in (-1, 5):
        with pytest.raises(IndexError, match=f"block {block}"):
            cache.view(block)
