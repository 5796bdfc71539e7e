"""Token ids to text, one answer at a time, one token at a time, never half a character.

Each token is a run of bytes, so an answer's text is the UTF-8 of its tokens' bytes put together; the codec keeps an
unfinished character back. This is O(1) a token, and exact where windowed decoding guesses.
(`tokenizers.decoders.DecodeStream` holds text back for ever after an invalid byte, so it is not used.)
"""

import codecs
import json
import re
from collections.abc import Sequence, Set

import tokenizers

from core.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"


class Detokenizer:
    """One answer's text. The pushes put together equal decoding all ids at once, with two exceptions.

    A character cut off by the end of the answer is dropped (decoding all at once shows U+FFFD for it, but half an emoji
    is no text the model meant), so there is nothing to flush. Where sentencepiece byte tokens are invalid UTF-8, the
    valid characters beside them are kept.
    """

    def __init__(self, token_bytes: Sequence[bytes], skipped_ids: Set[int], *, strip_first_space: bool) -> None:
        """Begin an answer.

        Args:
            token_bytes: each token's bytes, by id; ids beyond it have no text.
            skipped_ids: special tokens to leave out.
            strip_first_space: drop one space at the very beginning, as sentencepiece models do.
        """
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = strip_first_space

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; invalid bytes give U+FFFD."""
        table, skipped = self._token_bytes, self._skipped_ids
        data = b"".join(table[i] for i in ids if 0 <= i < len(table) and i not in skipped)
        text = self._utf8.decode(data)
        if self._strip_next and text:
            self._strip_next = False
            return text.removeprefix(" ")
        return text


def token_bytes_table(backend: tokenizers.Tokenizer) -> tuple[list[bytes], bool]:
    """Every token's bytes by id, and whether the first space of an answer is dropped.

    Raises:
        ModelError: the tokenizer's decoder is neither byte-level nor sentencepiece with byte fallback.
    """
    names = _decoder_steps(backend)
    if names in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        to_bytes = _ByteLevel()
        return [to_bytes(token) for token in _tokens_by_id(backend)], False
    if names in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return [_sentencepiece_bytes(token) for token in _tokens_by_id(backend)], "Strip" in names
    raise ModelError(
        f"tokenizer.json: a decoder of {names or 'no steps'}; only ByteLevel and ByteFallback ones are known"
    )


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[str]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps]


def _tokens_by_id(backend: tokenizers.Tokenizer) -> list[str]:
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        tokens[token_id] = token
    return tokens


class _ByteLevel:
    """GPT-2's printable spelling of bytes, read backwards: 188 bytes stand for themselves, the rest from U+0100 on."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes |= {chr(0x100 + index): byte for index, byte in enumerate(others)}

    def __call__(self, token: str) -> bytes:
        try:
            return bytes([self._bytes[char] for char in token])
        except KeyError:
            # An added token is kept as it was written: one foreign character says that it is not spelled in bytes.
            return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(match[1])
    return token.replace(_SENTENCEPIECE_SPACE, " ").encode()
