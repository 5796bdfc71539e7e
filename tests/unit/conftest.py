"""A scripted engine for whoever tests the loop around it."""

from collections.abc import Iterator

import pytest

from engine.scheduler import StepLimits
from engine.scripted import ScriptedEngine, StepGate, scripted_engine
from tests.engine_harness import Recorder, assert_all_returned

BUDGET = 8  # tokens in a step


@pytest.fixture
def parts() -> ScriptedEngine:
    return scripted_engine(limits=StepLimits(max_batched_tokens=BUDGET, max_sequences=4))


@pytest.fixture
def gate(parts: ScriptedEngine) -> StepGate:
    parts.runner.gate = StepGate()
    return parts.runner.gate


@pytest.fixture
def listener(parts: ScriptedEngine) -> Iterator[Recorder]:
    """Started on use; a test that also uses `gate` holds every step."""
    listener = Recorder()
    parts.loop.start(listener)
    yield listener
    if parts.runner.gate is not None:
        parts.runner.gate.open()
    parts.loop.stop()
    assert_all_returned(parts.pool, listener)
