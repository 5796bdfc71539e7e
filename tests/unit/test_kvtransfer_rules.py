"""Each rule of the protocol, over the in-process transport and a clock moved by hand."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from core.errors import ConfigError, TransferError
from core.ids import new_transfer_id
from kvtransfer.config import TransferConfig
from kvtransfer.frames import (
    Abort,
    Begin,
    Data,
    Done,
    Drained,
    Lease,
)
from kvtransfer.inproc import InprocTransport
from kvtransfer.send_session import SendSession
from kvtransfer.ticket import Committed, Ticket, TransferOutcome
from tests.unit.kvtransfer_helpers import (
    BLOCK_BYTES,
    COMMITTED,
    CONFIG,
    PROMPT,
    FakeReceiver,
    Faults,
    LossyTransport,
    Pair,
    SlowHandle,
    Stranger,
    eventually,
    fill,
    settle,
)


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture(params=[False, True], ids=["", "late"])
async def pair(request: pytest.FixtureRequest, faults: Faults) -> AsyncIterator[Pair]:
    async with Pair(LossyTransport(InprocTransport(), faults), is_late=request.param) as pair:
        await pair.sender.connect(pair.receiver.endpoint)
        yield pair


at_once = pytest.mark.parametrize(
    "pair", [False], indirect=True, ids=[""]
)  # what is pushed is sent before anything else


# Reservation and lease


async def test_an_unused_ticket_expires_without_any_traffic(pair: Pair) -> None:
    ends = pair.reserve([0, 1])
    await pair.pass_time(CONFIG.reserve_timeout_s - 1)
    assert not ends.received
    await pair.pass_time(2)
    assert [outcome.result for outcome in ends.received] == ["expired"]
    pair.sender.open(ends.ticket, ends.sent.append)
    await eventually(lambda: bool(ends.sent))
    assert ends.results == ("expired", "failed")
    assert "ended transfer" in ends.sent[0].reason


async def test_begin_stops_the_reserve_timer_and_heartbeats_keep_a_waiting_prompt(pair: Pair) -> None:
    ends = pair.open([0])
    await pair.pass_time(10 * CONFIG.lease_s)
    assert not ends.received
    assert not ends.sent
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("done", "done")


async def test_a_lease_that_no_heartbeat_names_frees_the_sender(pair: Pair) -> None:
    fake, sent = FakeReceiver(pair), list[TransferOutcome]()
    pair.sender.open(fake.ticket, sent.append)
    await fake.accept()
    while not sent:
        fake.say(Lease(15_000, []))
        await pair.pass_time(0.5)
    assert sent[0].result == "expired"
    assert pair.clock() == pytest.approx(15.0, abs=1.0)
    assert pair.sender.stats.leases_expired == 1


async def test_a_receiver_that_never_says_done_frees_the_sender_by_the_commit_deadline(pair: Pair) -> None:
    fake, sent = FakeReceiver(pair), list[TransferOutcome]()
    pair.sender.open(fake.ticket, sent.append)
    pair.sender.commit(fake.ticket.transfer_id, COMMITTED)
    await fake.accept()
    while not sent:
        fake.say(Lease(15_000, [fake.ticket.transfer_id]))
        await pair.pass_time(0.5)
    assert "no DONE" in sent[0].reason
    assert pair.clock() == pytest.approx(CONFIG.commit_timeout_s, abs=1.0)


def test_an_extension_never_shortens_a_lease() -> None:
    session = SendSession(Ticket(bytes(16), 1, "inproc://x", 1, 100_000), CONFIG, now=0.0)
    session.begin(0.0)
    session.on_lease(1, 0.0)
    assert session.on_timer(99.9) == []
    session.on_lease(100_000, 99.9)
    assert session.on_timer(199.8) == []
    assert [type(frame) for frame in session.on_timer(199.9)] == [Abort, Drained]


# Abort


async def test_an_abort_by_the_receiver_frees_both_ends(pair: Pair) -> None:
    ends = pair.open([0, 1])
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    await settle()
    pair.receiver.abort(ends.ticket.transfer_id, "the client left")
    assert not ends.received, "blocks are set aside until the sender drained"
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("aborted", "aborted")
    assert ends.sent[0].reason == "receiver: the client left"


async def test_an_abort_by_the_sender_frees_both_ends(pair: Pair) -> None:
    ends = pair.open([0, 1])
    pair.sender.abort(ends.ticket.transfer_id, "cancelled")
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("aborted", "aborted")


async def test_an_abort_before_begin_ends_at_once(pair: Pair) -> None:
    ends = pair.reserve([0])
    pair.receiver.abort(ends.ticket.transfer_id, "no prefill worker")
    pair.receiver.abort(ends.ticket.transfer_id, "again")
    assert [outcome.result for outcome in ends.received] == ["aborted"]


async def test_aborts_that_cross_and_repeat_end_each_side_once(pair: Pair) -> None:
    ends = pair.open([0, 1])
    await settle()
    for _ in range(2):
        pair.sender.abort(ends.ticket.transfer_id, "here")
        pair.receiver.abort(ends.ticket.transfer_id, "there")
    await settle()
    assert ends.results == ("aborted", "aborted")
    assert not pair.receiver.stats.frames_dropped


async def test_an_abort_that_races_the_end_is_a_no_op(pair: Pair) -> None:
    for who in (pair.sender, pair.receiver):
        ends = await pair.transfer([0], [0])
        who.abort(ends.ticket.transfer_id, "too late")
        pair.sender.push(ends.ticket.transfer_id, [0], 0)
        pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
        await settle()
        assert ends.results == ("done", "done")


async def test_a_lost_drained_fences_the_transfer_after_its_deadline(pair: Pair, faults: Faults) -> None:
    faults.set(Drained, "drop")
    ends = pair.open([0])
    await settle()
    pair.receiver.abort(ends.ticket.transfer_id, "the client left")
    await pair.pass_time(CONFIG.drain_timeout_s - 0.5)
    assert not ends.received
    await pair.pass_time(1)
    assert ends.received[0].result == "aborted"


@at_once
async def test_late_blocks_of_an_aborted_transfer_are_never_written(pair: Pair, faults: Faults) -> None:
    fill(pair.source, 0, seed=1)
    ends = pair.open([5])
    await settle()
    faults.set(Data, "hold", times=1)
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    pair.receiver.abort(ends.ticket.transfer_id, "the client left")
    await eventually(lambda: ends.both_ended)
    await settle()
    assert bytes(pair.target.view(5)) == bytes(BLOCK_BYTES)
    assert sum(pair.receiver.stats.frames_dropped.values()) == 1


@at_once
async def test_blocks_sent_before_the_sender_heard_of_the_abort_are_dropped(pair: Pair) -> None:
    fill(pair.source, 0, seed=1)
    ends = pair.open([5, 6])
    await settle()
    pair.receiver.abort(ends.ticket.transfer_id, "the client left")
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    await eventually(lambda: ends.both_ended)
    assert ends.sent[0].num_bytes == BLOCK_BYTES
    assert bytes(pair.target.view(5)) == bytes(BLOCK_BYTES)
    assert pair.receiver.stats.frames_dropped == {"aborting": 1}


async def test_the_sender_keeps_its_blocks_while_the_transport_reads_them(pair: Pair) -> None:
    assert isinstance(pair.transport, LossyTransport)
    pair.transport.slow_handle = SlowHandle()
    ends = pair.open([0, 1])
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    await settle()
    pair.sender.abort(ends.ticket.transfer_id, "cancelled")
    await eventually(lambda: bool(ends.received))
    await pair.pass_time(CONFIG.drain_timeout_s - 0.5)
    assert not ends.sent
    pair.transport.slow_handle.done = True
    await pair.pass_time(0.1)
    assert ends.results == ("aborted", "aborted")


async def test_a_socket_that_does_not_let_go_of_blocks_is_closed(pair: Pair) -> None:
    assert isinstance(pair.transport, LossyTransport)
    pair.transport.slow_handle = SlowHandle()
    ends = pair.open([0, 1])
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    await settle()
    pair.sender.abort(ends.ticket.transfer_id, "cancelled")
    await settle()
    await pair.pass_time(CONFIG.drain_timeout_s + 0.5)
    await eventually(lambda: bool(ends.sent))
    assert ends.sent[0].result == "aborted"
    pair.transport.slow_handle = None
    await pair.sender.connect(pair.receiver.endpoint)
    assert (await pair.transfer([0], [1])).results == ("done", "done")


async def test_a_callback_may_abort_what_it_is_told_to_adopt(pair: Pair) -> None:
    ends = pair.reserve([])
    ended: list[str] = []
    ticket = pair.receiver.open(
        [],
        PROMPT,
        lambda outcome: ended.append(outcome.result),
        lambda _: pair.receiver.abort(ticket.transfer_id, "too late for us"),
    )
    pair.sender.open(ticket, ends.sent.append)
    pair.sender.commit(ticket.transfer_id, COMMITTED)
    await eventually(lambda: bool(ends.sent) and bool(ended))
    assert (ended, ends.sent[0].result) == (["aborted"], "aborted")


async def test_a_callback_that_raises_fails_its_own_transfer_only(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    ends = pair.reserve([])

    def broken(_: Committed) -> None:
        raise ValueError("a bug of the caller")

    ticket = pair.receiver.open([], PROMPT, ends.received.append, broken)
    pair.sender.open(ticket, ends.sent.append)
    pair.sender.commit(ticket.transfer_id, COMMITTED)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("failed", "failed")
    assert "a bug of the caller" in caplog.text
    assert (await pair.transfer([0], [0])).results == ("done", "done")


# What a sender may get wrong


async def test_a_finished_answer_commits_without_its_blocks(pair: Pair) -> None:
    ends = pair.open([0, 1])
    finished = replace(COMMITTED, is_finished=True)
    pair.sender.commit(ends.ticket.transfer_id, finished)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("done", "done")
    assert ends.committed == [finished]


async def test_a_commit_with_missing_blocks_fails_both_ends_at_once(pair: Pair) -> None:
    ends = pair.open([0, 1])
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("failed", "failed")
    assert "1 of 2 blocks" in ends.received[0].reason


async def test_a_commit_for_another_prompt_fails(pair: Pair) -> None:
    ends = pair.open([])
    pair.sender.commit(ends.ticket.transfer_id, replace(COMMITTED, prompt_hash=b"other"))
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("failed", "failed")
    assert not ends.committed
    assert "reserved for" in ends.sent[0].reason


@pytest.mark.parametrize(("blocks", "first"), [([0], -1), ([0], 2), ([0, 1], 1), ([0, 1, 2], 0)])
async def test_a_push_outside_the_ticket_fails(pair: Pair, blocks: list[int], first: int) -> None:
    ends = pair.open([8, 9])
    pair.sender.push(ends.ticket.transfer_id, blocks, first)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("failed", "failed")
    assert "of 2" in ends.sent[0].reason


async def test_a_block_pushed_twice_fails(pair: Pair) -> None:
    ends = pair.open([8, 9])
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("failed", "failed")


async def test_a_block_number_that_does_not_exist_is_the_callers_error(pair: Pair) -> None:
    ends = pair.open([8, 9])
    with pytest.raises(IndexError):
        pair.sender.push(ends.ticket.transfer_id, [99], 0)
    with pytest.raises(IndexError):
        pair.reserve([99])
    pair.sender.abort(ends.ticket.transfer_id, "never mind")
    await eventually(lambda: ends.both_ended)


# Flow control


@at_once
async def test_the_sender_stops_at_the_window_and_goes_on_with_credit(pair: Pair, faults: Faults) -> None:
    ends = pair.open(list(range(32)))
    await settle()
    faults.seen.clear()
    pair.sender.push(ends.ticket.transfer_id, list(range(32)), 0)
    sent = sum(frame.num_bytes for frame in faults.seen if isinstance(frame, Data))
    assert sent == CONFIG.window_bytes
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("done", "done")
    assert ends.sent[0].num_bytes == 32 * BLOCK_BYTES


async def test_a_receiver_that_takes_nothing_fails_its_transfer_only(pair: Pair) -> None:
    slow = pair.transport.bind("inproc://slow")
    ticket = Ticket(new_transfer_id(), 1, "inproc://slow", 8, 60_000)
    ends = pair.reserve([])
    pair.sender.open(ticket, ends.sent.append)
    pair.sender.push(ticket.transfer_id, list(range(8)), 0)
    assert (await pair.transfer([0], [1])).results == ("done", "done")
    await pair.pass_time(CONFIG.connect_timeout_s + 1)
    assert ends.sent[0].result == "failed"
    assert (await pair.transfer([0], [1])).results == ("done", "done")
    slow.close()


async def test_transfers_share_a_link_message_by_message(pair: Pair, faults: Faults) -> None:
    long = pair.open(list(range(24)))
    short = pair.open([30])
    await settle()
    pair.sender.push(long.ticket.transfer_id, list(range(24)), 0)
    pair.sender.push(short.ticket.transfer_id, [0], 0)
    pair.sender.commit(long.ticket.transfer_id, COMMITTED)
    pair.sender.commit(short.ticket.transfer_id, COMMITTED)
    await eventually(lambda: short.both_ended and long.both_ended)
    done = [frame.transfer_id for frame in faults.seen if isinstance(frame, Done)]
    assert done == [short.ticket.transfer_id, long.ticket.transfer_id], "the short one does not wait for the long one"


async def test_closing_either_end_ends_every_transfer_once(pair: Pair) -> None:
    waiting = [pair.open([0]), pair.open([1])]
    reserved = pair.reserve([2])
    await settle()
    await pair.sender.aclose()
    await settle()
    await pair.receiver.aclose()
    assert [ends.results for ends in waiting] == [("failed", "failed")] * 2
    assert len(reserved.received) == 1
    assert pair.receiver.stats.num_inflight == pair.sender.stats.num_inflight == 0
    with pytest.raises(TransferError, match="not running"):
        pair.reserve([0])
    with pytest.raises(TransferError, match="not running"):
        pair.sender.open(reserved.ticket, reserved.sent.append)


async def test_a_sender_that_reads_nothing_is_dropped_before_it_costs_memory(pair: Pair) -> None:
    stranger = Stranger(pair.transport.connect(pair.receiver.endpoint))
    await stranger.hello()
    assert len(pair.receiver.peers()) == 2
    for number in range(12_000):  # each one asks for an answer; the transport holds a thousand
        stranger.say(Begin(bytes(16), number, 0))
        if number % 500 == 0:
            await settle()
    await eventually(lambda: len(pair.receiver.peers()) == 1)
    assert (await pair.transfer([0], [1])).results == ("done", "done")


@pytest.mark.parametrize(
    "make",
    [
        lambda: TransferConfig(idle_timeout_s=0),
        lambda: TransferConfig(lease_s=float("nan")),
        lambda: TransferConfig(peer_timeout_s=0.9, heartbeat_s=0.5),
        lambda: TransferConfig(lease_s=4),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], TransferConfig]) -> None:
    with pytest.raises(ConfigError, match="must be above"):
        make()
