"""What the compiler makes of every kernel for every kind of device, none of which is here."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.gpu.registry import all_variants
from kernels.gpu.variant import ARCHS

Report = dict[str, Any]
_ROOT = Path(__file__).parents[2]

# Compiled once, whoever of several test processes does it; minutes on two cores that others use too.
pytestmark = [pytest.mark.xdist_group("ahead of time"), pytest.mark.timeout(1500)]


@pytest.fixture(scope="session")
def compile_variants(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    """The report of `python -m bench.kernels`, in a process that does not interpret kernels."""

    def run(*flags: str) -> Report:
        output = tmp_path_factory.mktemp("report") / "report.json"
        command = [sys.executable, "-m", "bench.kernels", "--ahead-of-time", "--output", str(output), *flags]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
        assert output.exists(), f"exit status {done.returncode}\n{done.stderr}"
        report: Report = json.loads(output.read_text())["results"]
        return report

    return run


@pytest.fixture(scope="session")
def due(compile_variants: Callable[..., Report]) -> Report:
    """Of every kernel whose file is not what the committed table was made from, and of one variant of the others."""
    return compile_variants("--quick")


def test_variants_compile_without_spills_and_fit_every_device(due: Report) -> None:
    kernels = {tuple(name.split("/")[:3]) for name in due["variants"]}
    assert kernels == {(arch.name, op, each.kernel.__name__) for arch in ARCHS for op, each in all_variants(arch)}
    assert due["failures"] == []


def test_variants_take_no_more_than_is_committed(due: Report) -> None:
    _assert_not_worse(due)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_variant_compiles_and_none_is_worse_than_is_committed(compile_variants: Callable[..., Report]) -> None:
    report = compile_variants()
    assert report["failures"] == []
    _assert_not_worse(report)


def _assert_not_worse(report: Report) -> None:
    if not report["is_compared"]:
        pytest.skip("NOT COMPARED: bench/kernels/resources.json was written with another Triton than is installed")
    assert report["changes"] == [], "if it must be so, commit what `python -m bench.kernels --write` makes of it"
