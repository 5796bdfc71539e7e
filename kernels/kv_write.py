"""Storing new keys and values in the paged cache."""

from torch import Tensor


def kv_write_ref(kv: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """The specification, one token at a time."""
    for token, (block, offset) in enumerate(zip(blocks.tolist(), offsets.tolist(), strict=True)):
        kv[block, 0, :, offset] = k[token]
        kv[block, 1, :, offset] = v[token]


def kv_write(kv: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Scatter each token's key and value into its slot of one layer's cache, in place.

    Args:
        kv: [num_blocks, 2, kv_heads, block_tokens, dim], any strides: one layer's view of the cache.
        k, v: [n, kv_heads, dim], in kv's dtype.
        blocks, offsets: [n] int64: block and token inside it; no slot twice. Not range-checked against the pool's owner.
    """
    kv[:, 0][blocks, :, offsets] = k
    kv[:, 1][blocks, :, offsets] = v
