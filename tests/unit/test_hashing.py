"""Token hashes are the same in every process, machine and release."""

import hashlib

import pytest

from core.hashing import hash_tokens


def test_golden_vectors() -> None:
    assert hash_tokens([]).hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    # The words 1, 2, 3 as `01000000 02000000 03000000`.
    words = bytes.fromhex("010000000200000003000000")
    assert hash_tokens([1, 2, 3]) == hashlib.sha256(words).digest()
    assert hash_tokens([1, 2, 3]).hex() == "4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d"
    assert hash_tokens([2**32 - 1]) == hashlib.sha256(b"\xff\xff\xff\xff").digest()


def test_order_and_length_matter() -> None:
    assert len({hash_tokens(tokens) for tokens in ([1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [1], [513])}) == 6


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_an_error_not_another_token(token: int) -> None:
    with pytest.raises(OverflowError):
        hash_tokens([token])
