"""A process's life: start, serve until told to stop, drain, exit.

States: starting -> ready -> draining -> stopped. SIGINT or SIGTERM starts the drain; a second one ends it at once.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
import uvloop
from starlette.types import ASGIApp

from core.errors import ConfigError


def run_until_stopped(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main` on uvloop. It gets an event that is set by the first SIGINT or SIGTERM and must return after draining."""

    async def supervised() -> None:
        stop = asyncio.Event()
        task = asyncio.ensure_future(main(stop))
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if stop.is_set():
                task.cancel()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        with contextlib.suppress(asyncio.CancelledError):  # the second signal's; there is nobody left to tell
            await task

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(supervised())


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one. Raises ConfigError when the address cannot be had."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or 0") from error


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are `run_until_stopped`'s


class HttpServer:
    """An ASGI app on a socket of ours, as a task among others.

    Args:
        app: the application.
        sock: listening; closed at the end.
        drain_s: how long open responses may go on after `stop`.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, drain_s: int = 5) -> None:
        self._socket = sock
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http="httptools",
            ws="none",
            timeout_keep_alive=75,  # longer than the idle time of usual clients and proxies, so that they close first
            timeout_graceful_shutdown=drain_s,
            server_header=False,
        )
        self._server = _Server(config)

    async def serve(self) -> None:
        """Serve until `stop`."""
        with self._socket:  # uvicorn closes it only when it is not cancelled
            await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Accept nothing new; `serve` returns when open responses have ended or `drain_s` has passed."""
        self._server.should_exit = True
