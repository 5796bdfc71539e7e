"""Reading a model folder's weights: memory-mapped safetensors, every tensor accounted for."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ModelError
from core.model_config import ModelConfig

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CHECKSUMS_FILE = "checksums.json"  # written by the importer: {file name: sha256}
_HASH_CHUNK_BYTES = 1 << 24
EMBEDDING = "model.embed_tokens.weight"
_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors calls them
_MAX_NAMES = 5  # tensors named in one error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted.

    Raises:
        ModelError: there are none, or the index names one that is missing.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        paths = [folder / name for name in sorted(set(_read_index(index).values()))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ModelError(f"{index}: names files that are not there: {_some(missing)}")
        return paths
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    found = f"; it has {_some(others)}, which Baton does not load" if others else ""
    raise ModelError(f"{folder}: no {SINGLE_FILE} or {INDEX_FILE}{found}; only safetensors are loaded")


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: not a safetensors index: {error!r}") from error
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    # A file name only: an index must not point outside its folder.
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelError(f"{path}: weight_map must map tensor names to file names")
    return dict(weight_map)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the model needs."""
    hidden, inter = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)

    def add(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        if config.has_fused_projections:
            add(f"{prefix}.self_attn.qkv_proj", q_rows + 2 * kv_rows, hidden, config.qkv_bias)
            add(f"{prefix}.mlp.gate_up_proj", 2 * inter, hidden, config.mlp_bias)
        else:
            add(f"{prefix}.self_attn.q_proj", q_rows, hidden, config.qkv_bias)
            add(f"{prefix}.self_attn.k_proj", kv_rows, hidden, config.qkv_bias)
            add(f"{prefix}.self_attn.v_proj", kv_rows, hidden, config.qkv_bias)
            add(f"{prefix}.mlp.gate_proj", inter, hidden, config.mlp_bias)
            add(f"{prefix}.mlp.up_proj", inter, hidden, config.mlp_bias)
        add(f"{prefix}.self_attn.o_proj", hidden, q_rows, config.o_bias)
        add(f"{prefix}.mlp.down_proj", hidden, inter, config.mlp_bias)
    return shapes


@dataclass(frozen=True, slots=True)
class Projection:
    """Where one product of a layer has its weights: tensors that are stacked, since one pass over memory beats three."""

    names: tuple[str, ...]  # without ".weight" and ".bias"
    has_bias: bool


@dataclass(frozen=True, slots=True)
class LayerProjections:
    """The products of one layer."""

    qkv: Projection
    o: Projection
    gate_up: Projection
    down: Projection

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> "LayerProjections":
        """Name them as the checkpoint of `config` does."""
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        qkv = tuple(f"{attention}.{name}_proj" for name in ("q", "k", "v"))
        gate_up = tuple(f"{mlp}.{name}_proj" for name in ("gate", "up"))
        if config.has_fused_projections:
            qkv, gate_up = (f"{attention}.qkv_proj",), (f"{mlp}.gate_up_proj",)
        return cls(
            qkv=Projection(qkv, config.qkv_bias),
            o=Projection((f"{attention}.o_proj",), config.o_bias),
            gate_up=Projection(gate_up, config.mlp_bias),
            down=Projection((f"{mlp}.down_proj",), config.mlp_bias),
        )


def checkpoint_dtype(folder: Path) -> torch.dtype:
    """What the folder stores its embedding in; float32 for a dtype Baton does not compute with.

    Raises:
        ModelError: there are no weights, or a file is broken.
    """
    for path in weight_files(folder):
        with _open_safetensors(path) as file:
            if EMBEDDING in file.keys():  # noqa: SIM118 - not a dict
                return _STORED_DTYPES.get(file.get_slice(EMBEDDING).get_dtype(), torch.float32)
    return torch.float32


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from error


class WeightReader:
    """The checked tensors of one folder. Use as a context manager: it holds the files open."""

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype, progress: Progress | None = None) -> None:
        """Open and check; nothing is read yet.

        Args:
            folder: a Hugging Face model folder.
            config: what the folder's config.json says.
            dtype: every tensor is converted to it.
            progress: called with (bytes read, bytes to read) as tensors are taken.
        Raises:
            ModelError: a file is broken, or a tensor is missing, unexpected or of another shape.
        """
        self._dtype = dtype
        self._progress = progress
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._total_bytes = self._done_bytes = 0
        shapes = expected_shapes(config)
        try:
            for path in weight_files(folder):
                self._open(path)
            self._check(shapes, config)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def dtype(self) -> torch.dtype:
        """What tensors are converted to."""
        return self._dtype

    def _open(self, path: Path) -> None:
        file = self._stack.enter_context(_open_safetensors(path))
        self._files.update(dict.fromkeys(file.keys(), file))

    def _check(self, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> None:
        # Old checkpoints store the rotary table, and some tied ones their head a second time; both follow from the rest.
        ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
        unexpected = [n for n in self._files.keys() - shapes.keys() - ignored if not n.endswith("rotary_emb.inv_freq")]
        missing = shapes.keys() - self._files.keys()
        if missing or unexpected:
            parts = [
                f"{kind} {_some(sorted(n))}" for kind, n in (("lacks", missing), ("has unexpected", unexpected)) if n
            ]
            raise ModelError(f"the weights do not fit config.json ({config.family}): the folder {' and '.join(parts)}")
        for name, shape in shapes.items():
            found = tuple(self._files[name].get_slice(name).get_shape())
            if found != shape:
                raise ModelError(f"{name} has shape {found}, config.json asks for {shape}")
            self._total_bytes += torch.Size(shape).numel() * self._dtype.itemsize

    def take(self, *names: str) -> Tensor:
        """Read tensors in the wanted dtype, one below the other.

        Args:
            names: of equal trailing shapes.
        Returns:
            [sum of first dimensions, ...].
        """
        parts: list[Tensor] = [self._files[name].get_tensor(name) for name in names]
        # A copy in any case: the mapping is closed, and may be replaced on disk, while the model runs.
        tensor = torch.cat([part.to(self._dtype) for part in parts])
        self._count(tensor)
        return tensor

    def parts(self, *names: str) -> list[Tensor]:
        """Tensors to be copied into another order, in the checkpoint's own precision where that is less than the wanted one.

        Args:
            names: of equal trailing shapes.
        Returns:
            One tensor each, all of one dtype. They may lie in the mapped file: use them before the reader is closed.
        """
        parts: list[Tensor] = [self._files[name].get_tensor(name) for name in names]
        stored = {part.dtype for part in parts}
        is_narrower = self._dtype == torch.float32 and len(stored) == 1 and stored <= {torch.bfloat16, torch.float16}
        for part in parts:
            self._count(part)
        return parts if is_narrower else [part.to(self._dtype) for part in parts]

    def _count(self, tensor: Tensor) -> None:
        self._done_bytes += tensor.numel() * self._dtype.itemsize
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def weights_hash(folder: Path, progress: Progress | None = None) -> str:
    """SHA-256 over the contents of a folder's safetensors files: equal only for equal weights.

    Args:
        folder: a model folder. File hashes in its checksums.json, which the importer writes, are trusted.
        progress: called with (bytes hashed, bytes in all).
    Returns:
        64 hexadecimal digits.
    Raises:
        ModelError: there are no weights, or checksums.json is broken.
    """
    paths = weight_files(folder)
    known = _read_checksums(folder / CHECKSUMS_FILE)
    todo = [path for path in paths if path.name not in known]
    total = sum(path.stat().st_size for path in todo)
    done = 0
    for path in todo:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
        known[path.name] = digest.hexdigest()
    if len(paths) == 1:
        return known[paths[0].name]
    return hashlib.sha256("\n".join(f"{path.name} {known[path.name]}" for path in paths).encode()).hexdigest()


def _read_checksums(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(digest, str) for digest in value.values()):
        raise ModelError(f"{path}: must map file names to SHA-256 digests")
    return value


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
