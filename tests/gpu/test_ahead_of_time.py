"""What the compiler makes of every kernel for every kind of device, none of which is here."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
def everyday(compile_variants: Callable[..., Report]) -> Report:
    """Of chosen variants that two cores compile in a minute or two."""
    return compile_variants("--quick")


def test_everyday_variants_compile_without_spills_and_fit_every_device(everyday: Report) -> None:
    assert len(everyday["variants"]) > 100
    assert {name.partition("/")[0] for name in everyday["variants"]} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert everyday["failures"] == []


def test_everyday_variants_take_no_more_than_is_committed(everyday: Report) -> None:
    _assert_not_worse(everyday)


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
