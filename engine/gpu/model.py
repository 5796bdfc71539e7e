"""The decoder of the Llama family on a GPU: the same function of a batch as `engine.model`, as launches that never wait.

Products are cuBLAS's, which no kernel of ours beats; everything else is one Triton kernel for each line of `compute`. In
deterministic mode products have fixed tiles and all attention is prefill's, whose rows do not depend on how a sequence was
cut: then a token's bits are the same in any batch, after preemption, and however its prompt was chunked.

Where the next parts go: a layer's products are callables, so a tensor-parallel rank, an adapter or a set of experts is
another callable in the same place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from torch import Tensor

from core.model_config import ModelConfig
from engine.batch import Batch, Ints, Logits
from engine.gpu.device import Device
from engine.gpu.inputs import Sections, Stager, Step, StepShape, Window, step_arrays, step_views
from engine.rope import RotaryEmbedding
from engine.weights import EMBEDDING, LayerProjections, Projection, WeightReader
from kernels.gpu.add_rms_norm import add_rms_norm
from kernels.gpu.decode_attention import decode_attention, decode_scratch, max_items, num_programs
from kernels.gpu.linear import linear
from kernels.gpu.prefill_attention import prefill_attention, tile_rows
from kernels.gpu.qkv_rope_write import qkv_rope_write
from kernels.gpu.quantized_linear import quantize, quantized_linear
from kernels.gpu.silu_mul import silu_mul
from kernels.gpu.variant import arch_of
from kernels.native.ops import Quantization

Multiply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLimits:
    """What buffers are made for: no step is larger."""

    max_batched_tokens: int  # of one step
    max_sequences: int  # of one step
    max_context_tokens: int  # of one sequence
    block_tokens: int

    @property
    def max_blocks(self) -> int:
        """Of one sequence."""
        return -(-self.max_context_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Multiply
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Multiply
    post_norm: Tensor
    gate_up: Multiply
    down: Multiply
    has_rope: bool
    window: Window


class Bucket(NamedTuple):
    """A step of a fixed number of rows at a fixed place."""

    sections: Sections
    step: Step


class GpuModel:
    """Weights on the device, and the launches of one step. Implements `engine.batch.Decoder`."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        device: Device,
        limits: GpuLimits,
        *,
        deterministic: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        """Take the weights.

        Args:
            config: the model's shape.
            reader: its checked weights; gives the dtype.
            device: where they go.
            limits: of any step.
            deterministic: a row's result is the same bits in any batch.
            quantization: of the layers' weights and the head, on the way to the device.
        """
        self.config = config
        self.dtype = reader.dtype
        self.limits = limits
        self.windows: tuple[Window, ...] = tuple(dict.fromkeys(config.sliding_windows))
        self._is_deterministic = deterministic
        self._tile_rows = tile_rows(
            arch_of(device.place), self.dtype, config.head_dim, config.num_heads // config.num_kv_heads
        )
        self._num_programs = num_programs(device.place, self.dtype, config.head_dim)
        self._rotary = RotaryEmbedding(config.rope, device.place)
        if self._rotary.is_positional:
            self._cos, self._sin = self._rotary.table(limits.max_context_tokens)
        else:  # computed for each step, into the same place
            half = config.rope.rotary_dim // 2
            self._cos, self._sin = torch.zeros(2, limits.max_batched_tokens, half, device=device.place)
        load = _Loader(reader, device.place, deterministic, quantization)
        self._embedding = load.tensor(EMBEDDING)
        self._layers = [load.layer(config, number) for number in range(config.num_layers)]
        self._norm = load.tensor("model.norm.weight")
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        # Layers bear 4 bits better than what names the tokens.
        self._head = load.multiply(Projection((head,), has_bias=False), bits=8 if quantization else None)
        self._scratch = decode_scratch(max_items(limits.max_sequences), config.num_heads, config.head_dim, device.place)
        self.sampled = torch.zeros(limits.max_sequences, dtype=torch.int32, device=device.place)
        self._stager = Stager(device, self._most_ints())

    def stage(self, batch: Batch) -> Step:
        """Send a batch to the device as it is."""
        num_decodes = 0 if self._is_deterministic else batch.num_decodes
        arrays = self._arrays(batch, batch.num_tokens, num_decodes)
        sections = Sections({name: len(values) for name, values in arrays.items()})
        self._stager.put(sections, arrays)
        step = step_views(num_decodes, sections, self._stager, self.windows)
        self._set_angles(step)
        return step

    def bucket(self, num_rows: int) -> Bucket:
        """The place of every step of up to `num_rows` single tokens: always the same memory, to capture launches on."""
        shape = self._shape_of_bucket(num_rows)
        sections = shape.sections(self.windows)
        return Bucket(sections, step_views(shape.num_decodes, sections, self._stager, self.windows))

    def stage_into(self, bucket: Bucket, batch: Batch) -> None:
        """Send a batch of single tokens into a bucket, padded."""
        num_rows = len(bucket.step.token_ids)
        arrays = self._arrays(batch, num_rows, 0 if self._is_deterministic else num_rows)
        if self._is_deterministic:  # a tile for padding too, so that the launch has as many as was captured
            arrays["tiles"] = np.stack((np.arange(num_rows), np.zeros(num_rows)), 1).astype(np.int32).reshape(-1)
        self._stager.put(bucket.sections, arrays)
        self._set_angles(bucket.step)

    def compute(self, step: Step, cache: Tensor) -> Tensor:
        """Launch one step.

        Args:
            step: staged.
            cache: [num_blocks, layers, 2, kv_heads, block_tokens, dim], in the model's dtype.
        Returns:
            [rows, hidden] after the last layer, not normalised.
        """
        eps = self.config.rms_norm_eps
        ids = torch.where(step.token_ids < 0, self.sampled[(-1 - step.token_ids).clamp_min(0)], step.token_ids)
        # A row that could not be sampled has token -1; its sequence has ended, but that is not known here yet.
        hidden = F.embedding(ids.clamp_min(0), self._embedding)
        delta: Tensor | None = None
        for number, layer in enumerate(self._layers):
            kv = cache[:, number]
            normed, hidden = _add(delta, hidden, layer.input_norm, eps)
            q = qkv_rope_write(
                layer.qkv(normed),
                kv,
                step.blocks,
                step.offsets,
                self._cos,
                self._sin,
                step.angle_rows,
                num_heads=self.config.num_heads,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
                has_rope=layer.has_rope,
            )
            attended = self._attend(q, kv, step, layer.window)
            normed, hidden = _add(layer.o(attended.flatten(1)), hidden, layer.post_norm, eps)
            delta = layer.down(silu_mul(layer.gate_up(normed)))
        assert delta is not None, "a model has a layer"
        return hidden + delta

    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """Compute one step; see `Decoder`."""
        step = self.stage(batch)
        return self.compute(step, cache)[step.outputs]

    def logits(self, hidden: Tensor) -> Logits:
        """Next-token scores; see `Decoder`."""
        normed, _ = add_rms_norm(hidden, None, self._norm, self.config.rms_norm_eps)
        return Logits(self._head(normed).float())

    def _attend(self, q: Tensor, kv: Tensor, step: Step, window: Window) -> Tensor:
        """[rows, heads, dim]: single tokens by one kernel, chunks by the other, into one tensor."""
        out = torch.empty_like(q)
        n = step.num_decodes
        if n:
            work = step.works[window]
            decode_attention(
                q[:n],
                kv,
                step.tables,
                step.first_blocks,
                work.items,
                work.first_items,
                work.num_items,
                self._scratch,
                self._num_programs,
                out=out[:n],
            )
        if len(step.tiles):
            prefill_attention(
                q, kv, step.tables, step.first_blocks, step.first_rows, step.starts, step.tiles, window, out=out
            )
        return out

    def _arrays(self, batch: Batch, num_rows: int, num_decodes: int) -> dict[str, Ints]:
        return step_arrays(
            batch,
            self.limits.block_tokens,
            self.windows,
            num_rows=num_rows,
            num_decodes=num_decodes,
            tile_rows=self._tile_rows,
            has_positional_angles=self._rotary.is_positional,
        )

    def _set_angles(self, step: Step) -> None:
        """Where angles depend on more than the position: compute those of this step."""
        if self._rotary.is_positional:
            return
        cos, sin = self._rotary.angles(step.positions, step.prompt_lens)
        self._cos[: len(cos)].copy_(cos)
        self._sin[: len(sin)].copy_(sin)

    def _shape_of_bucket(self, num_rows: int) -> StepShape:
        return StepShape(
            num_rows=num_rows,
            num_decodes=0 if self._is_deterministic else num_rows,
            num_sequences=num_rows,
            num_blocks=num_rows * self.limits.max_blocks,
            num_tiles=num_rows if self._is_deterministic else 0,
            num_items=0 if self._is_deterministic else max_items(num_rows),
            num_outputs=num_rows,
        )

    def _most_ints(self) -> int:
        """Of the largest step: chunks and single tokens."""
        limits = self.limits
        shape = StepShape(
            num_rows=limits.max_batched_tokens,
            num_decodes=limits.max_sequences,
            num_sequences=limits.max_sequences,
            num_blocks=limits.max_sequences * limits.max_blocks,
            num_tiles=limits.max_sequences + limits.max_batched_tokens // self._tile_rows,
            num_items=max_items(limits.max_sequences),
            num_outputs=limits.max_batched_tokens,
        )
        return shape.sections(self.windows).num_ints


def _add(delta: Tensor | None, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised sum, sum); what nothing is added to is its own sum."""
    return add_rms_norm(hidden, None, weight, eps) if delta is None else add_rms_norm(delta, hidden, weight, eps)


class _Loader:
    """Takes weights to the device, as what multiplies with them there."""

    def __init__(
        self, reader: WeightReader, place: torch.device, deterministic: bool, quantization: Quantization | None
    ) -> None:
        self._reader = reader
        self._place = place
        self._is_deterministic = deterministic
        self._bits: Literal[4, 8] | None = None if quantization is None else 8 if quantization == "int8" else 4

    def tensor(self, *names: str) -> Tensor:
        """Tensors below one another."""
        return self._reader.take(*names).to(self._place)

    def multiply(self, projection: Projection, *, bits: Literal[4, 8] | None = None) -> Multiply:
        """x @ weight.T + bias."""
        weight = self.tensor(*(f"{name}.weight" for name in projection.names))
        bias = self.tensor(*(f"{name}.bias" for name in projection.names)) if projection.has_bias else None
        bits = bits or self._bits
        if bits is not None:
            return partial(
                quantized_linear,
                weight=quantize(weight, bits),
                bias=bias,
                is_deterministic=self._is_deterministic,
            )
        return partial(linear if self._is_deterministic else F.linear, weight=weight, bias=bias)

    def layer(self, config: ModelConfig, number: int) -> _Layer:
        """One layer's weights."""
        prefix, projections = f"model.layers.{number}", LayerProjections.of(config, number)
        return _Layer(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight"),
            qkv=self.multiply(projections.qkv),
            q_norm=self.tensor(f"{prefix}.self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=self.tensor(f"{prefix}.self_attn.k_norm.weight") if config.qk_norm else None,
            o=self.multiply(projections.o),
            post_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self.multiply(projections.gate_up),
            down=self.multiply(projections.down),
            has_rope=config.rope_layers[number],
            window=config.sliding_windows[number],
        )
