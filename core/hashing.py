"""Hashes over token ids: the same in every process and on every machine."""

import hashlib
import sys
from array import array
from collections.abc import Sequence

HASH_SCHEME = "sha256-chain-1"  # changes with anything below that changes a block's hash


def hash_tokens(token_ids: Sequence[int]) -> bytes:
    """SHA-256 of token ids as little-endian 32-bit words; the two ends of a KV transfer compare it.

    Args:
        token_ids: each in [0, 2**32).
    """
    return hashlib.sha256(_words(token_ids)).digest()


def hash_seed(
    *, model: str, revision: str, weights_hash: str, dtype: str, block_tokens: int, adapter: str, tenant: str, salt: str
) -> bytes:
    """What the hashes of a prompt's blocks start from: everything but the tokens that a block's content depends on, and
    everything that keeps one user's blocks from another.

    Each field is encoded with its name, its type and its length, so that no two different sets of values look alike:
    an adapter called X is not a salt X.

    Returns:
        32 bytes.
    """
    fields: dict[str, str | int] = {
        "model": model,
        "revision": revision,
        "weights_hash": weights_hash,
        "dtype": dtype,
        "block_tokens": block_tokens,
        "adapter": adapter,
        "tenant": tenant,
        "salt": salt,
    }
    digest = hashlib.sha256(HASH_SCHEME.encode())
    for name, value in fields.items():
        encoded = str(value).encode("utf-8", "surrogatepass")
        digest.update(f"{name}:{type(value).__name__}:{len(encoded)}:".encode() + encoded)
    return digest.digest()


def hash_blocks(parent: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """The hash of each full block: of the hash before it and its own tokens, so that it stands for the whole prefix.

    Args:
        parent: the hash of the block before the first, or `hash_seed`.
        token_ids: from the first block's first token on; what is left after the last full block has no hash yet.
        block_tokens: tokens in one block.
    Returns:
        32 bytes for each full block.
    """
    words = _words(token_ids)
    block_bytes = block_tokens * 4
    hashes = []
    for end in range(block_bytes, len(words) + 1, block_bytes):
        parent = hashlib.sha256(parent + words[end - block_bytes : end]).digest()
        hashes.append(parent)
    return hashes


def _words(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    assert words.itemsize == 4, "array('I') is 32 bits on every platform this runs on"
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
