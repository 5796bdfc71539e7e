"""Carries out step plans with torch: builds the batch, runs the model, samples."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.errors import ConfigError, ModelError
from core.layout import Fingerprint, KVLayout
from core.model_config import ModelConfig, load_model_config
from core.sampling import SamplingParams
from core.sequence import SequenceSpec, TokenLogprobs
from engine.backend import load_decoder, load_weigh, native_library, resolve_dtype
from engine.batch import Decoder, build_batch
from engine.draw import Weigh, rough_weights
from engine.kv_cache import DTYPES, KVCache
from engine.plan import Chunk, Sampled, StepPlan
from engine.sampler import UNUSABLE, prompt_logprobs, sample
from engine.sequence import Sequence
from engine.weights import Progress, WeightReader, checkpoint_dtype, weights_hash
from kernels.native.ops import Quantization

LOGPROB_ROWS = 64  # logits of a prompt that exist at once
NOTHING = Sampled(None)


class TorchRunner:
    """Implements `engine.plan.Runner`. Knows nothing from one step to the next but the cache."""

    def __init__(self, model: Decoder, kv_cache: KVCache, weigh: Weigh = rough_weights) -> None:
        """Join a model and the cache its KV goes to.

        Args:
            model: on the cache's device.
            kv_cache: of the model's layout and dtype.
            weigh: what sampling takes to weigh rows of logits.
        """
        assert kv_cache.tensor.dtype == model.dtype, "KV is stored in the model's dtype"
        self._model = model
        self._cache = kv_cache.tensor
        self._block_tokens = kv_cache.layout.block_tokens
        self._weigh = weigh

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Sampled]:
        """Compute one step; see `engine.plan.Runner`."""
        if not plan.chunks:
            return []
        chunks = plan.chunks
        batch = build_batch(chunks, self._block_tokens)
        samples = [chunk.samples for chunk in chunks]
        sampling = [chunk.sequence for chunk, does in zip(chunks, samples, strict=True) if does]
        hidden = self._model.forward(batch, self._cache)
        if len(hidden) == len(sampling):
            return _spread(self._sample(hidden, sampling), samples)
        # Some prompt's log-probabilities are asked for: it has a row for each of its tokens.
        rows = list(_rows_of(chunks))
        last = [of_chunk.stop - 1 for of_chunk, does in zip(rows, samples, strict=True) if does]
        newest = hidden[torch.tensor(last, dtype=torch.long, device=hidden.device)]
        results = _spread(self._sample(newest, sampling), samples)
        return [
            self._with_prompt_logprobs(result, chunk, hidden[of_chunk])
            if chunk.owes_prompt_logprobs and not result.error
            else result
            for result, chunk, of_chunk in zip(results, chunks, rows, strict=True)
        ]

    def _sample(self, hidden: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
        """The next token of each sequence. `hidden`: [n, hidden size], the row of its newest token."""
        if not sequences:
            return []
        logits = self._model.logits(hidden)
        return sample(logits.rows.cpu(), sequences, self._weigh, logits.best)

    def _with_prompt_logprobs(self, sampled: Sampled, chunk: Chunk, hidden: Tensor) -> Sampled:
        """Add those of the prompt tokens that follow the chunk's. `hidden`: [tokens of the chunk, hidden size]."""
        spec, start = chunk.sequence.spec, chunk.sequence.num_computed_tokens
        assert spec.sampling.prompt_logprobs is not None, "asked for"
        expected = spec.prompt[start + 1 : start + 1 + chunk.num_tokens]
        entries: list[TokenLogprobs] = []
        for first in range(0, len(expected), LOGPROB_ROWS):
            ids = expected[first : first + LOGPROB_ROWS]
            logits = self._model.logits(hidden[first : first + len(ids)])
            piece = prompt_logprobs(logits.rows.cpu(), ids, spec.sampling.prompt_logprobs, self._weigh)
            if piece is None:
                return Sampled(None, error=UNUSABLE)
            entries += piece
        return Sampled(sampled.token_id, sampled.logprobs, tuple(entries))

    def warm_up(self) -> None:
        """Run a small prompt and one decode, so that the first request meets no first-call cost.

        Call it before any sequence exists: it writes into block 0.

        Raises:
            ModelError: what the model computes is not usable; its weights are damaged or not of this dtype.
        """
        sampling = SamplingParams(temperature=0.0, max_tokens=2, seed=0)
        spec = SequenceSpec(
            sequence_id="warm-up",
            prompt=(0,) * max(self._block_tokens - 1, 1),
            sampling=sampling,
            eos_token_ids=(),
            block_table=(0,),
        )
        sequence = Sequence(spec)
        while sequence.num_output_tokens < 2 and sequence.num_computed_tokens < self._block_tokens:
            chunk = Chunk(sequence, sequence.num_uncomputed_tokens)
            (sampled,) = self.run(StepPlan((chunk,)))
            if sampled.error:
                raise ModelError(f"{sampled.error} for a first prompt: the weights are damaged, or overflow this dtype")
            sequence.num_computed_tokens += chunk.num_tokens
            assert sampled.token_id is not None, "the chunk reaches the newest token"
            sequence.token_ids.append(sampled.token_id)


def _spread(sampled: Seq[Sampled], samples: Seq[bool]) -> list[Sampled]:
    """One result for each chunk, given those of the chunks that sample."""
    following = iter(sampled)
    return [next(following) if does else NOTHING for does in samples]


def _rows_of(chunks: Seq[Chunk]) -> Iterator[slice]:
    """Of each chunk: which of the batch's outputs are its own."""
    end = 0
    for chunk in chunks:
        begin, end = end, end + chunk.num_outputs
        yield slice(begin, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Everything a worker needs of one loaded model."""

    runner: TorchRunner
    model: Decoder
    kv_cache: KVCache
    config: ModelConfig
    layout: KVLayout
    fingerprint: Fingerprint


def load_runner(
    folder: Path,
    *,
    model: str,
    revision: str = "",
    dtype: str = "auto",
    device: str = "cpu",
    block_tokens: int = 16,
    num_blocks: int | None = None,
    kv_memory_bytes: int | None = None,
    threads: int | None = None,
    deterministic: bool = False,
    quantization: Quantization | None = None,
    load_progress: Progress | None = None,
    hash_progress: Progress | None = None,
) -> LoadedModel:
    """Load a model folder and allocate its KV blocks. Takes seconds; call `runner.warm_up()` afterwards.

    Args:
        folder: a Hugging Face model folder with safetensors.
        model, revision: what the fingerprint calls it; equal on all workers that exchange KV.
        dtype: auto, float32, bfloat16 or float16, of weights, activations and KV.
        device: a torch device name.
        block_tokens: tokens in one KV block; a power of two.
        num_blocks: how many KV blocks; or
        kv_memory_bytes: memory to fill with them. Exactly one of the two is given.
        threads: compute threads of this process; None: one, and what torch chooses for its own operations.
        deterministic: a token's logits are the same bits in any batch, however its prompt was cut into chunks.
        quantization: int8 or int4 weights instead of the checkpoint's; native only. Such KV is not exchanged with others.
        load_progress: called with (bytes, total bytes) while weights are read.
        hash_progress: the same while weights without known checksums are hashed.
    Raises:
        ModelError: the folder needs a piece Baton does not have, or is damaged.
        ConfigError: any other value that cannot work.
    """
    if (num_blocks is None) == (kv_memory_bytes is None):
        raise ConfigError("give either a number of KV blocks or the memory for them")
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads={threads}: must be at least 1")
        torch.set_num_threads(threads)
    place = torch.device(device)
    config = load_model_config(folder)
    library = native_library(place)
    dtype = resolve_dtype(dtype, place, checkpoint_dtype(folder), library)
    layout = config.kv_layout(block_tokens, dtype)
    with WeightReader(folder, config, DTYPES[dtype], load_progress) as reader:
        loaded = load_decoder(
            config,
            reader,
            place,
            library,
            threads=threads or 1,
            deterministic=deterministic,
            quantization=quantization,
        )
    kv_cache = KVCache(layout, _num_blocks(layout, num_blocks, kv_memory_bytes), place)
    fingerprint = Fingerprint(
        model=model,
        revision=revision,
        weights_hash=weights_hash(folder, hash_progress) + (f"+{quantization}" if quantization else ""),
        dtype=dtype,
        kv_dtype=layout.dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=block_tokens,
    )
    return LoadedModel(
        runner=TorchRunner(loaded, kv_cache, load_weigh(library)),
        model=loaded,
        kv_cache=kv_cache,
        config=config,
        layout=layout,
        fingerprint=fingerprint,
    )


def _num_blocks(layout: KVLayout, num_blocks: int | None, kv_memory_bytes: int | None) -> int:
    if num_blocks is not None:
        return num_blocks
    assert kv_memory_bytes is not None
    return kv_memory_bytes // layout.block_bytes
