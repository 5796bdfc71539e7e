"""Host memory straight from the system.

What every step reads, the weights, lies in large pages: with small ones a step waits for address translations, most of all
in a virtual machine, where each is looked up in two tables. KV blocks do not: they are first written while others wait for
tokens, and to find a large page then may take the system long.
"""

import mmap

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
ALIGNMENT = 64  # a cache line


def fresh_zeros(num_bytes: int, *, in_large_pages: bool) -> Tensor:
    """[num_bytes] uint8. A page costs time and memory only once it is written.

    Raises:
        OSError, OverflowError: there is not so much memory.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if in_large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


class Arena:
    """Pieces of memory side by side, since most are smaller than a large page. A chunk lives as long as its last piece."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, on a cache line; see `fresh_zeros`."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._left):
            self._left = fresh_zeros(max(size, CHUNK_BYTES), in_large_pages=True)
        piece, self._left = self._left[:num_bytes], self._left[size:]
        return piece
