"""The HTTP edge over a real socket: shapes, streams, failures before and after the first token, clients that leave."""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from core.errors import (
    CancelledError,
    CapacityError,
    DeadlineError,
    DuplicateRequestError,
    InternalError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
)
from core.sampling import MIN_LOGPROB
from core.sequence import TokenLogprobs
from services.router.api import Chunk, GenerateCall
from services.router.fake import FakeRouterCore, Step, done, words
from services.router.http_edge import HttpLimits, create_app
from tests.unit.http_edge_harness import client_of, events_of, eventually, serving

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}


async def test_a_chat_answer_has_openai_s_shape() -> None:
    async with client_of(create_app(FakeRouterCore(words("Par", "is")), now=lambda: 1000.9)) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "abc"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "abc"
    assert answer.json() == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "created": 1000,
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Paris", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_chat_stream_has_the_role_in_its_first_token_and_done_last() -> None:
    core = FakeRouterCore(words("Par", "is\u2028", "é"))
    async with client_of(create_app(core)) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.isascii()
    *chunks, end = events_of(answer.text)
    assert end == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "Par"},
        {"content": "is\u2028"},
        {"content": "é"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_comes_once_and_only_when_asked(path: str) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with client_of(create_app(FakeRouterCore(words("a", "b")))) as client:
        *chunks, last, end = events_of((await client.post(path, json=CHAT | TEXT | asked)).text)
    assert end == "[DONE]"
    assert (last["choices"], last["usage"]["completion_tokens"], last["usage"]["total_tokens"]) == ([], 2, 5)
    assert [chunk["usage"] for chunk in chunks] == [None] * 3


async def test_an_answer_that_ends_with_its_first_token_still_names_the_role() -> None:
    async with client_of(create_app(FakeRouterCore(words()))) as client:
        chunk, end = events_of((await client.post("/v1/chat/completions", json=CHAT | {"stream": True})).text)
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (chunk["choices"][0]["finish_reason"], end) == ("stop", "[DONE]")


async def test_several_prompts_keep_their_index_and_add_up() -> None:
    def script(call: GenerateCall) -> Sequence[Step]:
        return [Chunk(text=f"<{call.text}>", token_ids=(1,)), done(completion_tokens=1, cached_tokens=2)]

    core = FakeRouterCore(script)
    body: dict[str, Any] = {"prompt": ["a", "b", "c"]}
    async with client_of(create_app(core, limits=HttpLimits(max_concurrent_prompts=2))) as client:
        whole = (await client.post("/v1/completions", json=body)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, _ = events_of((await client.post("/v1/completions", json=body | options)).text)
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [(0, "<a>"), (1, "<b>"), (2, "<c>")]
    assert whole["usage"] == last["usage"]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (9, 3)
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "<a>", 1: "<b>", 2: "<c>"}
    assert sorted(chunk["choices"][0]["finish_reason"] or "" for chunk in chunks) == [
        "",
        "",
        "",
        "stop",
        "stop",
        "stop",
    ]


async def test_only_so_many_prompts_of_a_call_run_at_once() -> None:
    gate = asyncio.Event()
    core = FakeRouterCore(lambda _: [gate, done()])
    async with client_of(create_app(core, limits=HttpLimits(max_concurrent_prompts=2))) as client:
        call = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": ["a", "b", "c", "d", "e"]}))
        await eventually(lambda: core.num_running == 2)
        assert (await client.get("/healthz")).status_code == 200  # the loop turned, and no third one began
        assert len(core.calls) == 2
        gate.set()
        assert len((await call).json()["choices"]) == 5


async def test_one_failing_prompt_fails_the_call_and_aborts_the_others() -> None:
    never = asyncio.Event()

    def script(call: GenerateCall) -> Sequence[Step]:
        return [UnavailableError("gone")] if call.text == "b" else [never]

    core = FakeRouterCore(script)
    async with client_of(create_app(core)) as client:
        answer = await client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert (answer.status_code, core.num_running, len(core.aborted)) == (503, 0, 2)


LOGPROBS = TokenLogprobs(7, -0.5, ((7, -0.5), (8, MIN_LOGPROB)))


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_in_both_shapes_are_strict_json(stream: bool) -> None:
    def script(call: GenerateCall) -> Sequence[Step]:
        chunk = Chunk(text="x", token_ids=(7,), logprobs=(LOGPROBS,))
        return [chunk, chunk, done(completion_tokens=2)]

    def choices(answer: httpx.Response) -> list[Any]:
        payloads = events_of(answer.text)[:-2] if stream else [answer.json()]
        return [payload["choices"][0]["logprobs"] for payload in payloads]

    async with client_of(create_app(FakeRouterCore(script))) as client:
        asked = {"stream": stream, "return_token_ids": True}
        chat = await client.post("/v1/chat/completions", json=CHAT | asked | {"logprobs": True, "top_logprobs": 2})
        text = await client.post("/v1/completions", json=TEXT | asked | {"logprobs": 2})
    assert "Infinity" not in chat.text + text.text
    tokens = [token for logprobs in choices(chat) for token in logprobs["content"]]
    top = [
        {"token": "t7", "logprob": -0.5, "bytes": [116, 55]},
        {"token": "t8", "logprob": -9999.0, "bytes": [116, 56]},
    ]
    assert tokens == [top[0] | {"top_logprobs": top}] * 2
    merged = {key: [value for part in choices(text) for value in part[key]] for key in choices(text)[0]}
    assert merged == {
        "tokens": ["t7", "t7"],
        "token_logprobs": [-0.5, -0.5],
        "text_offset": [0, 2],
        "top_logprobs": [{"t7": -0.5, "t8": -9999.0}] * 2,
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_returned_when_asked(stream: bool) -> None:
    async with client_of(create_app(FakeRouterCore(words("a", "b")))) as client:
        answer = await client.post("/v1/completions", json=TEXT | {"stream": stream, "return_token_ids": True})
    payloads = events_of(answer.text)[:-1] if stream else [answer.json()]
    assert [token_id for payload in payloads for token_id in payload["choices"][0]["token_ids"]] == [10, 11]


async def test_the_matched_stop_is_named() -> None:
    async with client_of(create_app(FakeRouterCore(lambda _: [done(matched_stop="END")]))) as client:
        answer = await client.post("/v1/completions", json=TEXT)
    assert answer.json()["choices"][0]["stop_reason"] == "END"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequestError("token_ids", "9 is out of range"), 400, "invalid_request_error"),
        (DuplicateRequestError("r is in flight"), 409, "conflict_error"),
        (CapacityError("full", retry_after_ms=1500), 429, "rate_limit_error"),
        (CancelledError("aborted"), 499, "cancelled_error"),
        (InternalError("bug"), 500, "internal_error"),
        (UnavailableError("no worker"), 503, "service_unavailable_error"),
        (DeadlineError("too late"), 504, "timeout_error"),
    ],
)
async def test_a_failure_before_the_first_token_is_an_http_status(
    error: ServingError, status: int, kind: str, stream: bool
) -> None:
    async with client_of(create_app(FakeRouterCore(lambda _: [error]))) as client:
        answer = await client.post("/v1/completions", json=TEXT | {"stream": stream})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert answer.headers.get("retry-after") == ("2" if status == 429 else None)
    if status == 400:
        # The core speaks of its own fields; the client sent `prompt`.
        assert answer.json()["error"]["param"] == "prompt"
        assert answer.json()["error"]["message"] == "prompt: 9 is out of range"


async def test_an_unknown_model_is_404_and_an_unknown_path_too() -> None:
    async with client_of(create_app(FakeRouterCore(words("a")))) as client:
        model = await client.post("/v1/completions", json=TEXT | {"model": "other"})
        path = await client.get("/v1/nothing")
        method = await client.get("/v1/completions")
    assert (model.status_code, model.json()["error"]["code"]) == (404, "model_not_found")
    assert (path.status_code, method.status_code) == (404, 405)
    assert path.json()["error"]["message"] == "Not Found"


async def test_a_failure_after_tokens_is_an_event_and_an_unclean_end(caplog: pytest.LogCaptureFixture) -> None:
    core = FakeRouterCore(lambda _: [Chunk(text="a", token_ids=(1,)), UnavailableError("decode worker d1 is gone")])
    received: list[bytes] = []

    async def read_all(answer: httpx.Response) -> None:
        async for data in answer.aiter_bytes():
            received.append(data)

    async with (
        client_of(create_app(core)) as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer,
    ):
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            await read_all(answer)
    token, error = events_of(b"".join(received).decode())
    assert token["choices"][0]["delta"]["content"] == "a"
    assert error["error"]["message"] == "decode worker d1 is gone"
    assert not any(record.exc_info for record in caplog.records)


async def test_a_bug_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    def script(call: GenerateCall) -> Sequence[Step]:
        raise ZeroDivisionError("secret")

    async with client_of(create_app(FakeRouterCore(script))) as client:
        answer = await client.post("/v1/completions", json=TEXT)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert [record.exc_info is not None for record in caplog.records if record.name.startswith("services")] == [True]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("with_first_token", [False, True])
async def test_a_client_that_leaves_aborts_its_request(stream: bool, with_first_token: bool) -> None:
    never = asyncio.Event()
    core = FakeRouterCore(lambda _: [*[Chunk(text="a", token_ids=(1,))] * with_first_token, never])
    async with serving(create_app(core)) as url:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            writer.write(raw_post("/v1/completions", TEXT | {"stream": stream}))
            await eventually(lambda: core.num_running == 1)
            if stream and with_first_token:
                await reader.readuntil(b"data: ")
            writer.close()
            await writer.wait_closed()
        await eventually(lambda: len(core.aborted) == 1)
        assert core.num_running == 0


async def test_a_client_that_leaves_aborts_all_its_prompts() -> None:
    never = asyncio.Event()
    core = FakeRouterCore(lambda _: [never])
    async with serving(create_app(core)) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(raw_post("/v1/completions", {"prompt": ["a", "b"]}))
        await eventually(lambda: core.num_running == 2)
        writer.close()
        await eventually(lambda: len(core.aborted) == 2)


async def test_a_reader_that_stops_reading_is_dropped_with_bounded_buffers() -> None:
    given = 0

    def script(call: GenerateCall) -> Iterator[Step]:
        nonlocal given
        for _ in range(100_000):
            given += 1
            yield Chunk(text="x" * 1000, token_ids=(1,))

    core = FakeRouterCore(script)
    async with serving(create_app(core, limits=HttpLimits(stall_timeout_s=0.2))) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port, limit=1)
        writer.write(raw_post("/v1/completions", TEXT | {"stream": True}))
        await eventually(lambda: len(core.aborted) == 1)
        writer.close()
    # Socket buffers hold some megabytes of the 100 MB; the server holds no more.
    assert given < 20_000


async def test_a_large_body_works_and_a_too_large_one_is_413() -> None:
    core = FakeRouterCore(words("a"))
    ids = list(range(100_000, 300_000))
    async with client_of(create_app(core, limits=HttpLimits(max_body_bytes=3_000_000))) as client:
        large = await client.post("/v1/completions", json={"prompt": ids})
        too_large = await client.post("/v1/completions", json={"prompt": ids * 3})

        async def unannounced() -> Any:
            for _ in range(40):
                yield b" " * 100_000

        chunked = await client.post("/v1/completions", content=unannounced())
        after = await client.get("/healthz")
    assert large.status_code == 200
    assert core.calls[0].token_ids == tuple(ids)
    for answer in (too_large, chunked):
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
        assert "3000000 bytes" in answer.json()["error"]["message"]
    assert (after.status_code, len(core.calls)) == (200, 1)


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b'{"prompt":"\\ud83d"}', b'{"prompt":"\xff"}', b"", b'{"prompt":NaN}']
)
async def test_bad_bytes_are_400_and_reach_nobody(data: bytes) -> None:
    core = FakeRouterCore(words("a"))
    async with client_of(create_app(core)) as client:
        answer = await client.post("/v1/completions", content=data)
        after = await client.post("/v1/completions", json=TEXT)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["param"] in ("body", "prompt")
    assert (after.status_code, len(core.calls)) == (200, 1)


async def test_an_upload_that_stops_is_408_and_reaches_nobody() -> None:
    core = FakeRouterCore(words("a"))
    async with serving(create_app(core, limits=HttpLimits(stall_timeout_s=0.05))) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(raw_post("/v1/completions", TEXT)[:-1])
        async with asyncio.timeout(30):
            answer = await reader.read()  # to the end: the server closes
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"no more of the body" in answer
    assert core.calls == []


async def test_a_bad_request_id_is_refused_and_a_good_one_is_the_cores() -> None:
    core = FakeRouterCore(words("a"))
    async with client_of(create_app(core)) as client:
        bad = await client.post("/v1/completions", json=TEXT, headers={"X-Request-Id": "a b"})
        made = await client.post("/v1/completions", json=TEXT)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "X-Request-Id")
    assert made.headers["x-request-id"] == core.calls[0].request_id != ""


async def test_pages_beside_the_api() -> None:
    core = FakeRouterCore(words(), model="m", max_model_len=77)
    app = create_app(core, metrics=lambda: (b"up 1\n", "text/plain; version=0.0.4"), now=lambda: 5.0)
    async with client_of(app) as client:
        models = (await client.get("/v1/models")).json()
        metrics = await client.get("/metrics")
        alive = [(await client.get(path)).status_code for path in ("/healthz", "/health", "/readyz")]
        core.ready = False
        unready = [(await client.get(path)).status_code for path in ("/healthz", "/readyz")]
    assert models == {
        "object": "list",
        "data": [{"id": "m", "object": "model", "created": 5, "owned_by": "baton", "max_model_len": 77}],
    }
    assert (metrics.content, metrics.headers["content-type"]) == (b"up 1\n", "text/plain; version=0.0.4")
    assert (alive, unready) == ([200, 200, 200], [200, 503])


def raw_post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


@pytest.fixture(autouse=True)
def _quiet_access_log() -> None:
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
