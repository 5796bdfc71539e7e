"""Composition root of the prefill worker."""

import asyncio
import logging
from collections.abc import Callable

from grpc import aio
from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from baton.v1 import worker_pb2_grpc
from core.errors import FingerprintError, TransferError
from kvtransfer.config import TransferConfig
from kvtransfer.sender import KVSender
from kvtransfer.transport import Transport
from services.common.engine_parts import EngineParts
from services.common.options import ClusterOptions
from services.common.registry import Registry
from services.common.worker_metrics import WorkerMetrics
from services.common.worker_process import WorkerParts, run_worker
from services.common.worker_servicer import WorkerServicer
from services.prefill.service import PrefillService
from services.prefill.servicer import PrefillServicer

logger = logging.getLogger(__name__)

PEER_POLL_S = 0.5


def compose(
    parts: EngineParts,
    transport: Transport,
    transfer: TransferConfig,
    registry: Registry,
    incarnation: str,
    metrics_registry: CollectorRegistry,
) -> WorkerParts:
    """Connect the parts of a prefill worker.

    Args:
        parts: the engine, not started.
        transport, transfer: how KV leaves.
        registry: where decode workers are found.
        incarnation: of this process.
        metrics_registry: for metrics.
    """
    metrics = WorkerMetrics(
        metrics_registry, "prefill", parts.fingerprint.model, parts.layout.block_tokens, parts.pool.num_total
    )
    sender = KVSender(parts.memory, transport, parts.fingerprint, incarnation, transfer)
    service = PrefillService(
        parts=parts,
        sender=sender,
        metrics=metrics,
        incarnation=incarnation,
    )

    def add_servicers(server: aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(service.host), server)
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(PrefillServicer(service), server)

    async def send() -> None:
        await sender.start()
        await sender.run()

    async def close() -> None:
        await sender.aclose()
        await asyncio.to_thread(parts.engine.stop)
        await asyncio.to_thread(parts.memory.close)

    def refresh_metrics() -> None:
        service.host.refresh_metrics()
        metrics.copy_transfer_stats(sender.stats)

    return WorkerParts(
        host=service.host,
        fingerprint=parts.fingerprint,
        start=service.start,
        add_servicers=add_servicers,
        tasks=[send, lambda: follow_peers(sender, registry, service.host.streams.announce)],
        close=close,
        refresh_metrics=refresh_metrics,
    )


async def follow_peers(sender: KVSender, registry: Registry, on_change: Callable[[], None]) -> None:
    """Keep a warm connection to every decode worker of the cluster, until cancelled.

    A decode worker whose KV is of another kind is reported once and left alone; the router never pairs the two.

    Args:
        sender: connects.
        registry: read twice a second; while it is unreachable, connections stay as they are.
        on_change: called when the connected set changed.
    """
    wanted: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def connect(endpoint: str, worker_id: str) -> None:
        while True:
            try:
                await sender.connect(endpoint)
            except FingerprintError as error:
                logger.error("decode worker %s is refused: %s", worker_id, error)
                return
            except TransferError as error:
                logger.warning("decode worker %s: %s", worker_id, error)
                await asyncio.sleep(PEER_POLL_S)
                continue
            logger.info("connected to decode worker %s", worker_id)
            on_change()
            return

    async with asyncio.TaskGroup() as group:
        while True:
            try:
                records = await registry.workers()
            except (RedisError, OSError) as error:
                registry.note_failure("reading the decode workers", error)
            else:
                # By incarnation too: a worker of another kind may come back at the same address.
                found = {(record.kv_endpoint, record.incarnation): record for record in records if record.kv_endpoint}
                replaced = {endpoint for endpoint, _ in found}
                connected = set(sender.peers())
                for gone in wanted.keys() - found.keys():
                    # A record that vanished while the link lives is Redis's trouble (flush, restart), not the worker's.
                    if gone[0] in connected - replaced:
                        continue
                    wanted.pop(gone).cancel()
                    sender.disconnect(gone[0])
                for new in found.keys() - wanted.keys():
                    name = f"connect {found[new].worker_id}"
                    wanted[new] = group.create_task(connect(new[0], found[new].worker_id), name=name)
            await asyncio.sleep(PEER_POLL_S)


async def serve(
    options: ClusterOptions,
    load: Callable[[], EngineParts],
    transport: Transport,
    transfer: TransferConfig,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    """Live a prefill worker's life.

    Args:
        options: where it listens and how it finds the others.
        load: loads the model; runs in a thread.
        transport, transfer: how KV leaves.
        stop: set when it should drain and end.
        on_ready: told its endpoints once it serves.
    """
    registry = Registry.from_url(options.redis_url, options.cluster)

    async def build(incarnation: str, metrics_registry: CollectorRegistry) -> WorkerParts:
        parts = await asyncio.to_thread(load)
        return compose(parts, transport, transfer, registry, incarnation, metrics_registry)

    await run_worker("prefill", options, registry, build, stop, on_ready)
