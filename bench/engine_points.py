"""What `bench.engine` times: decode steps and prompts on the runner alone, and decoding through the whole engine loop.

Contexts are not computed: their KV blocks hold random numbers, all blocks the same, each in memory of its own. How long a
step takes does not depend on the values, only on where they lie. (Zeroed memory would not do: until it is written, all
of it is one page of the kernel's, and always in the cache.)
"""

import random
import threading
import time
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bench.ceilings import Costs, Work
from core.errors import InternalError
from core.model_config import ModelConfig
from core.sampling import SamplingParams
from core.sequence import SequenceSpec, StepResult
from engine.batch import Batch, Decoder, Logits
from engine.block_pool import BlockPool
from engine.build import BuiltEngine
from engine.loop import EngineLoop
from engine.plan import Chunk, StepPlan
from engine.scheduler import StepLimits
from engine.sequence import Sequence
from engine.torch_runner import TorchRunner

MIN_STEPS = 2  # timed in one visit, however long they take
LOOP_TIMEOUT_S = 600.0


class Sample(NamedTuple):
    """One timed step or prompt."""

    seconds: float
    cpu_s: float  # of all threads
    model_s: float  # of the seconds, those inside the decoder


class TimedDecoder:
    """A decoder that adds up the time spent in it."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._spent_s = 0.0

    @property
    def dtype(self) -> torch.dtype:
        """Of the KV."""
        return self._decoder.dtype

    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """See `Decoder`."""
        began = time.perf_counter()
        hidden = self._decoder.forward(batch, cache)
        self._spent_s += time.perf_counter() - began
        return hidden

    def logits(self, hidden: Tensor) -> Logits:
        """See `Decoder`."""
        began = time.perf_counter()
        logits = self._decoder.logits(hidden)
        self._spent_s += time.perf_counter() - began
        return logits

    def take_s(self) -> float:
        """Seconds since it was last asked."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


class Rig:
    """A built engine with its decoder timed, and blocks to put sequences in.

    Args:
        built: the engine; its own loop is not used.
        num_blocks: of its memory, to be filled.
        limits: of one step.
        visit_s: how long a point is timed at a time.
    """

    def __init__(self, built: BuiltEngine, num_blocks: int, limits: StepLimits, visit_s: float) -> None:
        self.visit_s = visit_s
        self.blocks_for = built.layout.blocks_for
        self.pool = BlockPool(num_blocks)
        self.decoder = TimedDecoder(built.model)
        self.steps = _Steps()
        self._runner = TorchRunner(self.decoder, built.cache)
        self.loop = EngineLoop(self._runner, limits, self.pool, built.layout.block_tokens)
        self.loop.start(self._note_step)
        self._prompt = tuple(random.choices(range(built.config.vocab_size), k=built.config.max_context_tokens))  # noqa: S311
        blocks = built.cache[:num_blocks]
        blocks.copy_(torch.randn(blocks.shape[1:]))

    def close(self) -> None:
        """Stop the loop."""
        self.loop.stop()

    def spec(
        self, name: str, num_prompt_tokens: int, num_decodes: int, blocks: list[int], promise: int
    ) -> SequenceSpec:
        """A greedy sequence of random tokens; one that decodes (`num_decodes` above 0) has its prompt computed already."""
        is_decoding = num_decodes > 0
        return SequenceSpec(
            sequence_id=name,
            prompt=self._prompt[:num_prompt_tokens],
            sampling=SamplingParams(temperature=0.0, max_tokens=num_decodes + 1, seed=0),
            eos_token_ids=(),
            block_table=tuple(blocks),
            num_promised_blocks=promise,
            num_computed_tokens=num_prompt_tokens if is_decoding else 0,
            output=self._prompt[:1] if is_decoding else (),
        )

    def time(self, plan: StepPlan) -> Sample:
        """Run one step.

        Raises:
            InternalError: it failed.
        """
        self.decoder.take_s()
        began, began_cpu = time.perf_counter(), time.process_time()
        results = self._runner.run(plan)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        if errors := [result.error for result in results if result.error]:
            raise InternalError(f"a step of {len(plan.chunks)} chunks failed: {errors[0]}")
        return Sample(seconds, cpu_s, self.decoder.take_s())

    def _note_step(self, result: StepResult) -> None:
        self.steps.add(result, self.decoder.take_s())


class Point(Protocol):
    """One line of a sweep."""

    @property
    def max_tokens(self) -> int:
        """Of the longest sequence it has."""

    def num_blocks(self, block_tokens: int) -> int:
        """KV blocks it needs."""

    def visit(self, rig: Rig) -> list[Sample]:
        """Time it for a while, after a warm-up."""

    def work(self, costs: Costs) -> Work:
        """What one sample needs at least."""


@dataclass(frozen=True)
class Decode:
    """One step of `batch` sequences that have `context` tokens each, the one they compute included."""

    batch: int
    context: int

    @property
    def max_tokens(self) -> int:
        """See `Point`."""
        return self.context

    def num_blocks(self, block_tokens: int) -> int:
        """See `Point`."""
        return self.batch * -(-self.context // block_tokens)

    def visit(self, rig: Rig) -> list[Sample]:
        """The same step again and again: it is not advanced, so its context does not grow."""
        tables = [rig.pool.acquire(rig.blocks_for(self.context)).blocks for _ in range(self.batch)]
        specs = [rig.spec(f"decode-{n}", self.context - 1, 1, table, 0) for n, table in enumerate(tables)]
        plan = StepPlan([Chunk(Sequence(spec), 1) for spec in specs])
        rig.time(plan)
        samples: list[Sample] = []
        until = time.perf_counter() + rig.visit_s
        while len(samples) < MIN_STEPS or time.perf_counter() < until:
            samples.append(rig.time(plan))
        for table in tables:
            rig.pool.release(table)
        return samples

    def work(self, costs: Costs) -> Work:
        """See `Point`."""
        return costs.step(self.batch, self.batch, [self.context] * self.batch)


@dataclass(frozen=True)
class Prefill:
    """One prompt, alone, in chunks of at most `chunk` tokens as a worker cuts it, and its first sampled token."""

    prompt: int
    chunk: int

    @property
    def max_tokens(self) -> int:
        """See `Point`."""
        return self.prompt

    def num_blocks(self, block_tokens: int) -> int:
        """See `Point`."""
        return -(-self.prompt // block_tokens)

    def visit(self, rig: Rig) -> list[Sample]:
        """See `Point`; the warm-up is a first chunk."""
        table = rig.pool.acquire(rig.blocks_for(self.prompt)).blocks
        sequence = Sequence(rig.spec("prefill", self.prompt, 0, table, 0))
        rig.time(StepPlan([Chunk(sequence, min(self.chunk, self.prompt))]))
        samples: list[Sample] = []
        until = time.perf_counter() + rig.visit_s
        while not samples or time.perf_counter() < until:
            sequence.num_computed_tokens = 0
            chunks = []
            for num_tokens in self._chunks():
                chunks.append(rig.time(StepPlan([Chunk(sequence, num_tokens)])))
                sequence.num_computed_tokens += num_tokens
            samples.append(Sample(*(sum(parts) for parts in zip(*chunks, strict=True))))
        rig.pool.release(table)
        return samples

    def work(self, costs: Costs) -> Work:
        """See `Point`."""
        chunks = self._chunks()
        ends = list(accumulate(chunks))
        steps = [costs.step(n, int(end == self.prompt), [end]) for n, end in zip(chunks, ends, strict=True)]
        return Work(sum(step.flops for step in steps), sum(step.read_bytes for step in steps))

    def _chunks(self) -> list[int]:
        return [min(self.chunk, self.prompt - start) for start in range(0, self.prompt, self.chunk)]


@dataclass(frozen=True)
class Loop:
    """From one token to the next of `batch` sequences in the whole engine; contexts grow from `context` by `steps`."""

    batch: int
    context: int
    steps: int

    @property
    def max_tokens(self) -> int:
        """See `Point`."""
        return self.context + self.steps + 1

    def num_blocks(self, block_tokens: int) -> int:
        """See `Point`."""
        return self.batch * -(-self.max_tokens // block_tokens)

    def visit(self, rig: Rig) -> list[Sample]:
        """See `Point`; what is not counted is the steps before all sequences have come.

        Raises:
            InternalError: a sequence failed, or the engine does not answer.
        """
        rig.steps.expect(self.batch)
        num_blocks = rig.blocks_for(self.context + 1)
        promise = rig.blocks_for(self.max_tokens) - num_blocks
        with rig.pool:  # which the engine needs to plan: they all come at once
            for number in range(self.batch):
                blocks = rig.pool.acquire(num_blocks, promise=promise).blocks
                rig.loop.submit(rig.spec(f"loop-{number}", self.context, self.steps, blocks, promise))
        return rig.steps.of_all(LOOP_TIMEOUT_S)

    def work(self, costs: Costs) -> Work:
        """See `Point`."""
        return costs.step(self.batch, self.batch, [self.context + self.steps // 2] * self.batch)


class _Step(NamedTuple):
    ended: float
    ended_cpu: float  # on the process's own clock
    model_s: float
    num_tokens: int


class _Steps:
    """The listener's side of a loop's visit: steps as they come, until every expected sequence has ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_expected = self._num_ended = 0
        self._steps: list[_Step] = []
        self._error = ""

    def expect(self, num_sequences: int) -> None:
        """Begin anew."""
        with self._changed:
            self._num_expected, self._num_ended, self._steps = num_sequences, 0, []

    def add(self, result: StepResult, model_s: float) -> None:
        """Note the step that has just ended in the engine's thread."""
        num_tokens = sum(len(output.token_ids) for output in result.outputs)
        with self._changed:
            self._steps.append(_Step(time.perf_counter(), time.process_time(), model_s, num_tokens))
            self._num_ended += sum(output.has_ended for output in result.outputs)
            self._error = self._error or next((output.error for output in result.outputs if output.error), "")
            self._changed.notify_all()

    def of_all(self, timeout_s: float) -> list[Sample]:
        """Wait for the end; the steps, from the end of one to the end of the next, that gave every sequence a token."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_ended >= self._num_expected, timeout_s):
                raise InternalError(f"{self._num_expected} sequences did not end within {timeout_s} s")
            if self._error:
                raise InternalError(f"the engine failed: {self._error}")
            samples = [
                Sample(step.ended - last.ended, step.ended_cpu - last.ended_cpu, step.model_s)
                for last, step in pairwise(self._steps)
                if last.num_tokens == step.num_tokens == self._num_expected
            ]
        if not samples:
            raise InternalError(f"no two steps in a row gave all {self._num_expected} sequences a token; measure again")
        return samples


def why_not(point: Point, config: ModelConfig, block_tokens: int, max_blocks: int) -> str | None:
    """Why a point cannot be measured; None: it can."""
    if point.max_tokens > config.max_context_tokens:
        return f"the model takes {config.max_context_tokens} tokens"
    if (num_blocks := point.num_blocks(block_tokens)) > max_blocks:
        return f"needs {num_blocks} KV blocks, --kv-memory holds {max_blocks}"
    return None
