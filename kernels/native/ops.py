"""The native operations on torch tensors. Arguments are checked here: below, a wrong one would touch foreign memory."""

from collections.abc import Sequence
from ctypes import byref
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kernels.native.library import BatchStruct, LinearStruct, ModelStruct, load_library

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FORMAT_CODES = {"int8": 3, "int4": 4, "int16": 5}
GROUP_INPUTS = 32  # that share a scale when quantised

Quantization = Literal["int8", "int4"]
Integers = Literal["int16", "int8", "int4"]


class PackedLinear:
    """Weights [out, in] in the order the library reads them, in their own precision or as integers, and a float32 bias."""

    def __init__(self, struct: LinearStruct, memory: Tensor, bias: Tensor | None) -> None:
        """Keep together what `NativeOps.pack` made."""
        self.struct = struct
        self.memory = memory
        self.bias = bias


class NativeOps:
    """The functions of one build of the library, on a fixed set of threads. Results do not depend on their number."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        """Load the library and start its threads.

        Args:
            path: what `find_library` found.
            threads: compute threads, the caller's included.
        Raises:
            MemoryError: no memory or threads for so many.
        """
        self._library = load_library(path)
        self._logits = torch.empty(0, 0)  # kept: to map and clear new memory would take longer than to sample from it
        self._pool = self._library.baton_pool_create(threads)
        if not self._pool:
            raise MemoryError(f"no memory for {threads} compute threads")

    def __del__(self) -> None:
        if getattr(self, "_pool", None):
            self._library.baton_pool_destroy(self._pool)

    def pack(
        self,
        parts: Sequence[Tensor],
        bias: Tensor | None = None,
        integers: Integers | None = None,
        *,
        is_gated: bool = False,
    ) -> PackedLinear:
        """Prepare the weights of one product; the parts are not needed afterwards.

        Args:
            parts: [out_i, in] each, of one dtype: stacked one below the other.
            bias: [sum of out_i], any dtype, or None.
            integers: multiply in integers, the rows with 14 bits; of the weights int16 keeps 13 bits and a scale for each
                output; int8 keeps 8 and a scale for each 32 inputs of an output, as GGUF's Q8_0; int4 keeps 4, a scale and
                a minimum, as Q4_1. None: keep the parts' own precision and multiply in float32.
            is_gated: the product is silu(first half of the outputs) * second half.
        Raises:
            ValueError: int8 or int4 weights with a number of inputs that is not a multiple of 32.
            MemoryError: no room for a row.
        """
        dtype, num_inputs = DTYPE_CODES[parts[0].dtype], parts[0].shape[1]
        assert all(part.dtype == parts[0].dtype and part.shape[1] == num_inputs for part in parts)
        num_outputs = sum(len(part) for part in parts)
        if integers in ("int8", "int4") and num_inputs % GROUP_INPUTS:
            raise ValueError(f"{integers} weights with {num_inputs} inputs: must be a multiple of {GROUP_INPUTS}")
        code = dtype if integers is None else FORMAT_CODES[integers]
        struct = LinearStruct(num_outputs=num_outputs, num_inputs=num_inputs, format=code, is_gated=is_gated)
        memory = _aligned_zeros(self._library.baton_packed_bytes(byref(struct)))
        struct.weights = memory.data_ptr()
        row = 0
        for part in parts:
            rows = part.contiguous()
            if self._library.baton_pack(byref(struct), rows.data_ptr(), len(rows), row, dtype):
                raise MemoryError(f"no memory for a row of {num_inputs} weights")
            row += len(rows)
        wide_bias = None if bias is None else bias.float().contiguous()
        assert wide_bias is None or wide_bias.shape == (num_outputs,)
        struct.bias = _pointer(wide_bias)
        return PackedLinear(struct, memory, wide_bias)

    def multiply(self, linear: PackedLinear, x: Tensor) -> Tensor:
        """x @ W.T + bias, gated where the weights are; each row of it is the same bits in any batch.

        Args:
            x: [n, in] float32.
        Returns:
            [n, out] float32; half of them where they are gated.
        """
        assert x.dtype == torch.float32
        assert x.shape[1] == linear.struct.num_inputs
        x = x.contiguous()
        y = torch.empty(len(x), linear.struct.num_outputs // (2 if linear.struct.is_gated else 1))
        if self._library.baton_multiply(self._pool, byref(linear.struct), x.data_ptr(), y.data_ptr(), len(x), None):
            raise MemoryError(f"no memory for {len(x)} rows of {x.shape[1]}")
        return y

    def row(self, linear: PackedLinear, number: int) -> Tensor:
        """One row of the weights, [in] float32."""
        assert 0 <= number < linear.struct.num_outputs
        to = torch.empty(linear.struct.num_inputs)
        self._library.baton_unpack_row(byref(linear.struct), number, to.data_ptr())
        return to

    def add_and_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """x += delta, in place; returns the root-mean-square norm of the sum.

        Args:
            x: [n, dim] float32, contiguous.
            delta: [n, dim] of `dtype`, contiguous, or None.
            weight: [dim] float32.
            eps: keeps the root away from zero.
            dtype: of the result.
        Returns:
            [n, dim].
        """
        assert x.dtype == weight.dtype == torch.float32
        assert x.is_contiguous()
        assert weight.shape == x.shape[1:]
        assert delta is None or (delta.dtype == dtype and delta.shape == x.shape and delta.is_contiguous())
        out = torch.empty(x.shape, dtype=dtype)
        self._library.baton_rms_norm(
            self._pool,
            x.data_ptr(),
            _pointer(delta),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            *x.shape,
            DTYPE_CODES[dtype],
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up.

        Args:
            gate_up: [n, 2 * dim], gate first, contiguous.
        Returns:
            [n, dim] in the same dtype.
        """
        assert gate_up.is_contiguous()
        n, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((n, dim), dtype=gate_up.dtype)
        self._library.baton_silu_mul(self._pool, gate_up.data_ptr(), out.data_ptr(), n, dim, DTYPE_CODES[gate_up.dtype])
        return out

    def can_attend(self, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
        """Whether `attend` has room for heads of this shape."""
        return bool(self._library.baton_can_attend(num_heads, num_kv_heads, head_dim))

    def attend(self, model: ModelStruct, batch: BatchStruct, layer: int, qkv: Tensor) -> Tensor:
        """Norm and rotate queries and keys, store keys and values in the cache, and attend.

        Args:
            model: its sizes, and the layer's norms, rope and window.
            batch: the tokens and the cache.
            layer: which one.
            qkv: [n, (heads + 2 kv_heads) * dim], as projected; overwritten.
        Returns:
            [n, heads * dim] in qkv's dtype; in the model's last layer rows that are no outputs mean nothing.
        """
        width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        assert qkv.is_contiguous()
        assert qkv.shape == (batch.num_tokens, width)
        assert 0 <= layer < model.num_layers
        out = torch.empty((len(qkv), model.num_heads * model.head_dim), dtype=qkv.dtype)
        self._library.baton_attend(
            self._pool, byref(model), byref(batch), layer, qkv.data_ptr(), out.data_ptr(), DTYPE_CODES[qkv.dtype]
        )
        return out

    def forward(self, model: ModelStruct, batch: BatchStruct) -> Tensor:
        """All layers of one step, in one call.

        Returns:
            [num_outputs, hidden] float32: the hidden rows of the outputs after the last layer, not normalised.
        Raises:
            MemoryError: no room for the activations.
        """
        hidden = torch.empty(batch.num_outputs, model.hidden_size)
        if self._library.baton_forward(self._pool, byref(model), byref(batch), hidden.data_ptr()):
            raise MemoryError(f"no memory for the activations of {batch.num_tokens} tokens")
        return hidden

    def logits(self, model: ModelStruct, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Final norm and output head.

        Args:
            hidden: [n, hidden] float32, rows of what `forward` returned.
        Returns:
            [n, vocab] float32, the caller's until the next call; and [n] int32, the highest of each row, the first of equal
            ones or the first NaN.
        Raises:
            MemoryError: no room for them.
        """
        assert hidden.dtype == torch.float32
        assert hidden.shape[1] == model.hidden_size
        hidden = hidden.contiguous()
        num_rows, vocab = len(hidden), model.head.num_outputs
        if self._logits.shape[1] != vocab or len(self._logits) < num_rows:
            self._logits = torch.empty(num_rows, vocab)
        out = self._logits[:num_rows]
        best = torch.empty(num_rows, dtype=torch.int32)
        arguments = hidden.data_ptr(), num_rows, out.data_ptr(), best.data_ptr()
        if self._library.baton_logits(self._pool, byref(model), *arguments):
            raise MemoryError(f"no memory for the logits of {num_rows} tokens")
        return out, best


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _aligned_zeros(num_bytes: int) -> Tensor:
    """[num_bytes] uint8, on a cache line."""
    memory = torch.zeros(num_bytes + 63, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64
    return memory[begin : begin + num_bytes]
