"""The OpenAI-compatible HTTP edge: translate, delegate to the router's core, translate back.

A POST: read the body (limit) -> parse (`openai_schema`) -> `RouterCore.generate` -> write (`openai_answers`).
Nothing is sent before the core's first part is there, so whatever fails until then is a plain HTTP error.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from core.errors import CancelledError, InternalError, InvalidRequestError, ServingError
from core.ids import REQUEST_ID, new_request_id
from services.router.api import Chunk, Done, GenerateCall, RouterCore
from services.router.choices import merged
from services.router.http_exchange import (
    ClientGoneError,
    Exchange,
    header,
    openai_error,
    read_body,
    run_while_connected,
)
from services.router.openai_answers import DONE_EVENT, Answer, AnswerWriter, ChatChoices, Choices, CompletionChoices
from services.router.openai_schema import HttpCall, parse_chat, parse_completion

logger = logging.getLogger(__name__)

INLINE_BODY_BYTES = 64 * 1024  # about a millisecond of parsing; a larger body goes to a thread

Metrics = Callable[[], tuple[bytes, str]]
"""The metrics page: its body and content type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one client may cost the edge."""

    max_body_bytes: int = 16 * 2**20  # 413 beyond; a prompt of 122,000 token ids is about 1 MB
    stall_timeout_s: float = (
        30.0  # a client that takes, or sends, no bytes for so long is dropped and its request aborted
    )
    max_concurrent_prompts: int = 16  # of one completions call; its other prompts wait for these


def create_app(
    core: RouterCore,
    *,
    metrics: Metrics | None = None,
    limits: HttpLimits | None = None,
    now: Callable[[], float] = time.time,
) -> Starlette:
    """The edge as an ASGI application.

    Args:
        core: answers the requests.
        metrics: serves `/metrics` when given.
        limits: None for the defaults.
        now: unix time, for the `created` fields.
    """
    limits = limits or HttpLimits()
    chat = _Endpoint(core, limits, now, parse=parse_chat, choices=ChatChoices, id_prefix="chatcmpl-")
    completion = _Endpoint(core, limits, now, parse=parse_completion, choices=CompletionChoices, id_prefix="cmpl-")
    started = int(now())

    async def models(_request: Request) -> Response:
        cards = [
            {
                "id": card.name,
                "object": "model",
                "created": started,
                "owned_by": "baton",
                "max_model_len": card.max_model_len,
            }
            for card in core.models()
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def alive(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_request: Request) -> Response:
        reason = core.why_unready()
        return JSONResponse({"status": reason or "ready"}, 503 if reason else 200)

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/v1/models", models),
        Route("/healthz", alive),
        Route("/health", alive),
        Route("/readyz", ready),
    ]
    if metrics is not None:
        render = metrics

        async def metrics_page(_request: Request) -> Response:
            body, content_type = render()
            return Response(body, headers={"content-type": content_type})

        routes.append(Route("/metrics", metrics_page))
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


class _Endpoint:
    """One POST call, as a bare ASGI application: a stream costs its events and no layers around them."""

    def __init__(
        self,
        core: RouterCore,
        limits: HttpLimits,
        now: Callable[[], float],
        *,
        parse: Callable[[bytes, str], HttpCall],
        choices: Callable[..., Choices],
        id_prefix: str,
    ) -> None:
        self._core = core
        self._limits = limits
        self._now = now
        self._parse = parse
        self._choices = choices
        self._id_prefix = id_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._limits
        given_id = header(scope, b"x-request-id")
        request_id = given_id if given_id and REQUEST_ID.fullmatch(given_id) else new_request_id()
        exchange = Exchange(send, request_id=request_id)
        stall_timeout_s = limits.stall_timeout_s
        try:
            body = await read_body(scope, receive, max_bytes=limits.max_body_bytes, stall_timeout_s=stall_timeout_s)
        except ClientGoneError:
            return
        work = self._answer(body, given_id, exchange)
        await run_while_connected(receive, exchange, work, stall_timeout_s=stall_timeout_s)

    async def _answer(self, body: bytes, given_id: str | None, exchange: Exchange) -> None:
        try:
            if given_id and given_id != exchange.request_id:
                raise InvalidRequestError("X-Request-Id", f"must match {REQUEST_ID.pattern}")
            if len(body) <= INLINE_BODY_BYTES:
                call = self._parse(body, exchange.request_id)
            else:
                call = await asyncio.to_thread(self._parse, body, exchange.request_id)
            if call.stream:
                await self._answer_events(call, exchange)
            else:
                await self._answer_whole(call, exchange)
        except ServingError as error:
            await exchange.fail(error)
        except Exception:
            # A bug of ours: the log gets all of it, the client none.
            logger.exception("request %s failed", exchange.request_id)
            await exchange.fail(InternalError("an internal error ended this request"))

    async def _answer_whole(self, call: HttpCall, exchange: Exchange) -> None:
        answers = [Answer() for _ in range(len(call.calls) * call.n)]
        writer = self._writer(call)
        async with aclosing(self._parts(call)) as parts:
            async for index, part in parts:
                answers[index].add(part)
                if isinstance(part, Chunk):
                    writer.take_prompt(index, part)
        await exchange.answer(200, writer.whole(answers))

    async def _answer_events(self, call: HttpCall, exchange: Exchange) -> None:
        writer = self._writer(call)
        ends: list[Done] = []
        has_begun = False
        async with aclosing(self._parts(call)) as parts:
            async for index, part in parts:
                if not has_begun:
                    await exchange.start_events()
                    has_begun = True
                if isinstance(part, Done):
                    ends.append(part)
                    await exchange.event(writer.end_event(index, part))
                    continue
                writer.take_prompt(index, part)
                if part.token_ids or part.text:
                    await exchange.event(writer.event(index, part))
        last = writer.usage_event(ends) if call.include_usage else b""
        await exchange.end_events(last + DONE_EVENT)

    def _writer(self, call: HttpCall) -> AnswerWriter:
        model = call.calls[0].model or next((card.name for card in self._core.models()), "")
        return AnswerWriter(
            self._choices(self._core.token_text, logprobs=call.logprobs),
            call,
            self._core.token_text,
            answer_id=self._id_prefix + call.request_id,
            model=model,
            created=int(self._now()),
        )

    async def _parts(self, call: HttpCall) -> AsyncGenerator[tuple[int, Chunk | Done], None]:
        """The parts of all answers of a POST, each with its choice's index, as they come."""
        sources = [partial(_checked, self._core, each) for each in call.calls]
        async with aclosing(merged(sources, self._limits.max_concurrent_prompts)) as parts:
            async for number, part in parts:
                yield number * call.n + part.index, _without_answer(part) if call.is_score_only else part


async def _checked(core: RouterCore, call: GenerateCall) -> AsyncGenerator[Chunk | Done, None]:
    """The core's parts for one prompt. A normal end is a Done that says stop or length; anything else is an error."""
    num_open = call.n
    # Closing its iterator is how a call is aborted (`RouterCore.generate`); the protocol's type does not show it.
    answer = core.generate(call)
    async with aclosing(answer) as parts:
        async for part in parts:
            if isinstance(part, Done) and part.finish_reason == "abort":
                raise CancelledError("the request was aborted")
            if isinstance(part, Done) and part.finish_reason == "error":
                raise InternalError("the worker could not go on with this request")
            num_open -= isinstance(part, Done)
            yield part
            if not num_open:
                return
    raise InternalError("the answer ended without a finish reason")


def _without_answer(part: Chunk | Done) -> Chunk | Done:
    """What remains of an answer when its prompt alone was asked for."""
    if isinstance(part, Done):
        return replace(part, completion_tokens=0, finish_reason="length", matched_stop="")
    return replace(part, text="", token_ids=(), logprobs=())


async def _http_error(_request: Request, error: Exception) -> Response:
    """Starlette's own refusals (404, 405) and the body limit in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    body = openai_error(str(error.detail), "invalid_request_error", f"http_{error.status_code}")
    return JSONResponse(body, error.status_code, error.headers)
