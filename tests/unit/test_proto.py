"""The committed stubs are what the .proto files give."""

import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parents[2] / "proto"


def test_committed_stubs_equal_regenerated_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROTO))
    from generate import generate

    generate(tmp_path)
    fresh = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(fresh) >= 6, fresh
    for path in fresh:
        assert (PROTO / path).read_text() == (tmp_path / path).read_text(), f"{path} is stale: run `make proto`"
    sys.modules.pop("generate")
