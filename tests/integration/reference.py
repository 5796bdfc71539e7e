"""The reference answers: greedy tokens of the demo model, computed by an independent implementation."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.processes import SHARED_DATA

FILE = SHARED_DATA / "reference" / "smollm2_135m_greedy.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt and its 48 greedy tokens; `margins` are best minus second-best logit at each of them."""

    id: str
    kind: str  # chat or text
    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    margins: list[float]
    text: str


def reference_rows() -> list[Row]:
    """All rows; skips the test where the file is not there."""
    if not FILE.is_file():
        pytest.skip(f"no reference tokens: {FILE} is missing; disaggregated is compared with aggregated only")
    return [Row(**json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None for equal answers; one that ends early differs at its end."""
    if list(left) == list(right):
        return None
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def unexcused(row: Row, token_ids: Sequence[int], margin: float) -> str:
    """Why an answer to a row's prompt must not differ from the reference as it does; empty when it may.

    Args:
        row: its margins say where a near-tie is.
        token_ids: the answer.
        margin: differences of logits below this are near-ties, where rounding may choose.
    """
    at = first_difference(token_ids, row.token_ids)
    if at is None or (at < len(row.margins) and row.margins[at] < margin and len(token_ids) == len(row.token_ids)):
        return ""
    return f"{row.id}: {list(token_ids[at : at + 3])} != {row.token_ids[at : at + 3]} at token {at}"
