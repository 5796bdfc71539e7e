"""Attention over a paged cache, and what writes that cache."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.kernels.case import Case, Inputs, Make, Outputs
from bench.kernels.ceilings import Cost
from kernels.gpu.decode_attention import (
    decode_attention,
    decode_attention_ref,
    decode_items,
    decode_scratch,
    num_programs,
)
from kernels.gpu.prefill_attention import (
    packed_heads,
    prefill_attention,
    prefill_attention_varlen_ref,
    prefill_tiles,
    tile_rows,
)
from kernels.gpu.qkv_rope_write import qkv_rope_write, qkv_rope_write_ref
from kernels.gpu.variant import Config, arch_of

BLOCK_TOKENS = 16
_MAX_LAYERS = 32  # of one cache: sets of inputs are its layers, as they are in a model
_CACHE_SHARE = 4  # a quarter of the memory: torch's copies, queries and results need some too
_MAX_COPIED_BYTES = 12 << 30  # torch wants a contiguous copy of the cache
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class _Attention(Case):
    """Some sequences of one length in a cache whose blocks are in no order."""

    num_sequences: int
    num_tokens: int  # of each sequence, its new ones included
    num_heads: int = 32
    num_kv_heads: int = 8
    dim: int = 128

    @property
    def label(self) -> str:
        return f"d{self.dim}-{self.type_name}"

    @property
    def _num_blocks(self) -> int:
        """Of each sequence."""
        return -(-self.num_tokens // BLOCK_TOKENS)

    @property
    def _kv_bytes(self) -> int:
        """Of what the sequences have in one layer."""
        tokens = self.num_sequences * self.num_tokens
        return tokens * 2 * self.num_kv_heads * self.dim * self.dtype.itemsize

    @property
    def _queries_bytes(self) -> int:
        """Of the queries and as large a result, for one token of each sequence."""
        return 2 * self.num_sequences * self.num_heads * self.dim * self.dtype.itemsize

    def _layers(self, make: Make, count: int) -> tuple[list[Tensor], Tensor]:
        """[num_blocks, 2, kv_heads, block_tokens, dim] of each layer, and the sequences' blocks."""
        num_blocks = self.num_sequences * self._num_blocks
        shape = (num_blocks, count, 2, self.num_kv_heads, BLOCK_TOKENS, self.dim)
        cache = make.normal(*shape, dtype=self.dtype)
        return [cache[:, layer] for layer in range(count)], make.permutation(num_blocks)

    def inputs(self, make: Make) -> Inputs:
        return next(self._input_sets(make, 1))

    def input_sets(self, make: Make) -> Iterator[Inputs]:
        # More layers are more sets of inputs, and blocks as far apart as a model's.
        cache_bytes = make.memory_bytes() // _CACHE_SHARE
        return self._input_sets(make, max(1, min(_MAX_LAYERS, cache_bytes // self._kv_bytes)))

    @abstractmethod
    def _input_sets(self, make: Make, count: int) -> Iterator[Inputs]:
        """`count` of them, over one cache."""

    def wrong_at_size(self, inputs: Inputs) -> str:
        """Of some sequences: the specification would take hours."""
        q, kv, tables, *_ = inputs
        (got,) = self.call(inputs, None)
        of_sequence = [tensor.view(self.num_sequences, -1, self.num_heads, self.dim) for tensor in (q, got)]
        for sequence in {0, self.num_sequences // 2, self.num_sequences - 1}:
            queries, out = (tensor[sequence] for tensor in of_sequence)
            keys, values = self._contiguous(kv, tables.view(self.num_sequences, -1)[sequence])
            positions = torch.arange(self.num_tokens, device=q.device)
            is_visible = positions <= positions[-len(queries) :, None]
            wide = queries.float().transpose(0, 1)[None]
            wanted = F.scaled_dot_product_attention(
                wide, keys.float(), values.float(), attn_mask=is_visible, enable_gqa=True
            )
            if wrong := self.difference((out,), (wanted[0].transpose(0, 1).to(out.dtype),)):
                return f"sequence {sequence}: {wrong}"
        return ""

    def _contiguous(self, kv: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [sequences, kv_heads, tokens, dim] of the blocks' sequences, as torch wants them."""
        blocks = kv[tables.long()].view(-1, self._num_blocks, *kv.shape[1:])
        keys, values = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : self.num_tokens].contiguous()
        return keys, values


@dataclass(frozen=True, slots=True)
class DecodeAttention(_Attention):
    """One token of each sequence."""

    op = "decode_attention"
    target = 0.8

    @property
    def shape(self) -> str:
        return f"batch {self.num_sequences}, context {self.num_tokens}"

    def cost(self) -> Cost:
        # Multiplied once with all queries of a head: never what takes the longest, whatever multiplies.
        return Cost(
            self._kv_bytes + self._queries_bytes, 4 * self.num_tokens * self.num_sequences * self.num_heads * self.dim
        )

    def _input_sets(self, make: Make, count: int) -> Iterator[Inputs]:
        layers, tables = self._layers(make, count)
        found = decode_items(np.full(self.num_sequences, self.num_tokens, np.int32), None)
        items, first_items = _on(found.items, make.device), _on(found.first_items, make.device)
        first_blocks = _firsts(make, self.num_sequences, self._num_blocks)
        num_items = _on(np.array([len(found.items)], np.int32), make.device)
        scratch = decode_scratch(len(found.items), self.num_heads, self.dim, make.device)
        programs = num_programs(make.device, self.dtype, self.dim)
        for kv in layers:
            q = make.normal(self.num_sequences, self.num_heads, self.dim, dtype=self.dtype)
            yield q, kv, tables, first_blocks, items, first_items, num_items, scratch, programs

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        q, kv, tables, first_blocks, items, first_items, num_items, scratch, programs = inputs
        return (
            decode_attention(
                q, kv, tables, first_blocks, items, first_items, num_items, scratch, programs, config=config
            ),
        )

    def expected(self, inputs: Inputs) -> Outputs:
        q, kv, tables, *_ = inputs
        lengths = torch.full((self.num_sequences,), self.num_tokens, device=q.device)
        return (decode_attention_ref(q, kv, tables.long().view(self.num_sequences, -1), lengths, None),)

    def alternatives(self, inputs: Inputs) -> Mapping[str, Callable[[], object]]:
        if self._kv_bytes > _MAX_COPIED_BYTES:
            return {}
        q, kv, tables, *_ = inputs
        keys, values = self._contiguous(kv, tables)

        def attend() -> Outputs:
            return (F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0],)

        return {"SDPA": attend}


@dataclass(frozen=True, slots=True)
class PrefillAttention(_Attention):
    """Chunks at the ends of their sequences."""

    op = "prefill_attention"
    target = 0.6

    num_new: int = 0  # of each sequence; 0: all of its tokens

    @property
    def _num_rows(self) -> int:
        return self.num_new or self.num_tokens

    @property
    def shape(self) -> str:
        before = self.num_tokens - self._num_rows
        batch = f"{self.num_sequences} x " if self.num_sequences > 1 else ""
        return f"{batch}{self._num_rows} new" + (f" on {before}" if before else "")

    def cost(self) -> Cost:
        n, before = self._num_rows, self.num_tokens - self._num_rows
        pairs = self.num_sequences * (n * before + n * (n + 1) // 2)
        return Cost(self._kv_bytes + n * self._queries_bytes, 4 * pairs * self.num_heads * self.dim)

    def _input_sets(self, make: Make, count: int) -> Iterator[Inputs]:
        layers, tables = self._layers(make, count)
        first_blocks = _firsts(make, self.num_sequences, self._num_blocks)
        first_rows = _firsts(make, self.num_sequences, self._num_rows)
        starts = _on(self._starts(), make.device)
        rows = tile_rows(arch_of(make.device), self.dtype, self.dim, self.num_heads // self.num_kv_heads)
        for kv in layers:
            q = make.normal(self.num_sequences * self._num_rows, self.num_heads, self.dim, dtype=self.dtype)
            yield q, kv, tables, first_blocks, first_rows, starts, self._tiles(rows, make.device)

    def _starts(self) -> NDArray[np.int32]:
        return np.full(self.num_sequences, self.num_tokens - self._num_rows, np.int32)

    def _tiles(self, rows: int, device: torch.device) -> Tensor:
        first_rows = np.arange(self.num_sequences + 1, dtype=np.int32) * self._num_rows
        return _on(prefill_tiles(first_rows, rows, self._starts()), device)

    def adapted(self, inputs: Inputs, config: Config) -> Inputs:
        rows = config.tiles["BLOCK_M"] // packed_heads(self.num_heads // self.num_kv_heads)
        return *inputs[:-1], self._tiles(rows, inputs[0].device)

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        q, kv, tables, first_blocks, first_rows, starts, tiles = inputs
        return (prefill_attention(q, kv, tables, first_blocks, first_rows, starts, tiles, None, config=config),)

    def expected(self, inputs: Inputs) -> Outputs:
        q, kv, tables, first_blocks, first_rows, starts, _ = inputs
        return (prefill_attention_varlen_ref(q, kv, tables, first_blocks, first_rows, starts, None),)

    def alternatives(self, inputs: Inputs) -> Mapping[str, Callable[[], object]]:
        q, kv, tables, *_ = inputs
        keys, values = self._contiguous(kv, tables)
        queries = q.view(self.num_sequences, -1, self.num_heads, self.dim).transpose(1, 2)
        is_whole = self._num_rows == self.num_tokens
        mask: Any = None if is_whole else causal_lower_right(self._num_rows, self.num_tokens)

        def attend() -> Outputs:
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=is_whole, enable_gqa=True
            )
            return (out.transpose(1, 2).flatten(0, 1),)

        def attend_by_cudnn() -> Outputs:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return attend()

        return {"SDPA": attend} | ({"SDPA by cuDNN": attend_by_cudnn} if q.is_cuda and is_whole else {})


@dataclass(frozen=True, slots=True)
class QkvRopeWrite(Case):
    """Split, rotate and store what one projection gave."""

    op = "qkv_rope_write"

    num_rows: int
    num_heads: int = 32
    num_kv_heads: int = 8
    dim: int = 128

    @property
    def shape(self) -> str:
        return f"n {self.num_rows}, heads {self.num_heads} and {self.num_kv_heads}, dim {self.dim}"

    @property
    def label(self) -> str:
        return f"d{self.dim}-{self.type_name}"

    def cost(self) -> Cost:
        heads = self.num_heads + 2 * self.num_kv_heads
        angles = 2 * self.dim // 2 * 4
        return Cost(self.num_rows * (2 * heads * self.dim * self.dtype.itemsize + angles + 3 * 4), 0)

    def inputs(self, make: Make) -> Inputs:
        num_blocks = -(-self.num_rows // BLOCK_TOKENS)
        kv = make.normal(num_blocks, 2, self.num_kv_heads, BLOCK_TOKENS, self.dim, dtype=self.dtype)
        slots = make.permutation(num_blocks * BLOCK_TOKENS)[: self.num_rows]
        qkv = make.normal(self.num_rows, (self.num_heads + 2 * self.num_kv_heads) * self.dim, dtype=self.dtype)
        angles = make.uniform(self.num_rows, self.dim // 2) * 6.28
        rows = make.permutation(self.num_rows)
        return qkv, kv, slots // BLOCK_TOKENS, slots % BLOCK_TOKENS, angles.cos(), angles.sin(), rows

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        q = qkv_rope_write(*inputs, **self._constants(), config=config)
        return q, inputs[1]

    def expected(self, inputs: Inputs) -> Outputs:
        qkv, kv, *places = inputs
        changed: Tensor = kv.clone()
        return qkv_rope_write_ref(qkv, changed, *places, **self._constants()), changed

    def _constants(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads, "q_norm": None, "k_norm": None, "eps": _EPS, "has_rope": True}


def _on(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def _firsts(make: Make, count: int, each: int) -> Tensor:
    """[count + 1] int32: where each of so many parts of one length begins."""
    return torch.arange(count + 1, dtype=torch.int32, device=make.device) * each
