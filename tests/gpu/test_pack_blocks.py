import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.gpu.pack_blocks import pack_blocks, pack_blocks_ref, unpack_blocks, unpack_blocks_ref
from kernels.gpu.variant import Config

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64)
_KV = (3, 2, 2, 4, 8)  # layers, keys and values, heads, tokens, dim


def _cache(num_blocks: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of random bits: NaN of every kind among them."""
    torch.manual_seed(num_blocks)
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(256, (num_blocks, *shape[:-1], shape[-1] * size), dtype=torch.uint8, device=device)
    return bits.view(dtype)


def _ids(*ids: int, device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32, device=device)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _check(cache: Tensor, ids: Tensor) -> None:
    """Packs, and unpacks into another cache of which nothing else may change."""
    packed = pack_blocks(cache, ids)
    assert _is_same(packed, pack_blocks_ref(cache, ids))
    distinct = ids.unique()[torch.randperm(len(ids.unique()))]
    target = cache.flip(0).contiguous()
    expected = target.clone()
    packed = pack_blocks(cache, distinct)
    unpack_blocks(packed, distinct, target)
    unpack_blocks_ref(packed, distinct, expected)
    assert _is_same(target, expected)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_kv_blocks_of_any_dtype_bit_for_bit(dtype: torch.dtype, poisoned_empty: None, device: torch.device) -> None:
    # Unordered, repeated, both ends.
    _check(_cache(7, _KV, dtype, device), _ids(6, 0, 0, 3, device=device))


@pytest.mark.parametrize(
    "block_bytes", [1, 2, 3, 5, 6, 7, 8, 12, 15, 16, 17, 1000, 2047, 2048, 2049, 4102, 16384, 16392]
)
def test_blocks_of_any_size(block_bytes: int, poisoned_empty: None, device: torch.device) -> None:
    _check(_cache(5, (block_bytes,), torch.uint8, device), _ids(4, 1, 2, 1, device=device))


@pytest.mark.parametrize("num_blocks", [1, 15, 16, 17, 63, 100, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_number_of_blocks(num_blocks: int, poisoned_empty: None, device: torch.device) -> None:
    torch.manual_seed(num_blocks)
    _check(_cache(num_blocks, (24,), torch.uint8, device), _ids(*torch.randperm(num_blocks).tolist(), device=device))


@settings(max_examples=20, deadline=None)
@given(block_bytes=st.integers(1, 100), picks=st.lists(st.integers(0, 8), max_size=12), offset=st.integers(0, 9))
def test_any_blocks_at_any_address(block_bytes: int, picks: list[int], offset: int, device: torch.device) -> None:
    memory = _cache(1, (9 * block_bytes + 20,), torch.uint8, device)[0]
    cache = memory[offset : offset + 9 * block_bytes].view(9, block_bytes)
    before = memory.clone()
    ids = _ids(*picks, device=device)
    out = torch.zeros(len(picks) * block_bytes + 20, dtype=torch.uint8, device=device)
    place = out[offset // 2 : offset // 2 + len(picks) * block_bytes].view(len(picks), block_bytes)
    assert pack_blocks(cache, ids, out=place) is place
    assert torch.equal(place, pack_blocks_ref(cache, ids))
    assert not out[: offset // 2].any()
    assert not out[offset // 2 + place.numel() :].any()
    distinct = ids.unique()
    unpack_blocks(pack_blocks(cache, distinct), distinct, cache)
    assert torch.equal(memory, before)


def test_what_is_sent_arrives(device: torch.device) -> None:
    source, target = _cache(9, _KV, torch.bfloat16, device), _cache(6, _KV, torch.bfloat16, device)
    sent, received = _ids(8, 2, 5, device=device), _ids(0, 5, 3, device=device)
    unpack_blocks(pack_blocks(source, sent), received, target)
    assert _is_same(target[received.long()], source[sent.long()])


@pytest.mark.parametrize("block_bytes", [5, 8])
def test_blocks_past_two_billion_elements(block_bytes: int, device: torch.device) -> None:
    # 3 GB that nobody touches cost nothing.
    num_blocks = 3 * 10**9 // block_bytes
    cache = torch.empty(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    ids = _ids(num_blocks - 1, 1, device=device)
    packed = torch.arange(2 * block_bytes, dtype=torch.uint8, device=device).view(2, block_bytes)
    unpack_blocks(packed, ids, cache)
    assert torch.equal(cache[ids.long()], packed)
    assert torch.equal(pack_blocks(cache, ids), packed)


def test_no_blocks(device: torch.device) -> None:
    cache = _cache(3, _KV, torch.float16, device)
    packed = pack_blocks(cache, _ids(device=device))
    assert packed.shape == (0, *_KV)
    before = cache.clone()
    unpack_blocks(packed, _ids(device=device), cache)
    assert _is_same(cache, before)
    assert pack_blocks(cache[:, :0].contiguous(), _ids(1, 2, device=device)).shape == (2, 0, *_KV[1:])


def test_any_configuration_gives_the_result(device: torch.device) -> None:
    cache, ids = _cache(4, (1000,), torch.float32, device), _ids(3, 0, device=device)
    assert _is_same(pack_blocks(cache, ids, config=Config({"TILE": 64}, num_warps=1)), pack_blocks_ref(cache, ids))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    cache, ids = _cache(4, (6, 8), torch.float32, device), _ids(1, 0, device=device)
    packed = pack_blocks(cache, ids)
    with pytest.raises(ValueError, match="int32"):
        pack_blocks(cache, ids.long())
    with pytest.raises(ValueError, match="contiguous"):
        pack_blocks(cache.transpose(1, 2), ids)
    with pytest.raises(ValueError, match="contiguous"):
        unpack_blocks(packed.transpose(1, 2).contiguous().transpose(1, 2), ids, cache)
    for bad in (packed[:1], packed.view(2, 48), packed.half()):
        with pytest.raises(ValueError, match="need 2 blocks"):
            unpack_blocks(bad, ids, cache)
        with pytest.raises(ValueError, match="need 2 blocks"):
            pack_blocks(cache, ids, out=bad)
