"""The tensor that holds every KV block of a worker, and its bytes for those who move blocks."""

import mmap

import torch
from torch import Tensor

from core.errors import ConfigError
from core.host_blocks import HostBlocks
from core.layout import KVLayout
from core.sequence import require_blocks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVCache(HostBlocks):
    """KV blocks, `[block, layer, k/v, kv_head, token, dim]`. On a device it is the tensor alone: see `engine.gpu.memory`."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        """Allocate zeroed blocks.

        Args:
            layout: what one block is.
            num_blocks: how many.
            device: where they live.
        Raises:
            ConfigError: there is not one block, or no memory for so many.
        """
        if num_blocks < 1:
            raise ConfigError(
                f"{num_blocks} KV blocks of {layout.block_bytes} bytes: need at least 1; give more memory"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, layout.head_dim)
        try:
            self.tensor = _zeros(num_blocks * layout.block_bytes, device).view(DTYPES[layout.dtype]).view(shape)
        # torch has no narrower class for a failed allocation; mmap's depends on how far off the size is
        except (RuntimeError, OSError, OverflowError) as error:
            raise ConfigError(f"{num_blocks} KV blocks of {layout.block_bytes} bytes do not fit: {error}") from error
        # One row of bytes per block; numpy has no bfloat16, and a memoryview needs no dtype.
        self._bytes = None if device.type != "cpu" else self.tensor.view(num_blocks, -1).view(torch.uint8).numpy()

    def view(self, block: int) -> memoryview:
        """The writable bytes of one block, shared with the engine, not copied.

        Raises:
            IndexError: no such block.
        """
        assert self._bytes is not None, "blocks on a device have no host bytes"
        require_blocks((block,), self.num_blocks)
        return memoryview(self._bytes[block])


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] zeros, uint8. On the CPU a page costs time and memory only once it is written: starting does not."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)
