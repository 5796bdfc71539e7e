"""Host memory in the largest pages there are, for what every step reads.

A step walks through all weights. With small pages it waits for address translations, most of all in a virtual machine,
where each is looked up in two tables. KV blocks are not kept so: they are first written while others wait for tokens, and
to find a large page then may take the system long.
"""

import mmap

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
ALIGNMENT = 64  # a cache line


class Arena:
    """Pieces of memory side by side, since most are smaller than a large page. A chunk lives as long as its last piece."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, on a cache line. A page costs memory only once it is written.

        Raises:
            OSError: there is not so much memory.
        """
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._left):
            self._left = _chunk(max(size, CHUNK_BYTES))
        piece, self._left = self._left[:num_bytes], self._left[size:]
        return piece


def _chunk(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
