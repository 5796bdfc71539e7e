"""Frames: round trips, and whatever else may arrive on an open port."""

import pathlib
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import FrameError
from core.layout import PROTOCOL_VERSION
from kvtransfer.frames import (
    MAGIC,
    Abort,
    Ack,
    Alive,
    Begin,
    Bye,
    Commit,
    Control,
    Data,
    Done,
    Drained,
    Hello,
    HelloOk,
    HelloRefused,
    Lease,
    Reset,
    decode,
    encode_control,
    encode_data,
)

MAX_CONTROL_BYTES = 4096
ID = bytes(range(16))
CONTROL_HEAD = struct.pack("!4sBBHQ", MAGIC, PROTOCOL_VERSION, 1, 0, 0)
FRAMES: list[Control] = [
    Hello("p", "i", {"model": "m", "num_layers": 3}),
    HelloOk("i", 1 << 20),
    HelloRefused("dtype: bfloat16 here, float32 there"),
    Reset(),
    Bye(),
    Begin(ID, 2**63 - 1, 0),
    Commit(ID, 1, 2, 3, b"hash", False),
    Done(ID),
    Abort(ID, 1, "aborted", "the client left"),
    Drained(ID, 1),
    Ack(2**63 - 1),
    Lease(15_000, [ID, ID]),
    Alive([]),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_control_frame_survives_the_wire(frame: Control) -> None:
    assert decode(encode_control(frame, 41), MAX_CONTROL_BYTES) == (41, frame)


@given(
    blocks=st.lists(st.binary(max_size=64), min_size=1, max_size=5),
    checksum=st.booleans(),
    first=st.integers(0, 2**32 - 1),
)
def test_data_survives_the_wire_without_a_copy(blocks: list[bytes], checksum: bool, first: int) -> None:
    number, frame = decode(encode_data(Data(ID, 3, first, blocks), 9, checksum), MAX_CONTROL_BYTES)
    assert isinstance(frame, Data)
    assert (number, frame.transfer_id, frame.epoch, frame.first_index) == (9, ID, 3, first)
    assert all(mine is theirs for mine, theirs in zip(frame.blocks, blocks, strict=True))


def test_a_flipped_bit_is_seen_when_checksums_are_on() -> None:
    head, block = encode_data(Data(ID, 3, 0, [b"abc"]), 0, checksum=True)
    with pytest.raises(FrameError, match="checksum"):
        decode([head, b"abd"], MAX_CONTROL_BYTES)
    assert decode([head, block], MAX_CONTROL_BYTES)


def must_be_a_frame_or_a_frame_error(parts: list[bytes]) -> None:
    try:
        decode(parts, MAX_CONTROL_BYTES)
    except FrameError:
        return


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_raise_nothing_but_frame_error(parts: list[bytes]) -> None:
    must_be_a_frame_or_a_frame_error(parts)


@given(st.binary(max_size=300))
def test_random_msgpack_behind_a_good_header_raises_nothing_but_frame_error(body: bytes) -> None:
    must_be_a_frame_or_a_frame_error([CONTROL_HEAD + body])


@given(st.sampled_from(FRAMES), st.data())
def test_a_damaged_frame_raises_nothing_but_frame_error(frame: Control, data: st.DataObject) -> None:
    damaged = bytearray(encode_control(frame, 7)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    must_be_a_frame_or_a_frame_error([bytes(damaged[: data.draw(st.integers(0, len(damaged)))]), b"x"])
    must_be_a_frame_or_a_frame_error([bytes(damaged)])


DATA_HEAD = struct.Struct("!4sBBHQ16sQIII")


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "header"),
        ([b""], "header"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "magic"),
        ([pickle.dumps({"a": 1}, protocol=4) + bytes(16)], "magic"),
        ([struct.pack("!4sBBHQ", MAGIC, PROTOCOL_VERSION + 1, 1, 0, 0)], f"{PROTOCOL_VERSION + 1} there"),
        ([struct.pack("!4sBBHQ", MAGIC, PROTOCOL_VERSION, 9, 0, 0)], "kind"),
        ([CONTROL_HEAD, b"extra"], "parts"),
        ([CONTROL_HEAD + bytes(MAX_CONTROL_BYTES)], "at most"),
        ([CONTROL_HEAD + b"\x81\xa4type" + b"\x91" * 2000], "control message"),
        ([CONTROL_HEAD + b"\x81\xa4type\xa5Hello"], "control message"),
        ([CONTROL_HEAD + b"\xdd\xff\xff\xff\xff"], "control message"),
        (encode_control(Abort(ID, 1, "done", "an abort that claims success"), 0), "Invalid enum value 'done'"),  # type: ignore[arg-type]
        ([DATA_HEAD.pack(MAGIC, PROTOCOL_VERSION, 2, 0, 0, ID, 1, 0, 2, 0), b"one"], "announces 2"),
        ([DATA_HEAD.pack(MAGIC, PROTOCOL_VERSION, 2, 0, 0, ID, 1, 0, 0, 0)], "announces 0"),
        ([DATA_HEAD.pack(MAGIC, PROTOCOL_VERSION, 2, 0, 0, ID, 1, 0, 2**32 - 1, 0)], "announces"),
        ([DATA_HEAD.pack(MAGIC, PROTOCOL_VERSION, 2, 0, 0, ID, 1, 0, 1, 0)[:-1], b"one"], "data header"),
    ],
)
def test_each_kind_of_garbage_is_named(parts: list[bytes], why: str) -> None:
    with pytest.raises(FrameError, match=why):
        decode(parts, MAX_CONTROL_BYTES)


def test_nothing_in_kv_transfer_can_load_code() -> None:
    sources = (pathlib.Path(__file__).parents[2] / "kvtransfer").glob("*.py")
    text = "\n".join(source.read_text() for source in sources)
    for name in ("import pickle", "recv_pyobj", "send_pyobj", "eval(", "exec(", "marshal", "cloudpickle"):
        assert name not in text
