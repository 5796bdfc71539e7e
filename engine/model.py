"""The decoder of the Llama family as a function of a batch, in torch: the specification, and the way on any device.

`engine.native_model` computes the same on CPUs the native library is built for.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from torch import Tensor

from core.model_config import ModelConfig
from engine.batch import Batch, Ints, Logits
from engine.rope import RotaryEmbedding
from engine.weights import EMBEDDING, LayerProjections, Projection, WeightReader
from kernels.decode_attention import DecodeIndex, decode_attention
from kernels.kv_write import kv_write
from kernels.linear import Linear
from kernels.prefill_attention import PrefillIndex, prefill_attention
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    has_rope: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class _AttentionIndex:
    decode: DecodeIndex | None
    chunks: tuple[PrefillIndex, ...]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A batch as tensors on the model's device."""

    ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    prompt_lens: Tensor  # [n] int64, of each token's sequence
    blocks: Tensor  # [n] int64: the block that takes the token's KV
    offsets: Tensor  # [n] int64: the place in it


class Model:
    """Weights and the forward pass. Implements `engine.batch.Decoder`."""

    def __init__(self, config: ModelConfig, reader: WeightReader, device: torch.device) -> None:
        """Take the weights.

        Args:
            config: the model's shape.
            reader: its checked weights; gives the dtype.
            device: where they go.
        """
        self.config = config
        self.device = device
        self._rotary = RotaryEmbedding(config.rope, device)
        self._embedding = reader.take(EMBEDDING).to(device)
        self._layers = [_load_layer(config, reader, layer, device) for layer in range(config.num_layers)]
        self._norm = reader.take("model.norm.weight").to(device)
        head = self._embedding if config.tie_word_embeddings else reader.take("lm_head.weight").to(device)
        self._head = Linear(head)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV."""
        return self._embedding.dtype

    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """Compute one step; see `Decoder`. The rows are of the model's dtype."""
        tokens = self._tokens(batch, cache.shape[4])
        cos, sin = self._rotary.angles(tokens.positions, tokens.prompt_lens)
        windows = set(self.config.sliding_windows)
        indexes = {window: self._attention_index(batch, cache.shape[4], window) for window in windows}
        hidden = F.embedding(tokens.ids, self._embedding)
        eps = self.config.rms_norm_eps
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(hidden, layer.input_norm, eps))
            q, k, v = self._heads(layer, qkv, cos, sin)
            kv = cache[:, number]
            kv_write(kv, k, v, tokens.blocks, tokens.offsets)
            attended = _attend(q, kv, batch.num_decodes, indexes[layer.window])
            hidden = hidden + layer.o(attended.flatten(1))
            gate_up = layer.gate_up(rms_norm(hidden, layer.post_norm, eps))
            hidden = hidden + layer.down(silu_mul(gate_up))
        return hidden[self._tensor(batch.outputs)]

    def logits(self, hidden: Tensor) -> Logits:
        """Next-token scores; see `Decoder`."""
        return Logits(self._head(rms_norm(hidden, self._norm, self.config.rms_norm_eps)).float())

    def _heads(self, layer: _Layer, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split one projection into q [n, heads, dim] and k, v [n, kv_heads, dim], normalised and rotated."""
        config = self.config
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        queries, rotated = config.num_heads, config.num_heads + config.num_kv_heads
        qk, v = heads[:, :rotated], heads[:, rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(qk[:, :queries], layer.q_norm, config.rms_norm_eps)
            k = rms_norm(qk[:, queries:], layer.k_norm, config.rms_norm_eps)
            qk = torch.cat((q, k), dim=1)
        if layer.has_rope:
            qk = rope(qk, cos, sin)
        return qk[:, :queries], qk[:, queries:], v

    def _tokens(self, batch: Batch, block_tokens: int) -> _Tokens:
        positions = batch.positions()
        places = batch.per_token(batch.first_blocks[:-1]) + positions // block_tokens
        return _Tokens(
            ids=self._tensor(batch.token_ids),
            positions=self._tensor(positions),
            prompt_lens=self._tensor(batch.per_token(batch.prompt_lens)),
            blocks=self._tensor(batch.tables[places]),
            offsets=self._tensor(positions % block_tokens),
        )

    def _attention_index(self, batch: Batch, block_tokens: int, window: int | None) -> _AttentionIndex:
        decode, n = None, batch.num_decodes
        if n:
            lens = np.diff(batch.first_blocks[: n + 1])
            columns = np.minimum(np.arange(lens.max()), lens[:, None] - 1)  # padded with a sequence's last block
            tables = self._tensor(batch.tables[batch.first_blocks[:n, None] + columns])
            decode = DecodeIndex.build(tables, self._tensor(batch.starts[:n] + 1), block_tokens, window)
        chunks = []
        for number in range(n, batch.num_sequences):
            table = batch.tables[batch.first_blocks[number] : batch.first_blocks[number + 1]]
            length = int(batch.first_rows[number + 1] - batch.first_rows[number])
            start = int(batch.starts[number])
            chunks.append(PrefillIndex.build(self._tensor(table), start, length, block_tokens, window))
        return _AttentionIndex(decode, tuple(chunks))

    def _tensor(self, values: Ints) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _attend(q: Tensor, kv: Tensor, num_decodes: int, index: _AttentionIndex) -> Tensor:
    """[n, heads, dim], rows in the batch's order."""
    parts = [] if index.decode is None else [decode_attention(q[:num_decodes], kv, index.decode)]
    row = num_decodes
    for chunk in index.chunks:
        parts.append(prefill_attention(q[row : row + chunk.num_tokens], kv, chunk))
        row += chunk.num_tokens
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _load_layer(config: ModelConfig, reader: WeightReader, number: int, device: torch.device) -> _Layer:
    prefix = f"model.layers.{number}"

    def tensor(name: str) -> Tensor:
        return reader.take(f"{prefix}.{name}").to(device)

    def linear(projection: Projection) -> Linear:
        weight = reader.take(*(f"{name}.weight" for name in projection.names)).to(device)
        if not projection.has_bias:
            return Linear(weight)
        return Linear(weight, reader.take(*(f"{name}.bias" for name in projection.names)).to(device))

    projections = LayerProjections.of(config, number)
    return _Layer(
        input_norm=tensor("input_layernorm.weight"),
        qkv=linear(projections.qkv),
        q_norm=tensor("self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=tensor("self_attn.k_norm.weight") if config.qk_norm else None,
        o=linear(projections.o),
        post_norm=tensor("post_attention_layernorm.weight"),
        gate_up=linear(projections.gate_up),
        down=linear(projections.down),
        has_rope=config.rope_layers[number],
        window=config.sliding_windows[number],
    )
