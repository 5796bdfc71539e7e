"""Fixtures shared by all tests: the demo model, and stacks of real processes that serve it."""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from core.errors import ConfigError
from services.common.models.store import ModelStore
from tests.processes import CONTEXT_TOKENS, Stack, baton_up, cluster, make_home

# A shared machine may stand still for seconds in the middle of an example: that says nothing about the example.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    store = ModelStore(Path(os.environ.get("BATON_HOME", "~/.cache/baton")).expanduser())
    try:
        return store.resolve("smollm2-135m-instruct")
    except ConfigError as error:
        pytest.skip(f"the demo model is missing, run `baton model fetch smollm2-135m-instruct`: {error}")


@pytest.fixture(scope="session")
def float32_stack(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """`baton up` with the demo model in float32. Its tests belong to the xdist group "float32"."""
    home = make_home(tmp_path_factory.mktemp("float32") / "home", demo_model.parent)
    with baton_up(
        home, "--dtype", "float32", "--kv-memory", "768MiB", "--max-model-len", str(CONTEXT_TOKENS)
    ) as process:
        yield process.stack()


@pytest.fixture(scope="session")
def bfloat16_cluster(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Separately started processes in bfloat16, deterministic. Its tests belong to the xdist group "bfloat16".

    Router 0 is disaggregated, router 1 aggregated; both have the same workers.
    """
    home = make_home(tmp_path_factory.mktemp("bfloat16") / "home", demo_model.parent)
    flags = ["--dtype", "bfloat16", "--kv-memory", "512MiB", "--deterministic"]
    with cluster(home, flags, [[], ["--mode", "aggregated"]]) as stack:
        yield stack


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of a failed test's processes."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Stack):
                report.sections += [(f"log of {name}", text) for name, text in value.log_tails()]
    return report
