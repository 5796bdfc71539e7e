"""An engine under random requests, cancels, transfers and failures, with everything that must hold checked at every step.

All parts are real but the arithmetic. Everything happens in the engine's thread, inside `plan` and `run`, so a seed says
what happens. What other threads would do to the pool is done between two steps, where the engine has let go of it.
"""

import mmap
import random
import threading
from array import array
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import fields, replace
from functools import cache
from typing import NamedTuple

from core.clock import ManualClock
from core.errors import CapacityError
from core.hashing import hash_blocks
from core.layout import growth_blocks
from core.sampling import SamplingParams
from core.sequence import SequenceOutput, SequenceSpec, StepResult
from engine.loop import EngineLoop
from engine.plan import Launched, Sampled, StepPlan
from engine.scheduler import AGEING_STEPS, Room, StepLimits, plan_step
from engine.scripted import DIGEST_BYTES, expected_tokens, scripted_engine, scripted_layout
from engine.sequence import Sequence
from tests.engine_harness import content, fill

BLOCK = 4  # tokens
BLOCK_BYTES = BLOCK * DIGEST_BYTES
PREFIXES = [tuple(range(start, start + length)) for start, length in ((10, 9), (40, 16), (70, 23), (100, 4))]
MAX_ANSWER = 24
SEED = b"random engine"
DRAIN_EVERY = 300  # operations


@cache
def full_answer(prompt: tuple[int, ...]) -> list[int]:
    return expected_tokens(prompt, MAX_ANSWER, layout=scripted_layout(BLOCK))


class Hold(NamedTuple):
    """What a transfer has in the pool."""

    spec: SequenceSpec | None  # to be adopted; None: it was, or it is being sent elsewhere
    blocks: tuple[int, ...]
    promise: int = 0


class RandomEngine:
    """Run it once.

    Args:
        seed: of everything.
        num_operations: submits, cancels, holds, hand-overs, releases and steps.
        num_swap_blocks: of host memory for preempted sequences.
        num_priorities: from 0 up.
    """

    def __init__(
        self, seed: int, num_operations: int, num_swap_blocks: int, num_priorities: int, is_ahead: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.num_operations = num_operations
        self.num_priorities = num_priorities
        self.num_swap_blocks = num_swap_blocks
        max_sequences = self.rng.randint(2, 10)
        self.limits = StepLimits(
            max_batched_tokens=max_sequences + self.rng.randint(0, 20), max_sequences=max_sequences
        )
        self.parts = scripted_engine(num_blocks=self.rng.randint(14, 40), layout=scripted_layout(BLOCK))
        self.parts.runner.is_ahead = is_ahead
        self.pool = self.parts.pool
        swap_memory = (self.parts.memory, num_swap_blocks * mmap.PAGESIZE) if num_swap_blocks else None
        self.loop = EngineLoop(
            self, self.limits, self.pool, BLOCK, swap_memory=swap_memory, plan=self.plan, clock=ManualClock()
        )
        self.done = threading.Event()
        self.failure: BaseException | None = None
        self.counts: Counter[str] = Counter()  # of operations, and of what happened
        self.live: dict[str, Sequence] = {}
        self.ending: list[Sequence] = []  # a step in flight still writes their blocks
        self.specs: dict[str, SequenceSpec] = {}  # of sequences that have not ended
        self.aborted: set[str] = set()
        self.failed: set[str] = set()
        self.tokens: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[int]] = {}
        self.holds: list[Hold] = []
        self.num_steps_left = 0
        self.tables_before: dict[int, list[int]] = {}
        self.max_preemptions = 0
        self.is_draining = False

    def go(self) -> None:
        """Run to the end; raises what went wrong."""
        self.loop.start(self.listen)
        self.loop.abort("nobody")
        assert self.done.wait(250), "never done"
        self.loop.stop()
        if self.failure is not None:
            raise self.failure

    # In the engine's thread: before a step, in it, after it.

    def plan(self, sequences: Iterable[Sequence], limits: StepLimits, room: Room, block_tokens: int) -> StepPlan:
        try:
            return self._plan(list(sequences), limits, room, block_tokens)
        except BaseException as error:
            self.failure = error
            self.done.set()
            raise

    def _plan(self, sequences: list[Sequence], limits: StepLimits, room: Room, block_tokens: int) -> StepPlan:
        self.live = dict(self.loop._live)
        self.ending = list(self.loop._ending)
        assert sequences == [sequence for sequence in self.live.values() if not sequence.is_final]
        self.check_books()
        self.decide_whether_to_drain()
        if not self.done.is_set():
            self.act()
            self.loop.abort("nobody")  # so that the loop never sleeps
        before = self.state()
        plan = plan_step(sequences, limits, room, block_tokens)
        assert self.state() == before, "planning changed something"
        self.check_plan(plan)
        self.tables_before = {id(sequence): list(sequence.block_table) for sequence in sequences}
        self.counts["step"] += bool(plan.chunks)
        return plan

    def launch(self, plan: StepPlan) -> Launched:
        try:
            self.check_applied(plan)
            if not self.is_draining and self.rng.random() < 0.003:
                self.failed |= {chunk.sequence.spec.sequence_id for chunk in plan.chunks}
                raise RuntimeError("a step that fails, as some do")
            if not self.is_draining and self.rng.random() < 0.003:
                self.failed |= {chunk.sequence.spec.sequence_id for chunk in plan.chunks}
                return FailsLater(self.parts.runner.is_ahead)
            return self.parts.runner.launch(plan)
        except AssertionError as error:
            self.failure = error
            self.done.set()
            raise

    def listen(self, result: StepResult) -> None:
        try:
            for output in result.outputs:
                self.take(output)
        except BaseException as error:
            self.failure = error
            self.done.set()
            raise

    def decide_whether_to_drain(self) -> None:
        """From time to time nothing new comes, and all that is there must end; the cache outlives it."""
        num_done = sum(self.counts[name] for name in (*OPERATIONS, "step"))
        if not self.is_draining:
            if num_done < min((self.counts["drain"] + 1) * DRAIN_EVERY, self.num_operations):
                return
            self.is_draining = True
            self.counts["drain"] += 1
            # Each step computes at least one token, if need be again.
            self.num_steps_left = 8 + 4 * sum(len(spec.prompt) + MAX_ANSWER for spec in self.specs.values())
        while self.holds:
            self.release()
        self.num_steps_left -= 1
        assert self.num_steps_left > 0, f"{len(self.specs)} sequences do not end"
        if not self.specs:
            assert self.pool.num_available == self.pool.num_total
            self.is_draining = False
            if num_done >= self.num_operations:
                self.done.set()

    # What may happen.

    def act(self) -> None:
        if self.is_draining:
            return
        for _ in range(self.rng.choice((0, 1, 1, 2, 4))):
            name = self.rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
            getattr(self, name)()
            self.counts[name] += 1

    def a_spec(self, prefill_only: bool = False) -> SequenceSpec:
        prompt = self.rng.choice(PREFIXES)
        prompt = prompt[: self.rng.choice((len(prompt), len(prompt), self.rng.randint(1, len(prompt))))]
        prompt += (200 + self.rng.randint(0, 3),) * self.rng.choice((0, 0, 1, 3, 6))
        name = f"s{self.counts['named']}"
        self.counts["named"] += 1
        return SequenceSpec(
            sequence_id=name,
            prompt=prompt,
            sampling=SamplingParams(
                temperature=0.0,
                seed=0,
                max_tokens=self.rng.randint(1, MAX_ANSWER),
                prompt_logprobs=0 if self.rng.random() < 0.1 else None,
            ),
            eos_token_ids=(),
            priority=self.rng.randrange(self.num_priorities),
            hash_seed=None if self.rng.random() < 0.05 else SEED,
            prefill_only=prefill_only,
        )

    def submit(self) -> None:
        """A request for this engine alone, or for the prefill side of a transfer."""
        if len(self.specs) < 3 * self.limits.max_sequences:
            self.send(self.a_spec(prefill_only=self.rng.random() < 0.2))

    def send(self, spec: SequenceSpec) -> None:
        self.specs[spec.sequence_id] = spec
        self.tokens[spec.sequence_id] = list(spec.output)
        self.prompt_logprobs[spec.sequence_id] = []
        self.loop.submit(spec)

    def cancel(self) -> None:
        ending = {sequence.spec.sequence_id for sequence in self.loop._ending}
        if names := [name for name in self.specs if name not in ending]:
            name = self.rng.choice(names)
            self.aborted.add(name)
            self.loop.abort(name)

    def reserve(self) -> None:
        """Decode's side of a transfer: hold blocks, and let their content come."""
        spec = self.a_spec()
        num_tokens, max_tokens = len(spec.prompt), spec.sampling.max_tokens
        assert max_tokens is not None
        if len(self.holds) > 4 or spec.sampling.prompt_logprobs is not None or max_tokens < 2:
            return
        hashes = [] if spec.hash_seed is None else hash_blocks(spec.hash_seed, spec.prompt, BLOCK)
        promise = growth_blocks(num_tokens, num_tokens + max_tokens, BLOCK)
        try:
            blocks, num_cached = self.pool.admit(-(-num_tokens // BLOCK), hashes, promise)
        except CapacityError:
            return
        self.check_content(spec.prompt[: num_cached * BLOCK], blocks)
        fill(self.parts, spec.prompt, blocks, num_cached)
        self.holds.append(Hold(spec, tuple(blocks), promise))

    def adopt(self) -> None:
        """A transfer is complete: the engine goes on with it, while its end is still to come."""
        waiting = [hold for hold in self.holds if hold.spec is not None]
        if not waiting:
            return
        hold = self.rng.choice(waiting)
        spec, blocks, promise = hold
        assert spec is not None
        self.holds[self.holds.index(hold)] = Hold(None, blocks)
        self.pool.share(blocks)
        num_computed, first = len(spec.prompt), full_answer(spec.prompt)[0]
        self.send(
            replace(
                spec,
                block_table=blocks,
                num_promised_blocks=promise,
                num_computed_tokens=num_computed,
                output=(first,),
            )
        )

    def release(self) -> None:
        """A transfer ends, adopted or not, sent or received."""
        if self.holds:
            _, blocks, promise = self.holds.pop(self.rng.randrange(len(self.holds)))
            self.pool.release(blocks, promise)

    def take(self, output: SequenceOutput) -> None:
        """One output, as a service gets it."""
        name = output.sequence_id
        spec, tokens = self.specs[name], self.tokens[name]
        tokens += output.token_ids
        self.prompt_logprobs[name] += [entry.token_id for entry in output.prompt_logprobs]
        assert tokens == full_answer(spec.prompt)[: len(tokens)], f"{name}: wrong token"
        assert output.num_cached_tokens < len(spec.prompt)
        if not output.has_ended:
            return
        del self.specs[name]
        self.counts[str(output.finish_reason)] += 1
        assert (output.finish_reason == "abort") == (name in self.aborted)
        assert (output.finish_reason == "error") == (name in self.failed - self.aborted), output.error
        if output.finish_reason in (None, "length"):
            assert len(tokens) == (1 if spec.prefill_only else spec.sampling.max_tokens)
            if spec.sampling.prompt_logprobs is not None:
                assert self.prompt_logprobs[name] == list(spec.prompt[1:])
        if spec.prefill_only:
            self.holds.append(Hold(None, output.block_table))
        else:
            assert not output.block_table

    # What must hold.

    def check_books(self) -> None:
        """At the border of two steps: who has what, and how often."""
        self.pool.check()
        tables = [sequence.block_table for sequence in (*self.live.values(), *self.ending)]
        tables += [array("i", hold.blocks) for hold in self.holds]
        references = Counter(block for table in tables for block in table)
        assert self.pool.num_free == self.pool.num_total - len(references)
        assert self.pool.count_freed(references.elements()) == len(references), "a reference too many or too few"
        promises = sum(s.num_promised_blocks for s in (*self.live.values(), *self.ending)) + sum(
            hold.promise for hold in self.holds
        )
        assert self.pool.num_free - self.pool.num_available == promises
        slots = [slot for sequence in self.live.values() for slot in sequence.swap_slots]
        assert len(slots) == len(set(slots)) <= self.num_swap_blocks
        for sequence in self.live.values():
            assert not (sequence.has_blocks and sequence.swap_slots)
            assert sequence.num_computed_tokens < len(sequence.token_ids)
            if sequence.has_blocks:
                assert len(sequence.token_ids) - 1 <= len(sequence.block_table) * BLOCK
            else:
                assert len(sequence.swap_slots) == -(-sequence.num_computed_tokens // BLOCK)
            self.max_preemptions = max(self.max_preemptions, sequence.num_preemptions)

    def state(self) -> list[object]:
        pool = (self.pool.num_free, self.pool.num_available, self.pool.num_cached, self.pool.num_admissible)
        names = [field.name for field in fields(Sequence) if field.name not in ("spec", "_hashes")]  # frozen; a memo
        return [pool, *(copy(getattr(sequence, name)) for sequence in self.live.values() for name in names)]

    def check_plan(self, plan: StepPlan) -> None:
        ranked = sorted((s for s in self.live.values() if not s.is_final), key=rank)
        started = [sequence for sequence in ranked if sequence.has_blocks]
        running = [s for s in started if s not in plan.preempted][: self.limits.max_sequences]
        planned = [chunk.sequence for chunk in plan.chunks]
        assert len({id(sequence) for sequence in planned}) == len(planned) <= self.limits.max_sequences
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= self.limits.max_batched_tokens
        assert all(chunk.num_tokens > 0 for chunk in plan.chunks)
        assert len(running) + len(plan.starts) <= self.limits.max_sequences
        assert {id(s) for s in planned} <= {id(s) for s in running} | {id(start.sequence) for start in plan.starts}
        assert {id(start.sequence) for start in plan.starts} <= {id(s) for s in planned}
        assert not any(sequence.spec.prefill_only for sequence in plan.preempted)
        decodes = [s for s in started[: self.limits.max_sequences] if s.is_decoding and s not in plan.preempted]
        assert planned[: len(decodes)] == decodes, "a decoding sequence is left out"
        prompts = plan.chunks[len(decodes) :]
        assert list(prompts) == sorted(prompts, key=lambda chunk: (chunk.num_tokens > 1, rank(chunk.sequence)))
        computing = [sequence for sequence in running if not sequence.is_decoding]
        if computing:
            first = min(prompts, key=lambda chunk: rank(chunk.sequence))
            assert rank(first.sequence) <= rank(computing[0]), "the first prompt is left out"
            if first.sequence is computing[0]:
                half = -(-(self.limits.max_batched_tokens - len(decodes)) // 2)
                assert first.num_tokens >= min(half, computing[0].num_uncomputed_tokens)
        if ranked and (started or not self.holds) and not self.ending and len(ranked) == len(self.live):
            assert plan.chunks or plan.preempted, "nothing moves"

    def check_applied(self, plan: StepPlan) -> None:
        """Just before a step writes."""
        for victim in plan.preempted:
            table = self.tables_before[id(victim)]
            assert not victim.has_blocks
            assert len(victim.swap_slots) in (0, -(-victim.num_computed_tokens // BLOCK))
            self.counts["swapped" if victim.swap_slots else "dropped"] += 1
            num_free = self.num_swap_blocks - sum(len(sequence.swap_slots) for sequence in self.live.values())
            assert victim.swap_slots or num_free < len(table), "a slot is lost"
        everyone = (*self.live.values(), *self.ending)
        holders = Counter(block for sequence in everyone for block in sequence.block_table)
        for chunk in plan.chunks:
            sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
            end = start + chunk.num_tokens
            assert end <= len(sequence.token_ids)
            assert end <= len(sequence.block_table) * BLOCK, "tokens without a block"
            written = sequence.block_table[start // BLOCK : -(-end // BLOCK)]
            assert all(holders[block] == 1 for block in written), "two sequences write one block"
            assert sequence.num_published_blocks <= start // BLOCK
            self.check_content(sequence.token_ids[: sequence.num_confirmed_tokens], sequence.block_table)

    def check_content(self, token_ids: Seq[int], table: Seq[int]) -> None:
        expected = content(tuple(token_ids))
        for start in range(0, len(expected), BLOCK_BYTES):
            part = expected[start : start + BLOCK_BYTES]
            held = self.parts.memory.view(table[start // BLOCK_BYTES])[: len(part)]
            assert held == part, "a block holds something else"


class FailsLater:
    """A step that was launched, and of which nothing came back."""

    def __init__(self, is_ahead: bool) -> None:
        self.is_ahead = is_ahead

    def results(self) -> list[Sampled]:
        raise RuntimeError("a step that fails on the device, as some do")


OPERATIONS = {"submit": 8, "cancel": 1, "reserve": 3, "adopt": 3, "release": 4}  # with weights


def rank(sequence: Sequence) -> tuple[int, int]:
    return -sequence.spec.priority - sequence.num_waited_steps // AGEING_STEPS, sequence.number
