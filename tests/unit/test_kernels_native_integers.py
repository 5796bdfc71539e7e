"""Weights as integers, of 16, 8 and 4 bits: what the codes stand for, and products with them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.linear import integer_rows_ref
from kernels.native.build import levels, library_path
from kernels.native.ops import Integers, NativeOps, PackedLinear
from tests.unit.native import built_library, native_ops

FORMATS: list[Integers] = ["int16", "int8", "int4"]
NAN, INFINITY = float("nan"), float("inf")


def unpacked(linear: PackedLinear) -> Tensor:
    return torch.stack([native_ops().row(linear, number) for number in range(linear.struct.num_outputs)])


def groups(weight: Tensor) -> Tensor:
    return weight.float().view(len(weight), -1, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_inputs", [1, 63, 96, 640])
@pytest.mark.parametrize("size", [1e-2, 1.0, 1e4])
def test_16_bits_keep_12_bits_below_the_largest_weight_of_an_output(
    dtype: torch.dtype, num_inputs: int, size: float
) -> None:
    torch.manual_seed(4)
    weight = (torch.randn(70, num_inputs) * size).to(dtype)
    weight[5] = 0
    weight[6] = weight[6, 0]  # all alike: the sum of a group is what limits the codes
    off = (unpacked(native_ops().pack([weight], None, "int16")) - weight.float()).abs()
    steps = off / weight.float().abs().amax(-1, keepdim=True).clamp(min=1e-9)
    assert steps[6].max() <= 0.501 / 2046
    assert not steps[5].any()
    steps[6] = 0
    assert steps.max() <= 0.501 * 2**-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_half_a_step_off_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = torch.randn(70, 96).to(dtype)
    spread = groups(weight)
    step = spread.abs().amax(-1, keepdim=True) / 127
    off = groups(unpacked(native_ops().pack([weight], integers="int8"))) - spread
    assert bool((off.abs() <= 0.501 * step).all())
    step = (spread.amax(-1, keepdim=True) - spread.amin(-1, keepdim=True)) / 15
    off = groups(unpacked(native_ops().pack([weight], integers="int4"))) - spread
    # Rounding to codes is half a step off at most; the best line through them may put a weight further off, but not the group.
    per_group = off.square().mean(-1, keepdim=True).sqrt() / step
    assert per_group.max() <= 0.5
    assert per_group.mean() <= 0.3  # of evenly spread errors: 12 ** -0.5


def test_what_was_q8_0_is_so_again() -> None:
    torch.manual_seed(2)
    codes = torch.randint(-127, 128, (50, 3, 32)).float()
    codes[:, :, 7] = 127.0  # GGUF's scale makes the largest weight of a group 127
    weight = (codes * torch.rand(50, 3, 1).half().float()).view(50, 96)
    linear = native_ops().pack([weight], integers="int8")
    torch.testing.assert_close(unpacked(linear), weight, rtol=1e-6, atol=0)


def test_what_was_q4_1_is_so_again_as_far_as_its_rounding_tells() -> None:
    torch.manual_seed(3)
    codes = torch.randint(0, 16, (50, 3, 32)).float()
    codes[:, :, 3], codes[:, :, 4] = 0.0, 15.0  # GGUF's scale and minimum make the extremes of a group 0 and 15
    scale, least = torch.rand(50, 3, 1).half().float(), -8 * torch.rand(50, 3, 1).half().float()
    weight = (codes * scale + least).view(50, 96)
    linear = native_ops().pack([weight], integers="int4")
    torch.testing.assert_close(unpacked(linear), weight, rtol=1e-5, atol=1e-5)
    rounded = weight.bfloat16()
    refitted = unpacked(native_ops().pack([rounded], integers="int4"))
    assert (refitted - weight).norm() < 0.5 * (rounded.float() - weight).norm()


@pytest.mark.parametrize("integers", FORMATS[1:])
def test_groups_of_one_value_are_exact(integers: Integers) -> None:
    weight = torch.tensor([0.0, 1.0, -3.0])[:, None].expand(3, 64).contiguous()
    assert torch.equal(unpacked(native_ops().pack([weight], integers=integers)), weight)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 6, 7, 12, 13, 63, 100, 200]),
    st.integers(1, 150),
    st.integers(1, 25),
    st.integers(0, 31),
    st.sampled_from(FORMATS),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_multiply_uses_these_weights_and_a_row_is_the_same_in_any_batch(
    rows: int, num_outputs: int, num_groups: int, missing: int, integers: Integers, has_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    num_inputs = 32 * num_groups - (missing if integers == "int16" else 0)
    weight = torch.randn(num_outputs, num_inputs).bfloat16()
    x = torch.randn(rows, num_inputs) * 10 ** torch.randn(rows, 1)
    bias = torch.randn(num_outputs) if has_bias else None
    linear = native_ops().pack(list(weight.split(13)), bias, integers)
    out = native_ops().multiply(linear, x)
    expected = integer_rows_ref(x).double() @ unpacked(linear).double().T + (0 if bias is None else bias)
    size = x.norm(dim=1, keepdim=True) * weight.float().norm(dim=1)  # what sums of these products may come to
    assert bool(((out - expected).abs() <= 1e-6 * (size + 1)).all())
    for begin, end in ((0, 1), (max(0, rows - 2), rows), (rows // 2, rows)):
        assert torch.equal(native_ops().multiply(linear, x[begin:end]), out[begin:end])
    assert torch.equal(native_ops(3).multiply(linear, x), out)


@pytest.mark.parametrize("integers", FORMATS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_there_can_be_do_not_overflow(integers: Integers, sign: float) -> None:
    weight = torch.full((20, 128), 3.0).bfloat16()
    x = torch.full((7, 128), sign * 1e30)
    out = native_ops().multiply(native_ops().pack([weight], None, integers), x)
    torch.testing.assert_close(out, torch.full((7, 20), sign * 384e30), rtol=1e-3, atol=0)


@pytest.mark.parametrize("integers", FORMATS)
def test_rows_of_nothing_or_next_to_nothing_are_nothing(integers: Integers) -> None:
    linear = native_ops().pack([torch.ones(3, 64).half()], None, integers)
    x = torch.zeros(4, 64)
    x[1], x[2], x[3, 5] = -0.0, 1e-40, 1e-31
    assert not native_ops().multiply(linear, x).any()


@pytest.mark.parametrize("integers", FORMATS)
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_what_is_not_finite_spoils_its_row_and_no_other(integers: Integers, value: float) -> None:
    linear = native_ops().pack([torch.randn(40, 128).half()], None, integers)
    x = torch.randn(3, 128)
    clean = native_ops().multiply(linear, x)
    x[1, 77] = value
    out = native_ops().multiply(linear, x)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], clean[::2])


@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_a_16_bit_weight_that_is_not_finite_spoils_its_output_and_no_other(value: float) -> None:
    weight = torch.randn(40, 128).half()
    weight[9, 3] = value
    out = native_ops().multiply(native_ops().pack([weight], None, "int16"), torch.randn(3, 128))
    assert out[:, 9].isnan().all()
    assert out[:, :9].isfinite().all()
    assert out[:, 10:].isfinite().all()


def test_rows_lose_less_than_bfloat16_would_take() -> None:
    torch.manual_seed(5)
    x = torch.randn(50, 576)
    x[:, 7] *= 20  # an outlier costs its own group only
    lost = (integer_rows_ref(x) - x).norm()
    assert lost < 0.25 * (x.bfloat16().float() - x).norm()


@pytest.mark.parametrize("integers", FORMATS[1:])
def test_a_group_that_is_not_whole_is_refused(integers: Integers) -> None:
    with pytest.raises(ValueError, match=f"{integers} weights with 48 inputs"):
        native_ops().pack([torch.randn(4, 48)], integers=integers)


@pytest.mark.parametrize("integers", FORMATS)
def test_the_build_for_any_cpu_gives_the_same_products(integers: Integers) -> None:
    torch.manual_seed(6)
    built_library()
    plain = NativeOps(library_path(levels()[-1]))
    weight, x = torch.randn(70, 192), torch.randn(13, 192)
    if integers == "int16":
        weight = weight.bfloat16()
    ours, theirs = (ops.multiply(ops.pack([weight], None, integers), x) for ops in (native_ops(), plain))
    # Without fused operations a number half-way between two codes may take the other one.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    assert ((ours - theirs).abs() > 2e-5).float().mean() < 0.2


@pytest.mark.parametrize("integers", [None, *FORMATS])
@pytest.mark.parametrize("size", [1, 7, 16, 45])
@pytest.mark.parametrize("num_inputs", [32, 704])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_product_is_the_product_and_then_the_gate(
    integers: Integers | None, size: int, num_inputs: int, has_bias: bool
) -> None:
    torch.manual_seed(size)
    gate, up = torch.randn(2, size, num_inputs).bfloat16() / num_inputs**0.5
    bias = torch.randn(2 * size) if has_bias else None
    apart = native_ops().pack([gate, up], bias, integers)
    gated = native_ops().pack([gate, up], bias, integers, is_gated=True)
    assert torch.equal(unpacked(gated), unpacked(apart))
    for num_rows in (1, 6, 13, 200):
        x = torch.randn(num_rows, num_inputs)
        expected = native_ops().silu_mul(native_ops().multiply(apart, x))
        assert torch.equal(native_ops().multiply(gated, x), expected)
        assert torch.equal(native_ops(3).multiply(gated, x), expected)
