"""Hashes are the same in every process, machine and release, and no two different things have the same."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.hashing import HASH_SCHEME, hash_blocks, hash_seed, hash_tokens

FIELDS: dict[str, str | int] = {
    "model": "smollm2-135m-instruct",
    "revision": "main",
    "weights_hash": "abc123",
    "dtype": "bfloat16",
    "block_tokens": 16,
    "adapter": "",
    "tenant": "",
    "salt": "",
}


def seed(**changed: str | int) -> bytes:
    return hash_seed(**{**FIELDS, **changed})  # type: ignore[arg-type]


def test_golden_vectors() -> None:
    assert hash_tokens([]).hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    # The words 1, 2, 3 as `01000000 02000000 03000000`.
    words = bytes.fromhex("010000000200000003000000")
    assert hash_tokens([1, 2, 3]) == hashlib.sha256(words).digest()
    assert hash_tokens([1, 2, 3]).hex() == "4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d"
    assert hash_tokens([2**32 - 1]) == hashlib.sha256(b"\xff\xff\xff\xff").digest()


def test_golden_vectors_of_seeds_and_blocks() -> None:
    """What a worker of any release must agree with as long as HASH_SCHEME is the same."""
    assert HASH_SCHEME == "sha256-chain-1"
    encoded = (
        b"sha256-chain-1"
        b"model:str:21:smollm2-135m-instruct"
        b"revision:str:4:main"
        b"weights_hash:str:6:abc123"
        b"dtype:str:8:bfloat16"
        b"block_tokens:int:2:16"
        b"adapter:str:0:"
        b"tenant:str:7:t\xc3\xa9nant"
        b"salt:str:0:"
    )
    start = hashlib.sha256(encoded).digest()
    assert seed(tenant="ténant") == start
    first = hashlib.sha256(start + bytes.fromhex("01000000 02000000")).digest()
    second = hashlib.sha256(first + bytes.fromhex("03000000 ffffffff")).digest()
    assert hash_blocks(start, [1, 2, 3, 2**32 - 1, 5], 2) == [first, second]
    assert seed().hex() == "fd0cdbfd107a1e0084a26bd655abdadae148eb17682a155073a50306137eef56"
    assert [h.hex() for h in hash_blocks(seed(), range(5), 2)] == [
        "61e4cd55a80637ab50aa25d33efb6969146fca4c5a281a77879a91b98cda87ab",
        "bf27f0d3ec06ca2dfa6d2d3807a7bb89095e121174068ec14eb07c5a3f9e84a2",
    ]


def test_order_and_length_matter() -> None:
    assert len({hash_tokens(tokens) for tokens in ([1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [1], [513])}) == 6


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_an_error_not_another_token(token: int) -> None:
    with pytest.raises(OverflowError):
        hash_tokens([token])
    with pytest.raises(OverflowError):
        hash_blocks(b"", [token], 1)


def test_an_adapter_is_no_salt_and_no_tenant_whatever_its_name() -> None:
    names = ["adapter", "tenant", "salt", "revision"]
    assert len({seed(), *(seed(**{name: "x"}) for name in names)}) == 1 + len(names)
    assert seed(adapter="a", salt="b") != seed(adapter="b", salt="a")
    assert seed(adapter="ab") != seed(adapter="a", tenant="b")
    # A value that looks like the encoding of the next field.
    assert seed(adapter="xtenant:str:1:y") != seed(adapter="x", tenant="y")
    assert seed(adapter="x", tenant="") != seed(adapter="", tenant="x")


texts = st.text(st.sampled_from("ab:0119str\x00é\ud800"), max_size=12)
fields = st.fixed_dictionaries({name: texts for name in FIELDS if name != "block_tokens"}) | st.fixed_dictionaries(
    {name: st.sampled_from(["", "a", "1:a", "a:str:1:"]) for name in FIELDS if name != "block_tokens"}
)


@given(fields, fields, st.sampled_from([1, 16, 161]), st.sampled_from([1, 16, 161]))
def test_different_fields_have_different_seeds(
    first: dict[str, str], second: dict[str, str], first_tokens: int, second_tokens: int
) -> None:
    is_equal = (first, first_tokens) == (second, second_tokens)
    seeds = [hash_seed(**first, block_tokens=first_tokens), hash_seed(**second, block_tokens=second_tokens)]
    assert (seeds[0] == seeds[1]) == is_equal


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8), st.data())
def test_blocks_hashed_in_pieces_are_those_hashed_at_once(tokens: list[int], block: int, data: st.DataObject) -> None:
    whole = hash_blocks(b"parent", tokens, block)
    assert len(whole) == len(tokens) // block
    cut = data.draw(st.integers(0, len(whole)))
    head = hash_blocks(b"parent", tokens[: cut * block], block)
    tail = hash_blocks(head[-1] if head else b"parent", tokens[cut * block :], block)
    assert head + tail == whole


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_a_block_s_hash_stands_for_all_tokens_up_to_its_end(first: list[int], second: list[int]) -> None:
    hashes = [hash_blocks(b"parent", tokens, 2) for tokens in (first, second)]
    for index in range(4):
        same_tokens = first[: 2 * index + 2] == second[: 2 * index + 2]
        assert (hashes[0][index] == hashes[1][index]) == same_tokens
