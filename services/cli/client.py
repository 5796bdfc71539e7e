"""A gRPC client for people: streams one answer to the terminal."""

import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict
from grpc import aio

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from core.errors import ConfigError, ServingError
from services.common import rpc

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a person may set on the command line."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    timeout_s: float = 300.0

    def sampling(self) -> pb.SamplingParams:
        """The fields that were set; the router fills the others. Raises ConfigError for what no request can carry."""
        names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        try:
            return pb.SamplingParams(stop=self.stop, **given)
        except ValueError as error:  # an integer of more bits than the field, or a text that is not Unicode
            raise ConfigError(f"sampling options {given}: {error}") from None


async def stream(endpoint: str, request: pb.GenerateRequest, timeout_s: float) -> AsyncIterator[pb.GenerateResponse]:
    """Send one request. Raises ServingError with the router's own words."""
    async with aio.insecure_channel(endpoint, options=rpc.CHANNEL_OPTIONS) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        except aio.AioRpcError as error:
            raise rpc.error_of(error) from error
        finally:
            call.cancel()


async def generate_text(endpoint: str, prompt: str, asked: Asked, *, as_json: bool, is_chat: bool) -> None:
    """Print one answer as it comes; with `as_json` one object a line, the last with `timings`."""
    if is_chat:
        request = chat_request([("user", prompt)], asked)
    else:
        request = pb.GenerateRequest(text=_unicode(prompt), sampling=asked.sampling(), return_timings=True)
    async for response in stream(endpoint, request, asked.timeout_s):
        if as_json:
            kind = response.WhichOneof("event") or ""
            fields = MessageToDict(
                getattr(response, kind), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
            _write(json.dumps({"event": kind, **fields}) + "\n")
        else:
            _write(response.chunk.text)
    if not as_json:
        _write("\n")


def chat_request(messages: Sequence[tuple[str, str]], asked: Asked) -> pb.GenerateRequest:
    """A chat turn: (role, content) messages, oldest first."""
    chat = pb.Chat(messages=[pb.ChatMessage(role=role, content=_unicode(content)) for role, content in messages])
    return pb.GenerateRequest(chat=chat, sampling=asked.sampling(), return_timings=True)


async def chat(endpoint: str, asked: Asked, read_line: Callable[[], str | None], *, goes_on: bool) -> None:
    """Talk; the conversation so far is sent with every turn.

    Args:
        endpoint, asked: as for a single answer.
        read_line: the next thing to say; None ends.
        goes_on: report an error and read on, instead of raising it.
    """
    messages: list[tuple[str, str]] = []
    while (line := read_line()) is not None:
        if not line.strip():
            continue
        messages.append(("user", line))
        answer = ""
        try:
            async for response in stream(endpoint, chat_request(messages, asked), asked.timeout_s):
                answer += response.chunk.text
                _write(response.chunk.text)
        except (ConfigError, ServingError) as error:
            if not goes_on:
                raise
            print(f"error: {error}", file=sys.stderr)
            messages.pop()
            continue
        _write("\n")
        messages.append(("assistant", answer))


def timings_of(done: pb.GenerateDone) -> dict[str, Any]:
    """The timings of an answer as plain numbers."""
    return {field.name: getattr(done.timings, field.name) for field in done.timings.DESCRIPTOR.fields}


def _unicode(text: str) -> str:
    """The text, if a request can carry it: bytes that were not UTF-8 arrive from the system as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError("the prompt is not UTF-8 text") from None
    return text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
