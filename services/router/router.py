"""The router's core: validate, tokenise, claim the id, find room, hand over, deliver, and let go of everything.

A request's phases: preparing -> queued -> reserving -> prefilling -> decoding -> ended. Whatever ends it, `generate`'s finally
clauses give back what it held: its id, its place in the waiting room, its sequences at the workers.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from baton.v1 import worker_pb2
from core.clock import Clock, monotonic
from core.errors import (
    CapacityError,
    DeadlineError,
    DuplicateRequestError,
    InternalError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
    status_of,
)
from core.ids import REQUEST_ID, new_request_id
from services.common import rpc
from services.common.convert import sampling_to_pb
from services.common.options import RouterLimits
from services.common.registry import Registry
from services.router.answer import Answer, Marks
from services.router.api import Chunk, Done, EchoedPrompt, GenerateCall, ModelCard
from services.router.choices import Choices, choice_sampling
from services.router.fleet import Fleet, RemoteWorker
from services.router.intake import Intake, ServedModel
from services.router.metrics import WORKER_STATES, RouterMetrics
from services.router.placement import Need, Placement, Refusal, Snapshot
from services.router.request_keys import RequestKeys
from services.router.tokenizer import require_encodable
from services.router.waiting_room import WaitingRoom
from services.router.worker_call import BrokenWorkerError, RefusedError, call_worker

logger = logging.getLogger(__name__)


class Router:
    """`RouterCore` over a fleet of workers. Lives on one event loop.

    Args:
        model: served.
        limits: what is admitted, and how long things may take.
        registry: Redis.
        router_id: this process's incarnation.
        metrics: of the router.
        clock: for timings.
        rng: breaks ties of placement.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        limits: RouterLimits,
        registry: Registry,
        router_id: str,
        metrics: RouterMetrics,
        clock: Clock = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.model = model
        self.intake = Intake(model)
        self.is_draining = False
        self._limits = limits
        self._router_id = router_id
        self._metrics = metrics
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 (spreads load, guards nothing)
        self._counter = itertools.count()
        self._answers: dict[str, Answer] = {}  # by sequence id
        self._requests: dict[str, Choices | None] = {}  # by request id; None while preparing
        self._aborted_early: set[str] = set()  # while preparing
        self._emptied = asyncio.Event()
        self._keys = RequestKeys(registry, clock)
        self._room = WaitingRoom(
            self._snapshot,
            limits.max_queued,
            limits.max_queue_s,
            limits.worker_grace_s,
            metrics.decision.observe,
            clock,
        )
        self.fleet = Fleet(
            registry=registry,
            router_id=router_id,
            served_model=model.card.name,
            silence_s=limits.worker_silence_s,
            on_update=self._on_update,
            on_lost=self._on_lost,
            on_change=self._room.look,
        )

    async def run(self) -> None:
        """Follow workers and write request keys until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.fleet.run(), name="fleet")
            group.create_task(self._keys.run(), name="request keys")

    async def drain(self, timeout_s: float) -> None:
        """Admit nothing, let running requests end for `timeout_s`, then fail the rest."""
        self.is_draining = True
        if not await self._wait_empty(timeout_s):
            for choices in list(self._requests.values()):
                if choices is not None:
                    choices.fail(UnavailableError("router stopped before the answer was complete"))
            await self._wait_empty(5.0)
        await self._keys.flush()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Chunk | Done, None]:
        """Stream the answers; see `RouterCore.generate`."""
        marks = Marks(self._clock())
        num_open = call.n
        status = "CANCELLED"
        try:
            async with aclosing(self._serve(call, marks)) as events:
                async for event in events:
                    if isinstance(event, Done):
                        num_open -= 1
                        status = status if num_open else ""
                    yield event
        except ServingError as error:
            status = status_of(error).grpc
            raise
        except Exception as error:
            logger.exception("serving a request failed")
            hidden = rpc.hidden_bug(error)
            status = status_of(hidden).grpc
            raise hidden from error
        finally:
            if status:
                self._metrics.failed(status, was_admitted=marks.reserved is not None or status == "CANCELLED")

    async def tokenize(self, model: str, text: str) -> tuple[int, ...]:
        """The token ids of a text, special tokens of a bare prompt included."""
        self.intake.require_model(model)
        require_encodable("text", text, max_model_len=self.model.card.max_model_len)
        return tuple(await self.model.tokenizer.encode_async(text, add_special=True))

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """The text of token ids, special tokens kept."""
        self.intake.require_model(model)
        self.intake.require_length("token_ids", len(token_ids))
        self.intake.require_ids("token_ids", token_ids)
        return self.model.tokenizer.decode(token_ids)

    def models(self) -> tuple[ModelCard, ...]:
        """The one model served."""
        return (self.model.card,)

    def token_text(self, token_id: int) -> str:
        """How one token reads alone."""
        return self.model.tokenizer.token_text(token_id)

    def why_unready(self) -> str:
        """Empty when ready, else the reason."""
        if self.is_draining:
            return "draining"
        smallest = Need(1, 2)
        if self._snapshot().choose(smallest, frozenset()) is Refusal.NO_WORKERS:
            return "no live workers that can serve together"
        return ""

    def abort(self, request_id: str) -> bool:
        """End a request of this router as its client would; whether it was there."""
        if request_id not in self._requests:
            return False
        choices = self._requests[request_id]
        if choices is None:
            self._aborted_early.add(request_id)
        else:
            choices.cancel()
        return True

    @property
    def num_queued(self) -> int:
        """Requests waiting for room."""
        return len(self._room)

    def refresh_metrics(self) -> None:
        """Bring the gauges up to date; called when metrics are read."""
        self._metrics.queue_depth.set(len(self._room))
        self._metrics.queue_tokens.set(self._room.num_tokens)
        self._metrics.queue_oldest.set(self._room.oldest_s)
        self._metrics.waiting.labels(self.model.card.name).set(len(self._room))
        self._metrics.running.labels(self.model.card.name).set(len(self._answers))
        self._metrics.worker_state.clear()
        for worker in self.fleet:
            for state in WORKER_STATES:
                self._metrics.worker_state.labels(worker.worker_id, state).set(worker.state == state)

    async def _serve(self, call: GenerateCall, marks: Marks) -> AsyncGenerator[Chunk | Done, None]:
        if self.is_draining:
            raise UnavailableError("router is draining")
        self.intake.require_model(call.model)
        request_id = call.request_id or new_request_id()
        if not REQUEST_ID.fullmatch(request_id):
            raise InvalidRequestError("request_id", "must be 1 to 128 of A-Z a-z 0-9 . _ : -")
        if request_id in self._requests:
            raise DuplicateRequestError(f"request_id: {request_id} is in flight")
        timeout_s = min(call.timeout_s or self._limits.request_timeout_s, self._limits.request_timeout_s)
        if len(self._requests) >= self._limits.max_requests:
            raise CapacityError(f"{len(self._requests)} requests are open, max_requests={self._limits.max_requests}")
        owner = f"{self._router_id}-{next(self._counter)}"
        self._requests[request_id] = None
        timer: asyncio.TimerHandle | None = None
        late = DeadlineError(f"the answer was not complete within {timeout_s:.1f} s")
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    choices = await self._prepare(call, marks)
                    # A client's own id may be in flight at another router; one of ours cannot be.
                    if not await self._keys.claim(request_id, owner):
                        raise DuplicateRequestError(f"request_id: {request_id} is in flight at another router")
            except TimeoutError:
                raise late from None
            self._requests[request_id] = choices
            if request_id in self._aborted_early:
                choices.cancel()
            deadline = marks.arrived + timeout_s
            choices.set_deadline(deadline)
            timer = asyncio.get_running_loop().call_later(deadline - self._clock(), choices.fail, late)
            run = partial(self._attempts, request_id=request_id, owner=owner)
            async with aclosing(choices.events(run)) as events:
                async for event in events:
                    yield event
        finally:
            if timer is not None:
                timer.cancel()
            self._keys.end(request_id, owner)
            self._aborted_early.discard(request_id)
            del self._requests[request_id]
            if not self._requests:
                self._emptied.set()

    async def _prepare(self, call: GenerateCall, marks: Marks) -> Choices:
        """Tokenise, fill defaults, check. Raises InvalidRequestError."""
        prompt = await self.intake.prompt_ids(call)
        sampling = self.intake.resolve(call.sampling, len(prompt), self._largest_pool_tokens())
        tokenizer = self.model.tokenizer
        echoed = None
        if call.echo:
            text = tokenizer.decode(prompt) if call.text is None else call.text
            echoed = EchoedPrompt(text=text, token_ids=prompt)
        answers = [
            Answer(
                prompt,
                choice_sampling(sampling, index),
                tokenizer.detokenizer(skip_special=sampling.skip_special_tokens),
                Marks(marks.arrived) if index else marks,
                self._clock,
                index=index,
                echoed=None if index else echoed,
            )
            for index in range(call.n)
        ]
        for answer in answers:
            answer.priority, answer.cache_salt = call.priority, call.cache_salt
        return Choices(answers)

    async def _attempts(self, answer: Answer, request_id: str, owner: str) -> AsyncGenerator[Chunk | Done, None]:
        """Run the answer at one pair of workers after another until it is done, going on after the tokens there are."""
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
                        self._note_placed(answer, request_id)
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
        if placement.prefill is None:
            await call_worker(decode, decode.decode_stub.Run, worker_pb2.RunRequest(sequence=sequence))
            answer.marks.note_reserved(self._clock())
            return
        prefill = self.fleet.get(placement.prefill)
        ticket = await call_worker(decode, decode.decode_stub.Reserve, worker_pb2.ReserveRequest(sequence=sequence))
        answer.marks.note_reserved(self._clock())
        await call_worker(
            prefill, prefill.prefill_stub.Prefill, worker_pb2.PrefillRequest(sequence=sequence, ticket=ticket)
        )

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

    def _snapshot(self) -> Snapshot:
        is_whole = self._limits.mode == "aggregated"
        prefills = None if is_whole else self.fleet.views("prefill")
        return Snapshot(prefills=prefills, decodes=self.fleet.views("decode"), rng=self._rng)

    def _largest_pool_tokens(self) -> int:
        """The longest sequence a decode worker takes; the model's context while no worker is known."""
        views = self.fleet.views("decode")
        pools = [min(view.total_blocks * view.fingerprint.block_tokens, view.max_model_len) for view in views]
        return max(pools, default=self.model.card.max_model_len)

    def _note_placed(self, answer: Answer, request_id: str) -> None:
        placement = answer.placement
        assert placement is not None, "placed"
        self._keys.placed(request_id, placement.prefill or "", placement.decode)

    def _note_retry(self, answer: Answer, failure: ServingError) -> None:
        self._metrics.retries.inc()
        logger.warning("%s goes on elsewhere after %d tokens: %s", answer.sequence_id, len(answer.token_ids), failure)

    async def _wait_empty(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while self._requests:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            return False
        return True
