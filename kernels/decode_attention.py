"""Attention of a batch of single tokens over their paged KV: the decode half of every step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Gathered tokens in one group: few enough that its keys and values stay in the CPU's cache between gather and use.
_GROUP_LANES = 2048


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of similar length that one pair of batched products serves. Lanes are gathered tokens of a sequence."""

    rows: Tensor  # [m] int64 in [0, n)
    block_ids: Tensor  # [m * gathered blocks] int64
    hidden: Tensor  # [m, lanes] bool: lanes the token must not see
    hidden_lanes: Tensor  # [hidden lanes in all] int64, into m * lanes


@dataclass(frozen=True, slots=True)
class DecodeIndex:
    """Where a decode batch finds its KV: computed once a step, used by every layer with the same window."""

    groups: tuple[_Group, ...]

    @classmethod
    def build(cls, block_tables: Tensor, context_lens: Tensor, block_tokens: int, window: int | None) -> "DecodeIndex":
        """Work out which blocks to gather and what in them to hide.

        Args:
            block_tables: [n, max_blocks] int64, padded with any valid block.
            context_lens: [n] int64, tokens each sequence attends to, the new one included; at least 1.
            block_tokens: tokens in one block.
            window: the token sees at most this many tokens, itself included; None: all.
        """
        first = torch.zeros_like(context_lens) if window is None else (context_lens - window).clamp_min(0)
        first_block = first // block_tokens
        num_blocks = (context_lens - 1) // block_tokens - first_block + 1
        groups = []
        for group in _similar(num_blocks.tolist(), _GROUP_LANES // block_tokens):
            rows = torch.tensor(group, device=block_tables.device)
            width = int(num_blocks[rows[-1]])
            columns = first_block[rows, None] + torch.arange(width, device=rows.device)
            block_ids = block_tables[rows].gather(1, columns.clamp_max(block_tables.shape[1] - 1))
            lanes = torch.arange(width * block_tokens, device=rows.device)
            positions = first_block[rows, None] * block_tokens + lanes
            hidden = (positions >= context_lens[rows, None]) | (positions < first[rows, None])
            groups.append(_Group(rows, block_ids.flatten(), hidden, hidden.flatten().nonzero().flatten()))
        return cls(tuple(groups))


def _similar(num_blocks: list[int], limit: int) -> Iterator[list[int]]:
    """Rows by rising number of blocks, cut so that rows times the longest of a group stays within `limit` blocks."""
    group: list[int] = []
    for row in sorted(range(len(num_blocks)), key=num_blocks.__getitem__):
        if group and (len(group) + 1) * num_blocks[row] > limit:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def decode_attention_ref(
    q: Tensor, kv: Tensor, block_tables: Tensor, context_lens: Tensor, window: int | None
) -> Tensor:
    """The specification, one sequence and head at a time, in float32."""
    out = torch.empty_like(q)
    queries_per_kv = q.shape[1] // kv.shape[2]
    for row, length in enumerate(context_lens.tolist()):
        positions = torch.arange(0 if window is None else max(0, length - window), length)
        blocks, offsets = block_tables[row, positions // kv.shape[3]], positions % kv.shape[3]
        for head in range(q.shape[1]):
            keys = kv[blocks, 0, head // queries_per_kv, offsets].float()
            values = kv[blocks, 1, head // queries_per_kv, offsets].float()
            weights = (keys @ q[row, head].float() * q.shape[-1] ** -0.5).softmax(0)
            out[row, head] = weights @ values
    return out


def decode_attention(q: Tensor, kv: Tensor, index: DecodeIndex) -> Tensor:
    """Attend with one query token per sequence; lanes outside a sequence's context never reach the result.

    Args:
        q: [n, heads, dim].
        kv: [num_blocks, 2, kv_heads, block_tokens, dim], any strides: one layer's view of the cache, in q's dtype.
        index: of the same n sequences.
    Returns:
        [n, heads, dim] in q's dtype, softmax and sums in float32.
    Source: PagedAttention (Kwon et al., SOSP 2023); grouped queries (Ainslie et al., EMNLP 2023).
    """
    out = torch.empty_like(q)
    for group in index.groups:
        out[group.rows] = _attend(q[group.rows], kv, group)
    return out


def _attend(q: Tensor, kv: Tensor, group: _Group) -> Tensor:
    m, num_heads, dim = q.shape
    num_kv_heads, lanes = kv.shape[2], group.hidden.shape[1]
    # Heads before blocks: one gather gives each head a contiguous run of its tokens, so two batched products suffice.
    gathered = kv.permute(1, 2, 0, 3, 4).index_select(2, group.block_ids).float()
    keys, values = gathered.view(2, num_kv_heads * m, lanes, dim)
    # A hidden lane has weight zero, but zero times a stale NaN is NaN.
    values.view(num_kv_heads, m * lanes, dim).index_fill_(1, group.hidden_lanes, 0.0)
    queries = q.float().view(m, num_kv_heads, -1, dim).transpose(0, 1).reshape(num_kv_heads * m, -1, dim)
    scores = torch.bmm(queries * dim**-0.5, keys.transpose(1, 2)).view(num_kv_heads, m, -1, lanes)
    weights = scores.masked_fill_(group.hidden[:, None], float("-inf")).softmax(-1)
    out = torch.bmm(weights.view(num_kv_heads * m, -1, lanes), values)
    return out.view(num_kv_heads, m, -1, dim).transpose(0, 1).reshape(m, num_heads, dim).to(q.dtype)
