"""A step's numbers on their way to the device: laid out in one host buffer, sent with one copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, Ints
from engine.gpu.device import Device, Mark
from kernels.gpu.decode_attention import decode_items
from kernels.gpu.prefill_attention import prefill_tiles

# Integers: a section begins at 16 bytes, so that every launch sees the same alignment and none compiles anew.
_ALIGN = 4
_NUM_HOST_BUFFERS = 3  # the one being filled, and those the device may still read

Window = int | None


_OF_ROWS = ("token_ids", "blocks", "offsets", "angle_rows", "positions", "prompt_lens")
_AS_SENT = (*_OF_ROWS, "starts", "first_rows", "first_blocks", "tables", "outputs")  # what a `Step` has by these names


class Sections:
    """Places of named arrays in one buffer of int32, one after the other; only the used part of the last need be copied."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.slices: dict[str, slice] = {}
        self.num_ints = 0
        for name, size in sizes.items():
            self.slices[name] = slice(self.num_ints, self.num_ints + size)
            self.num_ints += -(-size // _ALIGN) * _ALIGN


class Stager:
    """Sends arrays to one buffer on the device. What was sent before is overwritten in the order of the stream.

    Args:
        device: where they go.
        num_ints: most that are sent at once, unless `reserve` makes more room.
    """

    def __init__(self, device: Device, num_ints: int) -> None:
        self._device = device
        self._allocate(num_ints)

    def reserve(self, num_ints: int) -> None:
        """Make room, in another place: not for a buffer whose address was captured."""
        if num_ints > len(self.buffer):
            self._device.mark().wait()  # nobody reads the old one any more
            self._allocate(2 * num_ints)

    def _allocate(self, num_ints: int) -> None:
        self._hosts = [self._device.host_buffer(4 * num_ints).view(torch.int32) for _ in range(_NUM_HOST_BUFFERS)]
        self._arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._marks: list[Mark | None] = [None] * _NUM_HOST_BUFFERS
        self._turn = 0
        self.buffer = torch.zeros(num_ints, dtype=torch.int32, device=self._device.place)

    def put(self, sections: Sections, arrays: Mapping[str, Ints]) -> None:
        """Copy arrays into their sections; each may be shorter than its section, whose rest then keeps what it had."""
        turn, self._turn = self._turn, (self._turn + 1) % _NUM_HOST_BUFFERS
        mark, array = self._marks[turn], self._arrays[turn]
        if mark is not None:
            mark.wait()  # the device still reads what this buffer held some steps ago
        end = 0
        for name, values in arrays.items():
            place = sections.slices[name]
            assert len(values) <= place.stop - place.start, f"{len(values)} {name} in a section of {place}"
            array[place.start : place.start + len(values)] = values
            end = max(end, place.start + len(values))
        self.buffer[:end].copy_(self._hosts[turn][:end], non_blocking=True)
        self._marks[turn] = self._device.mark()

    def views(self, sections: Sections) -> dict[str, Tensor]:
        """The sections on the device."""
        return {name: self.buffer[place] for name, place in sections.slices.items()}


@dataclass(frozen=True, slots=True)
class Work:
    """What decode attention has to do: the items of each row, for one window."""

    items: Tensor  # [m, 3] int32: row, first token, end token
    first_items: Tensor  # [rows + 1] int32
    num_items: Tensor  # [1] int32


@dataclass(frozen=True, slots=True)
class Step:
    """A batch on the device, int32 all. Rows beyond the batch's tokens are padding: they write no KV and nobody reads them."""

    num_decodes: int  # rows that decode attention takes, from the first on
    token_ids: Tensor  # [rows]; below 0: -1 - i stands for what row i of the step before sampled
    blocks: Tensor  # [rows]: the block that takes the token's KV, or -1
    offsets: Tensor  # [rows]: the place in it
    angle_rows: Tensor  # [rows]: of the rotary table
    positions: Tensor  # [rows]
    prompt_lens: Tensor  # [rows]: of each token's sequence
    starts: Tensor  # [s]
    first_rows: Tensor  # [s + 1]
    first_blocks: Tensor  # [s + 1]
    tables: Tensor
    tiles: Tensor  # [t, 2]: of the rows that prefill attention takes
    outputs: Tensor  # [m]
    works: Mapping[Window, Work]


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many of each a step may have: one that is captured once and filled many times, or the largest."""

    num_rows: int
    num_decodes: int
    num_sequences: int
    num_blocks: int
    num_tiles: int
    num_items: int
    num_outputs: int

    def sections(self, windows: Sequence[Window]) -> Sections:
        """Where each array lies. The tables come last: they are the longest, and seldom as long as they may be."""
        sizes = dict.fromkeys(_OF_ROWS, self.num_rows) | {
            "starts": self.num_sequences,
            "first_rows": self.num_sequences + 1,
            "first_blocks": self.num_sequences + 1,
            "tiles": 2 * self.num_tiles,
            "outputs": self.num_outputs,
        }
        for window in windows:
            sizes |= {f"num_items {window}": 1, f"first_items {window}": self.num_decodes + 1}
            sizes |= {f"items {window}": 3 * self.num_items}
        return Sections(sizes | {"tables": self.num_blocks})


def step_views(num_decodes: int, sections: Sections, stager: Stager, windows: Sequence[Window]) -> Step:
    """The step that lies in a stager's buffer."""
    views = stager.views(sections)
    return Step(
        num_decodes=num_decodes,
        tiles=views["tiles"].view(-1, 2),
        **{name: views[name] for name in _AS_SENT},
        works={
            window: Work(
                views[f"items {window}"].view(-1, 3), views[f"first_items {window}"], views[f"num_items {window}"]
            )
            for window in windows
        },
    )


def step_arrays(
    batch: Batch,
    block_tokens: int,
    windows: Sequence[Window],
    *,
    num_rows: int,
    num_decodes: int,
    tile_rows: int,
    has_positional_angles: bool,
) -> dict[str, Ints]:
    """What `Step` holds, on the host.

    Args:
        batch: the tokens.
        block_tokens: tokens in one block.
        windows: of the model's layers, each once.
        num_rows: at least the batch's tokens; the rest is padding, each row a sequence without tokens.
        num_decodes: how many of the first rows, single tokens or padding, decode attention takes; the others are prefill's.
        tile_rows: of prefill attention.
        has_positional_angles: whether a token's angles are those of its position; else each row has its own.
    """
    assert num_rows == batch.num_tokens or batch.num_decodes == batch.num_sequences, "only single tokens are padded"
    positions = batch.positions()
    num_padding = num_rows - batch.num_tokens
    num_sequences = batch.num_sequences + num_padding
    blocks = batch.tables[batch.per_token(batch.first_blocks[:-1]) + positions // block_tokens]
    # Padding has no rows, but the one before its first is looked up all the same: there must be one.
    first_rows = _padded(batch.first_rows, num_sequences + 1, max(batch.num_tokens, 1))
    starts = _padded(batch.starts, num_sequences, 0)
    tiles = prefill_tiles(first_rows[num_decodes:], tile_rows, starts[num_decodes:])
    tiles[:, 0] += num_decodes
    arrays = {
        "token_ids": _padded(batch.token_ids, num_rows, 0),
        "blocks": _padded(blocks, num_rows, -1),
        "offsets": _padded(positions % block_tokens, num_rows, 0),
        "angle_rows": _padded(positions, num_rows, 0) if has_positional_angles else np.arange(num_rows, dtype=np.int32),
        "positions": _padded(positions, num_rows, 0),
        "prompt_lens": _padded(batch.per_token(batch.prompt_lens), num_rows, 1),
        "starts": starts,
        "first_rows": first_rows,
        "first_blocks": _padded(batch.first_blocks, num_sequences + 1, len(batch.tables)),
        "tiles": tiles.reshape(-1),
        "outputs": batch.outputs,
    }
    contexts = batch.starts[:num_decodes] + 1
    for window in windows:
        work = decode_items(contexts, window)
        arrays[f"num_items {window}"] = np.array([len(work.items)], np.int32)
        arrays[f"first_items {window}"] = _padded(work.first_items, num_decodes + 1, len(work.items))
        arrays[f"items {window}"] = work.items.reshape(-1)
    return arrays | {"tables": batch.tables}


def _padded(values: Ints, size: int, filler: int) -> Ints:
    if len(values) == size:
        return values
    padded = np.full(size, filler, np.int32)
    padded[: len(values)] = values
    return padded


_NONE = np.empty(0, np.int32)
_BEGIN = np.zeros(1, np.int32)
NO_TOKENS = Batch(  # all padding; the first row's tile looks at a block all the same
    token_ids=_NONE,
    num_decodes=0,
    num_positions=0,
    starts=_NONE,
    first_rows=_BEGIN,
    prompt_lens=_NONE,
    tables=_BEGIN,
    first_blocks=_BEGIN,
    outputs=_NONE,
)
