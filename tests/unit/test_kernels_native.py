"""The native operations against the torch specifications, and each row bit for bit the same in any company."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.linear import linear_ref
from kernels.native.library import BatchStruct, LayerStruct, ModelStruct
from kernels.native.ops import DTYPE_CODES
from kernels.prefill_attention import prefill_attention_ref
from kernels.rms_norm import rms_norm_ref
from kernels.rope import rope_ref
from kernels.silu_mul import silu_mul_ref
from tests.unit.native import native_ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(9, 3), (32, 8), (64, 8), (28, 4), (3, 3), (100, 2)]
NAN = float("nan")


def rounding(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5 if dtype == torch.float32 else float(torch.finfo(dtype).eps), "atol": 1e-5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 577), (5, 24)])
def test_add_and_norm_is_the_reference(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    x, delta, weight = 9 * torch.randn(shape), torch.randn(shape).to(dtype), torch.randn(shape[1])
    total = x + delta.float()
    out = native_ops().add_and_norm(x, delta, weight, 1e-5, dtype)
    assert torch.equal(x, total)
    torch.testing.assert_close(out, rms_norm_ref(total, weight, 1e-5).to(dtype), **rounding(dtype))
    assert torch.equal(native_ops().add_and_norm(x, None, weight, 1e-5, dtype), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 17, 64, 5000])
def test_silu_mul_is_the_reference_at_any_height(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(2)
    gate_up = (torch.randn(3, 2 * dim) * torch.tensor([[1.0], [30.0], [200.0]])).to(dtype)
    torch.testing.assert_close(native_ops().silu_mul(gate_up), silu_mul_ref(gate_up), **rounding(dtype))


def test_what_is_not_a_number_stays_so() -> None:
    gate_up = torch.tensor([[NAN, 1.0, NAN, 1.0], [float("inf"), 2.0, 3.0, NAN]])
    assert native_ops().silu_mul(gate_up).isnan().tolist() == [[True, False], [False, True]]
    x = torch.tensor([[1.0, NAN], [1.0, 2.0]])
    assert native_ops().add_and_norm(x, None, torch.ones(2), 1e-5, torch.float32).isnan().tolist() == [
        [True] * 2,
        [False] * 2,
    ]
    linear = native_ops().pack([torch.eye(2)])
    assert native_ops().multiply(linear, x).isnan().tolist() == [[True] * 2, [False] * 2]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 5, 6, 7, 16, 17, 63, 100, 200]),
    st.integers(1, 150),
    st.integers(1, 600),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_multiply_is_the_reference_and_a_row_the_same_in_any_batch(
    rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, x = torch.randn(num_outputs, num_inputs).to(dtype), torch.randn(rows, num_inputs)
    bias = torch.randn(num_outputs) if has_bias else None
    ops = native_ops()
    linear = ops.pack(list(weight.split(13)), bias)
    out = ops.multiply(linear, x)
    torch.testing.assert_close(out, linear_ref(x, weight, bias), rtol=1e-4, atol=2e-4)
    for begin, end in ((0, 1), (max(0, rows - 2), rows), (rows // 2, rows)):
        assert torch.equal(ops.multiply(linear, x[begin:end]), out[begin:end])
    assert torch.equal(native_ops(3).multiply(linear, x), out)
    row = seed % num_outputs
    assert torch.equal(ops.row(linear, row), weight[row].float())


@pytest.mark.parametrize("threads", [1, 3])
def test_no_rows_have_no_products(threads: int) -> None:
    linear = native_ops().pack([torch.randn(40, 8)])
    assert native_ops(threads).multiply(linear, torch.empty(0, 8)).shape == (0, 40)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 65504.0, 6e-8, 6.1e-5, -3e-5, float("inf"), -float("inf")])
def test_float16_weights_are_widened_exactly(value: float) -> None:
    weight = torch.full((40, 2), value).half()
    assert torch.equal(native_ops().row(native_ops().pack([weight]), 39), weight[39].float())
    x = torch.tensor([[1.0, 0.0]])
    weight[:, 1] = 0
    assert torch.equal(native_ops().multiply(native_ops().pack([weight]), x), weight[:, 0].float()[None] + 0)


@dataclass
class Part:
    """The new tokens of one sequence."""

    start: int
    num_tokens: int
    table: list[int]


class Attention:
    """One layer of attention over a cache full of NaN, by the library and by the specification."""

    def __init__(
        self, heads: tuple[int, int], dim: int, block_tokens: int, dtype: torch.dtype, window: int | None = None
    ) -> None:
        self.num_heads, self.num_kv_heads = heads
        self.dim, self.block_tokens, self.window = dim, block_tokens, window
        self.num_blocks = max(40, 800 // block_tokens)
        self.cache = torch.full((self.num_blocks, 2, 2, heads[1], block_tokens, dim), NAN, dtype=dtype)
        self.norms = torch.rand(2, dim) + 0.5
        layer = LayerStruct(
            q_norm=self.norms[0].data_ptr(), k_norm=self.norms[1].data_ptr(), has_rope=1, window=window or 0
        )
        self._layers = (LayerStruct * 2)(layer, layer)
        self.rotary_half = dim // 4  # the rest of a head passes unchanged
        self.struct = ModelStruct(
            num_layers=2,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=dim,
            rotary_half=self.rotary_half,
            norm_eps=1e-5,
            layers=ctypes.cast(self._layers, ctypes.POINTER(LayerStruct)),
        )

    def angles(self, parts: Sequence[Part]) -> Tensor:
        positions = torch.cat([torch.arange(p.start, p.start + p.num_tokens) for p in parts])
        return positions[:, None] * torch.linspace(1.0, 0.1, self.rotary_half)

    def attend(self, qkv: Tensor, parts: Sequence[Part], threads: int = 1) -> Tensor:
        """[n, heads, dim]; the parts' keys and values are in the cache afterwards."""
        angles = self.angles(parts)
        cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
        ints = {
            "first_row": np.cumsum([0] + [p.num_tokens for p in parts], dtype=np.int32),
            "start": np.array([p.start for p in parts], dtype=np.int32),
            "tables": np.array([block for p in parts for block in p.table], dtype=np.int32),
            "outputs": np.arange(len(qkv), dtype=np.int32),
            "first_block": np.cumsum([0] + [len(p.table) for p in parts], dtype=np.int32),
        }
        batch = BatchStruct(
            num_tokens=len(qkv),
            num_sequences=len(parts),
            num_outputs=len(qkv),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            has_token_angles=1,
            cache=self.cache.data_ptr(),
            block_tokens=self.block_tokens,
            cache_dtype=DTYPE_CODES[self.cache.dtype],
            **{name: values.ctypes.data for name, values in ints.items()},
        )
        out = native_ops(threads).attend(self.struct, batch, 1, qkv.clone())
        return out.view(len(qkv), self.num_heads, self.dim)

    def expected(self, qkv: Tensor, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        """For one part: attention over what the cache holds, and the keys and values the part stores."""
        heads = qkv.view(len(qkv), -1, self.dim).float()
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        angles = self.angles([part])
        q = rope_ref(rms_norm_ref(q, self.norms[0], 1e-5), angles.cos(), angles.sin())
        k = rope_ref(rms_norm_ref(k, self.norms[1], 1e-5), angles.cos(), angles.sin())
        kv = self.cache[:, 1].float()
        return prefill_attention_ref(q, kv, torch.tensor(part.table), part.start, self.window), k, v

    def stored(self, part: Part) -> tuple[Tensor, Tensor]:
        positions = torch.arange(part.start, part.start + part.num_tokens)
        blocks, offsets = torch.tensor(part.table)[positions // self.block_tokens], positions % self.block_tokens
        return self.cache[blocks, 1, 0, :, offsets], self.cache[blocks, 1, 1, :, offsets]

    def qkv(self, num_tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(num_tokens, (self.num_heads + 2 * self.num_kv_heads) * self.dim).to(dtype)


@pytest.mark.parametrize(
    ("heads", "dim"), [*((heads, 64) for heads in HEADS), *(((4, 2), dim) for dim in (6, 8, 80, 96, 128, 256))]
)
@pytest.mark.parametrize(
    ("block_tokens", "cache_dtype", "window"),
    [(16, torch.bfloat16, None), (16, torch.bfloat16, 40), (1, torch.float32, 1), (64, torch.float16, None)],
)
def test_attention_is_the_reference(
    heads: tuple[int, int], dim: int, block_tokens: int, cache_dtype: torch.dtype, window: int | None
) -> None:
    torch.manual_seed(3)
    attention = Attention(heads, dim, block_tokens, cache_dtype, window)
    free = torch.randperm(attention.num_blocks).tolist()
    parts = []
    for length in (1, 33, 100):  # computed before: now in the cache
        need = -(-(length + 40) // block_tokens)
        table, free = free[:need], free[need:]
        attention.attend(attention.qkv(length), [Part(0, length, table)])
        parts.append(Part(length, {1: 1, 33: 17, 100: 1}[length], table))
    qkv = attention.qkv(sum(part.num_tokens for part in parts))
    out, row = attention.attend(qkv, parts), 0
    for part in parts:
        expected, k, v = attention.expected(qkv[row : row + part.num_tokens], part)
        assert expected.isfinite().all()
        torch.testing.assert_close(out[row : row + part.num_tokens], expected, rtol=0, atol=5e-6)
        for ours, theirs in zip(attention.stored(part), (k, v), strict=True):
            torch.testing.assert_close(ours, theirs.to(cache_dtype), **rounding(cache_dtype))
        row += part.num_tokens


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_token_attends_with_the_same_bits_however_the_work_is_cut(data: Any) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    lengths = data.draw(st.lists(st.integers(1, 130), min_size=1, max_size=4))
    block_tokens = data.draw(st.sampled_from([1, 4, 16, 64]))
    heads, window = data.draw(st.sampled_from([(9, 3), (4, 4), (8, 1)])), data.draw(st.sampled_from([None, 7, 64]))
    attention = Attention(heads, data.draw(st.sampled_from([16, 24, 64])), block_tokens, torch.bfloat16, window)
    tokens = [attention.qkv(length) for length in lengths]

    def tables(seed: int) -> list[list[int]]:
        free = torch.randperm(attention.num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        return [[free.pop() for _ in range(-(-length // block_tokens))] for length in lengths]

    whole = [attention.attend(qkv, [Part(0, len(qkv), table)]) for qkv, table in zip(tokens, tables(1), strict=True)]
    attention.cache.fill_(NAN)
    placed, done = tables(2), [0] * len(lengths)
    cut: list[list[Tensor]] = [[] for _ in lengths]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        sizes = [
            data.draw(st.integers(0, min(40, length - at))) if length > at else 0
            for at, length in zip(done, lengths, strict=True)
        ]
        if not any(sizes):
            sizes = [min(1, length - at) for at, length in zip(done, lengths, strict=True)]
        running = [number for number, size in enumerate(sizes) if size]
        parts = [Part(done[number], sizes[number], placed[number]) for number in running]
        qkv = torch.cat([tokens[number][done[number] : done[number] + sizes[number]] for number in running])
        out = attention.attend(qkv, parts, threads=data.draw(st.sampled_from([1, 3])))
        for number, rows in zip(running, out.split([sizes[number] for number in running]), strict=True):
            cut[number].append(rows)
            done[number] += sizes[number]
    for expected, pieces in zip(whole, cut, strict=True):
        assert torch.equal(torch.cat(pieces), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_of_low_precision_rows_rounds_only_its_ends(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    attention = Attention((6, 2), 64, 16, dtype)
    part, qkv = Part(0, 50, [3, 9, 0, 7]), attention.qkv(50, dtype)
    out = attention.attend(qkv, [part])
    assert out.dtype == dtype
    expected, _, _ = attention.expected(qkv, part)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_large_scores_do_not_overflow() -> None:
    attention = Attention((1, 1), 8, 4, torch.float32)
    attention.norms.fill_(1e18)
    part, qkv = Part(0, 3, [2]), attention.qkv(3)
    out = attention.attend(qkv, [part])
    assert out.isfinite().all()
    torch.testing.assert_close(out[0], qkv[0].view(3, 8)[2:])


def test_a_token_that_is_not_a_number_spoils_no_earlier_one() -> None:
    torch.manual_seed(5)
    attention = Attention((4, 2), 16, 4, torch.float32)
    qkv = attention.qkv(40)
    clean = attention.attend(qkv, [Part(0, 40, list(range(10)))])
    qkv[25] = NAN
    spoiled = attention.attend(qkv, [Part(0, 40, list(range(10)))])
    assert torch.equal(spoiled[:25], clean[:25])
    assert spoiled[25:].isnan().all()
