"""Attention of one prompt chunk over its sequence's paged KV: what came before the chunk, and the chunk itself."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefillIndex:
    """Where one chunk finds its KV: computed once a step, used by every layer with the same window."""

    block_ids: Tensor  # [gathered blocks] int64
    num_tokens: int  # of the chunk
    num_lanes: int  # gathered tokens that exist; the rest of the last block is not looked at
    visible: Tensor | None  # [n, num_lanes] bool; None: plain causal, nothing before the chunk

    @classmethod
    def build(
        cls, block_table: Tensor, start: int, num_tokens: int, block_tokens: int, window: int | None
    ) -> "PrefillIndex":
        """Work out which blocks to gather and what each token sees in them.

        Args:
            block_table: [max_blocks] int64; its first blocks hold the `start + num_tokens` tokens, this chunk included.
            start: tokens before the chunk.
            num_tokens: tokens in the chunk.
            block_tokens: tokens in one block.
            window: a token sees at most this many tokens, itself included; None: all.
        """
        end = start + num_tokens
        first_block = 0 if window is None else max(0, start + 1 - window) // block_tokens
        block_ids = block_table[first_block : -(-end // block_tokens)]
        num_lanes = end - first_block * block_tokens
        if start == 0 and (window is None or window >= num_tokens):
            return cls(block_ids, num_tokens, num_lanes, None)
        lanes = torch.arange(first_block * block_tokens, end, device=block_table.device)
        tokens = torch.arange(start, end, device=block_table.device)[:, None]
        visible = lanes <= tokens
        if window is not None:
            visible &= lanes > tokens - window
        return cls(block_ids, num_tokens, num_lanes, visible)


def prefill_attention_ref(q: Tensor, kv: Tensor, block_table: Tensor, start: int, window: int | None) -> Tensor:
    """The specification, one token and head at a time, in float32."""
    out = torch.empty_like(q)
    group = q.shape[1] // kv.shape[2]
    for row in range(q.shape[0]):
        end = start + row + 1
        positions = torch.arange(0 if window is None else max(0, end - window), end)
        blocks, offsets = block_table[positions // kv.shape[3]], positions % kv.shape[3]
        for head in range(q.shape[1]):
            keys = kv[blocks, 0, head // group, offsets].float()
            values = kv[blocks, 1, head // group, offsets].float()
            weights = (keys @ q[row, head].float() * q.shape[-1] ** -0.5).softmax(0)
            out[row, head] = weights @ values
    return out


def prefill_attention(q: Tensor, kv: Tensor, index: PrefillIndex) -> Tensor:
    """Attend with every token of one chunk; its own keys and values are in the cache already.

    Args:
        q: [n, heads, dim].
        kv: [num_blocks, 2, kv_heads, block_tokens, dim], any strides: one layer's view of the cache, in q's dtype.
        index: of the same n tokens.
    Returns:
        [n, heads, dim] in q's dtype, softmax and sums in float32.
    Source: PagedAttention (Kwon et al., SOSP 2023) with FlashAttention (Dao et al., NeurIPS 2022) inside.
    """
    gathered = kv.permute(1, 2, 0, 3, 4).index_select(2, index.block_ids)
    keys, values = gathered.flatten(2, 3)[:, :, : index.num_lanes].float()
    out = F.scaled_dot_product_attention(
        q.float().transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=index.visible,
        is_causal=index.visible is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).to(q.dtype)
