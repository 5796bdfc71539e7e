"""Composition root of the decode worker."""

import asyncio
from collections.abc import Callable

from grpc import aio
from prometheus_client import CollectorRegistry

from baton.v1 import worker_pb2_grpc
from kvtransfer.config import TransferConfig
from kvtransfer.receiver import KVReceiver
from kvtransfer.transport import Transport
from services.common.engine_parts import EngineParts
from services.common.options import ClusterOptions
from services.common.registry import Registry
from services.common.worker_metrics import WorkerMetrics
from services.common.worker_process import WorkerParts, run_worker
from services.common.worker_servicer import WorkerServicer
from services.decode.service import DecodeService
from services.decode.servicer import DecodeServicer


async def compose(
    parts: EngineParts,
    transport: Transport,
    transfer: TransferConfig,
    bind: str,
    advertise_host: str,
    incarnation: str,
    registry: CollectorRegistry,
) -> WorkerParts:
    """Connect the parts of a decode worker.

    Args:
        parts: the engine, not started.
        transport, transfer, bind: how KV arrives, and where; e.g. `tcp://127.0.0.1:0`.
        advertise_host: the host prefill workers connect to; empty: the one in `bind`.
        incarnation: of this process.
        registry: for metrics.
    """
    metrics = WorkerMetrics(
        registry, "decode", parts.fingerprint.model, parts.layout.block_tokens, parts.pool.num_total
    )
    receiver = KVReceiver(parts.memory, transport, parts.fingerprint, incarnation, transfer)
    await receiver.start(bind, advertise_host)
    service = DecodeService(
        parts=parts,
        receiver=receiver,
        metrics=metrics,
        incarnation=incarnation,
    )

    def add_servicers(server: aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(service.host), server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(DecodeServicer(service), server)

    async def close() -> None:
        await receiver.aclose()
        await asyncio.to_thread(parts.engine.stop)
        await asyncio.to_thread(parts.memory.close)

    def refresh_metrics() -> None:
        service.host.refresh_metrics()
        metrics.copy_transfer_stats(receiver.stats)

    return WorkerParts(
        host=service.host,
        fingerprint=parts.fingerprint,
        start=service.start,
        add_servicers=add_servicers,
        kv_endpoint=receiver.endpoint,
        tasks=[receiver.run],
        close=close,
        refresh_metrics=refresh_metrics,
    )


async def serve(
    options: ClusterOptions,
    bind: str,
    load: Callable[[], EngineParts],
    transport: Transport,
    transfer: TransferConfig,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    """Live a decode worker's life.

    Args:
        options: where it listens and how it finds the others.
        bind: where KV arrives, e.g. `tcp://127.0.0.1:0` or `ipc://*`.
        load: loads the model; runs in a thread.
        transport, transfer: how KV arrives.
        stop: set when it should drain and end.
        on_ready: told its endpoints once it serves.
    """

    async def build(incarnation: str, registry: CollectorRegistry) -> WorkerParts:
        parts = await asyncio.to_thread(load)
        advertise_host = options.advertise_host if bind.startswith("tcp://") else ""
        return await compose(parts, transport, transfer, bind, advertise_host, incarnation, registry)

    await run_worker("decode", options, Registry.from_url(options.redis_url, options.cluster), build, stop, on_ready)
