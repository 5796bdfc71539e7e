"""The router's core: validate, tokenise, claim the id, have the answers run (`attempts`), and let go of everything.

A request's phases: preparing -> running (each answer in a phase of its own) -> ended. Whatever ends it, the finally clauses
of `generate` and `_serve` give back what it held.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from core.clock import Clock, monotonic
from core.errors import (
    CapacityError,
    DeadlineError,
    DuplicateRequestError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
    status_of,
)
from core.ids import REQUEST_ID, new_request_id
from services.common import rpc
from services.common.options import RouterLimits
from services.common.registry import Registry
from services.router.answer import Answer, Marks
from services.router.api import Chunk, Done, EchoedPrompt, GenerateCall, ModelCard
from services.router.attempts import Attempts
from services.router.choices import Choices, choice_sampling
from services.router.fleet import Fleet
from services.router.intake import Intake, ServedModel
from services.router.metrics import RouterMetrics
from services.router.placement import Need, Refusal
from services.router.request_keys import RequestKeys
from services.router.tokenizer import require_encodable

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
        self._counter = itertools.count()
        self._requests: dict[str, Choices | None] = {}  # by request id; None while preparing
        self._aborted_early: set[str] = set()  # while preparing
        self._emptied = asyncio.Event()
        self._keys = RequestKeys(registry, clock)
        self.attempts = Attempts(
            limits=limits,
            registry=registry,
            router_id=router_id,
            served_model=model.card.name,
            metrics=metrics,
            on_placed=self._keys.placed,
            clock=clock,
            rng=rng,
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
        if self.attempts.snapshot().choose(smallest, frozenset()) is Refusal.NO_WORKERS:
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
        return self.attempts.num_queued

    @property
    def num_running(self) -> int:
        """Answers that workers are told of."""
        return self.attempts.num_running

    @property
    def fleet(self) -> Fleet:
        """The workers."""
        return self.attempts.fleet

    def refresh_metrics(self) -> None:
        """Bring the gauges up to date; called when metrics are read."""
        self.attempts.refresh_metrics(self.model.card.name)

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
            run = partial(self.attempts.run, request_id=request_id, owner=owner)
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
        pool_tokens = self.attempts.largest_pool_tokens(default=self.model.card.max_model_len)
        sampling = self.intake.resolve(call.sampling, len(prompt), pool_tokens)
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

    async def _wait_empty(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while self._requests:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            return False
        return True
