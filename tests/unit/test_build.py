"""Building an engine: what its threads keep to."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from core.sampling import SamplingParams
from core.sequence import SequenceSpec
from engine.build import build_engine
from engine.scheduler import StepLimits
from tests.unit.native import built_library
from tests.unit.tiny_model import write_tiny_model

TASKS = Path("/proc/self/task")


def cores_of_threads() -> dict[str, set[int]]:
    """By number: where each thread of this process may run."""
    cores = {}
    for task in TASKS.iterdir():
        with suppress(ProcessLookupError):  # it ended just now
            cores[task.name] = os.sched_getaffinity(int(task.name))
    return cores


@pytest.mark.skipif(not TASKS.is_dir(), reason="asks Linux")
def test_compute_threads_keep_to_the_engines_cores_and_nobody_else_does(tmp_path: Path) -> None:
    built_library()
    before = cores_of_threads()
    core = max(os.sched_getaffinity(0))
    built = build_engine(
        write_tiny_model(tmp_path),
        model="tiny",
        dtype="float32",
        device="cpu",
        block_tokens=16,
        num_blocks=4,
        kv_memory_bytes=0,
        threads=3,
        limits=StepLimits(max_batched_tokens=16, max_sequences=4),
        cores=frozenset({core}),
    )
    after = cores_of_threads()
    started = after.keys() - before.keys()
    assert len(started) >= 2
    assert all(after[thread] == {core} for thread in started)
    assert all(after[thread] == cores for thread, cores in before.items() if thread in after)
    seen: list[set[int]] = []
    built.engine.start(lambda _: seen.append(os.sched_getaffinity(0)))
    sampling = SamplingParams(temperature=0.0, max_tokens=2, seed=0)
    built.engine.submit(SequenceSpec(sequence_id="a", prompt=(1, 2), sampling=sampling, eos_token_ids=()))
    built.engine.stop()
    assert seen
    assert all(cores == {core} for cores in seen)
