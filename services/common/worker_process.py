"""A worker process around its role: health from the first moment, load, serve, heartbeat, drain.

Order: HTTP up (alive, not ready) -> model loaded -> gRPC up -> registered (ready) -> SIGTERM -> draining -> withdrawn -> exit.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from core.errors import ConfigError, InternalError
from core.ids import new_incarnation
from core.layout import Fingerprint
from services.common import rpc
from services.common.lifecycle import HttpServer, bind
from services.common.ops_http import create_ops_app
from services.common.options import ClusterOptions
from services.common.registry import Registry, WorkerRecord
from services.common.worker_host import WorkerHost

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
WATCH_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a role's composition root built.

    Args:
        host: what the worker keeps.
        fingerprint: of its KV blocks.
        start: starts the engine.
        add_servicers: registers the gRPC services.
        kv_endpoint: where KV transfers connect; empty for a prefill worker.
        tasks: run beside the server until the process ends.
        close: releases the parts.
        refresh_metrics: brings gauges up to date before they are read.
    """

    host: WorkerHost[Any]
    fingerprint: Fingerprint
    start: Callable[[], None]
    add_servicers: Callable[[aio.Server], None]
    kv_endpoint: str = ""
    tasks: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    close: Callable[[], Awaitable[None]]
    refresh_metrics: Callable[[], None]


async def run_worker(
    role: str,
    options: ClusterOptions,
    registry: Registry,
    build: Callable[[str, CollectorRegistry], Coroutine[Any, Any, WorkerParts]],
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    """Live one worker's life.

    Args:
        role: prefill or decode.
        build: given the incarnation and the metrics registry, loads the model and builds the parts; may take minutes.
        stop: set when the process should drain and end.
        on_ready: told "grpc=... http=..." once the worker serves.
    Raises:
        ConfigError: from `build`, or an address that cannot be had.
    """
    incarnation = new_incarnation()
    metrics = CollectorRegistry()
    life: dict[str, str] = {"unready": "loading the model"}
    parts: WorkerParts | None = None

    def why_unready() -> str:
        return life["unready"] if parts is None or life["unready"] else parts.host.why_unready()

    app = create_ops_app(why_unready, metrics, lambda: parts.refresh_metrics() if parts else None)
    http_socket = bind(options.host, options.http_port)
    http_endpoint = f"{options.reachable_host}:{http_socket.getsockname()[1]}"
    http = HttpServer(app, http_socket)
    async with aclosing(registry), asyncio.TaskGroup() as group:
        group.create_task(http.serve(), name="http")
        try:
            parts = await _unless_stopped(build(incarnation, metrics), stop)
            if parts is None:
                return
            server = aio.server(options=rpc.SERVER_OPTIONS)
            parts.add_servicers(server)
            health_servicer = HealthServicer()
            health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
            try:
                port = server.add_insecure_port(f"{options.host}:{options.port}")
            except RuntimeError as error:
                raise ConfigError(
                    f"cannot listen on {options.host}:{options.port}; choose another --port or 0"
                ) from error
            endpoint = f"{options.reachable_host}:{port}"
            parts.start()
            await server.start()
            beside = [group.create_task(task(), name="worker task") for task in parts.tasks]
            worker_id = f"{role}@{endpoint}"

            def record() -> WorkerRecord:
                assert parts is not None
                return WorkerRecord(
                    worker_id=worker_id,
                    role=role,
                    incarnation=incarnation,
                    state=parts.host.state,
                    endpoint=endpoint,
                    http_endpoint=http_endpoint,
                    kv_endpoint=parts.kv_endpoint,
                    fingerprint=parts.fingerprint,
                    capacity=parts.host.capacity,
                )

            beat = _heartbeat(registry, record, parts.host, options.worker_ttl_s)
            beside.append(group.create_task(beat, name="heartbeat"))
            beside.append(group.create_task(_watch(parts.host, health_servicer), name="watch"))
            life["unready"] = ""
            on_ready(f"grpc={endpoint} http={http_endpoint}")
            try:
                await stop.wait()
                logger.info("draining")
                await parts.host.drain(options.drain_timeout_s)
            finally:
                for task in beside:
                    task.cancel()
                await _withdraw(registry, worker_id)
                parts.host.streams.close()
                await server.stop(grace=1.0)
                await parts.close()
        finally:
            http.stop()


async def _heartbeat(
    registry: Registry, record: Callable[[], WorkerRecord], host: WorkerHost[Any], ttl_s: float
) -> None:
    """Write the worker's whole record again and again: whatever happened to it in Redis, it is back within one beat."""
    while True:
        try:
            await registry.heartbeat(record(), host.load_fields(), ttl_s)
        except (RedisError, OSError) as error:
            registry.note_failure("registering this worker", error)
        await asyncio.sleep(min(HEARTBEAT_S, ttl_s / 3))


async def _watch(host: WorkerHost[Any], health_servicer: HealthServicer) -> None:
    """Keep gRPC's health answer equal to readiness; end the process when its engine or its device is gone.

    Raises:
        InternalError: why; whoever supervises the process starts another.
    """
    while not (failure := host.failure()):
        is_ready = not host.why_unready()
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await health_servicer.set("", status)
        await asyncio.sleep(WATCH_S)
    raise InternalError(failure)


async def _unless_stopped(build: Coroutine[Any, Any, WorkerParts], stop: asyncio.Event) -> WorkerParts | None:
    """What `build` gives, or None when the process is told to stop first. Nothing is held yet, so nothing drains."""
    building = asyncio.ensure_future(build)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([building, stopping], return_when=asyncio.FIRST_COMPLETED)
        return building.result() if building.done() else None
    finally:
        stopping.cancel()
        building.cancel()


async def _withdraw(registry: Registry, worker_id: str) -> None:
    try:
        await registry.withdraw(worker_id)
    except (RedisError, OSError) as error:
        logger.warning("could not withdraw from the registry; the record expires by itself: %s", error)
