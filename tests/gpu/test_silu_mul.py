import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gpu.silu_mul import silu_mul
from kernels.gpu.variant import Config
from kernels.silu_mul import silu_mul_ref

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One place of the result. Of bfloat16 the interpreter cuts the rest off where a device rounds.
_RTOL = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
_ATOL = {torch.float32: 1e-9, torch.float16: 2**-24, torch.bfloat16: 1e-9}  # float16: its least number


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("dim", [1, 15, 16, 17, 63, 100, 1000, 1023, 1024, 1025, 2049])  # below, at and across one tile
def test_it_is_the_reference(dim: int, dtype: torch.dtype, poisoned_empty: None, device: torch.device) -> None:
    torch.manual_seed(dim)
    gate_up = (torch.randn(3, 2 * dim, device=device) * 2).to(dtype)
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_ref(gate_up), rtol=_RTOL[dtype], atol=_ATOL[dtype])


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 5), dim=st.integers(1, 300), seed=st.integers(0, 99))
def test_any_size(n: int, dim: int, seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    gate_up = torch.randn(n, 2 * dim, device=device)
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_ref(gate_up), rtol=2e-6, atol=1e-9)


def test_far_gates_are_nothing_or_all(device: torch.device) -> None:
    infinite, missing = float("inf"), float("nan")
    gate = torch.tensor([[-1e30, -1000.0, -88.0, -0.0, 0.0, 88.0, 1000.0, 1e30, infinite, -infinite, missing]])
    gate_up = torch.cat((gate, torch.full_like(gate, 3.0)), dim=1).to(device)
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_ref(gate_up), rtol=2e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dim", [100, 1030])
def test_rows_may_lie_apart_and_what_is_between_is_not_read(dim: int, device: torch.device) -> None:
    torch.manual_seed(0)
    wide = torch.full((3, 2 * dim + 7), float("nan"), device=device)
    gate_up = wide[:, 3 : 2 * dim + 3]
    gate_up.normal_()
    out = silu_mul(gate_up)
    torch.testing.assert_close(out, silu_mul_ref(gate_up), rtol=2e-6, atol=1e-9)
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_row_alone_is_the_row_in_a_batch(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    gate_up = torch.randn(7, 2 * 1100, device=device).to(dtype)
    gate_up[3] = float("nan")
    out = silu_mul(gate_up)
    for row in (0, 2, 4, 6):
        assert torch.equal(silu_mul(gate_up[row : row + 1]), out[row : row + 1])
        assert out[row].isfinite().all()


def test_no_rows(device: torch.device) -> None:
    assert silu_mul(torch.empty(0, 64, device=device)).shape == (0, 32)


def test_rows_past_two_billion_elements(device: torch.device) -> None:
    # Memory nobody touches costs nothing.
    stride = 2**30
    gate_up = torch.empty(2 * stride + 64, dtype=torch.float16, device=device).as_strided((3, 64), (stride, 1))
    gate_up.fill_(1.0)
    gate_up[2] = torch.arange(64, device=device) / 32
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_ref(gate_up), rtol=2**-10, atol=0)


def test_any_configuration_gives_the_result(device: torch.device) -> None:
    gate_up = torch.randn(2, 600, device=device)
    assert torch.equal(silu_mul(gate_up, Config({"TILE": 64}, num_warps=1)), silu_mul(gate_up))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    for bad in (torch.ones(2, 7, device=device), torch.ones(8, 2, device=device).t()):
        with pytest.raises(ValueError, match="contiguous rows of even length"):
            silu_mul(bad)
