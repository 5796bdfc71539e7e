"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

from core.errors import ConfigError
from services.common.models.store import ModelStore


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    store = ModelStore(Path(os.environ.get("BATON_HOME", "~/.cache/baton")).expanduser())
    try:
        return store.resolve("smollm2-135m-instruct")
    except ConfigError as error:
        pytest.skip(f"the demo model is missing, run `baton model fetch smollm2-135m-instruct`: {error}")
