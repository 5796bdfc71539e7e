import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.gpu.add_rms_norm import add_rms_norm, add_rms_norm_ref
from kernels.gpu.variant import Config
from kernels.rms_norm import rms_norm_ref

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One place of the result. Of bfloat16 the interpreter cuts the rest off where a device rounds.
_RTOL = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
_EPS = 1e-5


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = _EPS) -> None:
    normed, summed = add_rms_norm(x, residual, weight, eps)
    _, expected = add_rms_norm_ref(x, residual, weight, eps)
    is_exact = x.dtype != torch.bfloat16  # one addition, rounded once
    torch.testing.assert_close(summed, expected, rtol=0 if is_exact else _RTOL[x.dtype], atol=0)
    torch.testing.assert_close(normed, rms_norm_ref(summed, weight, eps), rtol=_RTOL[x.dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("dim", [1, 15, 16, 17, 63, 100, 576, 1000, 1024, 16384])
def test_sum_and_norm_are_the_reference(
    dim: int, dtype: torch.dtype, poisoned_empty: None, device: torch.device
) -> None:
    torch.manual_seed(dim)
    x, residual = (torch.randn(3, dim, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(dim, device=device).to(dtype)
    _check(x, residual, weight)
    _check(x, None, weight)


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 5), dim=st.integers(1, 300), scale=st.sampled_from([1e-4, 1.0, 100.0]), seed=st.integers(0, 99))
def test_any_size_and_scale(n: int, dim: int, scale: float, seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    x, residual = torch.randn(2, n, dim, device=device) * scale
    _check(x, residual, torch.randn(dim, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_rounded_sum_is_what_is_normalised(dtype: torch.dtype, device: torch.device) -> None:
    # The model's own two steps. 1 + 2^-12 is 1 in float16: norms of the exact sum would differ.
    x = torch.tensor([[1.0, 1.0, 3.0, 2048.0]], device=device, dtype=dtype)
    residual = torch.tensor([[2**-12, 2**-10, 2**-12, 1.0]], device=device, dtype=dtype)
    weight = torch.tensor([1000.0, 1000.0, 1000.0, 1.0], device=device, dtype=dtype)
    hidden = x + residual
    normed, summed = add_rms_norm(x, residual, weight, _EPS)
    torch.testing.assert_close(summed, hidden, rtol=0, atol=0)
    torch.testing.assert_close(normed, rms_norm_ref(hidden, weight, _EPS), rtol=2e-7, atol=0)


def test_without_residual_the_input_itself_is_returned(device: torch.device) -> None:
    x = torch.randn(2, 64, device=device)
    before = x.clone()
    assert add_rms_norm(x, None, torch.ones(64, device=device), _EPS)[1] is x
    assert torch.equal(x, before)


@pytest.mark.parametrize("dim", [100, 1024])
def test_rows_may_lie_apart_and_what_is_between_is_not_read(dim: int, device: torch.device) -> None:
    torch.manual_seed(0)
    wide = torch.full((2, 4, dim + 9), float("nan"), device=device)
    x, residual = wide[0, :, :dim], wide[1, ::2, 5 : dim + 5]
    x, residual = x[:2], residual[:2]
    x.normal_()
    residual.normal_()
    _check(x, residual, torch.randn(dim, device=device))
    normed, summed = add_rms_norm(x, residual, torch.ones(dim, device=device), _EPS)
    assert normed.is_contiguous()
    assert summed.is_contiguous()


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("dim", [63, 576, 2048])
def test_a_row_alone_is_the_row_in_a_batch(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    x, residual = (torch.randn(7, dim, device=device).to(dtype) for _ in range(2))
    x[3] = residual[5] = float("nan")
    weight = torch.randn(dim, device=device).to(dtype)
    normed, summed = add_rms_norm(x, residual, weight, _EPS)
    for row in (0, 2, 4, 6):
        alone = add_rms_norm(x[row : row + 1], residual[row : row + 1], weight, _EPS)
        assert torch.equal(alone[0], normed[row : row + 1])
        assert torch.equal(alone[1], summed[row : row + 1])
        assert normed[row].isfinite().all()


def test_zeros_stay_zeros(device: torch.device) -> None:
    zeros = torch.zeros(2, 40, device=device)
    normed, summed = add_rms_norm(zeros, zeros, torch.ones(40, device=device), 1e-6)
    assert not normed.any()
    assert not summed.any()


def test_no_rows(device: torch.device) -> None:
    none, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    normed, summed = add_rms_norm(none, none, weight, _EPS)
    assert normed.shape == summed.shape == (0, 64)


def test_rows_past_two_billion_elements(device: torch.device) -> None:
    # Memory nobody touches costs nothing.
    stride = 2**30
    x = torch.empty(2 * stride + 64, dtype=torch.float16, device=device).as_strided((3, 64), (stride, 1))
    x.fill_(1.0)
    x[2] = torch.arange(64, device=device)
    _check(x, x, torch.ones(64, dtype=torch.float16, device=device))


def test_any_configuration_gives_the_result(device: torch.device) -> None:
    torch.manual_seed(2)
    x, residual = torch.randn(2, 2, 576, device=device)
    weight = torch.randn(576, device=device)
    normed, summed = add_rms_norm(x, residual, weight, _EPS, Config({"LANES": 2048}, num_warps=1))
    expected = add_rms_norm(x, residual, weight, _EPS)
    torch.testing.assert_close(normed, expected[0], rtol=2e-6, atol=1e-7)
    assert torch.equal(summed, expected[1])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    for bad in (torch.ones(1, 8, device=device), x.half(), torch.ones(8, 2, device=device).t()):
        with pytest.raises(ValueError, match="residual"):
            add_rms_norm(x, bad, weight, _EPS)
    with pytest.raises(ValueError, match="contiguous rows"):
        add_rms_norm(torch.ones(8, 2, device=device).t(), None, weight, _EPS)
    with pytest.raises(ValueError, match="at most 16384"):
        add_rms_norm(torch.ones(1, 16385, device=device), None, weight, _EPS)
