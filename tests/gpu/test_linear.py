"""Matrix products for the deterministic mode: right, and the same bits for a row whatever is beside it."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels.gpu.linear as module
from kernels.gpu.linear import linear, linear_ref, num_segments, should_split
from kernels.gpu.variant import Config

# One place of the result: of bf16 the interpreter cuts the rest off where a device rounds.
TOLERANCES = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-11}
# So few outputs in a tile that a product of moderate size has several.
SMALL = Config({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256, "GROUP_M": 4}, num_warps=4, num_stages=2)


def _assert_right(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    wide_bias = None if bias is None else bias.double()
    expected = torch.nn.functional.linear(x.double(), weight.double(), wide_bias)
    # What rounding can reach: of the result once, and of each addition a little of what was added.
    scale = torch.nn.functional.linear(x.double().abs(), weight.double().abs())
    bound = TOLERANCES[out.dtype] * expected.abs() + 2e-6 * scale + 1e-30
    assert out.dtype == x.dtype
    assert out.is_contiguous()
    assert bool(((out.double() - expected).abs() <= bound).all())


def _inputs(n: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    torch.manual_seed(n * 7 + num_inputs)
    shapes = (n, num_inputs), (num_outputs, num_inputs), (num_outputs,)
    x, weight, bias = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    ("n", "num_inputs", "num_outputs"),
    [
        (1, 576, 130),
        (17, 100, 17),
        (16, 17, 100),
        (129, 63, 130),
        (15, 1, 1),
        (100, 1000, 16),
        (1000, 16, 15),
        (63, 15, 1000),
    ],
)
def test_linear_is_the_reference_but_for_the_order_of_additions(
    n: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: torch.device, poisoned_empty: None
) -> None:
    x, weight, bias = _inputs(n, num_inputs, num_outputs, dtype, device)
    _assert_right(linear(x, weight, bias), x, weight, bias)
    _assert_right(linear(x, weight), x, weight, None)
    torch.testing.assert_close(
        linear(x, weight, bias).float(), linear_ref(x, weight, bias).float(), rtol=2 * TOLERANCES[dtype], atol=1e-4
    )


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(1, 40), num_inputs=st.integers(1, 1200), num_outputs=st.integers(1, 70), has_bias=st.booleans())
def test_any_size_is_right(n: int, num_inputs: int, num_outputs: int, has_bias: bool, device: torch.device) -> None:
    x, weight, bias = _inputs(n, num_inputs, num_outputs, torch.float32, device)
    _assert_right(linear(x, weight, bias if has_bias else None, SMALL), x, weight, bias if has_bias else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = _inputs(100, 576, 50, dtype, device)
    whole = linear(x, weight, bias)
    for first, end in ((0, 1), (99, 100), (16, 17), (40, 57)):
        assert torch.equal(linear(x[first:end], weight, bias), whole[first:end])


@pytest.mark.parametrize("num_inputs", [1024, 1400])  # whole segments, and a last one that is shorter
def test_segments_in_one_program_and_in_one_each_are_the_same_bits(
    num_inputs: int, device: torch.device, poisoned_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", 8)
    x, weight, bias = _inputs(40, num_inputs, 50, torch.float32, device)
    segments = num_segments(num_inputs, 50, 32, 4)
    assert segments == 4
    assert should_split(1 * 2, segments)
    assert not should_split(3 * 2, segments)
    whole = linear(x, weight, bias, SMALL)
    _assert_right(whole, x, weight, bias)
    for first, end in ((0, 1), (24, 40), (39, 40)):
        assert torch.equal(linear(x[first:end], weight, bias, SMALL), whole[first:end])


def test_a_row_is_the_same_bits_among_thousands(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("minutes in the interpreter")
    for num_inputs, num_outputs in ((4096, 4096), (1536, 8960), (8960, 1536), (576, 49152)):
        x, weight, bias = _inputs(16384, num_inputs, num_outputs, torch.bfloat16, device)
        whole = linear(x, weight, bias)
        for n in (1, 2, 17, 64, 100, 129, 1000, 4097):
            assert torch.equal(linear(x[-n:], weight, bias), whole[-n:])


def test_rows_that_lie_apart_are_read_where_they_are(device: torch.device) -> None:
    x, weight, bias = _inputs(17, 200, 40, torch.float32, device)
    assert torch.equal(
        linear(x[:, 50:150], weight[:, 100:], bias), linear(x[:, 50:150].clone(), weight[:, 100:].clone(), bias)
    )


def test_what_lies_around_the_operands_never_reaches_a_result(device: torch.device, poisoned_empty: None) -> None:
    x, weight, bias = _inputs(17, 100, 40, torch.bfloat16, device)
    poisoned = [torch.full((rows + 9, 133), torch.nan, dtype=x.dtype, device=device) for rows in (17, 40)]
    poisoned[0][3:20, 16:116], poisoned[1][3:43, 16:116] = x, weight
    out = linear(poisoned[0][3:20, 16:116], poisoned[1][3:43, 16:116], bias)
    assert torch.equal(out, linear(x, weight, bias))


def test_a_nan_stays_in_its_row_and_in_its_column(device: torch.device) -> None:
    x, weight, bias = _inputs(20, 64, 50, torch.float32, device)
    x[3, 5], weight[7, 60] = torch.nan, torch.inf
    broken = ~linear(x, weight, bias).isfinite()
    assert broken[3].all()
    assert broken[:, 7].all()
    assert int(broken.sum()) == 50 + 20 - 1


def test_no_rows_give_no_rows(device: torch.device) -> None:
    x, weight, bias = _inputs(3, 64, 50, torch.float32, device)
    assert linear(x[:0], weight, bias).shape == (0, 50)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight, bias = _inputs(3, 64, 50, torch.float32, device)
    for arguments in (
        (x, weight[:, 1:], bias),
        (x, weight.half(), bias),
        (x.T.contiguous().T, weight, bias),
        (x, weight, bias[1:]),
        (x, weight, bias.half()),
    ):
        with pytest.raises(ValueError, match="need"):
            linear(*arguments)


def test_segments_follow_from_the_shape_of_the_weights_alone() -> None:
    assert num_segments(4096, 49152, 128, 8) == 1  # tiles enough
    assert num_segments(100, 100, 128, 8) == 1  # too short to cut
    assert [num_segments(inputs, 576, 128, 8) for inputs in (511, 512, 1024, 2048, 1 << 20)] == [1, 2, 4, 8, 8]
