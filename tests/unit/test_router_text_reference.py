"""The demo model's tokenizer and chat template against ids made by an independent implementation."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.router.api import ChatMessage
from services.router.chat_template import ChatTemplate
from services.router.tokenizer import Tokenizer

REFERENCE = Path(__file__).parents[3] / "shared/data/reference/smollm2_135m_greedy.jsonl"
MODEL = Path(os.environ.get("BATON_HOME", "~/.cache/baton")).expanduser() / "models/smollm2-135m-instruct"
MAX_MODEL_LEN = 8192
REFERENCE_CUT = 1500  # longer prompts were cut there


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    for path, wanted in (
        (REFERENCE, "the shared reference data"),
        (MODEL, "`baton model fetch smollm2-135m-instruct`"),
    ):
        if not path.exists():
            pytest.skip(f"needs {wanted}: {path} is missing")
    return [json.loads(line) for line in REFERENCE.read_text(encoding="utf-8").splitlines()]


def test_prompts_become_the_reference_ids(rows: list[dict[str, Any]]) -> None:
    tokenizer, template = Tokenizer.load(MODEL), ChatTemplate.load(MODEL)
    for row in rows:
        text, is_chat = row["prompt"], row["kind"] == "chat"
        if is_chat:
            text = template.render([ChatMessage(role="user", content=text)], max_model_len=MAX_MODEL_LEN)
        ids = tokenizer.encode(text, add_special=not is_chat)
        assert ids[:REFERENCE_CUT] == row["prompt_token_ids"], row["id"]


def test_answers_streamed_token_by_token_are_the_reference_texts(rows: list[dict[str, Any]]) -> None:
    tokenizer = Tokenizer.load(MODEL)
    for row in rows:
        for skip_special in (True, False):
            detokenizer = tokenizer.detokenizer(skip_special=skip_special)
            text = "".join(detokenizer.push([token_id]) for token_id in row["token_ids"])
            assert text == tokenizer.decode(row["token_ids"], skip_special=skip_special).removesuffix("\ufffd"), row[
                "id"
            ]
