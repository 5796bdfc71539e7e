"""One GGUF file, read with types checked: metadata by key, tensors by name, nothing loaded before it is asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from core.errors import ConfigError, ModelError

T = TypeVar("T")


class GGUFFile:
    """A memory-mapped GGUF file.

    Args:
        path: the file.
    Raises:
        ConfigError: missing, truncated or not a GGUF file.
        ModelError: big-endian, which nobody ships any more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        try:
            self._reader = gguf.GGUFReader(path)
        # What the reader raises on damaged bytes: its own ValueError and KeyError, and numpy's on short slices.
        except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
            raise ConfigError(f"{path}: not a readable GGUF file, or cut short ({error}); download it again") from error
        if self._reader.byte_order != "I":
            raise ModelError(f"{path}: needs big-endian GGUF, which Baton does not read")
        self.tensors: Mapping[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the model family, e.g. `llama`."""
        return self.require("general.architecture", str)

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The value of `key`, or `default` when the file has none; lists come back as Python lists."""
        field = self._reader.get_field(key)
        return default if field is None else self._typed(key, kind, field)

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`; ConfigError when the file lacks it."""
        field = self._reader.get_field(key)
        if field is None:
            raise ConfigError(f"{self.path}: has no {key}, so it cannot be imported")
        return self._typed(key, kind, field)

    def has(self, key: str) -> bool:
        """Whether the metadata holds `key`."""
        return self._reader.get_field(key) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in row-major order (GGUF stores it the other way round); ConfigError when it is missing."""
        if name not in self.tensors:
            raise ConfigError(f"{self.path}: has no tensor {name}")
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows `start` to `stop` of a tensor, dequantised.

        Returns:
            float32, `[stop - start, ...]`; a vector's elements count as its rows.
        Raises:
            ModelError: the quantisation type is unknown; it is named.
        """
        tensor = self.tensors[name]
        try:
            values: npt.NDArray[np.float32] = gguf.dequantize(tensor.data[start:stop], tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensor {name} needs quantisation {tensor.tensor_type.name}") from error
        return values

    def _typed(self, key: str, kind: type[T], field: Any) -> T:
        try:
            value = field.contents()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path}: {key} is damaged ({error}); download it again") from error
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind):
            raise ModelError(f"{self.path}: {key} is a {type(value).__name__}, Baton needs a {kind.__name__}")
        return value
