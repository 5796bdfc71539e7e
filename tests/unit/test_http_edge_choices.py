"""Several answers to a prompt, echoed prompts and their log-probabilities, in OpenAI's and vLLM's shapes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from core.errors import UnavailableError
from core.sequence import TokenLogprobs
from services.router.api import Chunk, EchoedPrompt, GenerateCall
from services.router.fake import FakeRouterCore, Step, done
from services.router.http_edge import create_app
from tests.unit.http_edge_harness import client_of, events_of

PROMPT = EchoedPrompt(text="Hey", token_ids=(4, 5, 6))
PROMPT_LOGPROBS = (TokenLogprobs(5, -2.0, ((9, -0.5), (5, -2.0))), TokenLogprobs(6, -3.0, ((9, -0.25), (8, -1.0))))


def core_of(call: GenerateCall) -> Sequence[Step]:
    """Each answer says its index twice; the first one says what the prompt was, in two pieces, before."""
    steps: list[Step] = []
    if call.echo or call.sampling.prompt_logprobs is not None:
        given = PROMPT_LOGPROBS if call.sampling.prompt_logprobs is not None else ()
        steps.append(Chunk(prompt_logprobs=given[:1], echoed=PROMPT if call.echo else None))
        steps.append(Chunk(prompt_logprobs=given[1:]))
    logprobs = () if call.sampling.logprobs is None else (TokenLogprobs(7, -0.5, ((7, -0.5), (8, -1.0))),)
    for index in range(call.n):
        steps += [Chunk(index=index, text=f"{index}", token_ids=(7,), logprobs=logprobs)] * 2
    ends = [replace(done(completion_tokens=2, cached_tokens=1), index=index) for index in reversed(range(call.n))]
    return steps + ends


async def post(path: str, body: dict[str, Any]) -> httpx.Response:
    async with client_of(create_app(FakeRouterCore(core_of))) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def joined(events: Sequence[Any]) -> dict[int, str]:
    """The text of each choice of a completion's events."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("n", [1, 2, 4])
async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(n: int) -> None:
    body = {"prompt": ["a", "b", "c"], "n": n}
    whole = (await post("/v1/completions", body)).json()
    expected = {prompt * n + choice: f"{choice}{choice}" for prompt in range(3) for choice in range(n)}
    assert [choice["index"] for choice in whole["choices"]] == list(expected)
    assert {choice["index"]: choice["text"] for choice in whole["choices"]} == expected
    assert whole["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 6 * n,
        "total_tokens": 9 + 6 * n,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last, end = events_of((await post("/v1/completions", body | asked)).text)
    assert (joined(events), last["usage"], last["choices"], end) == (expected, whole["usage"], [], "[DONE]")
    finished = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(finished) == list(expected)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_of_a_chat_names_its_role_once(stream: bool) -> None:
    answer = await post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 3, "stream": stream}
    )
    if not stream:
        messages = [(choice["index"], choice["message"]["content"]) for choice in answer.json()["choices"]]
        assert messages == [(0, "00"), (1, "11"), (2, "22")]
        return
    deltas = [event["choices"][0] for event in events_of(answer.text)[:-1]]
    assert [delta["index"] for delta in deltas if "role" in delta["delta"]] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_begins_every_choice_with_the_prompt(stream: bool) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "echo": True, "stream": stream, "logprobs": 1}
    answer = await post("/v1/completions", body)
    events = events_of(answer.text)[:-1] if stream else [answer.json()]
    assert joined(events) == {0: "Hey00", 1: "Hey11", 2: "Hey00", 3: "Hey11"}
    for index in range(4):
        parts = [choice["logprobs"] for event in events for choice in event["choices"] if choice["index"] == index]
        merged = {key: [value for part in parts if part for value in part[key]] for key in parts[0]}
        assert merged == {
            "tokens": ["t4", "t5", "t6", "t7", "t7"],
            "token_logprobs": [None, -2.0, -3.0, -0.5, -0.5],
            "text_offset": [0, 2, 4, 6, 8],
            # One beside each token: of the prompt no more were asked for, though more are known.
            "top_logprobs": [None, {"t9": -0.5, "t5": -2.0}, {"t9": -0.25, "t6": -3.0}, {"t7": -0.5}, {"t7": -0.5}],
        }
    assert not any("prompt_logprobs" in choice for event in events for choice in event["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_and_an_echo_score_the_prompt_alone(stream: bool) -> None:
    body = {"prompt": "a", "n": 2, "echo": True, "max_tokens": 0, "logprobs": 0, "stream": stream}
    asked = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    answer = await post("/v1/completions", body | asked)
    events = events_of(answer.text)[:-1] if stream else [answer.json()]
    assert joined(events) == {0: "Hey", 1: "Hey"}
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
    assert [choice["token_ids"] for choice in choices] == [[], []]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[None, -2.0, -3.0]] * 2
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)


VLLM_SHAPE = [
    None,
    {
        "5": {"logprob": -2.0, "rank": 2, "decoded_token": "t5"},
        "9": {"logprob": -0.5, "rank": 1, "decoded_token": "t9"},
    },
    {
        "6": {"logprob": -3.0, "rank": None, "decoded_token": "t6"},
        "9": {"logprob": -0.25, "rank": 1, "decoded_token": "t9"},
        "8": {"logprob": -1.0, "rank": 2, "decoded_token": "t8"},
    },
]


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_have_vllm_s_shape_and_come_once(stream: bool) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "prompt_logprobs": 2, "stream": stream}
    answer = await post("/v1/completions", body)
    events = events_of(answer.text)[:-1] if stream else [answer.json()]
    choices = [choice for event in events for choice in event["choices"]]
    shown = [(choice["index"], choice["prompt_logprobs"]) for choice in choices if "prompt_logprobs" in choice]
    assert sorted(index for index, _ in shown) == [0, 1, 2, 3]
    assert all(value == VLLM_SHAPE for _, value in shown)

    chat = {"messages": [{"role": "user", "content": "x"}], "n": 2, "prompt_logprobs": 2, "stream": stream}
    answer = await post("/v1/chat/completions", chat)
    events = events_of(answer.text)[:-1] if stream else [answer.json()]
    assert events[0]["prompt_logprobs"] == VLLM_SHAPE
    assert "prompt_logprobs" not in json.dumps([event["choices"] for event in events])


async def test_one_failing_choice_fails_the_call() -> None:
    def script(call: GenerateCall) -> Sequence[Step]:
        return [Chunk(index=1, text="x", token_ids=(1,)), replace(done(), index=1), UnavailableError("gone")]

    core = FakeRouterCore(script)
    async with client_of(create_app(core)) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "n": 2})
    assert (answer.status_code, core.num_running) == (503, 0)
