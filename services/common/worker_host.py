"""What a prefill and a decode worker do alike: admit sequences, tell routers, end what must end, drain.

States of a worker: ready -> draining -> gone; `unready` while its engine is stuck in one step. A sequence's deadline, its
router's disappearance, an Abort and a failure all end it through one function, `end`.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic

from baton.v1 import worker_pb2
from core.errors import BatonError, DeadlineError, InvalidRequestError, UnavailableError, status_of
from core.hashing import hash_blocks, hash_seed
from core.layout import growth_blocks
from core.sequence import SequenceOutput, SequenceSpec, StepResult
from services.common.convert import logprobs_to_pb, sampling_from_pb
from services.common.engine_parts import EngineParts
from services.common.ledger import Claim, Detail, Holding, Ledger, Use
from services.common.router_streams import RouterStreams
from services.common.rpc import hidden_bug
from services.common.worker_metrics import WorkerMetrics

logger = logging.getLogger(__name__)

# A step longer than this means a stuck device or thread: the worker says it is not ready until the step returns.
MAX_STEP_S = 60.0
# And longer than this, that it will never return: the process ends, and another takes its place.
MAX_HANG_S = 300.0


class WorkerHost(Generic[Detail]):
    """Ledger, router streams and engine of one worker, tied together. Lives on one event loop.

    Args:
        parts: the engine, which `start` connects, its blocks, and the limits a request is checked against.
        stop_uses: makes whoever uses a holding's blocks stop (abort the transfer, the engine); each use then ends by
            `ledger.end_use`.
        peers: what `Load.peers` reports.
        metrics: of the worker.
        incarnation: of this process.
        role_unready: empty, or why the role's own parts cannot serve yet.
    """

    def __init__(
        self,
        *,
        parts: EngineParts,
        stop_uses: Callable[[Holding[Detail]], None],
        peers: Callable[[], Iterable[str]],
        metrics: WorkerMetrics,
        incarnation: str,
        role_unready: Callable[[], str] = str,
    ) -> None:
        self.engine = parts.engine
        self.capacity = parts.capacity
        self._parts = parts
        self.ledger: Ledger[Detail] = Ledger(parts.pool, parts.capacity.max_sequences, self._expire, self._released)
        self.streams = RouterStreams(self.load, self._router_left)
        self.is_draining = False
        self._stop_uses = stop_uses
        self._peers = peers
        self._metrics = metrics
        self._incarnation = incarnation
        self._role_unready = role_unready
        self._last_step = StepResult()
        self._emptied = asyncio.Event()

    def start(
        self, on_output: Callable[[Holding[Detail], SequenceOutput, StepResult], worker_pb2.SequenceUpdate | None]
    ) -> None:
        """Start the engine; `on_output` translates each output of a step on the event loop."""
        loop = asyncio.get_running_loop()

        def from_engine_thread(result: StepResult) -> None:
            try:
                loop.call_soon_threadsafe(self._on_step, result, on_output)
            except RuntimeError:
                logger.debug("a step ended after the event loop was closed")

        self.engine.start(from_engine_thread)

    def spec(self, message: worker_pb2.Sequence) -> SequenceSpec:
        """A sequence as the engine takes it, nothing of it computed. Raises InvalidRequestError."""
        return SequenceSpec(
            sequence_id=message.sequence_id,
            prompt=tuple(message.prompt),
            output=tuple(message.output),
            sampling=sampling_from_pb(message.sampling),
            eos_token_ids=self._parts.eos_token_ids,
            priority=message.priority,
            hash_seed=self._hash_seed(message),
        )

    def admit(self, message: worker_pb2.Sequence, max_tokens: int, uses: set[Use], detail: Detail) -> Holding[Detail]:
        """Check a sequence against this worker's limits and take it.

        Args:
            message: from the router.
            max_tokens: most tokens whose KV it may need here, those it comes with included.
            uses: who has it first.
            detail: what only the role knows.
        Raises:
            ServingError: it is not taken, and nothing is held.
        """
        if self.is_draining:
            raise UnavailableError("worker is draining")
        if not self.streams.is_attached(message.router_id):
            raise UnavailableError(
                f"router {message.router_id} holds no Attach stream here, so tokens could not reach it"
            )
        num_tokens = len(message.prompt) + message.sampling.max_tokens
        if len(message.output) >= message.sampling.max_tokens:
            raise InvalidRequestError(
                "output", f"{len(message.output)} tokens leave none of {message.sampling.max_tokens}"
            )
        if not message.prompt or num_tokens > self.capacity.max_model_len:
            raise InvalidRequestError(
                "prompt",
                f"{len(message.prompt)} tokens and max_tokens={message.sampling.max_tokens}; need at least 1 token and"
                f" together at most max_model_len={self.capacity.max_model_len}",
            )
        ids = (message.prompt, message.output, message.sampling.stop_token_ids, message.sampling.logit_bias)
        highest = max(max(values, default=0) for values in ids)
        if highest >= self.capacity.vocab_size:
            raise InvalidRequestError(
                "token_ids", f"{highest} is not below the vocabulary size {self.capacity.vocab_size}"
            )
        num_blocks = self._parts.layout.blocks_for(max_tokens)
        if num_blocks > self.capacity.total_blocks:
            raise InvalidRequestError(
                "prompt",
                f"{max_tokens} tokens need {num_blocks} KV blocks; this worker has {self.capacity.total_blocks} in all",
            )
        holding = self.ledger.admit(
            message.sequence_id,
            message.router_id,
            self._claim(message, max_tokens),
            message.timeout_ms / 1000,
            uses,
            detail,
        )
        holding.num_published_tokens = len(message.output)
        return holding

    def _hash_seed(self, message: worker_pb2.Sequence) -> bytes | None:
        if len(message.prompt) > self._parts.max_cached_prompt_tokens:
            return None
        of = self._parts.fingerprint
        return hash_seed(
            model=of.model,
            revision=of.revision,
            weights_hash=of.weights_hash,
            dtype=of.kv_dtype,
            block_tokens=of.block_tokens,
            adapter="",
            tenant=message.tenant,
            salt=message.cache_salt,
        )

    def _claim(self, message: worker_pb2.Sequence, max_tokens: int) -> Claim:
        layout = self._parts.layout
        known = (*message.prompt, *message.output)
        seed = self._hash_seed(message)
        return Claim(
            layout.blocks_for(len(known)),
            [] if seed is None else hash_blocks(seed, known, layout.block_tokens),
            growth_blocks(len(known), max_tokens, layout.block_tokens),
        )

    def abort(self, sequence_ids: Iterable[str]) -> None:
        """End sequences their router no longer wants; ids not here yet are refused when they come."""
        for sequence_id in sequence_ids:
            holding = self.ledger.get(sequence_id)
            if holding is None:
                self.ledger.bury(sequence_id)
                self.streams.announce()  # the room that its router counted for it is free
            else:
                self._end(holding)

    def fail(self, holding: Holding[Detail], error: BatonError) -> None:
        """End a sequence with an error its router hears of."""
        if not holding.has_ended:
            update = worker_pb2.SequenceUpdate(
                sequence_id=holding.sequence_id,
                has_ended=True,
                error_code=status_of(error).grpc,
                error_message=str(error),
                matched_stop_id=-1,
            )
            self.streams.publish(holding.router_id, [update])
        self._end(holding)

    def token_update(self, holding: Holding[Detail], output: SequenceOutput) -> worker_pb2.SequenceUpdate | None:
        """What a step's output says to the router; None when it says nothing."""
        if holding.has_ended or not (output.token_ids or output.prompt_logprobs or output.has_ended):
            return None
        first_index = holding.num_published_tokens
        holding.num_published_tokens += len(output.token_ids)
        holding.has_ended = output.has_ended
        failed = output.finish_reason == "error"
        return worker_pb2.SequenceUpdate(
            sequence_id=holding.sequence_id,
            first_index=first_index,
            token_ids=output.token_ids,
            logprobs=logprobs_to_pb(output.logprobs),
            has_ended=output.has_ended,
            finish_reason="" if failed else output.finish_reason or "",
            matched_stop_id=-1 if output.matched_stop_id is None else output.matched_stop_id,
            error_code="INTERNAL" if failed else "",
            error_message=output.error,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=logprobs_to_pb(output.prompt_logprobs),
        )

    def failure(self) -> str:
        """Why this process is of no use any more; empty while it is of some."""
        stalled_s = self.engine.stalled_s()
        if math.isinf(stalled_s):
            return "the engine's loop crashed; the log above says why"
        if stalled_s > MAX_HANG_S:
            return f"an engine step hangs: it has been running for {stalled_s:.0f} s"
        return self._parts.memory.failure

    def why_unready(self) -> str:
        """Empty when a sequence sent now would be run."""
        if self.is_draining:
            return "draining"
        stalled_s = self.engine.stalled_s()
        if stalled_s > MAX_STEP_S:
            return f"engine step has been running for {stalled_s:.0f} s"
        return self._role_unready()

    @property
    def state(self) -> str:
        """ready, unready or draining, as the registry and routers see it."""
        return "draining" if self.is_draining else "unready" if self.why_unready() else "ready"

    def load(self) -> worker_pb2.Load:
        """What the worker reports of itself with every message."""
        held, step = len(self.ledger), self._last_step
        running = min(step.num_running, held)
        return worker_pb2.Load(
            state=self.state,
            running=running,
            waiting=held - running,
            waiting_tokens=step.num_waiting_tokens if held else 0,
            free_blocks=self.ledger.pool.num_admissible,
            total_blocks=self.ledger.pool.num_total,
            peers=sorted(self._peers()),
            incarnation=self._incarnation,
        )

    def load_fields(self) -> Mapping[str, Any]:
        """The same for the registry."""
        load = self.load()
        names = ("running", "waiting", "waiting_tokens", "free_blocks", "total_blocks")
        return {name: getattr(load, name) for name in names}

    def refresh_metrics(self) -> None:
        """Bring the gauges up to date; called when metrics are read."""
        load = self.load()
        self._metrics.running.set(load.running)
        self._metrics.waiting.set(load.waiting)
        # Cached blocks may be in several holdings: each counts once.
        reserved = {block for holding in self.ledger if "engine" not in holding.uses for block in holding.blocks}
        pool = self.ledger.pool
        self._metrics.set_blocks(pool.num_free, pool.num_cached, pool.num_total, len(reserved))

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let what is held finish for `timeout_s`, then end the rest and wait until it has let go."""
        self.is_draining = True
        self.streams.announce()
        if not await self._wait_empty(timeout_s):
            logger.warning("drain timeout: %d sequences are cut off", len(self.ledger))
            for holding in self.ledger:
                self.fail(holding, UnavailableError("worker stopped before the answer was complete"))
            await self._wait_empty(5.0)

    async def _wait_empty(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.ledger):
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    def _on_step(
        self,
        result: StepResult,
        on_output: Callable[[Holding[Detail], SequenceOutput, StepResult], worker_pb2.SequenceUpdate | None],
    ) -> None:
        self._last_step = result
        self._metrics.note_step(result)
        updates: defaultdict[str, list[worker_pb2.SequenceUpdate]] = defaultdict(list)
        ended = []
        for output in result.outputs:
            holding = self.ledger.get(output.sequence_id)
            if holding is None:
                continue
            self._metrics.generation_tokens.inc(len(output.token_ids))
            try:
                update = on_output(holding, output, result)
            except Exception as error:  # one sequence's bug must not cost the others of this step their tokens
                logger.exception("translating a step's output failed")
                self.fail(holding, hidden_bug(error))
                update = None
            if update is not None:
                updates[holding.router_id].append(update)
            if output.has_ended:
                ended.append(holding)
        for router_id, batch in updates.items():
            self.streams.publish(router_id, batch)
        for holding in ended:
            self.ledger.end_use(holding, "engine")

    def _end(self, holding: Holding[Detail]) -> None:
        holding.has_ended = True
        self._stop_uses(holding)

    def _expire(self, holding: Holding[Detail]) -> None:
        self.fail(holding, DeadlineError("the request's deadline passed while a worker held it"))

    def _router_left(self, router_id: str) -> None:
        holdings = self.ledger.of_router(router_id)
        if holdings:
            logger.warning("router %s left; %d of its sequences end", router_id, len(holdings))
        for holding in holdings:
            self._end(holding)

    def _released(self) -> None:
        self.streams.announce()
        if not len(self.ledger):
            self._emptied.set()
