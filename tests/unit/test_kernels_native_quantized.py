"""Weights of 8 and 4 bits: what the codes stand for, and products with them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.linear import linear_ref
from kernels.native.ops import PackedLinear, Quantization
from tests.unit.native import native_ops

FORMATS: list[Quantization] = ["int8", "int4"]


def unpacked(linear: PackedLinear) -> Tensor:
    return torch.stack([native_ops().row(linear, number) for number in range(linear.struct.num_outputs)])


def groups(weight: Tensor) -> Tensor:
    return weight.float().view(len(weight), -1, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_half_a_step_off_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = torch.randn(70, 96).to(dtype)
    spread = groups(weight)
    step = spread.abs().amax(-1, keepdim=True) / 127
    off = groups(unpacked(native_ops().pack([weight], quantization="int8"))) - spread
    assert bool((off.abs() <= 0.501 * step).all())
    step = (spread.amax(-1, keepdim=True) - spread.amin(-1, keepdim=True)) / 15
    off = groups(unpacked(native_ops().pack([weight], quantization="int4"))) - spread
    # Rounding to codes is half a step off at most; the best line through them may put a weight further off, but not the group.
    per_group = off.square().mean(-1, keepdim=True).sqrt() / step
    assert per_group.max() <= 0.5
    assert per_group.mean() <= 0.3  # of evenly spread errors: 12 ** -0.5


def test_what_was_q8_0_is_so_again() -> None:
    torch.manual_seed(2)
    codes = torch.randint(-127, 128, (50, 3, 32)).float()
    codes[:, :, 7] = 127.0  # GGUF's scale makes the largest weight of a group 127
    weight = (codes * torch.rand(50, 3, 1).half().float()).view(50, 96)
    linear = native_ops().pack([weight], quantization="int8")
    torch.testing.assert_close(unpacked(linear), weight, rtol=1e-6, atol=0)


def test_what_was_q4_1_is_so_again_as_far_as_its_rounding_tells() -> None:
    torch.manual_seed(3)
    codes = torch.randint(0, 16, (50, 3, 32)).float()
    codes[:, :, 3], codes[:, :, 4] = 0.0, 15.0  # GGUF's scale and minimum make the extremes of a group 0 and 15
    scale, least = torch.rand(50, 3, 1).half().float(), -8 * torch.rand(50, 3, 1).half().float()
    weight = (codes * scale + least).view(50, 96)
    linear = native_ops().pack([weight], quantization="int4")
    torch.testing.assert_close(unpacked(linear), weight, rtol=1e-5, atol=1e-5)
    rounded = weight.bfloat16()
    refitted = unpacked(native_ops().pack([rounded], quantization="int4"))
    assert (refitted - weight).norm() < 0.5 * (rounded.float() - weight).norm()


@pytest.mark.parametrize("quantization", FORMATS)
def test_groups_of_one_value_are_exact(quantization: Quantization) -> None:
    weight = torch.tensor([0.0, 1.0, -3.0])[:, None].expand(3, 64).contiguous()
    assert torch.equal(unpacked(native_ops().pack([weight], quantization=quantization)), weight)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 6, 7, 12, 13, 63, 100, 200]),
    st.integers(1, 150),
    st.integers(1, 20),
    st.sampled_from(FORMATS),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_multiply_uses_these_weights_and_a_row_is_the_same_in_any_batch(
    rows: int, num_outputs: int, num_groups: int, quantization: Quantization, has_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, x = torch.randn(num_outputs, 32 * num_groups), torch.randn(rows, 32 * num_groups)
    bias = torch.randn(num_outputs) if has_bias else None
    linear = native_ops().pack(list(weight.split(13)), bias, quantization)
    out = native_ops().multiply(linear, x)
    torch.testing.assert_close(out, linear_ref(x, unpacked(linear), bias), rtol=1e-4, atol=2e-4)
    for begin, end in ((0, 1), (max(0, rows - 2), rows), (rows // 2, rows)):
        assert torch.equal(native_ops().multiply(linear, x[begin:end]), out[begin:end])
    assert torch.equal(native_ops(3).multiply(linear, x), out)


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_group_that_is_not_whole_is_refused(quantization: Quantization) -> None:
    with pytest.raises(ValueError, match=f"{quantization} weights with 48 inputs"):
        native_ops().pack([torch.randn(4, 48)], quantization=quantization)
