"""What travels on the KV socket. Nothing is ever unpickled; every size is checked before anything is decoded.

Every message starts with one header: magic, version, kind, flags, and the sender's running number on this connection.
A control message is header + msgpack of one struct below, in one part. A data message is a header that goes on with
transfer id, epoch, index of its first block in the ticket's list, number of blocks and CRC-32, then one part of raw
bytes for each block.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from core.errors import FrameError
from core.layout import PROTOCOL_VERSION
from kvtransfer.states import Failure
from kvtransfer.transport import Part

MAGIC = b"BTKV"
_HEADER = struct.Struct("!4sBBHQ")  # magic, version, kind, flags, number
_DATA = struct.Struct("!4sBBHQ16sQIII")  # the header, then transfer id, epoch, first index, count, CRC-32
_CONTROL_KIND, _DATA_KIND = 1, 2
_HAS_CHECKSUM = 1
MAX_BLOCKS_PER_MESSAGE = 1024

TransferId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TransferIds = Annotated[list[TransferId], msgspec.Meta(max_length=1024)]


class Frame(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of control frames; the struct's name is its tag on the wire."""


class Hello(Frame, frozen=True):
    """Sender -> receiver, first on a connection: who I am and what my blocks look like."""

    name: Text  # the worker's stable name; a new incarnation under it fences the old one; may be empty
    incarnation: Text
    fingerprint: Annotated[dict[Text, Text | int], msgspec.Meta(max_length=64)]


class HelloOk(Frame, frozen=True):
    """Receiver -> sender: accepted; `window_bytes` may be unacknowledged at a time."""

    incarnation: Text
    window_bytes: Count


class HelloRefused(Frame, frozen=True):
    """Receiver -> sender: our blocks are not interchangeable."""

    reason: Annotated[str, msgspec.Meta(max_length=8192)]


class Reset(Frame, frozen=True):
    """Receiver -> sender: I do not know this connection (I restarted, or took you for dead); say HELLO again."""


class Bye(Frame, frozen=True):
    """Either way: this end closes now."""


class Begin(Frame, frozen=True):
    """Sender -> receiver: I hold this ticket and will fill it."""

    transfer_id: TransferId
    epoch: Epoch
    num_blocks: Count


class Commit(Frame, frozen=True):
    """Sender -> receiver: every block is out; the prompt is complete."""

    transfer_id: TransferId
    epoch: Epoch
    first_token: Count
    num_prompt_tokens: Count
    prompt_hash: Digest
    is_finished: bool


class Done(Frame, frozen=True):
    """Receiver -> sender: adopted, reuse your blocks."""

    transfer_id: TransferId


class Abort(Frame, frozen=True):
    """Either way, at once: this transfer ends; `result` and `reason` say why."""

    transfer_id: TransferId
    epoch: Epoch
    result: Failure
    reason: Text


class Drained(Frame, frozen=True):
    """Sender -> receiver: no frame of this transfer follows."""

    transfer_id: TransferId
    epoch: Epoch


class Ack(Frame, frozen=True):
    """Receiver -> sender: every message up to this number is out of my way, its bytes are credit again."""

    number: Number


class Lease(Frame, frozen=True):
    """Receiver -> sender, periodic: I still want these; keep their blocks `lease_ms` from now."""

    lease_ms: Count
    transfers: TransferIds


class Alive(Frame, frozen=True):
    """Sender -> receiver, periodic: I still work on these."""

    transfers: TransferIds


Control = Hello | HelloOk | HelloRefused | Reset | Bye | Begin | Commit | Done | Abort | Drained | Ack | Lease | Alive


@dataclass(frozen=True, slots=True)
class Data:
    """Blocks `first_index`, `first_index + 1`, ... of a ticket's list, one part each."""

    transfer_id: bytes
    epoch: int
    first_index: int
    blocks: Sequence[Part]
    num_bytes: int = field(init=False)  # of the blocks

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", sum(map(len, self.blocks)))


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def encode_control(frame: Control, number: int) -> list[Part]:
    """The parts of a control message."""
    return [_HEADER.pack(MAGIC, PROTOCOL_VERSION, _CONTROL_KIND, 0, number) + _encoder.encode(frame)]


def encode_data(frame: Data, number: int, checksum: bool) -> list[Part]:
    """The parts of a data message; block parts are passed on, not copied."""
    flags = _HAS_CHECKSUM if checksum else 0
    crc = _crc32(frame.blocks) if checksum else 0
    head = (MAGIC, PROTOCOL_VERSION, _DATA_KIND, flags, number)
    return [_DATA.pack(*head, frame.transfer_id, frame.epoch, frame.first_index, len(frame.blocks), crc), *frame.blocks]


def decode(parts: Sequence[Part], max_control_bytes: int) -> tuple[int, Control | Data]:
    """Read one message.

    Args:
        parts: as received.
        max_control_bytes: longer control messages are refused unread.
    Returns:
        The message's number on its connection, and the frame. Block parts are passed on, not copied.
    Raises:
        FrameError: anything that is not a frame of this protocol and version, whatever it is.
    """
    if not parts or len(parts[0]) < _HEADER.size:
        raise FrameError("shorter than a header")
    magic, version, kind, flags, number = _HEADER.unpack_from(parts[0])
    if magic != MAGIC:
        raise FrameError(f"magic {magic!r}: not a KV frame")
    if version != PROTOCOL_VERSION:
        raise FrameError(f"protocol version {version} there, {PROTOCOL_VERSION} here")
    if kind == _CONTROL_KIND:
        return number, _decode_control(parts, max_control_bytes)
    if kind == _DATA_KIND:
        return number, _decode_data(parts, bool(flags & _HAS_CHECKSUM))
    raise FrameError(f"unknown kind {kind}")


def _decode_control(parts: Sequence[Part], max_control_bytes: int) -> Control:
    if len(parts) != 1:
        raise FrameError(f"control message of {len(parts)} parts")
    if len(parts[0]) > max_control_bytes:
        raise FrameError(f"control message of {len(parts[0])} bytes, at most {max_control_bytes}")
    try:
        return _decoder.decode(memoryview(parts[0])[_HEADER.size :])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"control message: {error}") from error


def _decode_data(parts: Sequence[Part], has_checksum: bool) -> Data:
    if len(parts[0]) != _DATA.size:
        raise FrameError(f"data header of {len(parts[0])} bytes, not {_DATA.size}")
    *_, transfer_id, epoch, first_index, count, crc = _DATA.unpack(parts[0])
    blocks = parts[1:]
    if not 1 <= count <= MAX_BLOCKS_PER_MESSAGE or count != len(blocks):
        raise FrameError(f"data message announces {count} blocks, has {len(blocks)}, at most {MAX_BLOCKS_PER_MESSAGE}")
    if has_checksum and _crc32(blocks) != crc:
        raise FrameError("checksum does not match")
    return Data(transfer_id, epoch, first_index, blocks)


def _crc32(blocks: Sequence[Part]) -> int:
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
    return crc
