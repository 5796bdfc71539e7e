"""A model from a Hugging Face hub: here a small server on loopback that speaks the four calls the client makes."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.common.models.files import sha256_of
from services.common.models.gguf_import import import_gguf
from services.common.models.store import ModelStore
from tests.unit import tiny_gguf

ROOT = Path(__file__).parents[2]
COMMIT = "0" * 40
FETCH = """
import sys
from pathlib import Path
from core.errors import ConfigError
from services.common.models.fetch import fetch
from services.common.models.store import ModelStore
try:
    print(fetch("tiny/model", ModelStore(Path(sys.argv[1]))))
except ConfigError as error:
    print(f"{type(error).__name__}: {error}")
"""


class Hub(ThreadingHTTPServer):
    """Serves `files` as the repository tiny/model; `asked` lists the files whose content was asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.asked: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        """Stay quiet."""

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/tiny/model/tree/"):
            files = self.server.files.items()
            body = json.dumps([{"type": "file", "path": n, "size": len(b), "oid": COMMIT} for n, b in files]).encode()
        elif path.startswith("/api/models/tiny/model"):
            siblings = [{"rfilename": name} for name in self.server.files]
            body = json.dumps({"id": "tiny/model", "sha": COMMIT, "siblings": siblings}).encode()
        else:
            name = path.removeprefix(f"/tiny/model/resolve/{COMMIT}/")
            body = self.server.files[name]
            if with_body:
                self.server.asked.append(name)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    model = tmp_path / "model"
    model.mkdir()
    import_gguf(tiny_gguf.write(tmp_path / "tiny.gguf"), model)
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.name != "checksums.json"}
    files |= {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "original/model.safetensors": b"a second copy"}
    with Hub(files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def fetched(home: Path, endpoint: str) -> str:
    # A process of its own: the client reads its endpoint once, when it is imported.
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    command = [sys.executable, "-c", FETCH, str(home)]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_repository_becomes_a_stored_model_without_pickles_or_code(hub: Hub, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "home")
    folder = fetched(store.home, f"http://127.0.0.1:{hub.server_port}")
    assert store.resolve("tiny/model") == Path(folder)
    names = {path.name for path in Path(folder).iterdir()}
    assert names == set(hub.files) - {"pytorch_model.bin", "modeling.py", "original/model.safetensors"} | {
        "checksums.json"
    }
    assert not any(name.endswith((".bin", ".py")) or "/" in name for name in hub.asked)
    sums = json.loads((Path(folder) / "checksums.json").read_text())
    assert sums["model.safetensors"] == sha256_of(Path(folder) / "model.safetensors")
    assert list(store.downloads.iterdir()) == []


def test_a_repository_without_safetensors_is_refused(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    store = ModelStore(tmp_path / "home")
    answer = fetched(store.home, f"http://127.0.0.1:{hub.server_port}")
    assert answer == "ModelError: tiny/model: has no config.json or no safetensors weights"
    assert store.list() == []


def test_without_a_network_the_repository_is_named(tmp_path: Path) -> None:
    answer = fetched(tmp_path, "http://127.0.0.1:1")  # nobody listens there
    assert answer.startswith("ConfigError: tiny/model: could not be downloaded from the model hub")
