"""Products with weights of 8 and 4 bits: the codes are the nearest, and the product is that of what they stand for."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import kernels.gpu.linear
from kernels.gpu.quantized_linear import (
    GROUP,
    QuantizedWeight,
    dequantize,
    quantize,
    quantized_linear,
    quantized_linear_ref,
)
from kernels.gpu.variant import Config
from tests.gpu.test_linear import TOLERANCES

Bits = Literal[8, 4]
BITS: tuple[Bits, ...] = (8, 4)
SMALL = Config({"BLOCK_M": 16, "BLOCK_N": 32, "GROUP_M": 4}, num_warps=4, num_stages=2)


@pytest.fixture(autouse=True)
def bf16_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subtraction of bf16 where kernels are interpreted: the interpreter subtracts bits, and has no constants of it."""
    subtract = InterpreterBuilder.create_fsub

    def get_bf16(self: Any, value: float) -> TensorHandle:
        return self.cast_impl(self.get_fp32(value), tl.bfloat16)

    def create_fsub(self: Any, a: Any, b: Any) -> TensorHandle:
        if a.dtype.scalar != tl.bfloat16:
            return subtract(self, a, b)
        wide = subtract(self, self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32))
        return self.cast_impl(wide, tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "get_bf16", get_bf16, raising=False)
    monkeypatch.setattr(InterpreterBuilder, "create_fsub", create_fsub)


def _inputs(n: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    torch.manual_seed(n * 7 + num_inputs)
    x, weight, bias = (torch.randn(shape) for shape in ((n, num_inputs), (num_outputs, num_inputs), (num_outputs,)))
    return x.to(device, dtype), weight.to(device), bias.to(device, dtype)


def _assert_right(out: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    numbers = dequantize(weight).double()
    expected = torch.nn.functional.linear(x.double(), numbers, None if bias is None else bias.double())
    scale = torch.nn.functional.linear(x.double().abs(), numbers.abs())
    bound = TOLERANCES[out.dtype] * expected.abs() + 2e-6 * scale + 1e-37
    assert out.dtype == x.dtype
    assert out.is_contiguous()
    assert bool(((out.double() - expected).abs() <= bound).all())


def _error(weight: Tensor, bits: Bits) -> float:
    return float((dequantize(quantize(weight, bits)) - weight).norm() / weight.norm())


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("n", "num_inputs", "num_outputs"),
    [
        (1, 256, 100),
        (17, 100, 17),
        (16, 17, 130),
        (65, 300, 40),
        (130, 192, 1),
        (15, 1000, 63),
        (1000, 15, 16),
        (15, 63, 1000),
    ],
)
def test_quantized_linear_is_the_product_with_what_the_codes_stand_for(
    n: int, num_inputs: int, num_outputs: int, bits: Bits, dtype: torch.dtype, device: torch.device,
    poisoned_empty: None,
) -> None:  # fmt: skip
    x, wide, bias = _inputs(n, num_inputs, num_outputs, dtype, device)
    weight = quantize(wide, bits)
    out = quantized_linear(x, weight, bias)
    _assert_right(out, x, weight, bias)
    reference = quantized_linear_ref(x, weight, bias)
    torch.testing.assert_close(out.float(), reference.float(), rtol=2 * TOLERANCES[dtype], atol=1e-4)
    _assert_right(quantized_linear(x, weight, is_deterministic=True), x, weight, None)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("bits", BITS)
def test_every_code_at_every_place_is_read_as_itself(bits: Bits, dtype: torch.dtype, device: torch.device) -> None:
    low = -127 if bits == 8 else -8
    codes = (torch.arange(32 * GROUP).view(32, GROUP) * 5 + torch.arange(32)[:, None]) % (
        256 - 1 if bits == 8 else 16
    ) + low
    codes[:, 0] = low  # the largest: the scale is 1
    weight = quantize(codes.to(device).float(), bits)
    assert torch.equal(dequantize(weight).cpu(), codes.float())
    assert len(set(codes.flatten().tolist())) == (255 if bits == 8 else 16)
    assert torch.equal(quantized_linear(torch.eye(GROUP, device=device, dtype=dtype), weight).cpu(), codes.T.to(dtype))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 40),
    num_inputs=st.integers(1, 700),
    num_outputs=st.integers(1, 70),
    bits=st.sampled_from(BITS),
)
def test_any_size_is_right(n: int, num_inputs: int, num_outputs: int, bits: Bits, device: torch.device) -> None:
    x, wide, bias = _inputs(n, num_inputs, num_outputs, torch.float32, device)
    weight = quantize(wide, bits)
    _assert_right(quantized_linear(x, weight, bias, config=SMALL), x, weight, bias)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deterministic_row_is_the_same_bits_alone_and_in_any_batch(
    bits: Bits, dtype: torch.dtype, device: torch.device, poisoned_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, add = [], kernels.gpu.linear._add_segments

    def add_segments(partials: Tensor, *rest: Any) -> None:
        split.append(tuple(partials.shape[:2]))  # segments and rows
        add(partials, *rest)

    monkeypatch.setattr(kernels.gpu.linear, "_add_segments", add_segments)
    # Two segments, one after the other from the second tile on.
    monkeypatch.setattr(kernels.gpu.linear, "_ENOUGH_PROGRAMS", 3)
    x, wide, bias = _inputs(100, 512, 30, dtype, device)
    weight = quantize(wide, bits)
    whole = quantized_linear(x, weight, bias, is_deterministic=True)
    _assert_right(whole, x, weight, bias)
    assert split == []
    for first, end in ((0, 1), (99, 100), (50, 67)):
        assert torch.equal(quantized_linear(x[first:end], weight, bias, is_deterministic=True), whole[first:end])
    assert split[:2] == [(2, 1), (2, 1)]


@pytest.mark.parametrize("num_inputs", [1024, 1300])  # whole segments, and a last one that is shorter
@pytest.mark.parametrize("bits", BITS)
def test_segments_in_one_program_and_in_one_each_are_the_same_bits(
    bits: Bits, num_inputs: int, device: torch.device, poisoned_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.gpu.linear, "_ENOUGH_PROGRAMS", 8)
    x, wide, bias = _inputs(40, num_inputs, 50, torch.float32, device)
    weight = quantize(wide, bits)
    whole = quantized_linear(x, weight, bias, is_deterministic=True, config=SMALL)  # 6 tiles
    _assert_right(whole, x, weight, bias)
    for first, end in ((24, 40), (39, 40)):  # 2 tiles of 4 segments
        alone = quantized_linear(x[first:end], weight, bias, is_deterministic=True, config=SMALL)
        assert torch.equal(alone, whole[first:end])


def test_a_deterministic_row_is_the_same_bits_among_thousands(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("minutes in the interpreter")
    for bits in BITS:
        for num_inputs, num_outputs in ((4096, 4096), (1536, 8960), (8960, 1536)):
            x, wide, bias = _inputs(8192, num_inputs, num_outputs, torch.bfloat16, device)
            weight = quantize(wide, bits)
            whole = quantized_linear(x, weight, bias, is_deterministic=True)
            for n in (1, 2, 16, 17, 64, 65, 100, 1000):
                assert torch.equal(quantized_linear(x[-n:], weight, bias, is_deterministic=True), whole[-n:])


def test_rounding_costs_what_the_bits_allow() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 1024)
    assert _error(weight, 8) < 0.01
    assert _error(weight, 4) < 0.12
    for bits, step in ((8, 1 / 127), (4, 1 / 8)):
        quantized = quantize(weight, bits)  # type: ignore[arg-type]
        largest = weight.view(256, -1, 128).abs().amax(-1)
        assert torch.allclose(quantized.scales.T.abs(), largest * step)
        wrong_by = (dequantize(quantized) - weight).view(256, -1, 128).abs().amax(-1)
        # Half a step; 4 bits have no 8, so what is nearly as large as the largest, to the other side, is a whole step off.
        assert bool((wrong_by <= largest * step * (0.501 if bits == 8 else 1.001)).all())


@pytest.mark.parametrize("bits", BITS)
def test_what_was_rounded_before_is_not_rounded_again(bits: Bits) -> None:
    torch.manual_seed(1)
    once = dequantize(quantize(torch.randn(20, 300), bits))
    torch.testing.assert_close(dequantize(quantize(once, bits)), once, rtol=2e-7, atol=0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e30])
def test_weights_of_any_size_and_rows_of_zeros(bits: Bits, size: float, device: torch.device) -> None:
    x, wide, _ = _inputs(3, 200, 20, torch.float32, device)
    wide *= size
    wide[5], wide[7, :128] = 0, 0
    weight = quantize(wide, bits)
    assert not dequantize(weight)[5].any()
    assert float((dequantize(weight) / size - wide / size).norm() / (wide / size).norm()) < (
        0.01 if bits == 8 else 0.12
    )
    out = quantized_linear(x, weight)
    assert not out[:, 5].any()
    _assert_right(out, x, weight, None)


@pytest.mark.parametrize("bits", BITS)
def test_what_lies_around_the_operands_never_reaches_a_result(bits: Bits, device: torch.device) -> None:
    x, wide, bias = _inputs(17, 100, 40, torch.bfloat16, device)
    around_x = torch.full((26, 133), torch.nan, dtype=x.dtype, device=device)
    around_x[3:20, 16:116] = x
    weight = quantize(wide, bits)
    out = quantized_linear(x, weight, bias)
    codes, scales = (
        torch.full((3, *part.shape), 0x7FFFFFFF, device=device).to(part) for part in (weight.codes, weight.scales)
    )
    scales.fill_(torch.nan)
    codes[1], scales[1] = weight.codes, weight.scales
    apart = replace(weight, codes=codes[1], scales=scales[1])
    assert torch.equal(quantized_linear(around_x[3:20, 16:116], apart, bias), out)


@pytest.mark.parametrize("bits", BITS)
def test_a_weight_that_is_not_finite_shows(bits: Bits) -> None:
    for number in (torch.nan, torch.inf, -torch.inf):
        weight = torch.ones(3, 256)
        weight[1, 130] = number
        broken = dequantize(quantize(weight, bits)).isnan()
        assert broken[1, 128:].all()
        assert int(broken.sum()) == 128


def test_codes_take_their_bits_and_nothing_more() -> None:
    weight = torch.randn(48, 300)
    for bits in BITS:
        packed = quantize(weight, bits)
        assert packed.codes.shape == (3, 48, 4 * bits)
        assert packed.codes.dtype == torch.int32
        assert packed.scales.shape == (3, 48)
        assert packed.codes.is_contiguous()
        assert packed.scales.is_contiguous()


def test_no_rows_give_no_rows(device: torch.device) -> None:
    x, wide, bias = _inputs(3, 64, 50, torch.float32, device)
    assert quantized_linear(x[:0], quantize(wide, 4), bias).shape == (0, 50)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, wide, bias = _inputs(3, 64, 50, torch.float32, device)
    weight = quantize(wide, 8)
    for arguments in (
        (x[:, 1:], weight),
        (x.T.contiguous().T, weight),
        (x, weight, bias[1:]),
        (x, weight, bias.half()),
    ):
        with pytest.raises(ValueError, match="need"):
            quantized_linear(*arguments)
    with pytest.raises(ValueError, match="need 8 or 4"):
        quantize(wide, 3)  # type: ignore[arg-type]


def test_packing_is_what_the_kernel_documents() -> None:
    # Input 2 j + half of part p lies in word j, at bit p * bits + 16 * half.
    for bits, parts in ((8, 2), (4, 4)):
        codes = torch.arange(128).remainder(7).float() - 3
        codes[0] = -127 if bits == 8 else -8
        words = quantize(codes[None], bits).codes[0, 0].numpy().astype(np.uint32)  # type: ignore[arg-type]
        for k in range(128):
            part, place = divmod(k, 128 // parts)
            word = int(words[place // 2]) >> (part * bits + place % 2 * 16)
            assert (word & ((1 << bits) - 1)) - (1 << bits - 1) == int(codes[k])
