"""Log-probabilities of a prompt: those of transformers, however the prompt is cut and whatever runs beside it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.sampling import SamplingParams
from core.sequence import SequenceSpec, TokenLogprobs
from engine.load import load_runner
from engine.plan import Chunk, StepPlan
from engine.sequence import Sequence
from engine.torch_runner import LOGPROB_ROWS, TorchRunner
from tests.unit.tiny_model import write_tiny_model

transformers = pytest.importorskip("transformers")

NUM_TOP = 4
PROMPT = (*range(100, 1, -1), 5, 5, 7)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_sequence(name: str, prompt: tuple[int, ...], table: range) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=4, seed=0, prompt_logprobs=NUM_TOP)
    spec = SequenceSpec(sequence_id=name, prompt=prompt, sampling=sampling, eos_token_ids=(), block_table=tuple(table))
    return Sequence(spec)


def step(runner: TorchRunner, chunks: list[Chunk]) -> list[tuple[TokenLogprobs, ...]]:
    """Run one plan and apply it; what it said of each chunk's prompt."""
    results = runner.run(StepPlan(tuple(chunks)))
    for chunk, result in zip(chunks, results, strict=True):
        assert not result.error
        chunk.sequence.num_computed_tokens += chunk.num_tokens
        if result.token_id is not None:
            chunk.sequence.token_ids.append(result.token_id)
    return [result.prompt_logprobs for result in results]


@pytest.mark.parametrize("cuts", [[102], [1, 100, 1], [50, 52], [1] * 102], ids=lambda cuts: f"{len(cuts)} chunks")
def test_they_are_those_of_transformers(cuts: list[int], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, model_type="llama")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert len(PROMPT) == sum(cuts) > LOGPROB_ROWS
    runner = load_runner(folder, model="tiny", dtype="float32", block_tokens=4, num_blocks=64).runner
    sequence, other = new_sequence("s", PROMPT, range(30)), new_sequence("o", PROMPT[:9], range(30, 40))
    entries: list[TokenLogprobs] = []
    for number, length in enumerate(cuts):
        beside = [] if number else [Chunk(other, 9)]
        chunks = sorted([*beside, Chunk(sequence, length)], key=lambda chunk: chunk.num_tokens)
        entries += step(runner, chunks)[[chunk.sequence for chunk in chunks].index(sequence)]
    assert [entry.token_id for entry in entries] == list(PROMPT[1:])
    for position, entry in enumerate(entries):
        row = expected[position]
        best = row.topk(NUM_TOP)
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert step(runner, [Chunk(sequence, 1)]) == [()], "the answer's tokens are none of the prompt's"


def test_a_prompt_that_is_computed_again_after_its_first_token_says_nothing(tmp_path: Path) -> None:
    runner = load_runner(
        write_tiny_model(tmp_path), model="tiny", dtype="float32", block_tokens=4, num_blocks=64
    ).runner
    sequence = new_sequence("s", PROMPT[:9], range(10))
    assert len(step(runner, [Chunk(sequence, 9)])[0]) == 8
    sequence.num_computed_tokens = 0  # as after preemption
    assert step(runner, [Chunk(sequence, 10)]) == [()]
    one_token = new_sequence("one", PROMPT[:1], range(10, 12))
    assert step(runner, [Chunk(one_token, 1)]) == [()]


def test_an_unusable_row_ends_its_own_sequence_only(tmp_path: Path) -> None:
    runner = load_runner(write_tiny_model(tmp_path), model="tiny", dtype="float32", block_tokens=4, num_blocks=64)
    bad, good = new_sequence("bad", PROMPT[:9], range(10)), new_sequence("good", PROMPT[:9], range(10, 20))
    step(runner.runner, [Chunk(bad, 4), Chunk(good, 4)])
    runner.cache[0].fill_(float("nan"))
    broken, fine = runner.runner.run(StepPlan((Chunk(bad, 2), Chunk(good, 2))))
    assert "no usable logits" in broken.error
    assert fine.error == ""
    assert len(fine.prompt_logprobs) == 2
