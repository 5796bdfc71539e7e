"""`baton up`: a whole local stack until Ctrl-C."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from services.cli.flags import arguments_of
from services.cli.stack import Stack, StackError, free_port, running, wait_for_redis
from services.common.options import ClusterOptions, EngineOptions, ModelOptions, RouterLimits, flag

READY_TIMEOUT_S = 30.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many of each."""

    prefill: int = flag(1, "Prefill workers.")
    decode: int = flag(1, "Decode workers.")
    routers: int = flag(1, "Routers; the ports given are the first one's.")

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "routers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Everything `baton up` takes; `redis_url` empty starts an embedded Valkey."""

    sizes: Sizes
    model: ModelOptions
    cluster: ClusterOptions
    engine: EngineOptions
    limits: RouterLimits
    redis_url: str = ""

    def __post_init__(self) -> None:
        if self.redis_url:
            replace(self.cluster, redis_url=self.redis_url)  # checks it


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """Where a running stack answers."""

    grpc: list[str]
    http: list[str]
    metrics: list[str]

    def line(self) -> str:
        """What follows READY; lists are separated by commas, routers first."""
        return f"grpc={','.join(self.grpc)} http={','.join(self.http)} metrics={','.join(self.metrics)}"


async def start_stack(stack: Stack, options: UpOptions) -> Up:
    """Start everything and wait until a request would be served. Raises ConfigError or StackError."""
    redis_url = options.redis_url or await stack.start_valkey()
    if options.redis_url:
        await wait_for_redis(redis_url)
    here = ["--redis-url", redis_url, *arguments_of(options.cluster, without=("redis_url", "port", "http_port"))]
    model = arguments_of(options.model)
    num_prefill = options.sizes.prefill if options.limits.mode == "disaggregated" else 0
    engines = iter(worker_engines(options.engine, options.sizes.decode + num_prefill))
    specs: list[tuple[str, list[str]]] = []
    for role, number in (("decode", options.sizes.decode), ("prefill", num_prefill)):
        specs += [(f"{role}-{n}", [role, *here, *model, *arguments_of(next(engines))]) for n in range(number)]
    for index in range(options.sizes.routers):
        # Fixed ports, so that a router that had to be started again is found where it was.
        port = options.cluster.port if index == 0 and options.cluster.port else free_port()
        http_port = options.cluster.http_port if index == 0 and options.cluster.http_port else free_port()
        ports = ["--port", str(port), "--http-port", str(http_port)]
        specs.append((f"router-{index}", ["router", *here, *model, *arguments_of(options.limits), *ports]))
    children = await stack.start(specs)
    routers = [child for child in children if child.name.startswith("router")]
    others = [child for child in children if not child.name.startswith("router")]
    up = Up(
        grpc=[child.endpoints["grpc"] for child in routers],
        http=[child.endpoints["http"] for child in routers],
        metrics=[child.endpoints["http"] for child in [*routers, *others]],
    )
    await _wait_until_ready(up.http)
    return up


def worker_engines(options: EngineOptions, num_workers: int) -> list[EngineOptions]:
    """The options of each worker of one machine: its part of a GPU's memory, and cores of its own if they take up all.

    Two engines on one core hold each other up. Where cores are left over the system finds idle ones itself, also for a
    second stack.
    """
    usable, threads = sorted(os.sched_getaffinity(0)), options.threads
    options = replace(options, gpu_memory_share=options.gpu_memory_share / num_workers)
    if options.cores or num_workers * threads != len(usable):
        return [options] * num_workers
    parts = [usable[worker * threads : (worker + 1) * threads] for worker in range(num_workers)]
    return [replace(options, cores=",".join(map(str, part))) for part in parts]


async def run_up(options: UpOptions, logs: Path, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """Run a stack until `stop`; whatever dies is started again.

    Args:
        options: what to run.
        logs: folder of the processes' logs.
        stop: set when the stack should drain and end, also while it starts.
        on_ready: told where it serves.
    Raises:
        ConfigError, StackError: it did not come up.
    """
    async with running(Stack(logs, options.cluster.drain_timeout_s)) as stack:
        stopped = asyncio.ensure_future(stop.wait())
        starting = asyncio.ensure_future(start_stack(stack, options))
        tasks: list[asyncio.Future[Any]] = [stopped, starting]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                on_ready(starting.result().line())
                watching = asyncio.ensure_future(stack.watch())
                tasks.append(watching)
                await asyncio.wait([stopped, watching], return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    watching.result()  # only a bug ends it; let it be seen
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _wait_until_ready(endpoints: list[str]) -> None:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            for endpoint in endpoints:
                while not await _is_ready(endpoint):  # noqa: ASYNC110 (another process's state)
                    await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise StackError(f"no router saw workers that serve together within {READY_TIMEOUT_S:.0f} s") from None


async def _is_ready(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.write(b"GET /readyz HTTP/1.1\r\nHost: baton\r\nConnection: close\r\n\r\n")
    status = await reader.readline()
    writer.close()
    return b" 200 " in status
