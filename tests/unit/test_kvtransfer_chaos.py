"""Any order of pushes, commits, aborts, restarts, lost, doubled and late frames, and time: what must hold all the same."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.host_blocks import ByteBlocks
from kvtransfer.inproc import InprocTransport
from kvtransfer.transport import Part
from tests.unit.kvtransfer_helpers import (
    BLOCK_BYTES,
    COMMITTED,
    CONFIG,
    Ends,
    LossyTransport,
    Pair,
    fill,
    settle,
)

# The test moves the clock and calls tick; the timer of the ends must not add wall-clock luck.
MANUAL = replace(CONFIG, tick_s=3600.0, reconnect_s=1e-6, transfer_timeout_s=20.0)
LONGEST_S = MANUAL.transfer_timeout_s + MANUAL.commit_timeout_s + MANUAL.drain_timeout_s + 1
BLOCKS_EACH = 3

ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["open", "open", "restart_sender", "restart_receiver"]), st.just(0)),
    st.tuples(st.sampled_from(["push", "push", "push", "commit", "commit"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["abort_sender", "abort_receiver"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["drop", "twice", "hold"]), st.integers(0, 4)),
    st.tuples(st.just("settle"), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 1, 3, 6, 12])),
)


@dataclass
class Run:
    """One transfer of the run, with copies of its target blocks from the moment they were given back."""

    ends: Ends
    blocks: list[int]
    pushed: int = 0
    given_back: list[bytes] = field(default_factory=list)


class Chaos:
    def __init__(self, is_late: bool) -> None:
        self.faults: list[tuple[int, str]] = []  # (messages to pass before it, fault)
        self.runs: list[Run] = []
        transport = LossyTransport(InprocTransport(), self.fault)
        self.pair = Pair(transport, config=MANUAL, num_blocks=BLOCKS_EACH * 40, is_late=is_late)

    def fault(self, parts: Sequence[Part]) -> str:
        if not self.faults:
            return "pass"
        after, fault = self.faults[0]
        if after > 0:
            self.faults[0] = (after - 1, fault)
            return "pass"
        self.faults.pop(0)
        return fault

    async def act(self, action: str, argument: float) -> None:
        pair, index = self.pair, int(argument)
        run = self.runs[-1 - index] if index < len(self.runs) else None
        if action == "open":
            self.open()
        elif action in ("drop", "twice", "hold"):
            self.faults.append((index, action))
        elif action == "settle":
            await settle()
        elif action == "wait":
            await pair.pass_time(argument)
        elif action == "restart_sender":
            await pair.sender.aclose()
            pair.sender = pair.make_sender(f"s-{len(self.runs)}")
            await pair.sender.start()
        elif action == "restart_receiver":
            endpoint = pair.receiver.endpoint
            await pair.receiver.aclose()
            pair.receiver = pair.make_receiver(f"r-{len(self.runs)}")
            await pair.receiver.start(endpoint)
        elif run is not None:
            self.act_on(run, action)

    def act_on(self, run: Run, action: str) -> None:
        transfer_id = run.ends.ticket.transfer_id
        if action == "push" and run.pushed < BLOCKS_EACH:
            self.pair.sender.push(transfer_id, [run.blocks[run.pushed]], run.pushed)
            run.pushed += 1
        elif action == "commit":
            self.pair.sender.commit(transfer_id, COMMITTED)
        elif action == "abort_sender":
            self.pair.sender.abort(transfer_id, "test")
        elif action == "abort_receiver":
            self.pair.receiver.abort(transfer_id, "test")

    def open(self) -> None:
        first = BLOCKS_EACH * len(self.runs)
        blocks = list(range(first, first + BLOCKS_EACH))
        for block in blocks:
            fill(self.pair.source, block, seed=block)
        ends = self.pair.open(blocks)
        self.runs.append(Run(ends, blocks))

    def note_given_back(self) -> None:
        for run in self.runs:
            if run.ends.received and not run.given_back:
                run.given_back = [bytes(self.pair.target.view(block)) for block in run.blocks]

    def check(self) -> None:
        for run in self.runs:
            assert len(run.ends.received) == 1, "the receiver reports each end once"
            assert len(run.ends.sent) == 1, "the sender reports each end once"
            assert len(run.ends.committed) == (run.ends.received[0].result == "done")
            assert run.given_back == [bytes(self.pair.target.view(block)) for block in run.blocks], (
                "written after the end"
            )
            if run.ends.received[0].is_done:
                assert run.given_back == [bytes(self.pair.source.view(block)) for block in run.blocks]
            assert run.ends.received[0].is_done or not run.ends.sent[0].is_done, "sent, but never adopted"
        for end in (self.pair.sender, self.pair.receiver):
            assert end.stats.num_inflight == 0


async def play(actions: list[tuple[str, float]], is_late: bool) -> None:
    chaos = Chaos(is_late)
    async with chaos.pair as pair:
        await settle()
        for action, argument in actions[:40]:
            await chaos.act(action, argument)
            chaos.note_given_back()
        chaos.faults.clear()
        await pair.pass_time(LONGEST_S)
        chaos.note_given_back()
        chaos.check()
        # One more transfer: whatever happened, the pair recovered by itself.
        chaos.open()
        last = chaos.runs[-1]
        for _ in range(BLOCKS_EACH):
            chaos.act_on(last, "push")
        chaos.act_on(last, "commit")
        await pair.pass_time(1)
        assert last.ends.results == ("done", "done")


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.booleans())
def test_every_transfer_ends_once_on_both_sides_and_no_byte_is_written_after(
    actions: list[tuple[str, float]], is_late: bool
) -> None:
    asyncio.run(play(actions, is_late))


@pytest.mark.parametrize("is_late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("fault", ["drop", "twice", "hold"])
@pytest.mark.parametrize("after", range(8))
def test_one_fault_at_each_message_of_a_transfer(fault: str, after: int, is_late: bool) -> None:
    steps: list[tuple[str, float]] = [(fault, after), ("open", 0)]
    steps += [("push", 0), ("settle", 0)] * BLOCKS_EACH + [("commit", 0), ("settle", 0), ("wait", 1)]
    asyncio.run(play(steps, is_late))


def test_the_fake_memory_knows_its_size() -> None:
    memory = ByteBlocks(2, BLOCK_BYTES)
    assert len(memory.view(1)) == memory.block_bytes == BLOCK_BYTES
    for block in (-1, 2):
        with pytest.raises(IndexError):
            memory.view(block)
