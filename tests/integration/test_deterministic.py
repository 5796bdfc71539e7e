"""With --deterministic an answer is the same, bit for bit, whatever else the engine does: the demo model, real arithmetic."""

import threading
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from core.sampling import SamplingParams
from core.sequence import SequenceOutput, SequenceSpec, StepResult
from engine.build import build_engine
from engine.scheduler import StepLimits
from tests.integration.reference import reference_rows

NUM_TOKENS = 40
WAIT_S = 240.0

pytestmark = [pytest.mark.xdist_group("deterministic"), pytest.mark.timeout(400)]


class Answers:
    """A listener that gathers what each sequence got."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[SequenceOutput]] = {}
        self.num_preemptions = 0
        self._num_ended = 0
        self._changed = threading.Condition()

    def __call__(self, result: StepResult) -> None:
        with self._changed:
            self.num_preemptions += result.num_preemptions
            for output in result.outputs:
                self.outputs.setdefault(output.sequence_id, []).append(output)
                self._num_ended += output.has_ended
            self._changed.notify_all()

    def wait_for(self, num_ended: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_ended >= num_ended, WAIT_S), "the engine did not finish"

    def of(self, sequence_id: str) -> list[tuple[int, float]]:
        """Every token with the exact log-probability it had."""
        outputs = self.outputs[sequence_id]
        assert not outputs[-1].error, outputs[-1].error
        return [(entry.token_id, entry.logprob) for output in outputs for entry in output.logprobs]


def questions() -> list[SequenceSpec]:
    """Short reference prompts, greedy and sampled in turn, whose answers outgrow what is set aside for them."""
    rows = sorted(reference_rows(), key=lambda row: len(row.prompt_token_ids))[:8]
    return [
        SequenceSpec(
            sequence_id=row.id,
            prompt=tuple(row.prompt_token_ids),
            sampling=SamplingParams(
                temperature=index % 2 * 0.8, seed=index, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True
            ),
            eos_token_ids=(),
            hash_seed=b"one",
        )
        for index, row in enumerate(rows)
    ]


def answer(
    folder: Path,
    specs: Iterable[SequenceSpec],
    *,
    at_once: bool,
    num_blocks: int = 600,
    max_batched_tokens: int = 512,
    block_tokens: int = 16,
    swap_bytes: int = 0,
) -> Answers:
    """What a fresh engine answers, one after the other or all at once."""
    built = build_engine(
        folder,
        model="m",
        dtype="auto",
        device="cpu",
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        kv_memory_bytes=0,
        threads=1,
        limits=StepLimits(max_batched_tokens=max_batched_tokens, max_sequences=64),
        swap_bytes=swap_bytes,
        deterministic=True,
    )
    answers = Answers()
    built.engine.start(answers)
    try:
        # Holding the pool, no step begins: all at once means that none ends before the last has come.
        with built.pool if at_once else nullcontext():
            for number, spec in enumerate(specs, start=1):
                built.engine.submit(spec)
                if not at_once:
                    answers.wait_for(number)
        answers.wait_for(number)
    finally:
        built.engine.stop()
    assert built.pool.num_free == built.pool.num_total
    return answers


@pytest.fixture(scope="module")
def alone(demo_model: Path) -> dict[str, list[tuple[int, float]]]:
    specs = questions()
    answers = answer(demo_model, specs, at_once=False)
    return {spec.sequence_id: answers.of(spec.sequence_id) for spec in specs}


def test_in_a_batch_of_64_with_prompts_cut_small(demo_model: Path, alone: dict[str, list[tuple[int, float]]]) -> None:
    specs = questions()
    others = [
        replace(spec, sequence_id=f"other {number} {spec.sequence_id}", prompt=(*spec.prompt[number:], 7))
        for number in range(1, 8)
        for spec in specs
    ]
    answers = answer(demo_model, [*others[:28], *specs, *others[28:]], at_once=True, max_batched_tokens=100)
    assert {spec.sequence_id: answers.of(spec.sequence_id) for spec in specs} == alone


@pytest.mark.parametrize("swap_bytes", [0, 1 << 28], ids=["computed again", "swapped"])
def test_after_preemption(
    demo_model: Path, alone: dict[str, list[tuple[int, float]]], swap_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.layout.GROWTH_BLOCKS", 1)
    specs = questions()
    num_known = sum(-(-len(spec.prompt) // 16) for spec in specs)
    answers = answer(demo_model, specs, at_once=True, num_blocks=num_known + 10, swap_bytes=swap_bytes)
    assert answers.num_preemptions > 0
    assert {spec.sequence_id: answers.of(spec.sequence_id) for spec in specs} == alone


def test_on_cached_blocks_and_with_blocks_of_another_size(
    demo_model: Path, alone: dict[str, list[tuple[int, float]]]
) -> None:
    specs = questions()
    again = [replace(spec, sequence_id=f"again {spec.sequence_id}") for spec in specs]
    answers = answer(demo_model, [*specs, *again], at_once=False, block_tokens=8, num_blocks=1200)
    for spec in specs:
        assert answers.of(f"again {spec.sequence_id}") == answers.of(spec.sequence_id) == alone[spec.sequence_id]
    num_cached = [answers.outputs[spec.sequence_id][0].num_cached_tokens for spec in again]
    assert all(cached >= (len(spec.prompt) - 1) // 8 * 8 for cached, spec in zip(num_cached, again, strict=True))
