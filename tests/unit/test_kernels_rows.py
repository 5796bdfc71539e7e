"""The row-wise operations, against formulas written another way."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows

from kernels.linear import Linear, is_native, linear_ref
from kernels.rms_norm import rms_norm, rms_norm_ref
from kernels.rope import rope, rope_ref
from kernels.silu_mul import silu_mul, silu_mul_ref

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rounding(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5 if dtype == torch.float32 else float(torch.finfo(dtype).eps), "atol": 1e-5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 577), (5, 4, 24)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x, weight = (100 * torch.randn(shape)).to(dtype), torch.randn(shape[-1]).to(dtype)
    exact = F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, **rounding(dtype))
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    gate_up = (4 * torch.randn(3, 2 * 17)).to(dtype)
    gate, up = gate_up.double()[:, :17], gate_up.double()[:, 17:]
    torch.testing.assert_close(silu_mul(gate_up).double(), gate / (1 + (-gate).exp()) * up, **rounding(dtype))
    assert torch.equal(silu_mul(gate_up), silu_mul_ref(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [2, 8, 12])
def test_rope_turns_pairs_of_dimensions_as_complex_numbers(dtype: torch.dtype, rotary_dim: int) -> None:
    torch.manual_seed(3)
    x, angles = torch.randn(5, 3, 12).to(dtype), torch.randn(5, rotary_dim // 2)
    half = rotary_dim // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
    turned = pairs * torch.polar(torch.ones_like(angles).double(), angles.double())[:, None]
    exact = torch.cat((turned.real, turned.imag, x[..., rotary_dim:].double()), dim=-1)
    torch.testing.assert_close(rope(x, angles.cos(), angles.sin()).double(), exact, **rounding(dtype))
    assert torch.equal(rope(x, angles.cos(), angles.sin()), rope_ref(x, angles.cos(), angles.sin()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 33])
def test_linear_is_the_reference(dtype: torch.dtype, has_bias: bool, rows: int) -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(rows, 65).to(dtype), torch.randn(31, 65).to(dtype)
    bias = torch.randn(31).to(dtype) if has_bias else None
    out = Linear(weight, bias)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, linear_ref(x, weight, bias), **rounding(dtype))
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), exact, rtol=rounding(dtype)["rtol"], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_fixed_rows_a_row_is_the_same_in_any_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x, linear = torch.randn(70, 96).to(dtype), Linear(torch.randn(80, 96).to(dtype), fixed_rows=16)
    out = linear(x)
    for begin, end in ((0, 1), (5, 8), (3, 70), (16, 33)):
        assert torch.equal(linear(x[begin:end]), out[begin:end])


def test_float32_is_native_everywhere() -> None:
    assert is_native(torch.float32, torch.device("cpu"))
    assert is_native(torch.bfloat16, torch.device("cuda"))
