"""A TCP proxy that misbehaves on command: delay, stall, cut, or silently swallow what passes through it."""

import asyncio
from types import TracebackType

_CHUNK_BYTES = 1 << 16


class ChaosProxy:
    """Forwards connections to `host:port` from a port of its own. Use as an async context manager.

    Args:
        target: "host:port".
        listen: where clients connect; with another loopback address than the target's, the port may be the same.
    """

    def __init__(self, target: str, listen: str = "127.0.0.1:0") -> None:
        self._listen_host, _, self._listen_port = listen.rpartition(":")
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.delay_s = 0.0  # before each piece, both ways
        self.drops = False  # swallow everything, old connections and new ones: a black hole
        self.refuses = False  # close new connections at once
        self._flows = asyncio.Event()
        self._flows.set()
        self._connections: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._holes: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "ChaosProxy":
        self._server = await asyncio.start_server(self._start, self._listen_host, int(self._listen_port))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        assert self._server is not None
        return f"{self._listen_host}:{self._server.sockets[0].getsockname()[1]}"

    @property
    def num_connections(self) -> int:
        """Connections open now, black-holed ones included."""
        return len(self._connections)

    def stall(self) -> None:
        """Pass nothing on until `flow`; nothing is lost."""
        self._flows.clear()

    def flow(self) -> None:
        """End a stall."""
        self._flows.set()

    def black_hole_open_connections(self) -> None:
        """Swallow for ever what passes on the connections there are, without closing them; new ones work."""
        self._holes |= self._connections

    def cut(self) -> None:
        """Close every connection there is."""
        for pair in self._connections:
            for writer in pair:
                writer.close()

    def _start(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.close()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        pair = (writer, far_writer)
        self._connections.add(pair)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, far_writer, pair))
                group.create_task(self._pass(far_reader, writer, pair))
        except* OSError:
            pass  # either end broke off
        finally:
            self._connections.discard(pair)
            self._holes.discard(pair)
            for each in pair:
                each.close()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._flows.wait()
            if self.drops or pair in self._holes:
                continue
            writer.write(data)
            await writer.drain()
        for each in pair:
            each.close()  # one direction ended: end both, as a connection that was reset
