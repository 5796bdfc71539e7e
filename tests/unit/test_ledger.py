"""What a worker holds: every use ends once, blocks come back exactly once, aborts may overtake what they cancel."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.errors import CancelledError, CapacityError, DuplicateRequestError
from engine.block_pool import BlockPool
from services.common.ledger import MAX_TOMBSTONES, Claim, Holding, Ledger, Use

NUM_BLOCKS = 12
MAX_SEQUENCES = 5
FOREVER_S = 3600.0


class Kept:
    """A ledger over a real block pool, and what it told its owner."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.expired: asyncio.Queue[Holding[str]] = asyncio.Queue()
        self.num_released = 0
        self.ledger: Ledger[str] = Ledger(self.pool, MAX_SEQUENCES, self.expired.put_nowait, self._released)

    def _released(self) -> None:
        self.num_released += 1

    def admit(
        self,
        name: str,
        num_blocks: int = 1,
        uses: set[Use] | None = None,
        router: str = "r",
        timeout_s: float = FOREVER_S,
        promise: int = 0,
    ) -> Holding[str]:
        claim = Claim(num_blocks, (), promise)
        return self.ledger.admit(name, router, claim, timeout_s, uses or {"transfer"}, f"detail of {name}")


async def test_a_transfer_s_blocks_return_when_it_ends_and_the_slot_with_the_last_use() -> None:
    kept = Kept()
    holding = kept.admit("a", 4, promise=3)
    assert len(set(holding.blocks)) == 4
    assert kept.pool.num_available == NUM_BLOCKS - 7
    holding.uses.add("engine")
    kept.ledger.end_use(holding, "transfer")
    kept.ledger.end_use(holding, "transfer")
    assert kept.pool.num_available == NUM_BLOCKS
    assert kept.ledger.get("a") is holding
    assert kept.num_released == 0
    kept.ledger.end_use(holding, "engine")
    kept.ledger.end_use(holding, "engine")
    assert kept.ledger.get("a") is None
    assert (kept.pool.num_available, kept.num_released) == (NUM_BLOCKS, 1)


async def test_blocks_of_a_transfer_outlive_the_engine_s_use() -> None:
    kept = Kept()
    holding = kept.admit("a", 2)
    holding.uses.add("engine")
    kept.ledger.end_use(holding, "engine")
    assert kept.pool.num_free == NUM_BLOCKS - 2
    kept.ledger.end_use(holding, "transfer")
    assert kept.pool.num_free == NUM_BLOCKS


async def test_room_for_what_the_engine_runs_is_looked_for_and_not_held() -> None:
    kept = Kept()
    first = kept.admit("a", 8, {"engine"}, promise=4)
    second = kept.admit("b", NUM_BLOCKS, {"engine", "transfer"})
    assert kept.pool.num_available == NUM_BLOCKS
    assert first.blocks == second.blocks == []
    with pytest.raises(CapacityError, match="need 13 KV blocks, 12 of 12 are available"):
        kept.admit("c", 8, {"engine"}, promise=5)
    for holding in (first, second):
        kept.ledger.end_use(holding, "engine")
    kept.ledger.end_use(second, "transfer")
    assert kept.num_released == 2


async def test_cached_blocks_are_shared_with_a_transfer_and_said_so() -> None:
    kept = Kept()
    [block], _ = kept.pool.acquire(1)
    kept.pool.publish(block, b"head")
    holding = kept.ledger.admit("a", "r", Claim(3, [b"head", b"next"], 2), FOREVER_S, {"transfer"}, "")
    assert (holding.blocks[0], holding.num_cached_blocks, holding.num_promised_blocks) == (block, 1, 2)
    kept.pool.release([block])
    assert kept.pool.num_available == NUM_BLOCKS - 5
    kept.ledger.end_use(holding, "transfer")
    assert kept.pool.num_available == NUM_BLOCKS
    kept.pool.check()


async def test_an_old_holding_cannot_end_a_new_one_of_the_same_id() -> None:
    kept = Kept()
    old = kept.admit("a")
    kept.ledger.end_use(old, "transfer")
    new = kept.admit("a", 2)
    kept.ledger.end_use(old, "transfer")
    assert kept.ledger.get("a") is new
    assert kept.pool.num_free == NUM_BLOCKS - 2
    kept.ledger.end_use(new, "transfer")


async def test_a_refusal_holds_nothing() -> None:
    kept = Kept()
    first = kept.admit("a", 3)
    with pytest.raises(DuplicateRequestError, match="a is already held"):
        kept.admit("a")
    with pytest.raises(CapacityError, match="need 10 KV blocks, 9 of 12 are available"):
        kept.admit("b", 10)
    others = [kept.admit(f"c{number}") for number in range(MAX_SEQUENCES - 1)]
    with pytest.raises(CapacityError, match=f"max_sequences={MAX_SEQUENCES}"):
        kept.admit("d")
    assert len(kept.ledger) == MAX_SEQUENCES
    for holding in [first, *others]:
        kept.ledger.end_use(holding, "transfer")
    assert kept.pool.num_free == NUM_BLOCKS
    assert not list(kept.ledger)


async def test_an_abort_that_came_first_refuses_the_call_once() -> None:
    kept = Kept()
    kept.ledger.bury("a")
    with pytest.raises(CancelledError, match="aborted before it arrived"):
        kept.admit("a")
    assert kept.pool.num_free == NUM_BLOCKS
    kept.ledger.end_use(kept.admit("a"), "transfer")


async def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    kept = Kept()
    for number in range(MAX_TOMBSTONES + 1):
        kept.ledger.bury(f"{number}")
    kept.ledger.end_use(kept.admit("0"), "transfer")
    with pytest.raises(CancelledError):
        kept.admit("1")


async def test_a_deadline_fires_once_for_what_is_held_and_never_for_what_has_ended() -> None:
    kept = Kept()
    ended = kept.admit("ended", timeout_s=0.0)
    kept.ledger.end_use(ended, "transfer")
    late = kept.admit("late", timeout_s=0.001)
    async with asyncio.timeout(30):
        assert await kept.expired.get() is late
    assert kept.expired.empty()
    assert kept.ledger.get("late") is late, "ending it is its owner's decision"
    kept.ledger.end_use(late, "transfer")


async def test_a_router_s_holdings_are_found_and_may_end_while_they_are_walked() -> None:
    kept = Kept()
    for name, router in (("a", "r1"), ("b", "r2"), ("c", "r1")):
        kept.admit(name, router=router)
    for holding in kept.ledger.of_router("r1"):
        kept.ledger.end_use(holding, "transfer")
    assert [holding.sequence_id for holding in kept.ledger] == ["b"]
    for holding in kept.ledger:
        kept.ledger.end_use(holding, "transfer")
    assert kept.pool.num_free == NUM_BLOCKS


names = st.sampled_from(["a", "b", "c", "d", "e", "f", "g"])
all_uses: list[set[Use]] = [{"engine"}, {"transfer"}, {"engine", "transfer"}]  # run, reserve, prefill


class LedgerMachine(RuleBasedStateMachine):
    """Any order of admissions, ends (of old holdings too) and aborts, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.kept = Kept()
        self.held: dict[str, tuple[Holding[str], set[Use]]] = {}
        self.all: list[Holding[str]] = []
        self.buried: set[str] = set()

    def teardown(self) -> None:
        for holding in self.all:
            for use in ("engine", "transfer"):
                self.kept.ledger.end_use(holding, use)
        assert self.kept.pool.num_available == NUM_BLOCKS
        assert self.kept.num_released == len(self.all)
        self.loop.close()

    def num_available(self) -> int:
        """By the dictionary: a transfer holds its blocks and promises, the engine's sequences are not counted here."""
        transfers = [holding for holding, uses in self.held.values() if "transfer" in uses]
        return NUM_BLOCKS - sum(len(holding.blocks) + holding.num_promised_blocks for holding in transfers)

    @rule(name=names, num_blocks=st.integers(0, 6), promise=st.integers(0, 2), uses=st.sampled_from(all_uses))
    def admit(self, name: str, num_blocks: int, promise: int, uses: set[Use]) -> None:
        async def call() -> Holding[str]:
            return self.kept.admit(name, num_blocks, uses, promise=promise)

        expected: type[Exception] | None = None
        if name in self.held:
            expected = DuplicateRequestError
        elif name in self.buried:
            self.buried.discard(name)
            expected = CancelledError
        elif len(self.held) >= MAX_SEQUENCES or num_blocks + promise > self.num_available():
            expected = CapacityError
        if expected is not None:
            with pytest.raises(expected):
                self.loop.run_until_complete(call())
            return
        holding = self.loop.run_until_complete(call())
        assert len(set(holding.blocks)) == (0 if "engine" in uses else num_blocks)
        self.held[name] = (holding, set(uses))
        self.all.append(holding)

    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """The engine's last output names blocks, which are the holding's from then on."""
        prefills = [holding for holding, uses in self.held.values() if len(uses) == 2 and not holding.blocks]
        if prefills and self.num_available():
            data.draw(st.sampled_from(prefills)).blocks = self.kept.pool.acquire(1).blocks

    @rule(data=st.data(), use=st.sampled_from(["engine", "transfer"]))
    def end(self, data: st.DataObject, use: Use) -> None:
        if not self.all:
            return
        holding = data.draw(st.sampled_from(self.all))
        self.kept.ledger.end_use(holding, use)
        current = self.held.get(holding.sequence_id)
        if current is not None and current[0] is holding:
            current[1].discard(use)
            if not current[1]:
                del self.held[holding.sequence_id]

    @rule(name=names)
    def bury(self, name: str) -> None:
        if name not in self.held:
            self.kept.ledger.bury(name)
            self.buried.add(name)

    @invariant()
    def blocks_are_held_or_free_never_both(self) -> None:
        assert {holding.sequence_id for holding in self.kept.ledger} == set(self.held)
        held = [block for holding in self.kept.ledger for block in holding.blocks]
        assert len(held) == len(set(held))
        assert self.kept.pool.num_free == NUM_BLOCKS - len(held)
        assert self.kept.pool.num_available == self.num_available()


LedgerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLedgerAgainstADictionary = LedgerMachine.TestCase
