"""The writer's short cut for plain tokens says the same as spelling every event out."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from core.sequence import TokenLogprobs
from services.router.api import Chunk
from services.router.openai_answers import AnswerWriter, ChatChoices, CompletionChoices
from services.router.openai_schema import parse_completion

TEXTS = st.lists(st.tuples(st.integers(0, 2), st.text() | st.just("\x00") | st.just("\u2028")), max_size=12)
CHUNK_WITH_LOGPROBS = Chunk(text="l", token_ids=(7,), logprobs=(TokenLogprobs(7, -0.5),))


def writer(choices: ChatChoices | CompletionChoices, *, with_usage: bool) -> AnswerWriter:
    body = {"prompt": "x", "n": 3, "stream_options": {"include_usage": with_usage}}
    call = parse_completion(json.dumps(body).encode(), "r")
    return AnswerWriter(choices, call, str, answer_id="id", model='mod"el\x00', created=5)


def payload(event: bytes) -> dict[str, Any]:
    assert event.isascii()
    assert (event[:6], event[-2:], event.count(b"\n")) == (b"data: ", b"\n\n", 2)
    parsed: dict[str, Any] = json.loads(event[6:])
    return parsed


@given(TEXTS, st.booleans())
def test_chat_events_of_any_texts(texts: list[tuple[int, str]], with_usage: bool) -> None:
    written = writer(ChatChoices(str, logprobs=None), with_usage=with_usage)
    begun: set[int] = set()
    for index, text in texts:
        role = {} if index in begun else {"role": "assistant"}
        begun.add(index)
        expected = {
            "id": "id",
            "object": "chat.completion.chunk",
            "created": 5,
            "model": 'mod"el\x00',
            "choices": [
                {"index": index, "delta": role | {"content": text}, "logprobs": None, "finish_reason": None},
            ],
        } | ({"usage": None} if with_usage else {})
        assert payload(written.event(index, Chunk(text=text, token_ids=(1,)))) == expected


@given(TEXTS)
def test_completion_events_of_any_texts(texts: list[tuple[int, str]]) -> None:
    written = writer(CompletionChoices(str, logprobs=None), with_usage=False)
    for index, text in texts:
        (choice,) = payload(written.event(index, Chunk(text=text, token_ids=(1,))))["choices"]
        assert choice == {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def test_logprobs_are_never_lost_to_the_short_cut() -> None:
    written = writer(CompletionChoices(str, logprobs=0), with_usage=False)
    for text_offset in range(3):
        (choice,) = payload(written.event(0, CHUNK_WITH_LOGPROBS))["choices"]
        assert choice["logprobs"]["text_offset"] == [text_offset]


def test_a_part_of_a_character_has_no_bytes_to_show() -> None:
    written = writer(ChatChoices(lambda _: "\ufffd", logprobs=0), with_usage=False)
    (choice,) = payload(written.event(0, CHUNK_WITH_LOGPROBS))["choices"]
    assert choice["logprobs"]["content"] == [{"token": "\ufffd", "logprob": -0.5, "bytes": None, "top_logprobs": []}]
