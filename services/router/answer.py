"""One answer on its way to a client: tokens in from workers, text out to an edge.

States: waiting for the first token -> streaming -> done | failed. Tokens come from two workers on two streams; each carries its
position in the answer, so the order they arrive in does not matter. What the client has not taken yet gathers and leaves as
one chunk: the bound is the answer's own length, max_tokens.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from baton.v1 import worker_pb2
from core.clock import Clock
from core.errors import ServingError, UnavailableError, error_from_status
from core.sampling import SamplingParams
from core.sequence import FinishReason, TokenLogprobs
from services.common.convert import logprobs_from_pb
from services.router.api import Chunk, Done, EchoedPrompt, Path, Timings
from services.router.detokenizer import Detokenizer
from services.router.placement import Placement
from services.router.stop_strings import StopMatcher


class Marks:
    """Moments of one request on the router's clock; the durations between them are `Timings`."""

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.placed: float | None = None  # left the waiting room
        self.route_s = 0.0  # of the time before, what placing took
        self.reserved: float | None = None  # a worker took it
        self.first_token: float | None = None
        self.second_token: float | None = None
        self.last_token = arrived
        self.handed_first: float | None = None
        self.token_gaps_s: list[float] = []
        self.adopt_s = 0.0  # reported by decode
        self.first_decode_s = 0.0

    def note_placed(self, now: float, route_s: float) -> None:
        """It left the waiting room, after a choice that took `route_s` (cut to what this clock saw)."""
        if self.first_token is None:
            self.route_s = min(route_s, now - self.arrived)
            self.placed, self.reserved = now, None

    def note_reserved(self, now: float) -> None:
        """A worker holds blocks for it."""
        if self.first_token is None:
            self.reserved = now
        elif self.reserved is None:
            self.reserved = self.first_token  # which overtook the worker's word that it took the request

    def note_end(self, now: float) -> None:
        """It is over."""
        if self.first_token is None:
            self.last_token = now

    def timings(self, path: Path) -> Timings:
        """The partition of arrival to last token, in milliseconds."""
        # Without a token, the phase the request was in took the rest of its time.
        first = self.last_token if self.first_token is None else self.first_token
        reserved = first if self.reserved is None else self.reserved
        placed = reserved if self.placed is None else self.placed
        second = self.second_token if self.second_token is not None else first
        gap = second - first
        # Decode's own durations, cut to what this clock saw; the transfer is the rest that nothing else explains.
        first_decode = min(self.first_decode_s, gap) if path == "disaggregated" else gap
        adopt = min(self.adopt_s, gap - first_decode)
        parts = {
            "queue_ms": placed - self.arrived - self.route_s,
            "route_ms": self.route_s,
            "reserve_ms": reserved - placed,
            "prefill_ms": first - reserved,
            "transfer_ms": gap - first_decode - adopt,
            "adopt_ms": adopt,
            "first_decode_ms": first_decode,
            "decode_ms": self.last_token - second,
        }
        handed = first if self.handed_first is None else min(self.handed_first, self.last_token)
        return Timings(
            **{name: seconds * 1000 for name, seconds in parts.items()},
            e2e_ms=(self.last_token - self.arrived) * 1000,
            ttft_ms=(handed - self.arrived) * 1000,
        )


class Answer:
    """One request's output. Lives on the event loop; nothing here blocks.

    Args:
        prompt: token ids.
        sampling: with every default resolved.
        detokenizer: fresh, for this answer.
        marks: of the request.
        clock: the router's.
        index: among the answers to the request.
        echoed: goes out with the first chunk.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        detokenizer: Detokenizer,
        marks: Marks,
        clock: Clock,
        *,
        index: int = 0,
        echoed: EchoedPrompt | None = None,
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.marks = marks
        self.index = index
        self.placement: Placement | None = None
        self.preferred: Placement | None = None  # where its prompt's blocks are
        self.deadline = float("inf")  # on the router's clock
        self.queued_since: float | None = None  # when it first asked for room
        self.sequence_id = ""  # of the current attempt
        self.priority = 0  # of the call, as is the next
        self.cache_salt = ""
        self.num_cached_tokens = 0  # of the prompt: not computed for the first token
        self.token_ids: list[int] = []  # of the answer
        self.error: ServingError | None = None
        self.done: Done | None = None
        self.may_retry = False  # a worker failed, not the request
        self._detokenizer = detokenizer
        self._stops = StopMatcher(sampling.stop, include_stop=sampling.include_stop)
        self._clock = clock
        self._early: dict[int, worker_pb2.SequenceUpdate] = {}  # came before the tokens they follow
        self._text: list[str] = []  # not taken by the client yet, as are the next four
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._echoed = echoed
        self._num_prompt_logprobs = 0  # taken from workers,
        self._num_repeated = 0  # and how many of them the current attempt has sent too
        self._wake = asyncio.Event()
        self._interrupt: asyncio.Timeout | None = None

    @property
    def path(self) -> Path:
        """How it was served."""
        return "aggregated" if self.placement is not None and self.placement.prefill is None else "disaggregated"

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.done is not None or self.error is not None

    def begin_attempt(self, sequence_id: str) -> None:
        """Start, or start over at other workers after a failure that allows it, going on after the tokens there are."""
        self.sequence_id = sequence_id
        if self.may_retry:
            self.error = None
            self.may_retry = False
        self._early.clear()
        self._num_repeated = 0

    def fail(self, error: ServingError, *, may_retry: bool = False) -> None:
        """End without a Done; the client sees the status after what it has, unless the answer goes on elsewhere."""
        if not self.has_ended:
            self.error = error
            self.may_retry = may_retry
            self._ended()

    def cancel(self) -> None:
        """End with finish_reason "abort" and what there is."""
        if not self.has_ended:
            self._finish("abort", "")

    @asynccontextmanager
    async def interruptible(self) -> AsyncIterator[None]:
        """Leave the block early, without an error, when the answer ends meanwhile (deadline, abort, lost worker)."""
        try:
            async with asyncio.timeout(None) as self._interrupt:
                yield
        except TimeoutError:
            if not self.has_ended:
                raise
        finally:
            self._interrupt = None

    def on_update(self, update: worker_pb2.SequenceUpdate) -> None:
        """Take one worker's step."""
        if self.has_ended:
            return
        if update.error_code:
            error = error_from_status(update.error_code, update.error_message)
            self.fail(error, may_retry=isinstance(error, UnavailableError))
            return
        if update.prompt_logprobs:
            self._take_prompt_logprobs(logprobs_from_pb(update.prompt_logprobs))
        if update.token_ids or update.finish_reason:
            self._early[update.first_index] = update
        while not self.has_ended and (following := self._early.pop(len(self.token_ids), None)) is not None:
            self._take(following)

    async def events(self) -> AsyncGenerator[Chunk | Done, None]:
        """What an edge streams. Raises the ServingError the answer ended with."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._has_news:
                chunk = Chunk(
                    index=self.index,
                    text="".join(self._text),
                    token_ids=tuple(self._ids),
                    logprobs=tuple(self._logprobs),
                    prompt_logprobs=tuple(self._prompt_logprobs),
                    echoed=self._echoed,
                )
                self._text, self._ids, self._logprobs, self._prompt_logprobs = [], [], [], []
                self._echoed = None
                if self.marks.handed_first is None and chunk.token_ids:
                    self.marks.handed_first = self._clock()
                yield chunk
            if self._has_news:
                continue  # more came while the client took the last chunk
            if self.error is not None:
                raise self.error
            if self.done is not None:
                yield self.done
                return

    @property
    def _has_news(self) -> bool:
        return bool(self._text or self._ids or self._prompt_logprobs)

    def _take_prompt_logprobs(self, entries: tuple[TokenLogprobs, ...]) -> None:
        """Keep those that no earlier attempt gave."""
        if self.token_ids:
            return  # they were complete before the first token; a prompt computed again, perhaps in part, has nothing new
        news = entries[self._num_prompt_logprobs - self._num_repeated :]
        self._num_repeated += len(entries)
        self._num_prompt_logprobs += len(news)
        self._prompt_logprobs += news
        self._wake.set()

    def _take(self, update: worker_pb2.SequenceUpdate) -> None:
        now = self._clock()
        if update.first_decode_ms:
            self.marks.first_decode_s = update.first_decode_ms / 1000
            self.marks.adopt_s = update.adopt_ms / 1000
        if not self.token_ids:
            self.num_cached_tokens = update.num_cached_tokens
        logprobs = logprobs_from_pb(update.logprobs)
        for index, token_id in enumerate(update.token_ids):
            self._mark_token(now)
            self.token_ids.append(token_id)
            self._ids.append(token_id)
            self._logprobs += logprobs[index : index + 1]
            is_last = index == len(update.token_ids) - 1
            is_stop_token = is_last and update.finish_reason == "stop"
            if is_stop_token and not self.sampling.include_stop:
                break  # a stop token ends the answer; its text is not part of it
            matched = self._push_text(token_id)
            if matched is not None:
                self._finish("stop", matched, flushes=False)
                return
        if update.finish_reason:
            matched_id = str(update.matched_stop_id) if update.matched_stop_id >= 0 else ""
            if update.finish_reason not in ("stop", "length"):
                # A worker aborts by itself only when it stops.
                self.fail(
                    UnavailableError(f"the worker ended the answer with {update.finish_reason!r}"), may_retry=True
                )
                return
            self._finish("stop" if update.finish_reason == "stop" else "length", matched_id)
        self._wake.set()

    def _push_text(self, token_id: int) -> str | None:
        """Turn one token into text; returns the stop string it completes, if any."""
        text = self._detokenizer.push([token_id])
        if len(self.token_ids) <= self.sampling.min_tokens:
            self._text.append(text)  # no stop string counts yet
            return None
        safe, matched = self._stops.push(text)
        if safe:
            self._text.append(safe)
        return matched

    def _mark_token(self, now: float) -> None:
        marks = self.marks
        if marks.first_token is None:
            marks.first_token = now
        else:
            marks.token_gaps_s.append(now - marks.last_token)
            if marks.second_token is None:
                marks.second_token = now
        marks.last_token = now

    def _finish(self, reason: FinishReason, matched_stop: str, *, flushes: bool = True) -> None:
        if flushes:  # what was held back, in case it began a stop string, is text after all
            held_back = self._stops.finish()
            if held_back:
                self._text.append(held_back)
        placement = self.placement or Placement(decode="", prefill="")
        self.marks.note_end(self._clock())
        self.done = Done(
            index=self.index,
            finish_reason=reason,
            matched_stop=matched_stop,
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.token_ids),
            cached_tokens=self.num_cached_tokens,
            timings=self.marks.timings(self.path),
            prefill_worker=placement.decode if placement.prefill is None else placement.prefill,
            decode_worker=placement.decode,
            path=self.path,
        )
        self._ended()

    def _ended(self) -> None:
        self._wake.set()
        if self._interrupt is not None:
            self._interrupt.reschedule(asyncio.get_running_loop().time())
