"""The HTTP edge on a real uvicorn socket, for the tests beside this file."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

WAIT_S = 30.0  # longer than anything here takes; reached only by a failing test


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - conditions of many kinds, none of them an Event
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve `app` on a free port; gives its base URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.force_exit = True
        await server.shutdown()


@asynccontextmanager
async def client_of(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `app` over a socket."""
    async with serving(app) as url, http_client(url) as client:
        yield client


def http_client(url: str) -> httpx.AsyncClient:
    """A client that does not load certificates, which takes longer than a whole test."""
    return httpx.AsyncClient(base_url=url, timeout=WAIT_S, verify=False)


def events_of(body: str) -> list[Any]:
    """The data of every server-sent event, "[DONE]" as it is; anything that is no data line fails."""
    events = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events
