"""OpenAI request bodies: what is understood, what is refused, and that a refusal names the field."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequestError
from core.sampling import MAX_CHOICES, SamplingParams
from services.router.api import MAX_PRIORITY, MAX_SALT_CHARS, ChatMessage
from services.router.openai_schema import MAX_PROMPTS, HttpCall, parse_chat, parse_completion

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> HttpCall:
    return parse_chat(json.dumps({"messages": HELLO} | fields).encode(), "r")


def completion(**fields: Any) -> HttpCall:
    return parse_completion(json.dumps({"prompt": "Hello"} | fields).encode(), "r")


def test_defaults_are_the_servers() -> None:
    call = chat(model="m")
    (request,) = call.calls
    assert (request.request_id, request.model, request.chat) == ("r", "m", (ChatMessage(role="user", content="Hello"),))
    assert request.sampling.max_tokens is None
    assert request.sampling.temperature == 1.0
    assert (call.stream, call.include_usage, call.return_token_ids, call.logprobs) == (False, False, False, None)
    assert (request.n, request.echo, request.priority, request.cache_salt) == (1, False, 0, "")
    assert request.sampling == SamplingParams()


def test_every_sampling_field_arrives() -> None:
    sent = {"max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -5}
    sampling = (
        completion(
            **sent,
            stop=["a", "b"],
            stop_token_ids=[3],
            include_stop_str_in_output=True,
            ignore_eos=True,
            skip_special_tokens=False,
            logprobs=0,
        )
        .calls[0]
        .sampling
    )
    assert {name: getattr(sampling, name) for name in sent} == sent
    assert (sampling.stop, sampling.stop_token_ids, sampling.logprobs) == (("a", "b"), (3,), 0)
    assert (sampling.include_stop, sampling.ignore_eos, sampling.skip_special_tokens) == (True, True, False)


@pytest.mark.parametrize("parse", [chat, completion])
def test_penalties_bias_choices_and_the_prompt_s_logprobs_arrive(parse: Callable[..., HttpCall]) -> None:
    sent = {"frequency_penalty": -2, "presence_penalty": 0.5, "repetition_penalty": 1.3, "prompt_logprobs": 3}
    call = parse(**sent, logit_bias={"5": -100, "007": 1.5}, n=2, best_of=2, priority=-7, cache_salt="ü")
    (request,) = call.calls
    assert {name: getattr(request.sampling, name) for name in sent} == sent
    assert request.sampling.logit_bias == ((5, -100.0), (7, 1.5))
    assert (request.n, call.n, request.priority, request.cache_salt) == (2, 2, -7, "ü")
    assert (call.prompt_logprobs, call.logprobs) == (3, None)


def test_an_echo_with_logprobs_needs_those_of_the_prompt() -> None:
    for fields, asked, shown in (
        ({"logprobs": 2}, 2, None),
        ({"logprobs": 0}, 0, None),
        ({"logprobs": 2, "prompt_logprobs": 5}, 5, 5),
        ({"prompt_logprobs": 1}, 1, 1),
        ({}, None, None),
    ):
        call = completion(echo=True, **fields)
        assert call.echo
        assert call.calls[0].sampling.prompt_logprobs == asked
        assert (call.prompt_logprobs, call.logprobs) == (shown, fields.get("logprobs"))
    assert completion(logprobs=2).calls[0].sampling.prompt_logprobs is None


def test_no_tokens_at_all_may_be_asked_for_only_to_score_a_prompt() -> None:
    call = completion(echo=True, max_tokens=0, prompt=["a", "b"], n=2)
    assert call.is_score_only
    assert [each.sampling.max_tokens for each in call.calls] == [1, 1]
    assert not completion(echo=True, max_tokens=1).is_score_only
    for fields in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}, {"max_tokens": -1, "echo": True}):
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            completion(**fields)


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": None}, None),
    ],
)
def test_max_completion_tokens_wins_and_null_is_absent(fields: dict[str, Any], max_tokens: int | None) -> None:
    assert chat(**fields).calls[0].sampling.max_tokens == max_tokens


@pytest.mark.parametrize(("top_k", "meant"), [(-1, 0), (0, 0), (None, 0), (5, 5)])
def test_top_k_has_two_ways_to_be_off(top_k: int | None, meant: int) -> None:
    assert chat(top_k=top_k).calls[0].sampling.top_k == meant


@pytest.mark.parametrize(("stop", "meant"), [(None, ()), ("x", ("x",)), (["x", "y"], ("x", "y")), ([], ())])
def test_stop_is_a_string_or_a_list(stop: object, meant: tuple[str, ...]) -> None:
    assert chat(stop=stop).calls[0].sampling.stop == meant


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"role": "user", "content": []}, ""),
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "user", "content": "x", "name": "ignored"}, "x"),
    ],
)
def test_content_is_a_string_or_text_parts(message: dict[str, Any], content: str) -> None:
    (request,) = chat(messages=[message]).calls
    assert request.chat == (ChatMessage(role=message["role"], content=content),)


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("a", ["a"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([1, 2], [None], [(1, 2)]),
        ([[1], [2, 3]], [None, None], [(1,), (2, 3)]),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_either(prompt: object, texts: list[Any], ids: list[Any]) -> None:
    calls = completion(prompt=prompt).calls
    assert [call.text for call in calls] == texts
    assert [call.token_ids for call in calls] == ids
    assert len({call.request_id for call in calls}) == len(calls)


def test_a_prompt_of_a_megabyte_of_ids_is_understood() -> None:
    ids = list(range(100_000, 222_000))
    assert completion(prompt=ids).calls[0].token_ids == tuple(ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": None},
        {"best_of": 1, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0},
        {"logit_bias": {}, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"logprobs": None, "echo": False, "cache_salt": "", "priority": 0, "suffix": None},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"user": "u", "metadata": {"a": 1}, "never_heard_of": [[{}]], "kv_transfer_params": {"x": 1}},
    ],
)
def test_unknown_fields_and_neutral_values_are_taken(fields: dict[str, Any]) -> None:
    assert len(completion(**fields).calls) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", MAX_CHOICES + 1),
        ("n", "2"),
        ("best_of", 3),
        ("repetition_penalty", 0),
        ("repetition_penalty", "x"),
        ("frequency_penalty", -2.5),
        ("presence_penalty", 3),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("logit_bias", {"5": -101}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"1e3": 1}),
        ("logit_bias", {"٥": 1}),
        ("logit_bias", {"5": 1, "05": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", [5]),
        ("echo", 2),
        ("suffix", "x"),
        ("cache_salt", "s" * (MAX_SALT_CHARS + 1)),
        ("cache_salt", "\ud83d"),
        ("priority", MAX_PRIORITY + 1),
        ("priority", 0.5),
        ("bad_words", ["a"]),
        ("allowed_token_ids", [1]),
        ("lora_name", "a"),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("guided_json", {}),
        # wrong types
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 2**63),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 2),
        ("seed", 2**64),
        ("stream", "yes"),
        ("stream_options", 3),
        ("stop", [1]),
        ("stop", ""),
        ("stop_token_ids", ["a"]),
        ("model", 3),
        # half of a surrogate pair
        ("model", "\ud83d"),
        ("stop", "x\ud83d"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(field: str, value: object) -> None:
    for call in (chat, completion):
        with pytest.raises(InvalidRequestError) as caught:
            call(**{field: value})
        assert caught.value.field.split("[")[0] == field
        str(caught.value).encode("utf-8")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": "a\udc00"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_wrong_chat_field_is_refused_by_its_path(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        ([1, "a"], "prompt"),
        (["a", 1], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1, "a"]], "prompt[0][1]"),
        ([True], "prompt[0]"),
        ([1, 1.5], "prompt[1]"),
        (["a"] * (MAX_PROMPTS + 1), "prompt"),
        (["a", "\ud83d"], "prompt[1]"),
    ],
)
def test_a_wrong_prompt_is_refused_by_its_path(prompt: object, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=prompt)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"{} {}", "body"),
        (b"[" * 100_000, "body"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
        (b'{"prompt":' + b"[" * 100_000, "body"),
        (b'{"prompt":"a","temperature":NaN}', "body"),
        (b'{"prompt":"a","temperature":Infinity}', "body"),
        (b'{"prompt":"a","temperature":1e999}', "temperature"),
        (b'{"prompt":"\xff"}', "body"),
        (b'{"prompt":"\xc0\x80"}', "body"),
        (b'{"prompt":"\xed\xa0\xbd"}', "body"),
        (b'\xef\xbb\xbf{"prompt":"a"}', "body"),
    ],
)
def test_bytes_that_are_no_request_are_refused(data: bytes, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion(data, "r")
    assert caught.value.field == field


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5), st.data()
)
def test_any_value_in_any_field_is_understood_or_refused_in_words_that_can_be_sent(
    value: object, data: st.DataObject
) -> None:
    names = [
        "messages",
        "prompt",
        "stop",
        "max_tokens",
        "logit_bias",
        "stream_options",
        "n",
        "logprobs",
        "top_k",
        "echo",
        "cache_salt",
    ]
    field = data.draw(st.sampled_from(names))
    body = json.dumps({"messages": HELLO, "prompt": "a", field: value}).encode()
    for parse in (parse_chat, parse_completion):
        refusal = ""
        try:
            assert parse(body, "r").calls
        except InvalidRequestError as error:
            refusal = str(error)
        refusal.encode("utf-8")


def test_a_name_too_long_for_several_prompts_is_refused() -> None:
    body = json.dumps({"prompt": ["a", "b"]}).encode()
    with pytest.raises(InvalidRequestError, match="X-Request-Id"):
        parse_completion(body, "r" * 128)
