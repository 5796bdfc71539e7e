"""A whole Baton in one event loop: real routers, workers, gRPC, Valkey and KV transfer; only the model is scripted.

Workers live their real life (`run_worker`). Gates hold engines in exact steps; `GatedTransport` holds or loses KV frames;
`kill` cuts a worker off without a goodbye.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from grpc import aio
from prometheus_client import CollectorRegistry

from baton.v1 import inference_pb2_grpc
from core.ids import new_incarnation
from engine.scheduler import StepLimits
from engine.scripted import VOCAB_SIZE, ScriptedEngine, StepGate, scripted_engine, scripted_layout
from kvtransfer.config import TransferConfig
from kvtransfer.transport import Transport
from services.common import rpc
from services.common.engine_parts import EngineParts
from services.common.options import ClusterOptions, RouterLimits
from services.common.registry import Capacity
from services.common.worker_host import WorkerHost
from services.common.worker_process import WorkerParts, run_worker
from services.decode.main import compose as compose_decode
from services.prefill.main import compose as compose_prefill
from services.router.grpc_edge import InferenceServicer
from services.router.metrics import RouterMetrics
from services.router.router import Router
from tests.local_client import Answered, collect, generate
from tests.scripted_parts import (
    BLOCK,
    CONTEXT,
    EOS,
    MODEL,
    TRANSFER,
    WAIT_S,
    CuttableRegistry,
    GatedTransport,
    Valkey,
    eventually,
    fingerprint,
    served_model,
)


@dataclass(eq=False)
class Worker:
    """One worker of the stack, with everything a test may hold on to."""

    role: str
    engine: ScriptedEngine
    transport: GatedTransport
    registry: CuttableRegistry
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ready: str = ""
    host: WorkerHost[Any] | None = None
    server: aio.Server | None = None
    task: asyncio.Task[None] | None = None

    @property
    def gate(self) -> StepGate:
        assert self.engine.runner.gate is not None
        return self.engine.runner.gate

    @property
    def endpoint(self) -> str:
        return self.ready.split()[0].removeprefix("grpc=")

    @property
    def http(self) -> str:
        return self.ready.split()[1].removeprefix("http=")

    @property
    def worker_id(self) -> str:
        return f"{self.role}@{self.endpoint}"

    @property
    def num_held(self) -> int:
        """Sequences in its ledger."""
        assert self.host is not None
        return len(self.host.ledger)

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing at all."""
        pool = self.engine.pool
        return self.num_held == 0 and pool.num_free == pool.num_total and not self.engine.loop._live

    async def kill(self) -> None:
        """Cut every connection at once, without a goodbye."""
        assert self.task is not None
        assert self.server is not None
        self.transport.mode = "drop"
        self.registry.is_cut = True
        await self.server.stop(None)
        self.gate.open()
        self.task.cancel()
        await asyncio.wait([self.task])

    async def drain(self) -> None:
        """What SIGTERM does; returns when its process would exit."""
        assert self.task is not None
        self.stop.set()
        await self.task


@dataclass(eq=False)
class RouterProcess:
    """One router with its gRPC edge, and a client of it."""

    router: Router
    server: aio.Server
    target: str
    channel: aio.Channel
    stub: Any
    metrics: CollectorRegistry
    task: asyncio.Task[None]

    async def answer(self, **request: Any) -> "Answered":
        """One whole answer. Raises AioRpcError."""
        return await collect(self.stub.Generate(generate(**request), timeout=WAIT_S))

    @property
    def is_idle(self) -> bool:
        """Whether nothing of any request is left."""
        router = self.router
        counts = [len(worker.inflight) for worker in router.fleet]
        return not (router.attempts._answers or router._requests or router.num_queued or any(counts))


class Stack:
    """Routers and workers that share one Valkey and one in-process (or ZeroMQ) KV network.

    Args:
        valkey: shared by tests; each stack has its own cluster name in it.
        transport: makes a worker's transport.
        bind: where decode workers listen for KV.
    """

    _names = itertools.count()

    def __init__(
        self, valkey: Valkey, make_transport: Callable[[], Transport], bind: Callable[[], str], transfer: TransferConfig
    ) -> None:
        self.valkey = valkey
        self.cluster = f"c{next(Stack._names)}"
        self.transfer = transfer
        self.workers: list[Worker] = []
        self.routers: list[RouterProcess] = []
        self._make_transport = make_transport
        self._bind = bind

    @property
    def prefills(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == "prefill"]

    @property
    def decodes(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == "decode"]

    @property
    def router(self) -> RouterProcess:
        return self.routers[0]

    def registry(self) -> CuttableRegistry:
        return CuttableRegistry.from_url(self.valkey.url, self.cluster)  # type: ignore[return-value]

    def options(self, **changes: Any) -> ClusterOptions:
        return ClusterOptions(
            **{"redis_url": self.valkey.url, "cluster": self.cluster, "drain_timeout_s": WAIT_S, **changes}
        )

    async def start_worker(
        self,
        role: str,
        *,
        num_blocks: int = 64,
        max_batched_tokens: int = 32,
        max_sequences: int = 64,
        block_tokens: int = BLOCK,
        swap_bytes: int = 0,
        changes: Mapping[str, Any] | None = None,
        port: int = 0,
        configure: Callable[[ScriptedEngine], None] = lambda _: None,
        load: Callable[[], EngineParts] | None = None,
    ) -> Worker:
        """Start one and wait until it is registered.

        Args:
            changes: of its fingerprint.
            configure: its scripted engine.
            load: a real engine instead, which the rest says nothing about.
        """
        engine = scripted_engine(
            num_blocks=num_blocks,
            layout=scripted_layout(block_tokens),
            limits=StepLimits(max_batched_tokens=max_batched_tokens, max_sequences=8),
            swap_bytes=swap_bytes,
        )
        engine.runner.gate = StepGate()
        engine.runner.gate.open()
        configure(engine)
        parts = EngineParts(
            engine=engine.loop,
            pool=engine.pool,
            memory=engine.memory,
            layout=engine.layout,
            fingerprint=fingerprint(**{"block_tokens": block_tokens, **(changes or {})}),
            eos_token_ids=(EOS,),
            capacity=Capacity(
                total_blocks=num_blocks, max_sequences=max_sequences, max_model_len=CONTEXT, vocab_size=VOCAB_SIZE
            ),
            max_cached_prompt_tokens=CONTEXT,
        )
        if load is not None:
            parts = load()
            engine = engine._replace(loop=parts.engine, pool=parts.pool)
        worker = Worker(role, engine, GatedTransport(self._make_transport()), self.registry())

        async def build(incarnation: str, metrics: CollectorRegistry) -> WorkerParts:
            if role == "prefill":
                built = compose_prefill(parts, worker.transport, self.transfer, worker.registry, incarnation, metrics)
            else:
                built = await compose_decode(
                    parts, worker.transport, self.transfer, self._bind(), "", incarnation, metrics
                )
            worker.host = built.host

            def add_servicers(server: aio.Server) -> None:
                worker.server = server
                built.add_servicers(server)

            return replace(built, add_servicers=add_servicers)

        worker.task = asyncio.create_task(
            run_worker(
                role,
                self.options(port=port),
                worker.registry,
                build,
                worker.stop,
                lambda ready: setattr(worker, "ready", ready),
            )
        )
        self.workers.append(worker)
        await eventually(lambda: bool(worker.ready) or worker.task.done())
        if worker.task.done():
            await worker.task
        return worker

    async def start_router(self, limits: RouterLimits | None = None, stall_timeout_s: float = 30.0) -> RouterProcess:
        """Start a router with a gRPC edge and a client."""
        metrics = CollectorRegistry()
        router = Router(
            model=served_model(),
            limits=limits or RouterLimits(),
            registry=self.registry(),
            router_id=new_incarnation(),
            metrics=RouterMetrics(metrics, MODEL),
        )
        server = aio.server(options=rpc.SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(router, stall_timeout_s), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        target = f"127.0.0.1:{port}"
        channel = aio.insecure_channel(target, options=rpc.CHANNEL_OPTIONS)
        stub = inference_pb2_grpc.InferenceStub(channel)
        process = RouterProcess(router, server, target, channel, stub, metrics, asyncio.create_task(router.run()))
        self.routers.append(process)
        return process

    async def until_ready(self) -> None:
        """Wait until every router pairs what it can."""
        await eventually(lambda: not any(process.router.why_unready() for process in self.routers))

    async def until_paired(self) -> None:
        """Wait until every router has met every worker's present life, and they one another; all are of one kind."""
        lives = {worker.worker_id: worker.host._incarnation for worker in self.workers if worker.host is not None}

        def knows_all(process: RouterProcess) -> bool:
            known = {w.worker_id: w for w in process.router.fleet if w.state == "ready"}
            peers = [set(w.load.peers) for w in known.values() if w.record.role == "prefill"]
            decodes = {w.record.kv_endpoint for w in known.values() if w.record.role == "decode"}
            return {name: w.record.incarnation for name, w in known.items()} == lives and all(
                decodes <= each for each in peers
            )

        await eventually(lambda: all(knows_all(process) for process in self.routers))

    async def until_idle(self, within_s: float = 10.0) -> None:
        """Wait until nothing of any request is left anywhere: blocks, accounts, answers, Redis keys.

        Not for so long that a key's TTL, or a lease, would hide that nobody removed it.
        """
        live = [worker for worker in self.workers if worker.task is not None and not worker.task.done()]
        try:
            await eventually(
                lambda: (
                    all(worker.is_idle for worker in live)
                    and all(process.is_idle for process in self.routers)
                    and not self.request_keys()
                ),
                within_s,
            )
        except TimeoutError:
            raise AssertionError(self._what_is_left(live)) from None

    def request_keys(self) -> list[str]:
        """Request ids that Redis says are in flight."""
        return list(self.valkey.client.scan_iter(f"baton:{self.cluster}:request:*"))

    async def close(self) -> None:
        for process in self.routers:
            await process.channel.close()
            process.task.cancel()
            await asyncio.wait([process.task])
            await process.server.stop(0.2)
            await process.router._keys._registry.aclose()
        for worker in self.workers:
            worker.gate.open()
            worker.transport.release()
            if worker.task is not None and not worker.task.done():
                worker.task.cancel()
                await asyncio.wait([worker.task])
            await worker.registry.aclose()

    def _what_is_left(self, live: Sequence[Worker]) -> str:
        left = [f"{w.worker_id}: {list(w.host.ledger)}, {w.engine.pool.num_free} free" for w in live if w.host]
        left += [
            f"router: {p.router.attempts._answers} {[dict(w.inflight) for w in p.router.fleet]}" for p in self.routers
        ]
        return "\n".join([*left, f"keys: {self.request_keys()}"])


@asynccontextmanager
async def running_stack(
    valkey: Valkey,
    make_transport: Callable[[], Transport],
    *,
    bind: Callable[[], str] = lambda: "inproc://*",
    prefills: int = 1,
    decodes: int = 1,
    routers: int = 1,
    limits: RouterLimits | None = None,
    transfer: TransferConfig = TRANSFER,
    stall_timeout_s: float = 30.0,
    **worker: Any,
) -> AsyncIterator[Stack]:
    """A stack that is ready; at the end everything is stopped and no task is left."""
    before = asyncio.all_tasks()
    stack = Stack(valkey, make_transport, bind, transfer)
    try:
        # Decode first, then prefill, then routers: each finds the others at its first look.
        for _ in range(decodes):
            await stack.start_worker("decode", **worker)
        for _ in range(prefills):
            await stack.start_worker("prefill", **worker)
        for _ in range(routers):
            await stack.start_router(limits, stall_timeout_s)
        if decodes and (prefills or (limits is not None and limits.mode == "aggregated")):
            await stack.until_paired()
        yield stack
    finally:
        await stack.close()
    await eventually(lambda: asyncio.all_tasks() - before <= {asyncio.current_task()}, 20.0)
