"""The engine's thread: intake -> plan -> launch -> settle -> emit, one turn per step.

A sequence is waiting (it has no blocks: not started, or preempted), computing its prompt, decoding, or ended; it ends
exactly once, with one `has_ended` output.
What other threads ask for (`submit`, `abort`, `stop`) goes through an inbox and takes effect at the border between two
steps: when `run` has returned and before its results are emitted. So a step never sees its sequences change, an aborted
sequence gets no more tokens, and the blocks of an ended one are no longer written.

Blocks are given and taken at the same border, in one transaction on the pool: what a plan saw is what it gets.

A device computes a step while the next one is planned and launched; only then are the results of the first waited for. What
a step in flight samples is AWAITED in its sequence until it is settled. A sequence that ends with its step has been computed
once too often; that result is dropped, and its blocks are held until no step in flight writes them. Where the next step
cannot be planned without the tokens (penalties, preemption), the one in flight is settled first. Runners that compute when
they launch are settled at once: for them nothing is ever in flight while a step is planned.
"""

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator

from core.clock import Clock, monotonic
from core.errors import DeviceLostError
from core.sequence import (
    FinishReason,
    SequenceOutput,
    SequenceSpec,
    StepListener,
    StepResult,
    SwapMemory,
    TokenLogprobs,
)
from engine.block_pool import BlockPool
from engine.flight import InFlight, explain, go_ahead, must_be_known, new_prompt_logprobs, output_of
from engine.holdings import Holdings
from engine.host_swap import HostSwap, Rates
from engine.inbox import Inbox, Message
from engine.plan import Runner, Sampled, StepPlan
from engine.scheduler import Plan, StepLimits, plan_step
from engine.sequence import Sequence
from engine.stopping import finish_reason

logger = logging.getLogger(__name__)

# Fewer prompt tokens in a step say little about how fast they are computed.
_MIN_MEASURED_TOKENS = 64


class EngineLoop:
    """`core.sequence.Engine` over any runner.

    The number of sequences is not limited here: a service that wants a shorter queue refuses before it submits. A sequence
    that needs more blocks than the pool has ends with an error.

    Args:
        runner: computes plans; only the engine's thread calls it.
        limits: of one step.
        pool: the blocks of the runner's memory.
        block_tokens: tokens in one block.
        swap_memory: the blocks' bytes and how many bytes of host memory preempted sequences may be swapped to; None: they
            are always computed anew.
        cores: that the engine's thread keeps to; empty: any.
        plan: chooses a step; `plan_step` unless a worker needs another order. What `StepPlan` promises holds for any.
        on_start: called first in the engine's thread, before any sequence exists.
        max_last_step_s: how long `stop` waits for a step.
        clock: for `step_s` and `stalled_s`.
    """

    def __init__(
        self,
        runner: Runner,
        limits: StepLimits,
        pool: BlockPool,
        block_tokens: int,
        *,
        swap_memory: tuple[SwapMemory, int] | None = None,
        cores: frozenset[int] = frozenset(),
        plan: Plan = plan_step,
        on_start: Callable[[], None] | None = None,
        max_last_step_s: float = 60.0,
        clock: Clock = monotonic,
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._pool = pool
        self._block_tokens = block_tokens
        self._rates = Rates()
        swap = swap_memory and HostSwap(*swap_memory, self._rates.note_copied, clock)
        self._holdings = Holdings(pool, block_tokens, swap, self._rates)
        self._cores = cores
        self._plan = plan
        self._on_start = on_start
        self._max_last_step_s = max_last_step_s
        self._has_begun = threading.Event()  # or will not
        self._clock = clock
        self._num_submitted = 0
        self._inbox = Inbox()
        self._live: dict[str, Sequence] = {}  # oldest first; changed by the engine's thread only
        self._news: list[SequenceOutput] = []  # of this turn, to be told at its end, or after a crash
        self._listener: StepListener | None = None
        self._in_flight: InFlight | None = None
        self._settled_at = -math.inf
        # Ended, but a step computes them; and their last words.
        self._ending: dict[Sequence, tuple[SequenceOutput, ...]] = {}
        self._thread: threading.Thread | None = None
        self._step_started: float | None = None  # None: nothing waits for the device

    def start(self, listener: StepListener) -> None:
        """Begin. `listener` is called in the engine's thread after every step; it must not block.

        An exception of the listener is logged and the engine goes on: one step's outputs are lost, not the engine.
        """
        assert self._thread is None, "an engine starts once"
        self._pool.when_room(self._inbox.wake)
        self._listener = listener
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()
        self._has_begun.wait()

    def submit(self, spec: SequenceSpec) -> None:
        """Add a sequence. It always ends with one output with `has_ended`.

        Once the engine has stopped, that output says "abort" and comes before this returns, in the caller's thread.
        """
        assert self._listener is not None, "submit before start"
        assert spec.prompt, f"{spec.sequence_id}: empty prompt"
        assert spec.sampling.max_tokens is not None, f"{spec.sequence_id}: max_tokens is not set"
        num_tokens = len(spec.prompt) + len(spec.output)
        assert spec.num_computed_tokens < num_tokens, f"{spec.sequence_id}: nothing to compute"
        assert spec.num_computed_tokens <= len(spec.block_table) * self._block_tokens, f"{spec.sequence_id}: no blocks"
        assert spec.sequence_id not in self._live, f"{spec.sequence_id} is running"
        if not self._inbox.put(spec):
            output = output_of(Sequence(spec), has_ended=True, finish_reason="abort")
            self._emit(StepResult(outputs=[output]))

    def abort(self, sequence_id: str) -> None:
        """End a sequence at the next step border with finish_reason "abort"; unknown or ended ids are ignored."""
        self._inbox.put(sequence_id)

    def stalled_s(self) -> float:
        """Seconds the current step has been running; 0 when idle, infinity once the loop itself has crashed."""
        started = self._step_started  # read once: the engine's thread may set it to None between two reads
        return 0.0 if started is None else self._clock() - started

    def stop(self) -> None:
        """End every sequence with "abort", then the thread; a step that runs is finished first. May be called again.

        A step that hangs is left behind after a while, and its sequences hear nothing: the process must end.
        """
        self._inbox.close()
        if self._thread is not None:
            assert self._thread is not threading.current_thread(), "stop() waits for the thread that called it"
            self._thread.join(self._max_last_step_s)
            if self._thread.is_alive():
                logger.error("the engine's last step hangs and is left behind")

    def _main(self) -> None:
        reason: FinishReason = "abort"
        error = ""
        try:
            if self._cores:
                os.sched_setaffinity(threading.get_native_id(), self._cores)
            if self._on_start is not None:
                self._on_start()
            self._has_begun.set()
            while not self._inbox.is_closed:
                self._turn()
            self._settle()
        except Exception:  # a bug of ours, or the device is lost; a thread that dies in silence would hang every client
            logger.exception("engine loop crashed")
            reason, error = "error", "the engine crashed"
            self._step_started = -math.inf
            if self._in_flight is not None:
                with contextlib.suppress(Exception):  # only that it no longer writes blocks matters now
                    self._in_flight.launched.results()
        self._has_begun.set()
        self._inbox.close()
        for message in self._inbox.take(wait=False):
            if isinstance(message, SequenceSpec):
                self._live[message.sequence_id] = Sequence(message)
        for sequence in self._live.values():
            self._ending[sequence] = (output_of(sequence, has_ended=True, finish_reason=reason, error=error),)
        self._live.clear()
        for sequence, last_words in self._ending.items():
            self._news += last_words
            try:
                self._holdings.end(sequence)
            except AssertionError:  # after a crash the pool may be the thing that is broken; the others must still hear
                logger.exception("the blocks of %s are lost", sequence.spec.sequence_id)
        self._emit(StepResult(outputs=self._news))

    def _turn(self) -> None:
        """Launch one step and settle the one before; or sleep until a message or room comes."""
        if self._in_flight is not None and must_be_known(self._in_flight.plan):
            self._settle()
        plan, counts = self._schedule()
        launched = self._launch(plan, counts) if plan.chunks else None
        before, self._in_flight = self._in_flight, launched
        has_settled = self._settle_step(before)
        if launched is not None and not launched.launched.is_ahead:
            has_settled |= self._settle()
        can_rest = not plan.chunks and not plan.preempted and not has_settled
        if not has_settled:
            self._news += self._intake(self._inbox.take(wait=can_rest))
            if self._news or plan.preempted:
                self._tell(counts if launched is None else {})

    def _settle(self) -> bool:
        """Wait for the step in flight and do what happens at the border after it; False: there is none."""
        step, self._in_flight = self._in_flight, None
        return self._settle_step(step)

    def _settle_step(self, step: InFlight | None) -> bool:
        if step is None:
            return False
        results: list[Sampled] | str
        try:
            with self._at_device(step.started):
                results = step.launched.results()
            assert len(results) == len(step.plan.chunks), f"{len(results)} results for {len(step.plan.chunks)} chunks"
        except DeviceLostError:
            raise
        except Exception as error:  # whatever else a step raises, it concerns the sequences of that step only
            logger.exception("engine step of %d chunks failed", len(step.plan.chunks))
            results = explain(error)
        step_s = self._clock() - max(step.started, self._settled_at)
        self._settled_at = self._clock()
        self._news += self._intake(self._inbox.take(wait=False))
        if isinstance(results, str):
            results = [Sampled(None, error=results)] * len(step.plan.chunks)
        else:
            num_tokens = step.counts["num_prompt_tokens"] + step.counts["num_recomputed_tokens"]
            if num_tokens >= _MIN_MEASURED_TOKENS and step_s > 0:
                self._rates.note_computed(num_tokens, step_s)
        self._news += self._advance(step.plan, results)
        if self._news or step.plan.preempted:
            self._tell(step.counts, step_s)
        return True

    def _tell(self, counts: dict[str, int], step_s: float = 0.0) -> None:
        """Emit what has gathered."""
        outputs, self._news = self._news, []
        waiting = [sequence.num_uncomputed_tokens for sequence in self._live.values() if not sequence.is_decoding]
        self._emit(
            StepResult(
                outputs=outputs,
                num_waiting=len(waiting),
                num_running=len(self._live) - len(waiting),
                num_waiting_tokens=sum(waiting),
                step_s=step_s,
                **counts,
            )
        )

    def _schedule(self) -> tuple[StepPlan, dict[str, int]]:
        """The next plan, with its blocks given and taken; and what `StepResult` says of it."""
        num_skipped = 0
        while True:
            live = [sequence for sequence in self._live.values() if not sequence.is_final]
            computing = [sequence for sequence in live if not sequence.is_decoding]
            with self._pool:
                for sequence in computing:
                    if sequence.has_blocks:
                        num_skipped += self._holdings.skip_cached(sequence)
                plan = self._plan(live, self._limits, self._pool, self._block_tokens)
                if not plan.preempted:
                    num_looked_up, num_found = self._holdings.apply(plan)
                elif self._in_flight is None:
                    self._pool.keep(self._pool.num_total)  # until the plan is carried out: what it counts on stays
            if not plan.preempted or self._in_flight is None:
                break
            self._settle()  # those that yield must be known first, and what ends may make it needless
        with self._at_device(self._clock()):
            if plan.preempted:
                self._holdings.save(plan)
                with self._pool:
                    num_looked_up, num_found = self._holdings.apply(plan)
            self._holdings.load(plan)
        if 0 < len(plan.chunks) < len(self._live):
            in_step = {id(chunk.sequence) for chunk in plan.chunks}
            for sequence in live:
                sequence.num_waited_steps += id(sequence) not in in_step
        known = [chunk for chunk in plan.chunks if not chunk.sequence.is_decoding] if computing else []
        num_known = sum(chunk.num_tokens for chunk in known)
        num_again = sum(chunk.num_tokens for chunk in known if chunk.sequence.num_preemptions)
        return plan, {
            "num_prompt_tokens": num_known - num_again,
            "num_recomputed_tokens": num_again,
            "num_preemptions": len(plan.preempted),
            "num_looked_up_tokens": num_looked_up,
            "num_found_tokens": num_found + num_skipped,
        }

    def _launch(self, plan: StepPlan, counts: dict[str, int]) -> InFlight | None:
        """Give a plan to the runner; None when that failed, which ends the sequences of this plan and no other."""
        started = self._clock()
        try:
            with self._at_device(started):
                launched = self._runner.launch(plan)
        except DeviceLostError:
            raise
        except Exception as error:  # whatever else a step raises, it concerns the sequences of that step only
            logger.exception("engine step of %d chunks failed", len(plan.chunks))
            reason = explain(error)
            self._settle()
            self._news += self._intake(self._inbox.take(wait=False))
            for chunk in plan.chunks:
                if not chunk.sequence.has_ended:
                    self._news += self._end(chunk.sequence, "error", error=reason)
            return None
        for chunk in plan.chunks:
            go_ahead(chunk)
        return InFlight(plan, launched, counts, started)

    @contextlib.contextmanager
    def _at_device(self, since: float) -> Iterator[None]:
        """Whatever may wait for the device: `stalled_s` tells when it does not return."""
        self._step_started = since
        try:
            yield
        finally:
            self._step_started = None

    def _intake(self, messages: list[Message]) -> Iterator[SequenceOutput]:
        """Add and abort sequences; the outputs are of those that this ended."""
        for message in messages:
            if isinstance(message, SequenceSpec):
                self._num_submitted += 1
                sequence = Sequence(message, self._num_submitted)
                finish = finish_reason(sequence)
                num_blocks = -(-sequence.max_total_tokens // self._block_tokens)
                if finish.reason is not None:  # the token it came with ended it already
                    yield from self._end(sequence, finish.reason, matched_stop_id=finish.matched_stop_id)
                elif num_blocks > self._pool.num_total:
                    error = f"the sequence may need {num_blocks} KV blocks; the pool has {self._pool.num_total}"
                    yield from self._end(sequence, "error", error=error)
                else:
                    self._live[message.sequence_id] = sequence
                    self._holdings.publish(sequence)  # what came from elsewhere
            elif (aborted := self._live.get(message)) is not None:
                yield from self._end(aborted, "abort")

    def _advance(self, plan: StepPlan, results: list[Sampled]) -> Iterable[SequenceOutput]:
        """Put a step's results into its sequences; those that ended while it ran get nothing."""
        for chunk, sampled in zip(plan.chunks, results, strict=True):
            sequence, num_tokens = chunk
            start = sequence.num_confirmed_tokens
            sequence.num_unconfirmed_tokens -= num_tokens
            if sequence.has_ended:
                if not sequence.num_unconfirmed_tokens and sequence in self._ending:
                    self._holdings.end(sequence)
                    yield from self._ending.pop(sequence)
                continue
            if sampled.error:
                yield from self._end(sequence, "error", error=sampled.error)
                continue
            prompt_logprobs = new_prompt_logprobs(sequence, start, sampled) if sampled.prompt_logprobs else ()
            self._holdings.publish(sequence)
            if sampled.token_id is None:
                yield output_of(sequence, prompt_logprobs=prompt_logprobs)
                continue
            sequence.token_ids[sequence.num_known_tokens] = sampled.token_id
            sequence.num_awaited_tokens -= 1
            reason, matched_stop_id = finish_reason(sequence)
            if reason is None and not sequence.spec.prefill_only:
                yield output_of(sequence, sampled.token_id, sampled.logprobs, prompt_logprobs)
            else:
                newest = (sampled.token_id, sampled.logprobs, prompt_logprobs)
                yield from self._end(sequence, reason, newest, matched_stop_id=matched_stop_id)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason | None,
        newest: tuple[int | None, TokenLogprobs | None, tuple[TokenLogprobs, ...]] = (None, None, ()),
        matched_stop_id: int | None = None,
        error: str = "",
    ) -> Iterator[SequenceOutput]:
        """The last output of a sequence; lets go of what it had, or sees to it that this happens once no step uses it."""
        self._live.pop(sequence.spec.sequence_id, None)
        output = output_of(sequence, *newest, True, reason, matched_stop_id, error)
        sequence.has_ended = True
        # The output of one that is handed over gives its blocks away: not before nobody writes them.
        is_held_back = sequence.num_unconfirmed_tokens > 0 and sequence.spec.prefill_only
        if sequence.num_unconfirmed_tokens:
            self._ending[sequence] = (output,) if is_held_back else ()
        else:
            self._holdings.end(sequence)
        if not is_held_back:
            yield output

    def _emit(self, result: StepResult) -> None:
        assert self._listener is not None, "emit before start"
        if not result.outputs and not result.num_preemptions:
            return
        try:
            self._listener(result)
        except Exception:  # our bug; losing one step's outputs is better than losing every stream
            logger.exception("engine listener failed on %d outputs", len(result.outputs))
