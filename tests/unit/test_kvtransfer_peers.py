"""What a lost frame, and a hostile, dead or restarted peer, may not do; the clock is moved by hand."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from core.errors import FingerprintError, TransferError
from core.ids import new_transfer_id
from kvtransfer.frames import (
    Abort,
    Begin,
    Commit,
    Control,
    Data,
    Done,
    Drained,
    Lease,
    decode,
)
from kvtransfer.inproc import InprocTransport
from kvtransfer.sender import KVSender
from kvtransfer.ticket import Ticket
from tests.unit.kvtransfer_helpers import (
    BLOCK,
    BLOCK_BYTES,
    COMMITTED,
    CONFIG,
    FINGERPRINT,
    PROMPT,
    Faults,
    LossyTransport,
    Pair,
    Stranger,
    begin_of,
    eventually,
    fill,
    say_data,
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


@pytest.fixture
async def stranger(pair: Pair) -> Stranger:
    stranger = Stranger(pair.transport.connect(pair.receiver.endpoint))
    await stranger.hello()
    return stranger


# What only a broken or hostile peer does


@pytest.mark.parametrize(
    ("first", "blocks", "why"),
    [
        (2, [BLOCK], "block 2 of 2"),
        (1, [BLOCK, BLOCK], "block 2 of 2"),
        (2**32 - 1, [BLOCK], "of 2"),
        (0, [BLOCK], "sent twice"),
        (1, [BLOCK[:-1]], "bytes"),
        (1, [BLOCK + b"x"], "bytes"),
        (1, [b""], "bytes"),
    ],
)
async def test_a_wrong_block_fails_the_transfer_and_is_not_written(
    pair: Pair, stranger: Stranger, first: int, blocks: list[bytes], why: str
) -> None:
    ends = pair.reserve([10, 11])
    stranger.say(begin_of(ends.ticket))
    await say_data(stranger, ends.ticket, 0, [b"y" * BLOCK_BYTES])
    await say_data(stranger, ends.ticket, first, blocks)
    assert b"x" not in bytes(pair.target.view(10)) + bytes(pair.target.view(11))
    stranger.say(Drained(ends.ticket.transfer_id, ends.ticket.epoch))
    await settle()
    assert ends.received[0].result == "failed"
    assert why in ends.received[0].reason


async def test_blocks_of_another_epoch_unknown_transfer_or_before_begin_are_dropped(
    pair: Pair, stranger: Stranger
) -> None:
    ends = pair.reserve([10])
    await say_data(stranger, ends.ticket, 0, [BLOCK])
    stranger.say(begin_of(ends.ticket))
    await say_data(stranger, ends.ticket, 0, [BLOCK], epoch=ends.ticket.epoch + 1)
    await say_data(stranger, replace(ends.ticket, transfer_id=new_transfer_id()), 0, [BLOCK])
    assert bytes(pair.target.view(10)) == bytes(BLOCK_BYTES)
    dropped = pair.receiver.stats.frames_dropped
    assert dropped == {"no_begin": 1, "wrong_epoch": 1, "unknown_transfer": 1}
    assert not ends.received, "a stray frame ends nobody's transfer"


async def test_only_who_began_a_transfer_may_write_or_end_it(pair: Pair, stranger: Stranger) -> None:
    ends = pair.open([10])
    await settle()
    stranger.say(begin_of(ends.ticket))
    await say_data(stranger, ends.ticket, 0, [BLOCK])
    stranger.say(Abort(ends.ticket.transfer_id, ends.ticket.epoch, "aborted", "mine"))
    await settle()
    assert pair.receiver.stats.frames_dropped["wrong_peer"] == 3
    content = fill(pair.source, 0, seed=3)
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await eventually(lambda: ends.both_ended)
    assert bytes(pair.target.view(10)) == content


async def test_after_commit_nothing_is_written_and_a_second_commit_adopts_nothing(
    pair: Pair, stranger: Stranger
) -> None:
    ends = pair.reserve([10])
    commit = Commit(ends.ticket.transfer_id, ends.ticket.epoch, 1, 1, PROMPT, False)
    stranger.say(begin_of(ends.ticket))
    await say_data(stranger, ends.ticket, 0, [b"y" * BLOCK_BYTES])
    for _ in range(2):
        stranger.say(commit)
    await say_data(stranger, ends.ticket, 0, [BLOCK])
    assert len(ends.committed) == len(ends.received) == 1
    assert bytes(pair.target.view(10)) == b"y" * BLOCK_BYTES
    assert pair.receiver.stats.frames_dropped == {"ended_transfer": 2}


@pytest.mark.parametrize(
    "change", [{"epoch": 99}, {"num_blocks": 3}, {"transfer_id": bytes(16)}], ids=lambda change: next(iter(change))
)
async def test_a_forged_or_stale_ticket_fails_the_sender_at_once(pair: Pair, change: dict[str, int]) -> None:
    ends = pair.reserve([0])
    pair.sender.open(replace(ends.ticket, **change), ends.sent.append)
    await eventually(lambda: bool(ends.sent))
    assert ends.sent[0].result == "failed"


async def test_a_ticket_serves_once(pair: Pair) -> None:
    ends = pair.open([0])
    with pytest.raises(TransferError, match="in use"):
        pair.sender.open(ends.ticket, ends.sent.append)
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await eventually(lambda: ends.both_ended)
    again: list[str] = []
    pair.sender.open(ends.ticket, lambda outcome: again.append(outcome.result))
    await eventually(lambda: bool(again))
    assert again == ["failed"]
    assert len(ends.committed) == 1


@pytest.mark.parametrize("change", [{"transfer_id": b"short"}, {"num_blocks": -1}, {"epoch": 2**63}, {"lease_ms": -1}])
def test_a_ticket_that_cannot_be_one_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(TransferError, match=next(iter(change))):
        replace(Ticket(bytes(16), 1, "inproc://x", 1, 1), **change)


# Losing frames, peers, and finding them again


async def test_a_lost_frame_fails_what_it_may_have_belonged_to_and_nothing_after(pair: Pair, faults: Faults) -> None:
    first, second = pair.open([0, 1]), pair.open([2])
    await settle()
    faults.set(Data, "drop", times=1)
    pair.sender.push(first.ticket.transfer_id, [0], 0)
    pair.sender.push(first.ticket.transfer_id, [1], 1)
    await eventually(lambda: first.both_ended and second.both_ended)
    assert first.results == second.results == ("failed", "failed")
    assert pair.receiver.stats.sequence_gaps == 1
    for _ in range(50):
        assert (await pair.transfer([3], [3])).results == ("done", "done")


async def test_a_lost_frame_of_the_receiver_is_noticed_by_the_sender(pair: Pair, faults: Faults) -> None:
    ends = pair.open([0])
    await pair.pass_time(1)
    faults.set(Lease, "drop", times=1)
    await pair.pass_time(1)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("failed", "failed")
    assert pair.sender.stats.sequence_gaps == 1
    assert (await pair.transfer([3], [3])).results == ("done", "done")


@pytest.mark.parametrize("kind", [Begin, Data, Commit, Done, Lease])
async def test_a_frame_that_comes_twice_is_counted_and_does_nothing(
    pair: Pair, faults: Faults, kind: type[Control]
) -> None:
    faults.set(kind, "twice")
    ends = pair.open([4])
    await pair.pass_time(1)
    content = fill(pair.source, 1, seed=5)
    pair.sender.push(ends.ticket.transfer_id, [1], 0)
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("done", "done")
    assert bytes(pair.target.view(4)) == content
    await settle()
    assert pair.sender.stats.frames_dropped["replayed"] + pair.receiver.stats.frames_dropped["replayed"] >= 1


async def test_a_lost_done_is_noticed_at_the_next_frame(pair: Pair, faults: Faults) -> None:
    faults.set(Done, "drop", times=1)
    ends = pair.open([])
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await settle()
    assert ends.received[0].result == "done"
    await pair.pass_time(2 * CONFIG.heartbeat_s)
    await eventually(lambda: ends.both_ended)
    assert ends.sent[0].reason == "frames of the receiver were lost"
    assert (await pair.transfer([0], [0])).results == ("done", "done")


async def test_a_silent_sender_is_declared_dead_and_its_transfers_end(pair: Pair, faults: Faults) -> None:
    ends = pair.open([0])
    await settle()
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    await settle()
    for _ in range(12):  # the receiver's clock goes on; nothing comes from the sender
        pair.clock.advance(0.5)
        pair.receiver.tick()
    assert ends.received[0].result == "failed"
    assert pair.receiver.peers() == []
    await pair.pass_time(1)  # the sender speaks again, is told that it is unknown, and comes back by itself
    await eventually(lambda: pair.sender.peers() != [])
    assert ends.sent[0].result == "failed"
    assert (await pair.transfer([1], [1])).results == ("done", "done")


async def test_a_transfer_that_its_callers_forgot_ends_too(pair: Pair) -> None:
    ends = pair.open([0])
    await pair.pass_time(CONFIG.transfer_timeout_s + 1)
    assert ends.results == ("failed", "failed")
    assert "not committed" in ends.sent[0].reason


async def test_a_sender_that_forgets_one_transfer_loses_only_that_one(pair: Pair, stranger: Stranger) -> None:
    ends = pair.reserve([0])
    stranger.say(begin_of(ends.ticket))
    other = pair.open([1])
    for _ in range(25):
        stranger.say(Drained(bytes(16), 0))  # alive, but without a word about the transfer
        await pair.pass_time(0.5)
    assert "silent" in ends.received[0].reason
    assert not other.received


@pytest.mark.parametrize("name", ["p", ""])
async def test_a_restarted_sender_fences_its_former_life(pair: Pair, name: str) -> None:
    stranger = Stranger(pair.transport.connect(pair.receiver.endpoint))
    await stranger.hello("life-1", "q")
    ends = pair.reserve([10])
    stranger.say(begin_of(ends.ticket))
    await settle()
    reborn = Stranger(pair.transport.connect(pair.receiver.endpoint))
    await reborn.hello("life-2", "q" if name else "")
    assert bool(ends.received) == bool(name), "without a name the former life ends by timeout"
    if name:
        assert "life-2" in ends.received[0].reason
        await say_data(stranger, ends.ticket, 0, [BLOCK])
        assert bytes(pair.target.view(10)) == bytes(BLOCK_BYTES)
        assert pair.receiver.stats.frames_dropped["unknown_peer"] == 1


async def test_a_receiver_that_restarts_twenty_times_at_one_endpoint_is_found_each_time(pair: Pair) -> None:
    endpoint = pair.receiver.endpoint
    for life in range(20):
        ends = pair.open([0])
        await pair.receiver.aclose()
        await eventually(lambda ends=ends: ends.both_ended)
        assert ends.results == ("failed", "failed")
        pair.receiver = pair.make_receiver(f"r-{life}")
        await pair.receiver.start(endpoint)
        await pair.sender.connect(endpoint)
        assert (await pair.transfer([0], [0])).results == ("done", "done")


async def test_a_sender_that_restarts_twenty_times_is_taken_back_each_time(pair: Pair) -> None:
    for life in range(20):
        ends = pair.open([0])
        await settle()
        await pair.sender.aclose()
        await eventually(lambda ends=ends: ends.both_ended)
        pair.sender = pair.make_sender(f"s-{life}")
        await pair.sender.start()
        await pair.sender.connect(pair.receiver.endpoint)
        assert (await pair.transfer([0], [0])).results == ("done", "done")
    assert len(pair.receiver.peers()) == 1


async def test_a_receiver_that_vanished_without_a_word_is_reconnected(pair: Pair, faults: Faults) -> None:
    faults.set(Lease, "drop")
    ends = pair.open([0])
    await pair.pass_time(CONFIG.peer_timeout_s + 1)
    assert "no frame from" in ends.sent[0].reason
    faults.set(Lease, "pass")
    await pair.sender.connect(pair.receiver.endpoint)
    assert (await pair.transfer([0], [0])).results == ("done", "done")


# HELLO


async def test_another_kind_of_blocks_is_refused_naming_both_values(pair: Pair) -> None:
    other = pair.make_sender("s2", replace(FINGERPRINT, kv_dtype="float16", block_tokens=8), name="other")
    await other.start()
    with pytest.raises(FingerprintError) as refusal:
        await other.connect(pair.receiver.endpoint)
    for text in ("kv_dtype: float32 here, float16 there", "block_tokens: 4 here, 8 there"):
        assert text in str(refusal.value)
    ends = pair.reserve([0])
    other.open(ends.ticket, ends.sent.append)
    await eventually(lambda: bool(ends.sent))
    assert ends.sent[0].result == "failed"
    assert "kv_dtype" in ends.sent[0].reason
    assert other.peers() == []
    await other.aclose()


async def test_nobody_at_the_endpoint_is_an_error_within_the_deadline(pair: Pair) -> None:
    config = replace(CONFIG, connect_timeout_s=0.05)
    sender = KVSender(pair.source, pair.transport, FINGERPRINT, "s2", config)
    with pytest.raises(TransferError, match="inproc://nowhere"):
        await sender.connect("inproc://nowhere")
    await sender.aclose()


async def test_a_transfer_to_nowhere_fails_by_its_deadline(pair: Pair) -> None:
    ends = pair.reserve([0])
    pair.sender.open(replace(ends.ticket, endpoint="inproc://nowhere"), ends.sent.append)
    pair.sender.push(ends.ticket.transfer_id, [0], 0)
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await pair.pass_time(CONFIG.connect_timeout_s + 1)
    assert "no connection to inproc://nowhere" in ends.sent[0].reason
    await pair.pass_time(1)
    assert pair.sender.peers() == [pair.receiver.endpoint]


async def test_frames_before_hello_are_answered_with_reset(pair: Pair) -> None:
    socket = pair.transport.connect(pair.receiver.endpoint)
    Stranger(socket).say(Drained(bytes(16), 0))
    _, parts = await socket.recv()
    assert type(decode(parts, 100)[1]).__name__ == "Reset"


async def test_garbage_does_not_disturb_a_running_transfer(pair: Pair) -> None:
    ends = pair.open(list(range(8)))
    socket = pair.transport.connect(pair.receiver.endpoint)
    for index in range(8):
        content = fill(pair.source, index, seed=index)
        for garbage in (b"", b"\0" * 500, b"GET / HTTP/1.1\r\n\r\n", content):
            socket.send(b"", [garbage, content])
        pair.sender.push(ends.ticket.transfer_id, [index], index)
        await settle()
    pair.sender.commit(ends.ticket.transfer_id, COMMITTED)
    await eventually(lambda: ends.both_ended)
    assert ends.results == ("done", "done")
    assert pair.receiver.stats.frames_dropped == {"garbage": 32}
