"""The model cache: folders under `<home>/models`, each whole from the moment it is visible."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError
from services.common.models.files import Progress, file_lock, no_progress, staged_folder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FETCH_HINT = "`baton model fetch smollm2-135m-instruct`"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One line of `baton model list`."""

    name: str
    path: Path
    size_bytes: int
    architecture: str  # as config.json names it, e.g. LlamaForCausalLM


class ModelStore:
    """Models by name.

    Args:
        home: Baton's folder, e.g. ~/.cache/baton; created when first needed.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.models = home / "models"
        self.downloads = home / "downloads"

    def resolve(self, model: str, progress: Progress = no_progress) -> Path:
        """The Hugging Face style folder of `model`.

        Args:
            model: a folder, a GGUF file (imported once, then reused until it changes) or the name of a stored model.
            progress: shown while a GGUF file is imported.
        Raises:
            ConfigError: there is no such model; the message lists those that exist.
            ModelError: a GGUF file needs a piece that Baton does not have.
        """
        path = Path(model).expanduser()
        if path.suffix == ".gguf":
            return self.add(_import_name(path), lambda folder: _import_gguf(path, folder, progress))
        if (path / "config.json").is_file():
            return path
        if path.is_dir():
            raise ConfigError(f"{path}: has no config.json, so it is not a model folder")
        name = stored_name(model)
        if self.has(name):
            return self.models / name
        known = ", ".join(stored.name for stored in self.list()) or "none"
        raise ConfigError(
            f"model {model!r}: no such folder, GGUF file or stored model; stored: {known}; try {_FETCH_HINT}"
        )

    def list(self) -> list[StoredModel]:
        """Every stored model, by name."""
        if not self.models.is_dir():
            return []
        folders = (path for path in self.models.iterdir() if _NAME.fullmatch(path.name))
        return [_describe(path) for path in sorted(folders) if (path / "config.json").is_file()]

    def has(self, name: str) -> bool:
        """Whether a model of that name is stored."""
        return (self.models / name / "config.json").is_file()

    def import_file(self, source: Path, name: str | None = None, progress: Progress = no_progress) -> Path:
        """Import a GGUF file under a name, the file's own by default; an existing model of that name is never replaced.

        Raises:
            ConfigError: the name is taken or not a name, or the file is damaged.
            ModelError: the model needs a piece that Baton does not have.
        """
        name = stored_name(name or source.stem.lower())
        if self.has(name):
            raise ConfigError(f"model {name!r} exists in {self.models / name}; remove it or give another name")
        return self.add(name, lambda folder: _import_gguf(source, folder, progress))

    def add(self, name: str, build: Callable[[Path], None]) -> Path:
        """The folder of model `name`, built by `build` unless it exists; of many processes that ask at once, one builds.

        Args:
            name: a valid name, see `stored_name`.
            build: fills the empty folder it is given; when it raises, nothing stays.
        """
        folder = self.models / name
        if not self.has(name):
            with file_lock(self.home / "locks" / f"{name}.lock"):
                if not self.has(name):
                    if folder.exists():
                        raise ConfigError(f"{folder}: in the way, and not a whole model; remove it")
                    with staged_folder(folder) as staging:
                        build(staging)
        return folder


def stored_name(model: str) -> str:
    """The folder name of a model: `org/name` becomes `org--name`.

    Raises:
        ConfigError: it could leave the cache or is not a plain name.
    """
    name = model.replace("/", "--", 1) if model.count("/") == 1 else model
    if not _NAME.fullmatch(name) or ".." in name:
        raise ConfigError(f"model {model!r}: neither a path nor a name of letters, digits and . _ - (or org/name)")
    return name


def _import_name(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    stat = path.stat()
    # Not the content's hash: reading many GiB at every start to find that nothing changed would be worse.
    key = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    stem = re.sub(r"[^a-z0-9_-]+", "-", path.stem.lower()).strip("-_") or "model"
    return f"{stem[:100]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _describe(path: Path) -> StoredModel:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        architecture = str(config["architectures"][0])
    except (ValueError, KeyError, IndexError, TypeError):
        architecture = "unreadable config.json"
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return StoredModel(path.name, path, size, architecture)


def _import_gguf(source: Path, folder: Path, progress: Progress) -> None:
    # Here, not above: a router that is given a model folder needs neither numpy nor gguf.
    from services.common.models.gguf_import import import_gguf

    import_gguf(source, folder, progress)
