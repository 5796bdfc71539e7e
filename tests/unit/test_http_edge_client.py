"""The users' own client, the `openai` package, against the HTTP edge."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import openai
import pytest

from core.errors import CapacityError, DeadlineError, InvalidRequestError, ServingError, UnavailableError
from services.router.api import Chunk, GenerateCall
from services.router.fake import FakeRouterCore, Script, Step, words
from services.router.http_edge import create_app
from tests.unit.http_edge_harness import http_client, serving

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


@asynccontextmanager
async def openai_client(script: Script) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(create_app(FakeRouterCore(script))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http_client(url)) as client,
    ):
        yield client


async def test_chat_whole_and_streamed_are_the_same_answer() -> None:
    async with openai_client(words("Par", "is 🙂", "!")) as client:
        whole = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5)  # type: ignore[arg-type]
        stream = await client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},  # type: ignore[arg-type]
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == "Paris 🙂!"
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3


async def test_completions_with_ids_and_lists() -> None:
    async with openai_client(words("a", "b")) as client:
        by_ids = await client.completions.create(model="fake", prompt=[1, 2, 3], logprobs=0)
        by_list = await client.completions.create(model="fake", prompt=["x", "y"])
        stream = await client.completions.create(model="fake", prompt="x", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert by_ids.choices[0].text == text == "ab"
    assert [choice.index for choice in by_list.choices] == [0, 1]


async def test_models_are_listed() -> None:
    async with openai_client(words()) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequestError("max_tokens", "too many"), openai.BadRequestError),
        (CapacityError("full"), openai.RateLimitError),
        (UnavailableError("none"), openai.InternalServerError),
        (DeadlineError("late"), openai.InternalServerError),
    ],
)
async def test_errors_become_the_clients_own(error: ServingError, expected: type[openai.APIStatusError]) -> None:
    async with openai_client(lambda _: [error]) as client:
        with pytest.raises(expected, match=str(error)):
            await client.completions.create(model="fake", prompt="x")
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")


async def test_a_failure_in_a_stream_is_an_error_and_no_end() -> None:
    def script(call: GenerateCall) -> Sequence[Step]:
        return [Chunk(text="a", token_ids=(1,)), UnavailableError("worker gone")]

    async with openai_client(script) as client:
        stream = await client.completions.create(model="fake", prompt="x", stream=True)
        assert (await anext(stream)).choices[0].text == "a"
        with pytest.raises(openai.APIError, match="worker gone"):
            await anext(stream)
