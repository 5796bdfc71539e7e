"""A runner without tensors, for the tests and demonstrations of everything around an engine.

Each computed token writes a digest, chained over (previous slot, token id), into its slot of its KV block; the next
token is a function of every slot read back. So a block that is missing, misplaced, stale or overwritten changes the
tokens, as it would with a real model, and `expected_tokens` says without any memory what they should be.
"""

import copy
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from core.errors import ConfigError
from core.host_blocks import ByteBlocks, HostBlocks
from core.layout import KVLayout
from core.sequence import TokenLogprobs
from engine.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.plan import Chunk, Done, Launched, Sampled, StepPlan
from engine.scheduler import StepLimits
from engine.sequence import Sequence

DIGEST_BYTES = 8
VOCAB_SIZE = 256


def scripted_layout(block_tokens: int = 16) -> KVLayout:
    """The smallest layout the runner can write: 8 bytes a token."""
    return KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=block_tokens, dtype="float32")


class StepGate:
    """Holds steps inside `run`, before they compute anything, until a test lets them through. Closed at first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_arrived = 0
        self._num_allowed = 0.0

    @property
    def is_holding(self) -> bool:
        """Whether a step waits at the gate now."""
        return self._num_arrived > self._num_allowed

    def wait_until_holding(self, timeout_s: float = 60.0) -> None:
        """Block until a step waits at the gate; TimeoutError when none comes."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_holding, timeout_s):
                raise TimeoutError(f"no step came to the gate in {timeout_s} s")

    def allow(self, num_steps: int = 1) -> None:
        """Let this many more steps through."""
        with self._changed:
            self._num_allowed += num_steps
            self._changed.notify_all()

    def open(self) -> None:
        """Let every step through, until `close`."""
        with self._changed:
            self._num_allowed = math.inf
            self._changed.notify_all()

    def close(self) -> None:
        """Hold every step that has not arrived yet."""
        with self._changed:
            self._num_allowed = self._num_arrived

    def arrive(self) -> None:
        """The runner's side: pass, or wait until allowed."""
        with self._changed:
            self._num_arrived += 1
            number = self._num_arrived
            self._changed.notify_all()
            self._changed.wait_for(lambda: number <= self._num_allowed)


@dataclass(kw_only=True)
class ScriptedRunner:
    """An `engine.plan.Runner`; every field but the first two may be changed while no step runs.

    Tokens follow from the tokens before them and, with temperature above 0, from the seed; other sampling fields change
    nothing, and `min_tokens` needs no mask because an EOS token only ever comes from `script`.
    """

    memory: HostBlocks
    layout: KVLayout
    vocab_size: int = VOCAB_SIZE  # above the number of EOS tokens
    step_s: float = 0.0  # a step takes this long, and `token_s` for each of its tokens
    token_s: float = 0.0
    script: Callable[[Sequence], int | None] | None = None  # the next token; None: the one that follows from the KV
    fail_when: Callable[[StepPlan], Exception | None] | None = None  # raised by the step, before it writes
    gate: StepGate | None = None
    is_ahead: bool = False  # computes like a device: a step is launched before the one before is settled
    sampled: dict[tuple[str, int], int] = field(default_factory=dict)  # by sequence and position, where `is_ahead`

    def __post_init__(self) -> None:
        if self.memory.block_bytes != self.layout.block_bytes:
            raise ConfigError(f"blocks of {self.memory.block_bytes} bytes, layout says {self.layout.block_bytes}")
        if self._slot_bytes < DIGEST_BYTES:
            raise ConfigError(f"layout has {self._slot_bytes} bytes a token, the digest needs {DIGEST_BYTES}")

    @property
    def _slot_bytes(self) -> int:
        return self.layout.block_bytes // self.layout.block_tokens

    def launch(self, plan: StepPlan) -> Launched:
        """Compute a step at once; or, `is_ahead`, as late as a device may: when its results are asked for."""
        return _Ahead(self, plan) if self.is_ahead else Done(self.run(plan))

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Write a digest for every token of the plan; sample where a chunk reaches its newest token."""
        if self.gate is not None:
            self.gate.arrive()
        delay_s = self.step_s + self.token_s * sum(chunk.num_tokens for chunk in plan.chunks)
        if delay_s > 0:
            time.sleep(delay_s)
        if self.fail_when is not None and (error := self.fail_when(plan)) is not None:
            raise error
        for chunk in plan.chunks:
            self._write(chunk)
        return [self._result(chunk) for chunk in plan.chunks]

    def _result(self, chunk: Chunk) -> Sampled:
        result = self._sample(chunk.sequence) if chunk.samples else Sampled(None)
        spec, start = chunk.sequence.spec, chunk.sequence.num_computed_tokens
        num_top = spec.sampling.prompt_logprobs
        if num_top is None or chunk.sequence.num_output_tokens > 0:
            return result
        following = spec.prompt[start + 1 : start + 1 + chunk.num_tokens]
        entries = tuple(scripted_logprobs(token, num_top, self.vocab_size) for token in following)
        return Sampled(result.token_id, result.logprobs, entries)

    def _write(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        start = sequence.num_computed_tokens
        for position in range(start, start + chunk.num_tokens):
            previous = b"" if position == 0 else bytes(self._slot(sequence, position - 1))
            self._slot(sequence, position)[:] = slot_bytes(previous, sequence.token_ids[position], self._slot_bytes)

    def _slot(self, sequence: Sequence, position: int) -> memoryview:
        block, slot = divmod(position, self.layout.block_tokens)
        start = slot * self._slot_bytes
        return self.memory.view(sequence.block_table[block])[start : start + self._slot_bytes]

    def _context(self, sequence: Sequence) -> Iterable[memoryview]:
        """The bytes of all slots of the sequence's tokens, in order."""
        num_bytes = len(sequence.token_ids) * self._slot_bytes
        for block in sequence.block_table[: self.layout.blocks_for(len(sequence.token_ids))]:
            yield self.memory.view(block)[:num_bytes]
            num_bytes -= self.layout.block_bytes

    def _sample(self, sequence: Sequence) -> Sampled:
        spec = sequence.spec
        token = None if self.script is None else self.script(sequence)
        if token is None:
            seed = None if spec.sampling.is_greedy else spec.sampling.seed
            token = next_token(self._context(sequence), self.vocab_size, spec.eos_token_ids, seed)
        num_top = spec.sampling.logprobs
        return Sampled(token, None if num_top is None else scripted_logprobs(token, num_top, self.vocab_size))


class _Ahead:
    """A step as it was when it was launched. Implements `Launched`."""

    is_ahead = True

    def __init__(self, runner: ScriptedRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = StepPlan(tuple(Chunk(_frozen(chunk.sequence), chunk.num_tokens) for chunk in plan.chunks))

    def results(self) -> list[Sampled]:
        sampled = self._runner.sampled
        for chunk in self._plan.chunks:
            sequence = chunk.sequence
            for position in range(sequence.num_known_tokens, len(sequence.token_ids)):
                # A step that failed sampled nothing, and those that it was for have ended.
                sequence.token_ids[position] = sampled.get((sequence.spec.sequence_id, position), 0)
        results = self._runner.run(self._plan)
        for chunk, result in zip(self._plan.chunks, results, strict=True):
            if result.token_id is not None:
                sampled[chunk.sequence.spec.sequence_id, len(chunk.sequence.token_ids)] = result.token_id
        return results


def _frozen(sequence: Sequence) -> Sequence:
    twin = copy.copy(sequence)
    twin.token_ids, twin.block_table = list(sequence.token_ids), sequence.block_table[:]
    return twin


def slot_bytes(previous: bytes, token_id: int, num_bytes: int) -> bytes:
    """The KV of one token: a digest of the slot before it (none at position 0) and its id, repeated to fill the slot."""
    digest = hashlib.blake2b(previous + token_id.to_bytes(4, "little"), digest_size=DIGEST_BYTES).digest()
    return (digest * -(-num_bytes // DIGEST_BYTES))[:num_bytes]


def next_token(
    context: Iterable[bytes | memoryview], vocab_size: int, eos_token_ids: tuple[int, ...], seed: int | None
) -> int:
    """The token that follows from the KV of all tokens before it; never an EOS."""
    mixed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in context:
        mixed.update(piece)
    if seed is not None:
        mixed.update(seed.to_bytes(8, "little", signed=True))
    token = int.from_bytes(mixed.digest(), "little") % vocab_size
    while token in eos_token_ids:
        token = (token + 1) % vocab_size
    return token


def scripted_logprobs(token_id: int, num_top: int, vocab_size: int = VOCAB_SIZE) -> TokenLogprobs:
    """Made-up logprobs: the chosen token has -0.5, each following id 1 less."""
    top = tuple(((token_id + rank) % vocab_size, -0.5 - rank) for rank in range(num_top))
    return TokenLogprobs(token_id, -0.5, top)


def expected_tokens(
    prompt: Iterable[int],
    num_tokens: int,
    *,
    layout: KVLayout | None = None,
    vocab_size: int = VOCAB_SIZE,
    eos_token_ids: tuple[int, ...] = (),
    seed: int | None = None,
) -> list[int]:
    """The answer a `ScriptedRunner` without a script gives when every KV byte is right.

    Args:
        prompt: token ids; for an answer that goes on, prompt and answer so far.
        num_tokens: how many tokens to foretell.
        layout: the runner's; only its bytes per token matter. None: `scripted_layout()`.
        vocab_size: the runner's.
        eos_token_ids: the sequence's.
        seed: the sequence's when its temperature is above 0, else None.
    """
    layout = layout or scripted_layout()
    num_bytes = layout.block_bytes // layout.block_tokens
    slots: list[bytes] = []
    for token in prompt:
        slots.append(slot_bytes(slots[-1] if slots else b"", token, num_bytes))
    answer: list[int] = []
    for _ in range(num_tokens):
        token = next_token(slots, vocab_size, eos_token_ids, seed)
        answer.append(token)
        slots.append(slot_bytes(slots[-1], token, num_bytes))
    return answer


class ScriptedEngine(NamedTuple):
    """An engine over a scripted runner, not started, with all its parts."""

    loop: EngineLoop
    runner: ScriptedRunner
    memory: ByteBlocks
    pool: BlockPool
    layout: KVLayout


def scripted_engine(
    *, num_blocks: int = 64, layout: KVLayout | None = None, limits: StepLimits | None = None, swap_bytes: int = 0
) -> ScriptedEngine:
    """Build one; set the fields of `.runner` (script, gate, delays, failures) before `.loop.start(listener)`.

    Args:
        num_blocks: of the memory and the pool.
        layout: None: `scripted_layout()`.
        limits: None: 64 tokens and 8 sequences a step.
        swap_bytes: of host memory for preempted sequences.
    """
    layout = layout or scripted_layout()
    memory = ByteBlocks(num_blocks, layout.block_bytes)
    runner = ScriptedRunner(memory=memory, layout=layout)
    pool = BlockPool(num_blocks)
    loop = EngineLoop(
        runner,
        limits or StepLimits(max_batched_tokens=64, max_sequences=8),
        pool,
        layout.block_tokens,
        swap_memory=(memory, swap_bytes) if swap_bytes else None,
    )
    return ScriptedEngine(loop, runner, memory, pool, layout)
