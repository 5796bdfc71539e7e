"""Penalties over a greedy answer of a tiny model: those of transformers, and of the definition, across a hand-off too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.sampling import SamplingParams
from core.sequence import SequenceSpec
from engine.load import load_runner
from engine.plan import Chunk, StepPlan
from engine.sequence import Sequence
from tests.unit.tiny_model import write_tiny_model

transformers = pytest.importorskip("transformers")

PROMPT = (5, 17, 17, 80, 3, 17, 42, 5)
NEW_TOKENS = 16


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def answer(folder: Path, known: tuple[int, ...] = (), **penalties: float) -> list[int]:
    """Greedy tokens after PROMPT; the `known` first ones were sampled elsewhere."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, seed=0, **penalties)  # type: ignore[arg-type]
    spec = SequenceSpec(
        sequence_id="s",
        prompt=PROMPT,
        output=known,
        sampling=sampling,
        eos_token_ids=(),
        block_table=tuple(range(16)),
    )
    runner = load_runner(folder, model="tiny", dtype="float32", block_tokens=4, num_blocks=16).runner
    sequence = Sequence(spec)
    while sequence.num_output_tokens < NEW_TOKENS:
        chunk = Chunk(sequence, sequence.num_uncomputed_tokens)
        (sampled,) = runner.run(StepPlan((chunk,)))
        sequence.num_computed_tokens += chunk.num_tokens
        assert sampled.token_id is not None
        sequence.token_ids.append(sampled.token_id)
    return sequence.token_ids[len(PROMPT) :]


@pytest.fixture
def reference(tmp_path: Path) -> Any:
    folder = write_tiny_model(tmp_path, model_type="llama")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def by_definition(reference: Any, repetition: float, frequency: float, presence: float) -> list[int]:
    """The whole context computed anew for each token, then each penalty written out."""
    tokens: list[int] = []
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1].tolist()
        for token in {*PROMPT, *tokens}:
            logits[token] *= repetition if logits[token] < 0 else 1 / repetition
        for token in set(tokens):
            logits[token] -= frequency * tokens.count(token) + presence
        tokens.append(max(range(len(logits)), key=lambda token: (logits[token], -token)))
    return tokens


def test_the_repetition_penalty_is_that_of_transformers(reference: Any, tmp_path: Path) -> None:
    inputs = torch.tensor([PROMPT])
    for penalty in (0.8, 1.3, 5.0):
        expected = reference.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=penalty,
        )[0, len(PROMPT) :].tolist()
        assert answer(tmp_path, repetition_penalty=penalty) == expected


@pytest.mark.parametrize(
    "penalties",
    [(1.0, 0.5, 0.0), (1.0, 0.0, 1.0), (1.3, 0.5, 1.0), (1.0, -2.0, -2.0), (0.9, 2.0, -0.5)],
    ids=["frequency", "presence", "all", "rewards", "mixed"],
)
def test_every_penalty_is_its_definition_after_a_hand_off_too(
    reference: Any, tmp_path: Path, penalties: tuple[float, float, float]
) -> None:
    expected = by_definition(reference, *penalties)
    assert len(set(expected)) > 1
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    given = dict(zip(names, penalties, strict=True))
    assert answer(tmp_path, **given) == expected
    assert answer(tmp_path, known=tuple(expected[:1]), **given) == expected
