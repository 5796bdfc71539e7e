"""Hashes over token ids: the same in every process and on every machine."""

import hashlib
import sys
from array import array
from collections.abc import Sequence


def hash_tokens(token_ids: Sequence[int]) -> bytes:
    """SHA-256 of token ids as little-endian 32-bit words; the two ends of a KV transfer compare it.

    Args:
        token_ids: each in [0, 2**32).
    """
    words = array("I", token_ids)
    assert words.itemsize == 4, "array('I') is 32 bits on every platform this runs on"
    if sys.byteorder == "big":
        words.byteswap()
    return hashlib.sha256(words.tobytes()).digest()
