"""The workers this router knows: found in Redis, kept by one Attach stream each.

A connection's states: connecting -> attached -> lost -> connecting ... until the record is gone. Redis says whom to connect to;
the stream alone says who is alive, so losing Redis loses no worker and a dead worker is noticed without Redis. In-flight
accounts belong to one incarnation: a restarted worker begins with none.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
from grpc import aio
from redis.exceptions import RedisError

from baton.v1 import worker_pb2, worker_pb2_grpc
from core.errors import UnavailableError
from services.common import rpc
from services.common.registry import Registry, WorkerRecord
from services.router.placement import WorkerView

logger = logging.getLogger(__name__)

POLL_S = 0.5
RECONNECT_S = 0.25
SILENT_TURNS = 6
ABORT_TIMEOUT_S = 2.0
# Beyond this many undelivered aborts the worker is not answering; its stream will end and it aborts by itself.
MAX_PENDING_ABORTS = 10_000


@dataclass(slots=True)
class _InFlight:
    num_blocks: int
    queued_tokens: int  # 0 once the first token is there


class RemoteWorker:
    """One incarnation of a worker. Lives on the event loop."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self.is_attached = False
        self.has_spoken = False  # since the silence was last looked at
        self.load = worker_pb2.Load()
        self.inflight: dict[str, _InFlight] = {}
        self._is_full = False  # it refused for lack of room since its last report
        self._unreported_blocks = 0  # taken since its last report
        self._aborts: list[str] = []
        self._has_aborts = asyncio.Event()
        self._open_channel()

    def _open_channel(self) -> None:
        self.channel = aio.insecure_channel(self.record.endpoint, options=rpc.CHANNEL_OPTIONS)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        self.prefill_stub = worker_pb2_grpc.PrefillWorkerStub(self.channel)
        self.decode_stub = worker_pb2_grpc.DecodeWorkerStub(self.channel)

    async def reconnect(self) -> None:
        """Leave a connection that has gone silent; gRPC would put new calls on it until its own keepalive gives up."""
        silent = self.channel
        self._open_channel()
        await silent.close(grace=None)

    @property
    def worker_id(self) -> str:
        """As in the registry."""
        return self.record.worker_id

    @property
    def block_tokens(self) -> int:
        """Tokens in one of its blocks."""
        return self.record.fingerprint.block_tokens

    @property
    def state(self) -> str:
        """ready, unready, draining or lost."""
        return (self.load.state or "unready") if self.is_attached else "lost"

    def take(self, sequence_id: str, num_blocks: int, queued_tokens: int) -> None:
        """Count a sequence sent there, before the worker itself reports it."""
        self.inflight[sequence_id] = _InFlight(num_blocks, queued_tokens)
        self._unreported_blocks += num_blocks

    def note_first_token(self, sequence_id: str) -> None:
        """Its prompt waits no longer."""
        if sequence_id in self.inflight:
            self.inflight[sequence_id].queued_tokens = 0

    def note_full(self) -> None:
        """It refused for lack of room: nothing more goes there until its next report."""
        self._is_full = True

    def note_report(self, load: worker_pb2.Load) -> None:
        """Its newest word about itself."""
        self.load = load
        self._is_full = False
        self._unreported_blocks = 0

    def abort(self, sequence_id: str) -> None:
        """Tell the worker, soon or when it is back, to end a sequence; never blocks."""
        if len(self._aborts) < MAX_PENDING_ABORTS:
            self._aborts.append(sequence_id)
            self._has_aborts.set()

    async def send_aborts(self) -> None:
        """Deliver aborts until cancelled, those that gathered in one call."""
        while True:
            await self._has_aborts.wait()
            self._has_aborts.clear()
            sequence_ids, self._aborts = self._aborts, []
            try:
                await self.stub.Abort(
                    worker_pb2.AbortSequencesRequest(sequence_ids=sequence_ids), timeout=ABORT_TIMEOUT_S
                )
            except aio.AioRpcError as error:
                logger.warning("abort at %s failed (%s); tried again", self.worker_id, error.code().name)
                self._aborts = sequence_ids + self._aborts
                self._has_aborts.set()
                await asyncio.sleep(RECONNECT_S)

    async def watch_silence(self, silence_s: float) -> None:
        """Return never; raise TimeoutError when the worker has said nothing for `silence_s`.

        Counted in turns of the event loop, not by the clock: a router that was itself held up reads what came meanwhile
        before it takes anybody for dead.
        """
        num_silent = 0
        while num_silent < SILENT_TURNS:
            self.has_spoken = False
            await asyncio.sleep(silence_s / SILENT_TURNS)
            num_silent = 0 if self.has_spoken else num_silent + 1
        raise TimeoutError

    def view(self) -> WorkerView:
        """A snapshot for placement."""
        capacity = self.record.capacity
        taken = sum(entry.num_blocks for entry in self.inflight.values())
        free = min(self.load.free_blocks - self._unreported_blocks, capacity.total_blocks - taken)
        held = max(self.load.running + self.load.waiting, len(self.inflight))
        return WorkerView(
            worker_id=self.worker_id,
            is_ready=self.state == "ready" and self.record.state != "draining",
            fingerprint=self.record.fingerprint,
            kv_endpoint=self.record.kv_endpoint,
            peers=frozenset(self.load.peers),
            free_blocks=0 if self._is_full else max(free, 0),
            total_blocks=capacity.total_blocks,
            free_sequences=capacity.max_sequences - held,
            queued_tokens=max(sum(entry.queued_tokens for entry in self.inflight.values()), self.load.waiting_tokens),
            max_model_len=capacity.max_model_len,
        )


class Fleet:
    """Every worker of the cluster.

    Args:
        registry: where workers are found.
        router_id: this router's incarnation.
        served_model: workers of other models are passed over.
        silence_s: a stream that says nothing for this long is lost.
        on_update: called for each update of a step, in order, on the event loop.
        on_lost: called with a worker whose stream ended and the sequences that were there.
        on_change: called when room may have appeared.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        router_id: str,
        served_model: str,
        silence_s: float,
        on_update: Callable[[RemoteWorker, worker_pb2.SequenceUpdate], None],
        on_lost: Callable[[RemoteWorker, list[str]], None],
        on_change: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._router_id = router_id
        self._served_model = served_model
        self._silence_s = silence_s
        self._on_update = on_update
        self._on_lost = on_lost
        self._on_change = on_change
        self._workers: dict[str, RemoteWorker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[RemoteWorker]:
        return iter(self._workers.values())

    def get(self, worker_id: str) -> RemoteWorker:
        """A worker that a placement named. Raises UnavailableError when it left since."""
        try:
            return self._workers[worker_id]
        except KeyError:
            raise UnavailableError(f"worker {worker_id} left") from None

    def forget(self, worker_id: str, sequence_id: str) -> None:
        """A sequence no longer depends on a worker."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.inflight.pop(sequence_id, None)

    def views(self, role: str) -> list[WorkerView]:
        """Snapshots of one pool."""
        return [worker.view() for worker in self._workers.values() if worker.record.role == role]

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    records = await self._registry.workers()
                except (RedisError, OSError) as error:
                    self._registry.note_failure("reading the workers", error)
                else:
                    self._follow(records, group)
                await asyncio.sleep(POLL_S)

    def _follow(self, records: list[WorkerRecord], group: asyncio.TaskGroup) -> None:
        fresh = {record.worker_id: record for record in records if record.fingerprint.model == self._served_model}
        for worker_id, worker in list(self._workers.items()):
            record = fresh.get(worker_id)
            is_replaced = record is not None and record.incarnation != worker.record.incarnation
            # A record that vanished while the stream lives is Redis's trouble (flush, restart), not the worker's.
            if is_replaced or (record is None and not worker.is_attached):
                del self._workers[worker_id]
                self._tasks.pop(worker_id).cancel()
            elif record is not None:
                worker.record = record
        for worker_id, record in fresh.items():
            if worker_id not in self._workers:
                worker = self._workers[worker_id] = RemoteWorker(record)
                self._tasks[worker_id] = group.create_task(self._keep(worker), name=f"worker {worker_id}")

    async def _keep(self, worker: RemoteWorker) -> None:
        try:
            while True:
                try:
                    await self._attach(worker)
                except* aio.AioRpcError as group:
                    logger.warning("worker %s: %s", worker.worker_id, _first_line(group))
                except* TimeoutError:
                    logger.warning("worker %s: silent for too long", worker.worker_id)
                    await worker.reconnect()
                await asyncio.sleep(RECONNECT_S)
        finally:
            await worker.channel.close(grace=None)

    async def _attach(self, worker: RemoteWorker) -> None:
        """One stream's life; returns or raises when it ends."""
        async with asyncio.TaskGroup() as group:
            call = worker.stub.Attach(worker_pb2.AttachRequest(router_id=self._router_id))
            beside = [
                group.create_task(worker.send_aborts(), name="aborts"),
                group.create_task(worker.watch_silence(self._silence_s), name="silence"),
            ]
            try:
                while True:
                    batch = await call.read()
                    worker.has_spoken = True
                    if (
                        not isinstance(batch, worker_pb2.StepBatch)
                        or batch.load.incarnation != worker.record.incarnation
                    ):
                        return  # it ended the stream, or another life of the worker sits at this address
                    if not worker.is_attached:
                        worker.is_attached = True
                        logger.info("worker %s attached (%s)", worker.worker_id, batch.load.state)
                    worker.note_report(batch.load)
                    for update in batch.updates:
                        self._on_update(worker, update)
                    self._on_change()
            finally:
                for task in beside:
                    task.cancel()
                call.cancel()
                self._detached(worker)

    def _detached(self, worker: RemoteWorker) -> None:
        was_attached, worker.is_attached = worker.is_attached, False
        sequence_ids = list(worker.inflight)
        worker.inflight.clear()
        if was_attached:
            logger.warning("worker %s lost with %d sequences", worker.worker_id, len(sequence_ids))
            self._on_lost(worker, sequence_ids)
            self._on_change()


def _first_line(group: BaseExceptionGroup[BaseException]) -> str:
    error = group.exceptions[0]
    assert isinstance(error, aio.AioRpcError), "the stream's own task raises it"
    is_cancelled = error.code() == grpc.StatusCode.CANCELLED
    return "stream cancelled" if is_cancelled else f"{error.code().name} {error.details()}"
