"""The engine's thread: intake -> plan -> run -> emit, one turn per step.

A sequence is waiting (it has no blocks: not started, or preempted), computing its prompt, decoding, or ended; it ends
exactly once, with one `has_ended` output.
What other threads ask for (`submit`, `abort`, `stop`) goes through an inbox and takes effect at the border between two
steps: when `run` has returned and before its results are emitted. So a step never sees its sequences change, an aborted
sequence gets no more tokens, and the blocks of an ended one are no longer written.

Blocks are given and taken at the same border, in one transaction on the pool: what a plan saw is what it gets.
"""

import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator

from core.clock import Clock, monotonic
from core.errors import BatonError
from core.sequence import (
    BlockMemory,
    FinishReason,
    SequenceOutput,
    SequenceSpec,
    StepListener,
    StepResult,
    TokenLogprobs,
)
from engine.block_pool import BlockPool
from engine.holdings import Holdings
from engine.host_swap import HostSwap, Rates
from engine.plan import Runner, Sampled, StepPlan
from engine.scheduler import Plan, StepLimits, plan_step
from engine.sequence import Sequence
from engine.stopping import finish_reason

logger = logging.getLogger(__name__)

# Fewer prompt tokens in a step say little about how fast they are computed.
_MIN_MEASURED_TOKENS = 64

Message = SequenceSpec | str  # a sequence to add, or the id of one to abort


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
        clock: for `step_s` and `stalled_s`.
    """

    def __init__(
        self,
        runner: Runner,
        limits: StepLimits,
        pool: BlockPool,
        block_tokens: int,
        *,
        swap_memory: tuple[BlockMemory, int] | None = None,
        cores: frozenset[int] = frozenset(),
        plan: Plan = plan_step,
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
        self._clock = clock
        self._num_submitted = 0
        self._inbox = _Inbox()
        self._live: dict[str, Sequence] = {}  # oldest first; changed by the engine's thread only
        self._news: list[SequenceOutput] = []  # of this turn, to be told at its end, or after a crash
        self._listener: StepListener | None = None
        self._thread: threading.Thread | None = None
        self._step_started: float | None = None  # None: no step runs

    def start(self, listener: StepListener) -> None:
        """Begin. `listener` is called in the engine's thread after every step; it must not block.

        An exception of the listener is logged and the engine goes on: one step's outputs are lost, not the engine.
        """
        assert self._thread is None, "an engine starts once"
        self._pool.when_room(self._inbox.wake)
        self._listener = listener
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

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
            self._emit(StepResult(outputs=[self._ended(Sequence(spec), "abort")]))

    def abort(self, sequence_id: str) -> None:
        """End a sequence at the next step border with finish_reason "abort"; unknown or ended ids are ignored."""
        self._inbox.put(sequence_id)

    def stalled_s(self) -> float:
        """Seconds the current step has been running; 0 when idle, infinity once the loop itself has crashed."""
        started = self._step_started  # read once: the engine's thread may set it to None between two reads
        return 0.0 if started is None else self._clock() - started

    def stop(self) -> None:
        """End every sequence with "abort", then the thread; a step that runs is finished first. May be called again."""
        self._inbox.close()
        if self._thread is not None:
            assert self._thread is not threading.current_thread(), "stop() waits for the thread that called it"
            self._thread.join()

    def _main(self) -> None:
        reason: FinishReason = "abort"
        error = ""
        try:
            if self._cores:
                os.sched_setaffinity(threading.get_native_id(), self._cores)
            while not self._inbox.is_closed:
                self._turn()
        except Exception:  # a bug in this file or in the plan; a thread that dies in silence would hang every client
            logger.exception("engine loop crashed")
            reason, error = "error", "the engine crashed"
            self._step_started = -math.inf
        self._inbox.close()
        for message in self._inbox.take(wait=False):
            if isinstance(message, SequenceSpec):
                self._live[message.sequence_id] = Sequence(message)
        for sequence in self._live.values():
            self._news.append(self._output(sequence, has_ended=True, finish_reason=reason, error=error))
            try:
                self._holdings.end(sequence)
            except AssertionError:  # after a crash the pool may be the thing that is broken; the others must still hear
                logger.exception("the blocks of %s are lost", sequence.spec.sequence_id)
        self._live.clear()
        self._emit(StepResult(outputs=self._news))

    def _turn(self) -> None:
        """One step, or a sleep until a message or room comes, and everything that happens at the border after it."""
        plan, counts = self._schedule()
        results: list[Sampled] | str = []
        step_s = 0.0
        if plan.chunks:
            self._step_started = started = self._clock()
            results = self._run(plan)
            self._step_started = None
            step_s = self._clock() - started
        can_rest = not plan.chunks and not plan.preempted
        self._news += self._intake(self._inbox.take(wait=can_rest))
        if isinstance(results, str):
            self._news += self._fail(plan, results)
        else:
            self._measure(counts["num_prompt_tokens"] + counts["num_recomputed_tokens"], step_s)
            self._news += self._advance(plan, results)
        outputs, self._news = self._news, []
        if outputs or plan.preempted:
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
        computing = [sequence for sequence in self._live.values() if not sequence.is_decoding]
        with self._pool:
            for sequence in computing:
                if sequence.has_blocks:
                    num_skipped += self._holdings.skip_cached(sequence)
            plan = self._plan(self._live.values(), self._limits, self._pool, self._block_tokens)
            if plan.preempted:
                self._pool.keep(self._pool.num_total)  # until the plan is carried out: what it counts on stays
            else:
                num_looked_up, num_found = self._holdings.apply(plan)
        if plan.preempted:
            self._holdings.save(plan)
            with self._pool:
                num_looked_up, num_found = self._holdings.apply(plan)
        self._holdings.load(plan)
        if 0 < len(plan.chunks) < len(self._live):
            in_step = {id(chunk.sequence) for chunk in plan.chunks}
            for sequence in self._live.values():
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

    def _run(self, plan: StepPlan) -> list[Sampled] | str:
        """The runner's results, or the error that ends the sequences of this plan and no other."""
        try:
            results = self._runner.run(plan)
            assert len(results) == len(plan.chunks), f"runner gave {len(results)} results for {len(plan.chunks)} chunks"
        except BatonError as error:
            logger.exception("engine step of %d chunks failed", len(plan.chunks))
            return str(error)
        except Exception as error:  # whatever a step raises, it concerns the sequences of that step only
            logger.exception("engine step of %d chunks failed", len(plan.chunks))
            # Only the type leaves the worker: a foreign message may quote the request.
            return f"engine step failed: {type(error).__name__}"
        return results

    def _measure(self, num_tokens: int, step_s: float) -> None:
        if num_tokens >= _MIN_MEASURED_TOKENS and step_s > 0:
            self._rates.note_computed(num_tokens, step_s)

    def _intake(self, messages: list[Message]) -> Iterator[SequenceOutput]:
        """Add and abort sequences; the outputs are of those that this ended."""
        for message in messages:
            if isinstance(message, SequenceSpec):
                self._num_submitted += 1
                sequence = Sequence(message, self._num_submitted)
                finish = finish_reason(sequence)
                num_blocks = -(-sequence.max_total_tokens // self._block_tokens)
                if finish.reason is not None:  # the token it came with ended it already
                    yield self._ended(sequence, finish.reason, matched_stop_id=finish.matched_stop_id)
                elif num_blocks > self._pool.num_total:
                    error = f"the sequence may need {num_blocks} KV blocks; the pool has {self._pool.num_total}"
                    yield self._ended(sequence, "error", error)
                else:
                    self._live[message.sequence_id] = sequence
                    self._holdings.publish(sequence)  # what came from elsewhere
            elif (aborted := self._live.pop(message, None)) is not None:
                yield self._ended(aborted, "abort")

    def _advance(self, plan: StepPlan, results: list[Sampled]) -> Iterable[SequenceOutput]:
        """Put a step's results into its sequences; those aborted while it ran get nothing."""
        for chunk, sampled in zip(plan.chunks, results, strict=True):
            sequence, num_tokens = chunk
            sequence_id = sequence.spec.sequence_id
            if self._live.get(sequence_id) is not sequence:
                continue
            if sampled.error:
                del self._live[sequence_id]
                yield self._ended(sequence, "error", sampled.error)
                continue
            prompt_logprobs = _news(sequence, sampled) if sampled.prompt_logprobs else ()
            sequence.num_computed_tokens += num_tokens
            self._holdings.publish(sequence)
            if sampled.token_id is None:
                yield self._output(sequence, prompt_logprobs=prompt_logprobs)
                continue
            sequence.token_ids.append(sampled.token_id)
            finish = finish_reason(sequence)
            has_ended = finish.reason is not None or sequence.spec.prefill_only
            output = self._output(sequence, sampled.token_id, sampled.logprobs, prompt_logprobs, has_ended, *finish)
            if has_ended:
                del self._live[sequence_id]
                self._holdings.end(sequence)
            yield output

    def _fail(self, plan: StepPlan, error: str) -> Iterator[SequenceOutput]:
        """End the sequences of a step that failed; the others go on."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if self._live.get(sequence.spec.sequence_id) is sequence:
                del self._live[sequence.spec.sequence_id]
                yield self._ended(sequence, "error", error)

    def _ended(
        self, sequence: Sequence, reason: FinishReason, error: str = "", matched_stop_id: int | None = None
    ) -> SequenceOutput:
        """The last output of a sequence that is not live any more; lets go of what it had."""
        output = self._output(
            sequence, has_ended=True, finish_reason=reason, matched_stop_id=matched_stop_id, error=error
        )
        self._holdings.end(sequence)
        return output

    def _output(
        self,
        sequence: Sequence,
        token_id: int | None = None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
        has_ended: bool = False,
        finish_reason: FinishReason | None = None,
        matched_stop_id: int | None = None,
        error: str = "",
    ) -> SequenceOutput:
        spec = sequence.spec
        return SequenceOutput(
            sequence_id=spec.sequence_id,
            token_ids=() if token_id is None else (token_id,),
            logprobs=() if logprobs is None else (logprobs,),
            prompt_logprobs=prompt_logprobs,
            num_computed_tokens=sequence.num_computed_tokens,
            num_cached_tokens=min(sequence.num_cached_tokens, sequence.num_prompt_tokens - 1),
            block_table=tuple(sequence.block_table) if spec.prefill_only else (),
            has_ended=has_ended,
            finish_reason=finish_reason,
            matched_stop_id=matched_stop_id,
            error=error,
        )

    def _emit(self, result: StepResult) -> None:
        assert self._listener is not None, "emit before start"
        if not result.outputs and not result.num_preemptions:
            return
        try:
            self._listener(result)
        except Exception:  # our bug; losing one step's outputs is better than losing every stream
            logger.exception("engine listener failed on %d outputs", len(result.outputs))


class _Inbox:
    """Messages to the engine's thread, in order. Closed, it refuses new ones and still gives out those it has."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._is_woken = False
        self.is_closed = False

    def put(self, message: Message) -> bool:
        """Add one message; False when closed."""
        with self._changed:
            if not self.is_closed:
                self._messages.append(message)
                self._changed.notify()
            return not self.is_closed

    def wake(self) -> None:
        """End the next or the present wait of `take` without a message: something else changed."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def take(self, *, wait: bool) -> list[Message]:
        """All messages; with `wait`, sleeps until there is one, or `wake`, or the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._is_woken or self.is_closed or not wait)
            self._is_woken = False
            messages, self._messages = self._messages, []
            return messages

    def close(self) -> None:
        """Refuse messages from now on and wake the reader."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()


def _news(sequence: Sequence, sampled: Sampled) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of prompt tokens that were not given out before: a preempted prompt is computed twice."""
    num_known = sequence.num_prompt_logprobs - sequence.num_computed_tokens  # entry i is of the token after position i
    sequence.num_prompt_logprobs = max(
        sequence.num_prompt_logprobs, sequence.num_computed_tokens + len(sampled.prompt_logprobs)
    )
    return sampled.prompt_logprobs[max(num_known, 0) :]
