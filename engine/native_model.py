"""The decoder on a CPU, through the native library: the same function of a batch as `engine.model`, several times faster.

Products are integers with weights of 16 bits or fewer, or, where float32 is asked for, float32 with the checkpoint's own
weights; everything else is float32. `NativeModel` computes a whole step in one call. `MixedModel` is for CPUs that multiply
bfloat16 matrices in hardware: products by oneDNN, the rest native.
"""

import ctypes

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from torch import Tensor

from core.model_config import ModelConfig
from engine.batch import Batch, Logits
from engine.rope import RotaryEmbedding
from engine.weights import EMBEDDING, LayerProjections, Projection, WeightReader
from kernels.linear import Linear
from kernels.native.library import BatchStruct, LayerStruct, LinearStruct, ModelStruct
from kernels.native.ops import DTYPE_CODES, Integers, NativeOps, PackedLinear, Quantization

_CPU = torch.device("cpu")
# Rows of every oneDNN product in deterministic mode: it chooses how to add by the number of rows.
_FIXED_ROWS = 64


class _Frame:
    """What both models share: sizes and norms as the library wants them, and batches."""

    def __init__(self, config: ModelConfig, reader: WeightReader) -> None:
        self.config = config
        self.vectors: dict[str, Tensor] = {}  # norms by name, [size] float32
        self._kept: list[PackedLinear] = []  # what the structs point into
        self._rotary = RotaryEmbedding(config.rope, _CPU)
        self.layers = (LayerStruct * config.num_layers)(*(self._layer(reader, n) for n in range(config.num_layers)))
        self.struct = ModelStruct(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_half=config.rope.rotary_dim // 2,
            norm_eps=config.rms_norm_eps,
            layers=ctypes.cast(self.layers, ctypes.POINTER(LayerStruct)),
            final_norm=self._vector(reader, "model.norm.weight"),
        )

    def _layer(self, reader: WeightReader, number: int) -> LayerStruct:
        config, prefix = self.config, f"model.layers.{number}"
        return LayerStruct(
            input_norm=self._vector(reader, f"{prefix}.input_layernorm.weight"),
            q_norm=self._vector(reader, f"{prefix}.self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=self._vector(reader, f"{prefix}.self_attn.k_norm.weight") if config.qk_norm else None,
            post_norm=self._vector(reader, f"{prefix}.post_attention_layernorm.weight"),
            has_rope=config.rope_layers[number],
            window=config.sliding_windows[number] or 0,
        )

    def _vector(self, reader: WeightReader, name: str) -> int:
        self.vectors[name] = reader.take(name).float()
        return self.vectors[name].data_ptr()

    def keep(self, linear: PackedLinear) -> LinearStruct:
        self._kept.append(linear)
        return linear.struct

    def batch(self, batch: Batch, cache: Tensor) -> tuple[BatchStruct, object]:
        """The batch as the library wants it, and what has to live as long."""
        num_blocks, block_tokens = cache.shape[0], cache.shape[4]
        # Below nobody checks: an index out of range would be foreign memory.
        if batch.token_ids.view(np.uint32).max() >= self.config.vocab_size:  # so are negative ones
            raise IndexError(f"a token id is not in [0, {self.config.vocab_size})")
        if batch.tables.view(np.uint32).max() >= num_blocks:
            raise IndexError(f"a block number is not in [0, {num_blocks})")
        assert cache.is_contiguous()
        assert cache.shape[1] == self.config.num_layers
        if self._rotary.is_positional:
            cos, sin = self._rotary.table(batch.num_positions)
        else:
            prompt_lens = batch.per_token(batch.prompt_lens)
            cos, sin = self._rotary.angles(torch.tensor(batch.positions()), torch.tensor(prompt_lens))
        struct = BatchStruct(
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
            token_ids=batch.token_ids.ctypes.data,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            first_row=batch.first_rows.ctypes.data,
            start=batch.starts.ctypes.data,
            tables=batch.tables.ctypes.data,
            first_block=batch.first_blocks.ctypes.data,
            cache=cache.data_ptr(),
            block_tokens=block_tokens,
            cache_dtype=DTYPE_CODES[cache.dtype],
            has_token_angles=not self._rotary.is_positional,
            num_outputs=len(batch.outputs),
            outputs=batch.outputs.ctypes.data,
        )
        return struct, (batch, cos, sin, cache)


class NativeModel:
    """Implements `engine.batch.Decoder` in one native call a step. Every row is the same bits in any batch."""

    def __init__(
        self, config: ModelConfig, reader: WeightReader, ops: NativeOps, quantization: Quantization | None = None
    ) -> None:
        """Take the weights.

        Args:
            config: the model's shape.
            reader: its checked weights; gives the dtype of the KV.
            ops: the library, and its threads.
            quantization: of the layers' weights. The embedding and the head are then int8: they bear less.
        Raises:
            ValueError: quantised weights of a shape that cannot be.
        """
        self.dtype = reader.dtype
        self._ops = ops
        # Integers lose less than 16-bit arithmetic would, five times less in the logits, and multiply faster than float32.
        unquantized: Integers | None = None if reader.dtype == torch.float32 else "int16"
        integers = quantization or unquantized
        edges = "int8" if quantization else unquantized
        self._frame = frame = _Frame(config, reader)
        for number in range(config.num_layers):
            projections, layer = LayerProjections.of(config, number), frame.layers[number]
            layer.qkv = self._pack(reader, projections.qkv, integers)
            layer.o = self._pack(reader, projections.o, integers)
            layer.gate_up = self._pack(reader, projections.gate_up, integers, is_gated=True)
            layer.down = self._pack(reader, projections.down, integers)
        embedding = self._pack(reader, Projection(("model.embed_tokens",), has_bias=False), edges)
        frame.struct.embedding = frame.struct.head = embedding
        if not config.tie_word_embeddings:
            frame.struct.head = self._pack(reader, Projection(("lm_head",), has_bias=False), edges)

    def _pack(
        self, reader: WeightReader, projection: Projection, integers: Integers | None, *, is_gated: bool = False
    ) -> LinearStruct:
        parts = reader.parts(*(f"{name}.weight" for name in projection.names))
        bias = reader.take(*(f"{name}.bias" for name in projection.names)) if projection.has_bias else None
        return self._frame.keep(self._ops.pack(parts, bias, integers, is_gated=is_gated))

    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """Compute one step; see `Decoder`. The rows are float32."""
        struct, _alive = self._frame.batch(batch, cache)
        return self._ops.forward(self._frame.struct, struct)

    def logits(self, hidden: Tensor) -> Logits:
        """Next-token scores; see `Decoder`."""
        return Logits(*self._ops.logits(self._frame.struct, hidden))


class MixedModel:
    """Implements `engine.batch.Decoder` with products by oneDNN, in the weights' dtype, and everything else native."""

    def __init__(self, config: ModelConfig, reader: WeightReader, ops: NativeOps, deterministic: bool = False) -> None:
        """Take the weights.

        Args:
            config: the model's shape.
            reader: its checked weights; gives the dtype.
            ops: the library, and its threads.
            deterministic: a row gives the same bits in any batch; small batches then cost as much as middling ones.
        """
        self.dtype = reader.dtype
        self._ops = ops
        self._frame = _Frame(config, reader)
        fixed_rows = _FIXED_ROWS if deterministic else None

        def linear(projection: Projection) -> Linear:
            weight = reader.take(*(f"{name}.weight" for name in projection.names))
            if not projection.has_bias:
                return Linear(weight, fixed_rows=fixed_rows)
            return Linear(weight, reader.take(*(f"{name}.bias" for name in projection.names)), fixed_rows)

        self._layers = []
        for number in range(config.num_layers):
            projections = LayerProjections.of(config, number)
            qkv, o = linear(projections.qkv), linear(projections.o)
            self._layers.append((qkv, o, linear(projections.gate_up), linear(projections.down)))
        self._embedding = reader.take(EMBEDDING)
        head = self._embedding if config.tie_word_embeddings else reader.take("lm_head.weight")
        self._head = Linear(head, fixed_rows=fixed_rows)

    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """Compute one step; see `Decoder`. The rows are float32."""
        frame, ops = self._frame, self._ops
        struct, _alive = frame.batch(batch, cache)
        hidden = F.embedding(torch.tensor(batch.token_ids), self._embedding).float()
        delta: Tensor | None = None
        for number, (qkv, o, gate_up, down) in enumerate(self._layers):
            normed = self._norm(f"model.layers.{number}.input_layernorm.weight", hidden, delta)
            attended = ops.attend(frame.struct, struct, number, qkv(normed))
            if number == len(self._layers) - 1:
                rows = torch.tensor(batch.outputs).long()
                hidden, attended = hidden[rows], attended[rows]
            normed = self._norm(f"model.layers.{number}.post_attention_layernorm.weight", hidden, o(attended))
            delta = down(ops.silu_mul(gate_up(normed)))
        assert delta is not None, "a model has a layer"
        return hidden + delta

    def logits(self, hidden: Tensor) -> Logits:
        """Next-token scores; see `Decoder`."""
        return Logits(self._head(self._norm("model.norm.weight", hidden, None)).float())

    def _norm(self, name: str, x: Tensor, delta: Tensor | None) -> Tensor:
        return self._ops.add_and_norm(x, delta, self._frame.vectors[name], self._frame.config.rms_norm_eps, self.dtype)
