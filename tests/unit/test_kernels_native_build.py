"""Building the native library: finding a compiler, rebuilding what changed, and taking a build the CPU can run."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native.build import build, find_compiler, levels, library_path
from kernels.native.library import cpu_features, find_library, load_library, usable_levels
from tests.unit.native import built_library

SOURCE = "int answer(void) { return %d; }\n"


def executable(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def test_a_compiler_is_found_by_name_in_order(tmp_path: Path) -> None:
    path = {"PATH": str(tmp_path)}
    for name in ("clang", "gcc", "cc"):
        executable(tmp_path, name)
        assert find_compiler(path) == [name]
    assert find_compiler({**path, "CC": "ccache gcc-12"}) == ["ccache", "gcc-12"]


def test_without_a_compiler_one_from_pypi_is_taken_or_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="ziglang"):
        find_compiler({"PATH": str(tmp_path)})
    (tmp_path / "ziglang").mkdir()
    assert find_compiler({"PATH": str(tmp_path)}) == [sys.executable, "-m", "ziglang", "cc"]


def test_changed_sources_are_built_again_and_the_old_build_is_removed(tmp_path: Path) -> None:
    source, built = tmp_path / "answer.c", tmp_path / "built"
    source.write_text(SOURCE % 42)
    compiler = find_compiler(os.environ)
    first = build(compiler, tmp_path, built)
    assert first == [library_path(level, tmp_path, built) for level in levels()]
    written = [path.stat().st_mtime_ns for path in first]
    assert build(compiler, tmp_path, built) == first
    assert [path.stat().st_mtime_ns for path in first] == written
    source.write_text(SOURCE % 43)
    second = build(compiler, tmp_path, built)
    assert not {*first} & {*second}
    assert {*built.iterdir()} == {*second}
    assert ctypes.CDLL(str(second[-1])).answer() == 43  # the base level runs anywhere


def test_a_level_the_compiler_does_not_know_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "answer.c").write_text(SOURCE % 1)
    old = tmp_path / "old-compiler"
    real = " ".join(find_compiler(os.environ))
    old.write_text(f'#!/bin/sh\ncase "$*" in *-mfma*) exit 1;; esac\nexec {real} "$@"\n')
    old.chmod(0o755)
    assert [path.name.split("-")[0] for path in build([str(old)], tmp_path, tmp_path / "built")] == ["base"]


def test_broken_sources_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "answer.c").write_text("int answer(void) { return }\n")
    with pytest.raises(subprocess.CalledProcessError):
        build(find_compiler(os.environ), tmp_path, tmp_path / "built")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's list of features is Linux's")
def test_a_cpu_takes_the_best_level_it_has_all_features_of(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma bmi2 avx512f\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    features = cpu_features(info)
    assert features == {"fpu", "avx2", "fma", "bmi2", "avx512f"}
    assert "base" in [level.name for level in usable_levels(features)]
    assert "avx512" not in [level.name for level in usable_levels(features)]
    assert [level.name for level in usable_levels(frozenset())] == ["base"]
    assert cpu_features(tmp_path / "none") == frozenset()


def test_nothing_is_found_where_nothing_is_built(tmp_path: Path) -> None:
    assert find_library(tmp_path) is None
    assert load_library(built_library()).baton_dtype_bytes(1) == 2


def test_the_build_command_says_where_the_libraries_are() -> None:
    expected = built_library()
    done = subprocess.run([sys.executable, "-m", "kernels.native.build"], capture_output=True, text=True, check=True)
    assert str(expected) in done.stdout.splitlines()
