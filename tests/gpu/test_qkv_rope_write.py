from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.gpu.qkv_rope_write import qkv_rope_write, qkv_rope_write_ref
from kernels.gpu.variant import Config

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One place of values up to 4: of the norm, of the rotation, or of both together. Of bfloat16 the interpreter cuts
# the rest off where a device rounds.
_ATOL = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-5}
_EPS = 1e-6
_NUM_BLOCKS = 6
_NUM_ANGLES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What one layer's call takes; the cache is one of two layers, NaN wherever nothing is written."""

    qkv: Tensor
    cache: Tensor
    blocks: Tensor
    offsets: Tensor
    cos: Tensor
    sin: Tensor
    angle_rows: Tensor
    num_heads: int
    norms: tuple[Tensor, Tensor] | None
    has_rope: bool = True

    def run(self, config: Config | None = None) -> tuple[Tensor, Tensor]:
        """The queries, and the whole cache afterwards."""
        cache = self.cache.clone()
        q = qkv_rope_write(*self._tensors(cache), **self._settings(), config=config)  # type: ignore[arg-type]
        return q, cache

    def expected(self) -> tuple[Tensor, Tensor]:
        cache = self.cache.clone()
        q = qkv_rope_write_ref(*self._tensors(cache), **self._settings())  # type: ignore[arg-type]
        return q, cache

    def rows(self, *rows: int) -> "_Case":
        chosen = list(rows)
        return replace(
            self,
            qkv=self.qkv[chosen],
            blocks=self.blocks[chosen],
            offsets=self.offsets[chosen],
            angle_rows=self.angle_rows[chosen],
        )

    def _tensors(self, cache: Tensor) -> tuple[Tensor, ...]:
        return self.qkv, cache[:, 1], self.blocks, self.offsets, self.cos, self.sin, self.angle_rows

    def _settings(self) -> dict[str, object]:
        q_norm, k_norm = self.norms or (None, None)
        return {
            "num_heads": self.num_heads,
            "q_norm": q_norm,
            "k_norm": k_norm,
            "eps": _EPS,
            "has_rope": self.has_rope,
        }


def _case(
    device: torch.device,
    n: int = 2,
    heads: tuple[int, int] = (5, 2),
    dim: int = 64,
    half: int | None = None,
    has_norm: bool = True,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
) -> _Case:
    torch.manual_seed(dim + n)
    slots = torch.randperm(_NUM_BLOCKS * block_tokens, device=device)[:n].int()
    angles = torch.rand(_NUM_ANGLES, dim // 2 if half is None else half, device=device) * 100
    norms = torch.randn(2, dim, device=device).to(dtype)
    shape = (_NUM_BLOCKS, 2, 2, heads[1], block_tokens, dim)
    return _Case(
        qkv=torch.randn(n, (heads[0] + 2 * heads[1]) * dim, device=device).to(dtype),
        cache=torch.full(shape, float("nan"), dtype=dtype, device=device),
        blocks=slots // block_tokens,
        offsets=slots % block_tokens,
        cos=angles.cos(),
        sin=angles.sin(),
        angle_rows=torch.randint(_NUM_ANGLES, (n,), dtype=torch.int32, device=device),
        num_heads=heads[0],
        norms=(norms[0], norms[1]) if has_norm else None,
    )


def _check(case: _Case) -> None:
    atol = _ATOL[case.qkv.dtype]
    q, cache = case.run()
    expected_q, expected_cache = case.expected()
    torch.testing.assert_close(q, expected_q, rtol=atol / 2, atol=atol)
    # NaN stays where nothing is written; values are copies.
    torch.testing.assert_close(cache, expected_cache, rtol=atol / 2, atol=atol, equal_nan=True)
    torch.testing.assert_close(cache[:, :, 1], expected_cache[:, :, 1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_size_is_the_reference(
    dim: int, has_norm: bool, dtype: torch.dtype, poisoned_empty: None, device: torch.device
) -> None:
    _check(_case(device, dim=dim, has_norm=has_norm, dtype=dtype))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (9, 3), (32, 8), (64, 8), (28, 4), (12, 12)])
def test_any_number_of_heads(heads: tuple[int, int], poisoned_empty: None, device: torch.device) -> None:
    _check(_case(device, heads=heads, dtype=torch.float16))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 100, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_number_of_tokens(n: int, poisoned_empty: None, device: torch.device) -> None:
    case = _case(device, n=n, heads=(1, 1), dim=16, half=0 if n > 100 else None, has_norm=False, block_tokens=512)
    _check(replace(case, has_rope=n <= 100))


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("dim", "half"), [(128, 48), (80, 20), (96, 1), (64, 16)])
def test_dimensions_past_the_rotary_ones_pass(
    dim: int, half: int, has_norm: bool, poisoned_empty: None, device: torch.device
) -> None:
    case = _case(device, dim=dim, half=half, has_norm=has_norm)
    _check(case)
    if not has_norm:
        q, _ = case.run()
        heads = case.qkv.view(len(q), -1, dim)[:, : case.num_heads]
        assert torch.equal(q[..., 2 * half :], heads[..., 2 * half :])


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dim", [80, 128])
def test_a_layer_without_positions(dim: int, has_norm: bool, poisoned_empty: None, device: torch.device) -> None:
    case = replace(_case(device, dim=dim, has_norm=has_norm, dtype=torch.float16), has_rope=False)
    _check(case)
    if not has_norm:
        q, cache = case.run()
        expected_q, expected_cache = case.expected()
        assert torch.equal(q, expected_q)
        torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_tokens", [1, 2, 64])
def test_blocks_of_any_size(block_tokens: int, device: torch.device) -> None:
    _check(_case(device, n=6, heads=(2, 1), block_tokens=block_tokens))


@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 3), heads=st.tuples(st.integers(1, 5), st.integers(1, 4)), half=st.integers(0, 20))
def test_any_size(n: int, heads: tuple[int, int], half: int, device: torch.device) -> None:
    case = _case(device, n=n, heads=heads, dim=40, half=half)
    _check(replace(case, has_rope=half > 0))


@pytest.mark.parametrize("has_norm", [False, True])
def test_what_is_rounded_between_the_steps_is_rounded_here(has_norm: bool, device: torch.device) -> None:
    # Of float16 all but a few values agree in every bit; were the norm not rounded before the rotation, many would not.
    case = _case(device, n=5, heads=(4, 2), dim=128, has_norm=has_norm, dtype=torch.float16)
    (q, cache), (expected_q, expected_cache) = case.run(), case.expected()
    is_written = expected_cache.isfinite()
    assert (q == expected_q).float().mean() > 0.99
    assert (cache == expected_cache)[is_written].float().mean() > 0.99


def test_a_padding_row_writes_zeros_to_its_queries_and_nothing_else(poisoned_empty: None, device: torch.device) -> None:
    case = _case(device, n=4, heads=(5, 2))
    qkv, blocks, offsets, angle_rows = (x.clone() for x in (case.qkv, case.blocks, case.offsets, case.angle_rows))
    # Whatever a graph's last replay left there.
    qkv[1], qkv[3] = float("nan"), 7.0
    blocks[1] = blocks[3] = -1
    offsets[1], offsets[3] = 10**6, 0
    angle_rows[1], angle_rows[3] = 10**8, -(10**8)
    padded = replace(case, qkv=qkv, blocks=blocks, offsets=offsets, angle_rows=angle_rows)
    q, cache = padded.run()
    expected_q, expected_cache = case.rows(0, 2).run()
    assert torch.equal(q[[0, 2]], expected_q)
    assert not q[[1, 3]].any()
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)
    only_padding = padded.rows(1, 3)
    assert only_padding.run()[1].isnan().all()
    _check(padded)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("dim", [80, 128])
def test_a_row_alone_is_the_row_in_a_batch(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    case = _case(device, n=3, dim=dim, dtype=dtype)
    case.qkv[1] = float("nan")
    q, cache = case.run()
    for row in (0, 2):
        alone_q, alone_cache = case.rows(row).run()
        assert torch.equal(alone_q[0], q[row])
        assert q[row].isfinite().all()
        block, offset = int(case.blocks[row]), int(case.offsets[row])
        assert torch.equal(alone_cache[block, 1, :, :, offset], cache[block, 1, :, :, offset])
        assert cache[block, 1, :, :, offset].isfinite().all()


def test_a_value_that_is_not_a_number_stays_in_its_head(device: torch.device) -> None:
    case = _case(device, n=1, heads=(3, 2))
    heads = case.qkv.view(7, 64)
    heads[1, 5] = heads[4, 63] = heads[6, 0] = float("nan")
    q, cache = case.run()
    assert [bool(head.isfinite().all()) for head in q[0]] == [True, False, True]
    written = cache[int(case.blocks[0]), 1, :, :, int(case.offsets[0])]
    assert [bool(head.isfinite().all()) for head in written.flatten(0, 1)] == [True, False, True, False]


def test_no_rows(device: torch.device) -> None:
    case = _case(device).rows()
    assert case.run()[0].shape == (0, 5, 64)


def test_blocks_past_two_billion_elements(device: torch.device) -> None:
    # Memory nobody touches costs nothing.
    case = _case(device, n=1, heads=(2, 1), dtype=torch.float16)
    stride = 2**30
    storage = torch.empty(2 * stride + 2 * 16 * 64, dtype=torch.float16, device=device)
    kv = storage.as_strided((3, 2, 1, 16, 64), (stride, 16 * 64, 16 * 64, 64, 1))
    kv[2] = float("nan")
    blocks = torch.full_like(case.blocks, 2)
    qkv_rope_write(
        case.qkv,
        kv,
        blocks,
        case.offsets,
        case.cos,
        case.sin,
        case.angle_rows,
        num_heads=2,
        q_norm=None,
        k_norm=None,
        eps=_EPS,
        has_rope=True,
    )
    expected = replace(case, blocks=blocks, norms=None).expected()[1][2, 1]
    torch.testing.assert_close(kv[2], expected, rtol=2**-10, atol=2**-9, equal_nan=True)


@pytest.mark.parametrize("tile_heads", [1, 2, 16])
def test_any_configuration_gives_the_result(tile_heads: int, device: torch.device) -> None:
    case = _case(device)
    config = Config({"HALF_LANES": 32, "REST_LANES": 1, "TILE_HEADS": tile_heads}, num_warps=1)
    (q, cache), (expected_q, expected_cache) = case.run(config), case.run()
    torch.testing.assert_close(q, expected_q, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cache, expected_cache, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    case = _case(device)
    for bad, match in (
        (replace(case, num_heads=4), "need qkv"),
        (replace(case, qkv=case.qkv.half()), "need qkv"),
        (replace(case, cos=torch.zeros(9, 33, device=device)), "angles up to 32"),
        (replace(case, qkv=case.qkv.t().contiguous().t()), "contiguous"),
        (replace(case, sin=case.sin.t().contiguous().t()), "contiguous"),
        (replace(case, norms=(case.qkv[0, :64], None)), "both norms"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=match):
            bad.run()
