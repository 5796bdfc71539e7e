"""Each rule of the protocol, over the in-process transport and a clock moved by hand."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest

from core.errors import ConfigError, FingerprintError, FrameError, TransferError
from core.ids import new_transfer_id
from kvtransfer.config import TransferConfig
from kvtransfer.frames import (
    Abort,
    Begin,
    Commit,
    Control,
    Data,
    Done,
    Drained,
    Hello,
    HelloOk,
    Lease,
    decode,
    encode_control,
    encode_data,
)
from kvtransfer.inproc import InprocTransport
from kvtransfer.send_session import SendSession
from kvtransfer.sender import KVSender
from kvtransfer.ticket import Committed, Ticket, TransferOutcome
from kvtransfer.transport import Part, Socket
from tests.unit.kvtransfer_helpers import (
    BLOCK_BYTES,
    COMMITTED,
    CONFIG,
    FINGERPRINT,
    PROMPT,
    LossyTransport,
    Pair,
    SlowHandle,
    eventually,
    fill,
    settle,
)


class Faults:
    """Drops, doubles or holds back frames of one kind."""

    def __init__(self) -> None:
        self.kind: type[Control] | type[Data] | None = None
        self.fault = "pass"
        self.left = 0
        self.seen: list[Control | Data] = []

    def set(self, kind: type[Control] | type[Data], fault: str, times: int = 10**9) -> None:
        self.kind, self.fault, self.left = kind, fault, times

    def __call__(self, parts: Sequence[Part]) -> str:
        try:
            _, frame = decode(parts, 1 << 16)
        except FrameError:
            return "pass"
        self.seen.append(frame)
        if self.kind is not None and isinstance(frame, self.kind) and self.left > 0:
            self.left -= 1
            return self.fault
        return "pass"


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def pair(faults: Faults) -> AsyncIterator[Pair]:
    async with Pair(LossyTransport(InprocTransport(), faults)) as pair:
        await pair.sender.connect(pair.receiver.endpoint)
        yield pair


class Stranger:
    """Speaks frames to a receiver without a KVSender's manners."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self.number = 0

    async def hello(self, incarnation: str = "stranger", name: str = "") -> None:
        self.say(Hello(name, incarnation, {key: getattr(FINGERPRINT, key) for key in FINGERPRINT.__slots__}))
        await self.socket.recv()

    def say(self, frame: Control) -> None:
        self.socket.send(b"", encode_control(frame, self.number))
        self.number += 1


@pytest.fixture
async def stranger(pair: Pair) -> Stranger:
    stranger = Stranger(pair.transport.connect(pair.receiver.endpoint))
    await stranger.hello()
    return stranger


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


class FakeReceiver:
    """Accepts a sender and says only what it is told to."""

    def __init__(self, pair: Pair) -> None:
        self.socket = pair.transport.bind("inproc://*")
        self.ticket = Ticket(new_transfer_id(), 1, self.socket.endpoint, 0, 15_000)
        self.number = 0

    async def accept(self) -> None:
        self.peer, _ = await self.socket.recv()
        self.say(HelloOk("fake", 1000))

    def say(self, frame: Control) -> None:
        self.socket.send(self.peer, encode_control(frame, self.number))
        self.number += 1


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


# What only a broken or hostile peer does


def _begin(ticket: Ticket) -> Begin:
    return Begin(ticket.transfer_id, ticket.epoch, ticket.num_blocks)


async def _say_data(
    stranger: Stranger, ticket: Ticket, first: int, blocks: list[bytes], epoch: int | None = None
) -> None:
    data = Data(ticket.transfer_id, ticket.epoch if epoch is None else epoch, first, blocks)
    stranger.socket.send(b"", encode_data(data, stranger.number, checksum=False))
    stranger.number += 1
    await settle()


BLOCK = b"x" * BLOCK_BYTES


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
    stranger.say(_begin(ends.ticket))
    await _say_data(stranger, ends.ticket, 0, [b"y" * BLOCK_BYTES])
    await _say_data(stranger, ends.ticket, first, blocks)
    assert b"x" not in bytes(pair.target.view(10)) + bytes(pair.target.view(11))
    stranger.say(Drained(ends.ticket.transfer_id, ends.ticket.epoch))
    await settle()
    assert ends.received[0].result == "failed"
    assert why in ends.received[0].reason


async def test_blocks_of_another_epoch_unknown_transfer_or_before_begin_are_dropped(
    pair: Pair, stranger: Stranger
) -> None:
    ends = pair.reserve([10])
    await _say_data(stranger, ends.ticket, 0, [BLOCK])
    stranger.say(_begin(ends.ticket))
    await _say_data(stranger, ends.ticket, 0, [BLOCK], epoch=ends.ticket.epoch + 1)
    await _say_data(stranger, replace(ends.ticket, transfer_id=new_transfer_id()), 0, [BLOCK])
    assert bytes(pair.target.view(10)) == bytes(BLOCK_BYTES)
    dropped = pair.receiver.stats.frames_dropped
    assert dropped == {"no_begin": 1, "wrong_epoch": 1, "unknown_transfer": 1}
    assert not ends.received, "a stray frame ends nobody's transfer"


async def test_only_who_began_a_transfer_may_write_or_end_it(pair: Pair, stranger: Stranger) -> None:
    ends = pair.open([10])
    await settle()
    stranger.say(_begin(ends.ticket))
    await _say_data(stranger, ends.ticket, 0, [BLOCK])
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
    stranger.say(_begin(ends.ticket))
    await _say_data(stranger, ends.ticket, 0, [b"y" * BLOCK_BYTES])
    for _ in range(2):
        stranger.say(commit)
    await _say_data(stranger, ends.ticket, 0, [BLOCK])
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
    stranger.say(_begin(ends.ticket))
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
    stranger.say(_begin(ends.ticket))
    await settle()
    reborn = Stranger(pair.transport.connect(pair.receiver.endpoint))
    await reborn.hello("life-2", "q" if name else "")
    assert bool(ends.received) == bool(name), "without a name the former life ends by timeout"
    if name:
        assert "life-2" in ends.received[0].reason
        await _say_data(stranger, ends.ticket, 0, [BLOCK])
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


# Flow control


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
