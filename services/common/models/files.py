"""Files that are either whole or absent: locks, staging folders, checksums.

A folder is built under a hidden name beside its target, flushed to disk and renamed. The lock of a target is held all that
time, so a hidden folder met under the lock belongs to a dead process and is swept.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.errors import ConfigError

Progress = Callable[[str, int, int], None]
"""Called with (label, done, total), in bytes, as work goes on."""

CHECKSUMS = "checksums.json"
LOCK_TIMEOUT_S = 3600.0  # longer than any import; a holder that dies releases at once
_LOCK_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20


def no_progress(label: str, done: int, total: int) -> None:
    """Show nothing."""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` readably, keys in the order given."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checksums(folder: Path) -> None:
    """Write `checksums.json`: file name -> SHA-256 of every other file directly in `folder`."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    write_json(folder / CHECKSUMS, {path.name: sha256_of(path) for path in paths})


@contextmanager
def file_lock(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock file `path` against every other process and thread; the kernel frees it when the holder dies.

    Raises:
        ConfigError: somebody else held it for `timeout_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ConfigError(f"{path}: another process has held this lock for {timeout_s:g} s") from None
                time.sleep(_LOCK_POLL_S)
        yield


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """An empty folder that becomes `target` when the block ends, and vanishes when it raises.

    The caller holds `target`'s lock, and `target` does not exist.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".staging-{target.name}-"
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    staging = target.parent / f"{prefix}{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        yield staging
        publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, target: Path) -> None:
    """Flush every file of `staging` to disk, then rename it to `target`: after a power cut it is whole or absent."""
    for path in (*staging.rglob("*"), staging):
        _fsync(path)
    staging.rename(target)
    _fsync(target.parent)


def copy_verified(source: Any, target: Path, sha256: str, total: int, label: str, progress: Progress) -> None:
    """Copy a binary stream into `target` and check what arrived.

    Raises:
        ConfigError: the bytes are not the expected ones; `target` is removed.
    """
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
            done += len(chunk)
            progress(label, done, total)
    if digest.hexdigest() != sha256:
        target.unlink()
        raise ConfigError(f"{target.name}: SHA-256 is {digest.hexdigest()}, expected {sha256}")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
