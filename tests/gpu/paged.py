"""Sequences in a paged cache as awkward as the cache may be: NaN where no token is, blocks in no order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Paged:
    """Chunks of sequences at the end of what is in the cache, and the queries of the chunks' tokens."""

    q: Tensor  # [n, heads, dim], a view into rows that hold more
    kv: Tensor  # [num_blocks, 2, kv_heads, block_tokens, dim], one layer of a cache of two
    tables: Tensor  # [blocks] int32
    first_blocks: Tensor  # [s + 1] int32
    first_rows: Tensor  # [s + 1] int32
    starts: Tensor  # [s] int32

    def only(self, sequence: int, rows: slice | None = None) -> "Paged":
        """One of the sequences as if alone, or some rows of its chunk."""
        first, end = self.first_rows[sequence : sequence + 2].tolist()
        chosen = range(first, end)[rows or slice(None)]
        blocks = self.tables[self.first_blocks[sequence] : self.first_blocks[sequence + 1]]
        return Paged(
            self.q[chosen.start : chosen.stop],
            self.kv,
            blocks,
            _firsts([len(blocks)], blocks.device),
            _firsts([len(chosen)], blocks.device),
            self.starts[sequence : sequence + 1] + (chosen.start - first),
        )

    def block_table(self) -> Tensor:
        """[s, most blocks] int64, padded with block 0."""
        tables = self.tables.long().split(self.first_blocks.diff().tolist())
        return torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True)


def paged(
    device: torch.device,
    chunks: Sequence[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> Paged:
    """Make sequences.

    Args:
        chunks: of each sequence the tokens before its chunk, and the tokens of the chunk.
        heads: query heads and KV heads.
        window: tokens that no row of the chunk can see are NaN.
    """
    num_heads, num_kv_heads = heads
    counts = [-(-(start + rows) // block_tokens) for start, rows in chunks]
    num_blocks = sum(counts) + 3
    tables = 1 + torch.randperm(num_blocks - 1)[: sum(counts)]  # block 0 is the one a careless kernel would read
    cache = torch.full((num_blocks, 2, 2, num_kv_heads, block_tokens, dim), float("nan"), dtype=dtype)
    kv = cache[:, 1]
    for (start, rows), table in zip(chunks, tables.split(counts), strict=True):
        first = 0 if window is None else max(0, start + 1 - window)
        positions = torch.arange(first, start + rows)
        shape = (len(positions), 2, num_kv_heads, dim)
        kv[table[positions // block_tokens], :, :, positions % block_tokens] = torch.randn(shape).to(dtype)
    n = sum(rows for _, rows in chunks)
    q = torch.randn(n, num_heads + 2, dim).to(dtype).to(device)[:, 1:-1]
    return Paged(
        q,
        cache.to(device)[:, 1],
        tables.int().to(device),
        _firsts(counts, device),
        _firsts([rows for _, rows in chunks], device),
        torch.tensor([start for start, _ in chunks], dtype=torch.int32, device=device),
    )


def _firsts(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], device=device).cumsum(0).int()
