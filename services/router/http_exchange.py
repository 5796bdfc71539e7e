"""One HTTP request and its answer over bare ASGI: body limit, disconnects, stalled readers, errors at any moment."""

import asyncio
import math
from collections.abc import Coroutine, Iterable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from core.clock import Clock, monotonic
from core.errors import CapacityError, InvalidRequestError, NotFoundError, ServingError, status_of
from services.router.openai_answers import encode_json, event_of

# A field of `GenerateCall` or `SamplingParams` as HTTP clients spell it.
_HTTP_NAMES = {
    "text": "prompt",
    "token_ids": "prompt",
    "chat": "messages",
    "include_stop": "include_stop_str_in_output",
}

Headers = list[tuple[bytes, bytes]]


class ClientGoneError(Exception):
    """The client left before its request was complete."""


class Exchange:
    """The answering half of one request."""

    def __init__(self, send: Send, *, request_id: str, clock: Clock = monotonic) -> None:
        self._send = send
        self.request_id = request_id  # ours, or the client's own if it can be one; goes back in a header
        self._clock = clock
        self._has_started = False
        self._write_began: float | None = None

    async def answer(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send a whole JSON answer."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", b"application/json"), length, *headers])
        await self._write({"type": "http.response.body", "body": body, "more_body": False})

    async def start_events(self) -> None:
        """Begin an event stream."""
        # The last header keeps reverse proxies from collecting events.
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._start(200, [*headers, (b"x-accel-buffering", b"no")])

    async def event(self, data: bytes) -> None:
        """Send events. Waits while the reader is behind: what it has not read is bounded by the server's write buffer."""
        await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes) -> None:
        """Send the last events and end the answer."""
        await self._write({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: ServingError) -> None:
        """Report an error: as an HTTP status, or, when the answer has begun, as an event and no end of the body.

        The server then closes the connection without the terminating chunk. That is the one form of a broken stream
        that every client counts as an error.
        """
        if self._has_started:
            await self.event(event_of(error_body(error)))
            return
        headers: Headers = []
        if isinstance(error, CapacityError):
            headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_ms / 1000))).encode()))
            headers.append((b"retry-after-ms", str(error.retry_after_ms).encode()))
        await self.answer(status_of(error).http, encode_json(error_body(error)), headers)

    async def _start(self, status: int, headers: Headers) -> None:
        self._has_started = True
        headers.append((b"x-request-id", self.request_id.encode()))
        await self._write({"type": "http.response.start", "status": status, "headers": headers})

    def stalled_s(self) -> float:
        """How long the write under way has been waiting for the reader; 0 when none is."""
        return 0.0 if self._write_began is None else self._clock() - self._write_began

    async def _write(self, message: dict[str, Any]) -> None:
        # Whoever runs this exchange watches `stalled_s`: a timer of its own would cost each token more than the write.
        self._write_began = self._clock()
        await self._send(message)
        self._write_began = None


def error_body(error: ServingError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    status = status_of(error)
    message, param = str(error), None
    if isinstance(error, InvalidRequestError):
        param = _HTTP_NAMES.get(error.field, error.field)
        message = param + message.removeprefix(error.field)
    code = "model_not_found" if isinstance(error, NotFoundError) else status.grpc.lower()
    return openai_error(message, status.openai_type, code, param)


def openai_error(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    # Half of a surrogate pair in a quoted value must not break the error itself.
    message = message.encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, stall_timeout_s: float) -> bytes:
    """The request's body.

    Raises:
        HTTPException: 413, it is longer than `max_bytes`, as announced or as received; 408, the client sent nothing for
            `stall_timeout_s`.
        ClientGoneError: the client left.
    """
    too_large = HTTPException(413, f"the body is larger than {max_bytes} bytes, the limit")
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        try:
            async with asyncio.timeout(stall_timeout_s):
                message = await receive()
        except TimeoutError:
            headers = {"connection": "close"}
            raise HTTPException(408, f"no more of the body came within {stall_timeout_s} s", headers) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


async def run_while_connected(
    receive: Receive, exchange: Exchange, work: Coroutine[Any, Any, None], *, stall_timeout_s: float
) -> None:
    """Run `work`; when the client goes away or stops reading first, cancel it and wait until it has cleaned up.

    Args:
        receive: gives nothing but the disconnect from now on.
        exchange: what `work` answers through.
        work: the answering; its exceptions are raised here.
        stall_timeout_s: how long one write may wait for the reader, give or take a quarter.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        while exchange.stalled_s() < stall_timeout_s:
            ended, _ = await asyncio.wait(
                (working, watching), timeout=stall_timeout_s / 4, return_when=asyncio.FIRST_COMPLETED
            )
            if ended:
                break
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
