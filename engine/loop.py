"""The engine's thread: intake -> plan -> run -> emit, one turn per step.

A sequence is waiting (prompt not computed), decoding, or ended; it ends exactly once, with one `has_ended` output.
What other threads ask for (`submit`, `abort`, `stop`) goes through an inbox and takes effect at the border between two
steps: when `run` has returned and before its results are emitted. So a step never sees its sequences change, an aborted
sequence gets no more tokens, and the blocks of an ended one are no longer written.
"""

import logging
import math
import threading
from collections.abc import Iterator

from core.clock import Clock, monotonic
from core.errors import BatonError
from core.sequence import FinishReason, SequenceOutput, SequenceSpec, StepListener, StepResult
from engine.plan import Runner, Sampled, StepPlan
from engine.scheduler import Plan, StepLimits, plan_step
from engine.sequence import Sequence
from engine.stopping import finish_reason

logger = logging.getLogger(__name__)

Message = SequenceSpec | str  # a sequence to add, or the id of one to abort


class EngineLoop:
    """`core.sequence.Engine` over any runner.

    The number of sequences is not limited here: each comes with its blocks reserved, so there are never more of them
    than the pool has blocks, and a service that wants a shorter queue refuses before it reserves.

    Args:
        runner: computes plans; only the engine's thread calls it.
        limits: of one step.
        plan: chooses a step; `plan_step` unless a worker needs another order.
        clock: for `step_s` and `stalled_s`.
    """

    def __init__(self, runner: Runner, limits: StepLimits, plan: Plan = plan_step, clock: Clock = monotonic) -> None:
        self._runner = runner
        self._limits = limits
        self._plan = plan
        self._clock = clock
        self._inbox = _Inbox()
        self._live: dict[str, Sequence] = {}  # oldest first; changed by the engine's thread only
        self._listener: StepListener | None = None
        self._thread: threading.Thread | None = None
        self._step_started: float | None = None  # None: no step runs

    def start(self, listener: StepListener) -> None:
        """Begin. `listener` is called in the engine's thread after every step; it must not block.

        An exception of the listener is logged and the engine goes on: one step's outputs are lost, not the engine.
        """
        assert self._thread is None, "an engine starts once"
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
        assert spec.num_computed_tokens < len(spec.prompt) + len(spec.output), f"{spec.sequence_id}: nothing to compute"
        assert spec.sequence_id not in self._live, f"{spec.sequence_id} is running"
        if not self._inbox.put(spec):
            self._emit(StepResult(outputs=[_ended(Sequence(spec), "abort")]))

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
            while not self._inbox.is_closed:
                self._turn()
        except Exception:  # a bug in this file or in the plan; a thread that dies in silence would hang every client
            logger.exception("engine loop crashed")
            reason, error = "error", "the engine crashed"
            self._step_started = -math.inf
        self._inbox.close()
        outputs = self._intake(self._inbox.take(wait=False))
        outputs += [_ended(sequence, reason, error) for sequence in self._live.values()]
        self._live.clear()
        self._emit(StepResult(outputs=outputs))

    def _turn(self) -> None:
        """One step, or a sleep until a message comes, and everything that happens at the border after it."""
        plan = self._plan(self._live.values(), self._limits)
        results: list[Sampled] | str = []
        step_s = 0.0
        if plan.chunks:
            self._step_started = started = self._clock()
            results = self._run(plan)
            self._step_started = None
            step_s = self._clock() - started
        outputs = self._intake(self._inbox.take(wait=not plan.chunks))
        if isinstance(results, str):
            outputs += self._fail(plan, results)
        else:
            outputs += self._advance(plan, results)
        if outputs:
            self._emit(self._result(outputs, step_s))

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

    def _intake(self, messages: list[Message]) -> list[SequenceOutput]:
        """Add and abort sequences; returns the outputs of those that this ended."""
        outputs = []
        for message in messages:
            if isinstance(message, SequenceSpec):
                sequence = Sequence(message)
                finish = finish_reason(sequence)
                if finish.reason is None:
                    self._live[message.sequence_id] = sequence
                else:  # the token it came with ended it already
                    outputs.append(_ended(sequence, finish.reason, matched_stop_id=finish.matched_stop_id))
            elif (aborted := self._live.pop(message, None)) is not None:
                outputs.append(_ended(aborted, "abort"))
        return outputs

    def _advance(self, plan: StepPlan, results: list[Sampled]) -> Iterator[SequenceOutput]:
        """Put a step's results into its sequences; those aborted while it ran get nothing."""
        for chunk, sampled in zip(plan.chunks, results, strict=True):
            sequence = chunk.sequence
            if sequence.spec.sequence_id not in self._live:
                continue
            sequence.num_computed_tokens += chunk.num_tokens
            if sampled.error:
                del self._live[sequence.spec.sequence_id]
                yield _ended(sequence, "error", sampled.error)
                continue
            if sampled.token_id is None:
                yield SequenceOutput(
                    sequence_id=sequence.spec.sequence_id,
                    num_computed_tokens=sequence.num_computed_tokens,
                    prompt_logprobs=sampled.prompt_logprobs,
                )
                continue
            sequence.token_ids.append(sampled.token_id)
            finish = finish_reason(sequence)
            has_ended = finish.reason is not None or sequence.spec.prefill_only
            if has_ended:
                del self._live[sequence.spec.sequence_id]
            yield SequenceOutput(
                sequence_id=sequence.spec.sequence_id,
                token_ids=(sampled.token_id,),
                logprobs=() if sampled.logprobs is None else (sampled.logprobs,),
                prompt_logprobs=sampled.prompt_logprobs,
                num_computed_tokens=sequence.num_computed_tokens,
                has_ended=has_ended,
                finish_reason=finish.reason,
                matched_stop_id=finish.matched_stop_id,
            )

    def _fail(self, plan: StepPlan, error: str) -> Iterator[SequenceOutput]:
        """End the sequences of a step that failed; the others go on."""
        for chunk in plan.chunks:
            if self._live.pop(chunk.sequence.spec.sequence_id, None) is not None:
                yield _ended(chunk.sequence, "error", error)

    def _result(self, outputs: list[SequenceOutput], step_s: float) -> StepResult:
        waiting = [sequence.num_uncomputed_tokens for sequence in self._live.values() if not sequence.is_decoding]
        return StepResult(
            outputs=outputs,
            num_waiting=len(waiting),
            num_running=len(self._live) - len(waiting),
            num_waiting_tokens=sum(waiting),
            step_s=step_s,
        )

    def _emit(self, result: StepResult) -> None:
        assert self._listener is not None, "emit before start"
        if not result.outputs:
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
        self.is_closed = False

    def put(self, message: Message) -> bool:
        """Add one message; False when closed."""
        with self._changed:
            if not self.is_closed:
                self._messages.append(message)
                self._changed.notify()
            return not self.is_closed

    def take(self, *, wait: bool) -> list[Message]:
        """All messages; with `wait`, sleeps until there is one or the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self.is_closed or not wait)
            messages, self._messages = self._messages, []
            return messages

    def close(self) -> None:
        """Refuse messages from now on and wake the reader."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()


def _ended(
    sequence: Sequence, reason: FinishReason, error: str = "", matched_stop_id: int | None = None
) -> SequenceOutput:
    return SequenceOutput(
        sequence_id=sequence.spec.sequence_id,
        num_computed_tokens=sequence.num_computed_tokens,
        has_ended=True,
        finish_reason=reason,
        matched_stop_id=matched_stop_id,
        error=error,
    )
