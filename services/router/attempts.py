"""One answer at one pair of workers, and at another when a worker fails or refuses.

An attempt's phases: queued -> reserving -> prefilling -> decoding -> ended. `run`'s finally clause gives back what it held:
its place in the waiting room, its sequences at the workers.
"""

import itertools
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from baton.v1 import worker_pb2
from core.clock import Clock, monotonic
from core.errors import InternalError, ServingError, UnavailableError
from services.common.convert import sampling_to_pb
from services.common.options import RouterLimits
from services.common.registry import Registry
from services.router.answer import Answer
from services.router.api import Chunk, Done
from services.router.fleet import Fleet, RemoteWorker
from services.router.metrics import WORKER_STATES, RouterMetrics
from services.router.placement import Need, Placement, Snapshot
from services.router.waiting_room import WaitingRoom
from services.router.worker_call import BrokenWorkerError, RefusedError, call_worker

logger = logging.getLogger(__name__)


class Attempts:
    """Runs answers at a fleet of workers. Lives on one event loop.

    Args:
        limits: how long things may take, and how often they are tried.
        registry: Redis.
        router_id: this process's incarnation.
        served_model: whose workers to follow.
        metrics: of the router.
        on_placed: told the request id and where its answer runs, once the workers have accepted it.
        clock: for timings.
        rng: breaks ties of placement.
    """

    def __init__(
        self,
        *,
        limits: RouterLimits,
        registry: Registry,
        router_id: str,
        served_model: str,
        metrics: RouterMetrics,
        on_placed: Callable[[str, Placement], None],
        clock: Clock = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._limits = limits
        self._router_id = router_id
        self._metrics = metrics
        self._on_placed = on_placed
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 (spreads load, guards nothing)
        self._answers: dict[str, Answer] = {}  # by sequence id
        self._room = WaitingRoom(
            self.snapshot,
            limits.max_queued,
            limits.max_queue_s,
            limits.worker_grace_s,
            metrics.decision.observe,
            clock,
        )
        self.fleet = Fleet(
            registry=registry,
            router_id=router_id,
            served_model=served_model,
            silence_s=limits.worker_silence_s,
            on_update=self._on_update,
            on_lost=self._on_lost,
            on_change=self._room.look,
        )

    @property
    def num_running(self) -> int:
        """Answers that workers are told of."""
        return len(self._answers)

    @property
    def num_queued(self) -> int:
        """Answers waiting for room."""
        return len(self._room)

    def snapshot(self) -> Snapshot:
        """The workers as they can be chosen from now."""
        is_whole = self._limits.mode == "aggregated"
        prefills = None if is_whole else self.fleet.views("prefill")
        return Snapshot(prefills=prefills, decodes=self.fleet.views("decode"), rng=self._rng)

    def largest_pool_tokens(self, default: int) -> int:
        """The longest sequence a decode worker takes; `default` while no worker is known."""
        views = self.fleet.views("decode")
        pools = [min(view.total_blocks * view.fingerprint.block_tokens, view.max_model_len) for view in views]
        return max(pools, default=default)

    def refresh_metrics(self, model: str) -> None:
        """Bring the gauges up to date."""
        self._metrics.queue_depth.set(len(self._room))
        self._metrics.queue_tokens.set(self._room.num_tokens)
        self._metrics.queue_oldest.set(self._room.oldest_s)
        self._metrics.waiting.labels(model).set(len(self._room))
        self._metrics.running.labels(model).set(len(self._answers))
        self._metrics.worker_state.clear()
        self._metrics.worker_inflight.clear()
        for worker in self.fleet:
            self._metrics.worker_inflight.labels(worker.worker_id).set(len(worker.inflight))
            for state in WORKER_STATES:
                self._metrics.worker_state.labels(worker.worker_id, state).set(worker.state == state)

    async def run(self, answer: Answer, request_id: str, owner: str) -> AsyncGenerator[Chunk | Done, None]:
        """Run the answer at one pair of workers after another until it is done, going on after the tokens there are.

        Args:
            answer: started here at its first token, or after those it has.
            request_id: of its request.
            owner: makes its sequences' ids unique in the cluster.
        Raises:
            ServingError: no worker took it, or too many failed.
        """
        excluded: set[str] = set()
        num_failed = 0
        for attempt in itertools.count():
            sequence_id = f"{owner}.{answer.index}.{attempt}"
            try:
                answer.begin_attempt(sequence_id)
                async with answer.interruptible():
                    if not answer.has_ended:  # aborted while its id was claimed
                        await self._place(answer, sequence_id, frozenset(excluded))
                        await self._dispatch(answer, sequence_id)
                        assert answer.placement is not None, "placed"
                        self._on_placed(request_id, answer.placement)
                async with aclosing(answer.events()) as events:
                    async for event in events:
                        if isinstance(event, Done):
                            self._metrics.finished(event, answer.marks.token_gaps_s)
                        yield event
                return
            except RefusedError as refusal:
                # The view of the worker was too good, or another router was faster: wait for its next report.
                refusal.worker.note_full()
            except BrokenWorkerError as failure:
                excluded.add(failure.worker.worker_id)
                num_failed += 1
                if num_failed >= self._limits.max_attempts:
                    raise
                self._note_retry(answer, failure)
            except UnavailableError as failure:  # a worker was lost, or left before it could be called
                num_failed += 1
                if not answer.may_retry or num_failed >= self._limits.max_attempts:
                    raise
                self._note_retry(answer, failure)
            finally:
                self._let_go(sequence_id)

    async def _place(self, answer: Answer, sequence_id: str, excluded: frozenset[str]) -> None:
        """Wait for room; when this returns the sequence is counted at its workers."""

        def take(placement: Placement) -> None:
            num_queued_tokens = len(answer.prompt) + len(answer.token_ids)
            decode = self.fleet.get(placement.decode)
            num_blocks = need.blocks_to_decode(decode.block_tokens)
            decode.take(sequence_id, num_blocks, num_queued_tokens if placement.prefill is None else 0)
            if placement.prefill is not None:
                prefill = self.fleet.get(placement.prefill)
                prefill.take(sequence_id, need.blocks_to_prefill(prefill.block_tokens), num_queued_tokens)
            self._answers[sequence_id] = answer
            answer.placement = placement

        assert answer.sampling.max_tokens is not None, "resolved"
        num_known = len(answer.prompt) + len(answer.token_ids)
        need = Need(num_known, len(answer.prompt) + answer.sampling.max_tokens, answer.preferred)
        came_back_since = answer.queued_since
        answer.queued_since = self._clock() if came_back_since is None else came_back_since
        await self._room.place(need, excluded, take, came_back_since, answer.priority)
        answer.marks.note_placed(self._clock(), self._room.last_decision_s)

    async def _dispatch(self, answer: Answer, sequence_id: str) -> None:
        """Hand the sequence to its workers; when this returns they have accepted it."""
        placement = answer.placement
        assert placement is not None, "placed"
        sequence = worker_pb2.Sequence(
            sequence_id=sequence_id,
            router_id=self._router_id,
            prompt=answer.prompt,
            sampling=sampling_to_pb(answer.sampling),
            timeout_ms=max(int((answer.deadline - self._clock()) * 1000), 1),
            output=answer.token_ids,
            priority=answer.priority,
            cache_salt=answer.cache_salt,
        )
        decode = self.fleet.get(placement.decode)
        silence_s = self._limits.worker_silence_s
        if placement.prefill is None:
            await call_worker(decode, decode.decode_stub.Run, worker_pb2.RunRequest(sequence=sequence), silence_s)
            answer.marks.note_reserved(self._clock())
            return
        prefill = self.fleet.get(placement.prefill)
        reserve = worker_pb2.ReserveRequest(sequence=sequence)
        ticket = await call_worker(decode, decode.decode_stub.Reserve, reserve, silence_s)
        answer.marks.note_reserved(self._clock())
        request = worker_pb2.PrefillRequest(sequence=sequence, ticket=ticket)
        await call_worker(prefill, prefill.prefill_stub.Prefill, request, silence_s)

    def _let_go(self, sequence_id: str) -> None:
        """End an attempt everywhere: at workers that may still hold the sequence, and in every account here."""
        answer = self._answers.pop(sequence_id, None)
        placed: set[str | None] = set()
        if answer is not None and answer.error is not None and answer.placement is not None:
            # A worker whose stream broke has no account here, but the call that hands the sequence over may be on its way.
            placed = {answer.placement.prefill, answer.placement.decode}
        for worker in self.fleet:
            if worker.inflight.pop(sequence_id, None) is not None or worker.worker_id in placed:
                worker.abort(sequence_id)
        self._room.look()

    def _on_update(self, worker: RemoteWorker, update: worker_pb2.SequenceUpdate) -> None:
        answer = self._answers.get(update.sequence_id)
        if answer is None:
            return
        if update.error_code and update.sequence_id not in worker.inflight:
            return  # prefill missed the end of a transfer whose KV decode works with
        if update.token_ids:
            worker.note_first_token(update.sequence_id)
        is_decode = answer.placement is not None and worker.worker_id == answer.placement.decode
        if is_decode and update.has_ended:
            worker.inflight.pop(update.sequence_id, None)  # it let go by itself
        try:
            answer.on_update(update)
        except Exception:  # one answer's bug must not end the stream that carries everybody's tokens
            logger.exception("delivering an update failed")
            answer.fail(InternalError("delivering the answer failed; the router's log has the details"))
        is_after_transfer = is_decode and len(answer.token_ids) > update.first_index  # prefill's token is there too
        if (
            is_after_transfer
            and update.token_ids
            and answer.placement is not None
            and answer.placement.prefill is not None
        ):
            # What happens to prefill now does not concern this answer.
            self.fleet.forget(answer.placement.prefill, update.sequence_id)

    def _on_lost(self, worker: RemoteWorker, sequence_ids: list[str]) -> None:
        for sequence_id in sequence_ids:
            answer = self._answers.get(sequence_id)
            if answer is not None:
                answer.fail(UnavailableError(f"worker {worker.worker_id} was lost"), may_retry=True)

    def _note_retry(self, answer: Answer, failure: ServingError) -> None:
        self._metrics.retries.inc()
        logger.warning("%s goes on elsewhere after %d tokens: %s", answer.sequence_id, len(answer.token_ids), failure)
