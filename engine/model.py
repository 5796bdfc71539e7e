"""The decoder of the Llama family as a function of a batch: tokens in, hidden rows and logits out."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from torch import Tensor

from core.model_config import ModelConfig
from engine.rope import RotaryEmbedding
from engine.weights import WeightReader
from kernels.decode_attention import DecodeIndex, decode_attention
from kernels.kv_write import kv_write
from kernels.linear import Linear
from kernels.prefill_attention import PrefillIndex, prefill_attention
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """One prompt chunk of a batch."""

    block_table: Tensor  # [blocks] int64
    start: int  # tokens of the sequence before the chunk
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, flat: `num_decodes` single tokens first, then the chunks one after the other."""

    token_ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    prompt_lens: Tensor  # [n] int64, of each token's sequence
    blocks: Tensor  # [n] int64: the block that takes the token's KV
    offsets: Tensor  # [n] int64: the place in it
    num_decodes: int
    decode_tables: Tensor  # [num_decodes, max_blocks] int64, padded with any valid block
    chunks: tuple[ChunkRows, ...]


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


class Model:
    """Weights and the forward pass. Holds no request state: that is in the batch and the cache."""

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
        self._embedding = reader.take("model.embed_tokens.weight").to(device)
        self._layers = [_load_layer(config, reader, layer, device) for layer in range(config.num_layers)]
        self._norm = reader.take("model.norm.weight").to(device)
        head = self._embedding if config.tie_word_embeddings else reader.take("lm_head.weight").to(device)
        self._head = Linear(head)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV."""
        return self._embedding.dtype

    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """Compute one step, writing every token's KV into its slot.

        Args:
            batch: the tokens; the KV of all tokens before them is in the cache.
            cache: [num_blocks, layers, 2, kv_heads, block_tokens, dim], in the model's dtype.
        Returns:
            [n, hidden]: each token's hidden row after the last layer, not normalised.
        """
        cos, sin = self._rotary.angles(batch.positions, batch.prompt_lens)
        windows = set(self.config.sliding_windows)
        indexes = {window: _attention_index(batch, cache.shape[4], window) for window in windows}
        hidden = F.embedding(batch.token_ids, self._embedding)
        eps = self.config.rms_norm_eps
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(hidden, layer.input_norm, eps))
            q, k, v = self._heads(layer, qkv, cos, sin)
            kv = cache[:, number]
            kv_write(kv, k, v, batch.blocks, batch.offsets)
            attended = _attend(q, kv, batch.num_decodes, indexes[layer.window])
            hidden = hidden + layer.o(attended.flatten(1))
            gate_up = layer.gate_up(rms_norm(hidden, layer.post_norm, eps))
            hidden = hidden + layer.down(silu_mul(gate_up))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores.

        Args:
            hidden: [n, hidden], rows of what `forward` returned.
        Returns:
            [n, vocab] float32.
        """
        return self._head(rms_norm(hidden, self._norm, self.config.rms_norm_eps)).float()

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


def _attention_index(batch: Batch, block_tokens: int, window: int | None) -> _AttentionIndex:
    decode = None
    if batch.num_decodes:
        context_lens = batch.positions[: batch.num_decodes] + 1
        decode = DecodeIndex.build(batch.decode_tables, context_lens, block_tokens, window)
    chunks = (PrefillIndex.build(c.block_table, c.start, c.num_tokens, block_tokens, window) for c in batch.chunks)
    return _AttentionIndex(decode, tuple(chunks))


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

    def linear(names: tuple[str, ...], has_bias: bool) -> Linear:
        weight = reader.take(*(f"{prefix}.{name}.weight" for name in names)).to(device)
        bias = reader.take(*(f"{prefix}.{name}.bias" for name in names)).to(device) if has_bias else None
        return Linear(weight, bias)

    # One product instead of three (and of two): at small batches a step is bound by the number of passes over memory.
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    if config.has_fused_projections:
        qkv, gate_up = ("self_attn.qkv_proj",), ("mlp.gate_up_proj",)
    return _Layer(
        input_norm=tensor("input_layernorm.weight"),
        qkv=linear(qkv, config.qkv_bias),
        q_norm=tensor("self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=tensor("self_attn.k_norm.weight") if config.qk_norm else None,
        o=linear(("self_attn.o_proj",), config.o_bias),
        post_norm=tensor("post_attention_layernorm.weight"),
        gate_up=linear(gate_up, config.mlp_bias),
        down=linear(("mlp.down_proj",), config.mlp_bias),
        has_rope=config.rope_layers[number],
        window=config.sliding_windows[number],
    )
