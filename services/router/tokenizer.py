"""Text to token ids and back: the one place where the router touches the `tokenizers` library.

Control tokens typed by a user (`<|im_end|>` in a prompt) become that token's id, as with Hugging Face tokenizers:
clients write whole prompts by hand through the completions call, and the reference ids were made that way.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from core.errors import InvalidRequestError, ModelError
from services.router.detokenizer import Detokenizer, token_bytes_table

MAX_CHARS_PER_TOKEN = 32  # prose has 3 to 5; a text above this many times the context is refused before it is tokenised
INLINE_CHARS = 4096  # up to about a millisecond of work; longer texts go to a thread
MAX_ENCODE_THREADS = 2  # long texts tokenised at once; more would only take cores from the event loop


class Tokenizer:
    """A model folder's tokenizer. Safe to share between tasks; holds no request state."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        """Wrap a loaded tokenizer.

        Args:
            backend: its truncation and padding are turned off: the router has its own limits.
            config: the content of `tokenizer_config.json`.
        Raises:
            ModelError: tokens of this kind of tokenizer cannot be turned into bytes one by one.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._token_bytes, self._strips_first_space = token_bytes_table(backend)
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._encode_slots = asyncio.Semaphore(MAX_ENCODE_THREADS)
        self.bos_token = _token_content(config.get("bos_token"))
        self.eos_token = _token_content(config.get("eos_token"))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `tokenizer.json` and, where there is one, `tokenizer_config.json`.

        Raises:
            ModelError: a file is missing or malformed.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder}: no tokenizer.json; only fast tokenizers can be served")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for malformed content
            raise ModelError(f"{path}: {error}") from error
        return cls(backend, read_tokenizer_config(folder))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token."""
        return len(self._token_bytes)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids left out of the text when special tokens are skipped."""
        return self._special_ids

    def token_id(self, token: str) -> int | None:
        """The id of a token by its content, e.g. `eos_token`; None when there is none."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The token ids of `text`, in the calling thread. Releases the interpreter lock while it works.

        Args:
            text: without lone surrogates; see `require_encodable`.
            add_special: add what the model wants around a bare prompt (BOS); False for a rendered chat template.
        """
        # The batch call, because plain `encode` keeps the interpreter lock: seconds of standstill for a long prompt.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    async def encode_async(self, text: str, *, add_special: bool) -> list[int]:
        """As `encode`, but a long text is tokenised in a worker thread, so that no stream waits for it."""
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special=add_special)
        async with self._encode_slots:
            return await asyncio.to_thread(self.encode, text, add_special=add_special)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; ids without a token give nothing, invalid bytes U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_text(self, token_id: int) -> str:
        """How one token reads alone: special tokens by name, U+FFFD for a part of a character, "" for no token."""
        if not 0 <= token_id < len(self._token_bytes):
            return ""
        return self._token_bytes[token_id].decode("utf-8", "replace")

    def detokenizer(self, *, skip_special: bool) -> Detokenizer:
        """A new incremental detokeniser for one answer."""
        skipped = self._special_ids if skip_special else frozenset[int]()
        return Detokenizer(self._token_bytes, skipped, strip_first_space=self._strips_first_space)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The content of `tokenizer_config.json`; empty when the folder has none.

    Raises:
        ModelError: it is not a JSON object.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return config


def require_encodable(field: str, text: str, *, max_model_len: int) -> None:
    """Refuse a text that cannot be tokenised, before any work is spent on it.

    Args:
        field: the request field's public name, for the error.
        text: as the client sent it.
        max_model_len: the model's context in tokens.
    Raises:
        InvalidRequestError: it is longer than any prompt that fits, or holds half of a surrogate pair.
    """
    limit = max_model_len * MAX_CHARS_PER_TOKEN
    if len(text) > limit:
        raise InvalidRequestError(
            field, f"{len(text)} characters; a context of {max_model_len} tokens takes at most {limit}"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            field, f"half of a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}"
        ) from None


def _token_content(token: object) -> str:
    """A token of the configuration is a string or an object with `content`; "" when absent."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
