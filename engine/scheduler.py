"""What the next step computes: pure functions from sequences and room to a plan. No clock, no device, nothing changed.

The rules, and why they hold:

- Order. Sequences rank by priority, and by arrival among equals. One that has no part in AGEING_STEPS steps rises by one
  priority level, and stays there, so none waits for ever behind later ones of a higher priority.
- Decodes first. Each step computes one token of every decoding sequence; prompts get what is left of the step.
- Prompts. The first in rank gets at least half of what is left, so a long prompt of n tokens that has become the first
  is done within 2 n / left steps, whatever else arrives. The rest goes to the others by priority and, among equals, to
  the fewest uncomputed tokens first, so a prompt of at most half a step waits only for equals shorter than itself.
- Starting. A sequence takes blocks for all its known tokens at once, and has some set aside for its growth, so a started
  one never waits for blocks while it computes its prompt. While the first that does not fit waits, those behind it may
  start; once it has waited PATIENCE_STEPS, or if it had to yield, nobody passes, and as running sequences end it gets its
  room.
- Same prefix. A prompt whose next block an earlier prompt of the same plan computes waits for it and finds it cached.
- Preemption. When a decoding sequence must grow, nothing is set aside for it and nothing is available, the last in rank
  yields: of a lower priority, or an equal whose growth is not set aside either; if there is none, the one that must grow.
  What is set aside doubles with each preemption, so equals preempt a sequence at most log2(blocks of its answer) times.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from core.errors import ConfigError
from core.layout import growth_blocks
from engine.plan import Chunk, Start, StepPlan
from engine.sequence import Sequence

AGEING_STEPS = 256
PATIENCE_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How much one step may hold. `max_batched_tokens >= max_sequences`, so that no sequence in a step can starve."""

    max_batched_tokens: int = 512  # tokens in one step, decodes and prompt chunks together
    max_sequences: int = 64  # sequences that run at the same time

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise ConfigError(f"max_sequences={self.max_sequences}: must be at least 1")
        if self.max_batched_tokens < self.max_sequences:
            raise ConfigError(
                f"max_batched_tokens={self.max_batched_tokens} is below max_sequences={self.max_sequences}: "
                "each running sequence needs one token of every step; raise the first or lower the second"
            )


class Room(Protocol):
    """What the plan asks of the block pool; nothing of it changes while a plan is made."""

    @property
    def num_available(self) -> int:
        """Blocks that can be given now."""

    def find(self, hashes: Seq[bytes]) -> tuple[int, int]:
        """How many leading hashes are cached, and how many of those blocks are available now and would not be then."""

    def count_freed(self, blocks: Iterable[int]) -> int:
        """How many of these blocks would become available if each were released as often as it is named."""


Plan = Callable[[Iterable[Sequence], StepLimits, Room, int], StepPlan]


def plan_step(sequences: Iterable[Sequence], limits: StepLimits, room: Room, block_tokens: int) -> StepPlan:
    """Choose the next step; see the rules above.

    A prompt is cut where the budget ends, not at block borders: a prompt that runs alone is always cut into pieces of
    `max_batched_tokens`, in a prefill worker as in an aggregated one, hence rounded alike. Whoever ships blocks ships
    the full ones.

    Args:
        sequences: every sequence that has not ended; each has at least one uncomputed token.
        limits: of one step.
        room: the block pool.
        block_tokens: tokens in one block.
    Returns:
        Decodes, then prompt chunks of one token, then longer ones, each group in rank; who must yield; who starts. Empty
        when nothing can run.
    """
    return _Planner(sorted(sequences, key=_rank), limits, room, block_tokens).plan()


def _level(sequence: Sequence) -> int:
    return sequence.spec.priority + sequence.num_waited_steps // AGEING_STEPS


def _rank(sequence: Sequence) -> tuple[int, int]:
    return -_level(sequence), sequence.number


class _Planner:
    """One plan in the making: the pool's room less what the plan has given away so far."""

    def __init__(self, ranked: list[Sequence], limits: StepLimits, room: Room, block_tokens: int) -> None:
        self._started = [sequence for sequence in ranked if sequence.has_blocks]
        self._waiting = [sequence for sequence in ranked if not sequence.has_blocks]
        self._limits = limits
        self._room = room
        self._block_tokens = block_tokens
        self._available = room.num_available
        self._found: dict[int, tuple[int, int]] = {}
        self._preempted: list[Sequence] = []
        self._starts: list[Start] = []
        self._num_slots = 0
        self._num_kept = 0  # blocks to be left for the first that waits

    def plan(self) -> StepPlan:
        decodes = self._decodes()
        running = [s for s in self._started if s not in self._preempted][: self._limits.max_sequences]
        budget = self._limits.max_batched_tokens - len(decodes)
        self._num_slots = self._limits.max_sequences - len(running)
        computing = [s for s in running if not s.is_decoding] if len(decodes) < len(running) else []
        prompts = self._prompts(computing, budget)
        prompts.sort(key=lambda chunk: (chunk.num_tokens > 1, _rank(chunk.sequence)))
        return StepPlan((*decodes, *prompts), tuple(self._preempted), tuple(self._starts), self._num_kept)

    def _decodes(self) -> list[Chunk]:
        """One token for each decoding sequence; makes room for those that need another block."""
        chunks = []
        for sequence in self._started[: self._limits.max_sequences]:
            if sequence.is_decoding and sequence not in self._preempted and self._can_grow(sequence):
                chunks.append(Chunk(sequence, 1))
        return chunks

    def _can_grow(self, sequence: Sequence) -> bool:
        """Whether there is a block for the newest token, after others have yielded if they must."""
        if len(sequence.token_ids) <= len(sequence.block_table) * self._block_tokens or sequence.num_promised_blocks:
            return True
        while self._available < 1:
            victim = self._victim(sequence)
            self._available += self._gain([victim])
            self._preempted.append(victim)
            if victim is sequence:
                return False
        self._available -= 1
        return True

    def _victim(self, needy: Sequence) -> Sequence:
        """The last in rank that helps, or that helps with others; the needy one itself where all of them do not."""
        behind = self._started[self._started.index(needy) + 1 :]
        candidates = [other for other in reversed(behind) if self._may_yield(other, needy)]
        if not self._gain(candidates):
            return needy
        return next((other for other in candidates if self._gain([other])), candidates[0])

    def _may_yield(self, other: Sequence, needy: Sequence) -> bool:
        if other.spec.prefill_only or other in self._preempted:
            return False  # the blocks of the former may be on their way to another worker
        return _level(other) < _level(needy) or not other.num_promised_blocks

    def _gain(self, victims: list[Sequence]) -> int:
        """Blocks that become available if these yield too: what is set aside for them, and what they alone hold."""
        held = [block for victim in self._preempted for block in victim.block_table]
        more = [block for victim in victims for block in victim.block_table]
        num_freed = self._room.count_freed(held + more) - self._room.count_freed(held)
        return num_freed + sum(victim.num_promised_blocks for victim in victims)

    def _prompts(self, computing: list[Sequence], budget: int) -> list[Chunk]:
        """Chunks of prompts that have blocks, and of those that can start now."""
        waiting = self._may_start()
        first: Sequence | None = None
        first_part = 0  # of the budget, at least
        pending: set[bytes] = set()  # blocks that prompts of this plan are computing
        chunks: list[Chunk] = []
        for sequence in sorted(computing + waiting, key=_rank):
            num_tokens = self._admit(sequence, pending)
            if num_tokens:
                first, first_part = sequence, min(num_tokens, -(-budget // 2))
                break
        if first is None:
            return []
        left = budget - first_part
        others = [sequence for sequence in computing + waiting if sequence is not first]
        for sequence in sorted(others, key=self._order_after_first):
            if left == 0:
                break
            num_tokens = min(self._admit(sequence, pending), left)
            if num_tokens:
                chunks.append(Chunk(sequence, num_tokens))
                left -= num_tokens
        num_tokens = min(self._num_uncomputed(first), first_part + left)
        return [Chunk(first, num_tokens), *chunks]

    def _order_after_first(self, sequence: Sequence) -> tuple[int, int, tuple[int, int]]:
        return -sequence.spec.priority, self._num_uncomputed(sequence), _rank(sequence)

    def _may_start(self) -> list[Sequence]:
        """Those waiting who may start if they fit; notes what newcomers must leave."""
        if self._preempted:  # whoever yielded just now must not be the first to profit, nor may newcomers be
            self._num_kept = self._available
            return []
        stuck = next((index for index, one in enumerate(self._waiting) if not self._fits(one)), None)
        if stuck is not None:
            self._num_kept = self._blocks_to_start(self._waiting[stuck])
            if self._waiting[stuck].num_waited_steps < PATIENCE_STEPS and not self._waiting[stuck].num_preemptions:
                stuck = None
        return [one for one in self._waiting[:stuck] if self._fits(one)] if self._num_slots > 0 else []

    def _admit(self, sequence: Sequence, pending: set[bytes]) -> int:
        """How many tokens a prompt has to compute; 0: not in this step, since it cannot start or had better wait."""
        hashes = sequence.reusable_hashes(self._block_tokens)
        num_computed = self._num_computed(sequence)
        # What a step in flight computes is nobody's to use yet, so others wait for that as well.
        missing = hashes[max(num_computed - sequence.num_unconfirmed_tokens, 0) // self._block_tokens :]
        if missing and missing[0] in pending:
            return 0
        if not sequence.has_blocks:
            if self._num_slots < 1 or not self._fits(sequence):
                return 0
            self._num_slots -= 1
            self._available -= self._blocks_to_start(sequence)
            self._starts.append(Start(sequence, self._promise(sequence)))
        pending.update(missing)
        return self._num_uncomputed(sequence)

    def _num_computed(self, sequence: Sequence) -> int:
        """Tokens whose KV it has, or will have once it starts: from the cache, or from where it was swapped to."""
        if sequence.has_blocks:
            return sequence.num_computed_tokens
        return max(self._find(sequence)[0] * self._block_tokens, sequence.num_computed_tokens)

    def _num_uncomputed(self, sequence: Sequence) -> int:
        return len(sequence.token_ids) - self._num_computed(sequence)

    def _find(self, sequence: Sequence) -> tuple[int, int]:
        """What the pool's `find` says of its blocks, asked once."""
        if id(sequence) not in self._found:
            self._found[id(sequence)] = self._room.find(sequence.reusable_hashes(self._block_tokens))
        return self._found[id(sequence)]

    def _promise(self, sequence: Sequence) -> int:
        return growth_blocks(
            len(sequence.token_ids), sequence.max_total_tokens, self._block_tokens, sequence.num_preemptions
        )

    def _blocks_to_start(self, sequence: Sequence) -> int:
        """Available blocks that it would take: its own, less the cached ones that others hold, and its promise."""
        num_cached, num_idle = self._find(sequence)
        num_blocks = -(-len(sequence.token_ids) // self._block_tokens)
        return num_blocks - num_cached + num_idle + self._promise(sequence)

    def _fits(self, sequence: Sequence) -> bool:
        # It needs a block beyond what may be cached: in a full pool that answers without looking thousands of hashes up.
        return self._promise(sequence) < self._available and self._blocks_to_start(sequence) <= self._available
