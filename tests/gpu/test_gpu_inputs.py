"""A step's numbers on their way to the device: every one arrives where the kernels look for it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.sampling import SamplingParams
from core.sequence import SequenceSpec
from engine.batch import build_batch
from engine.gpu.device import Device, find_device
from engine.gpu.inputs import NO_TOKENS, Sections, Stager, StepShape, step_arrays, step_views
from engine.plan import Chunk
from engine.sequence import Sequence

BLOCK = 4
WINDOWS = (None, 7)
TILE = 16


@pytest.fixture(scope="module")
def stand_in(device: torch.device) -> Device:
    return find_device(device)


def chunk_of(number: int, start: int, num_tokens: int) -> Chunk:
    num_prompt = start + num_tokens
    spec = SequenceSpec(
        sequence_id=f"s{number}",
        prompt=tuple(range(1000 * number, 1000 * number + num_prompt)),
        sampling=SamplingParams(temperature=0.0, max_tokens=4, seed=0),
        eos_token_ids=(),
        block_table=tuple(100 * number + index for index in range(-(-num_prompt // BLOCK))),
        num_computed_tokens=start,
    )
    return Chunk(Sequence(spec), num_tokens)


SINGLES = st.lists(st.integers(0, 40), max_size=4)  # starts
CHUNKS = st.lists(st.tuples(st.integers(0, 20), st.integers(2, 40)), max_size=3)  # starts and lengths


@settings(max_examples=60)
@given(singles=SINGLES, longer=CHUNKS, is_deterministic=st.booleans())
def test_every_token_finds_its_place_and_its_attention(
    stand_in: Device, singles: list[int], longer: list[tuple[int, int]], is_deterministic: bool
) -> None:
    parts = [(start, 1) for start in singles] + longer
    if not parts:
        return
    chunks = [chunk_of(number, start, length) for number, (start, length) in enumerate(parts)]
    batch = build_batch(chunks, BLOCK)
    num_decodes = 0 if is_deterministic else len(singles)
    arrays = step_arrays(
        batch, BLOCK, WINDOWS, num_rows=batch.num_tokens, num_decodes=num_decodes, tile_rows=TILE, has_positional_angles=True
    )  # fmt: skip
    sections = Sections({name: len(values) for name, values in arrays.items()})
    stager = Stager(stand_in, sections.num_ints)
    stager.put(sections, arrays)
    step = step_views(num_decodes, sections, stager, WINDOWS)
    row = 0
    tiles = {tuple(tile) for tile in step.tiles.tolist()}
    for number, (start, length) in enumerate(parts):
        for position in range(start, start + length):
            assert step.token_ids[row] == 1000 * number + position
            assert step.blocks[row] == 100 * number + position // BLOCK
            assert step.offsets[row] == position % BLOCK
            assert step.angle_rows[row] == position
            row += 1
        table = step.tables[step.first_blocks[number] : step.first_blocks[number + 1]].tolist()
        assert table == [100 * number + index for index in range(len(table))]
        if number < num_decodes:
            for window, work in step.works.items():
                items = work.items[work.first_items[number] : work.first_items[number + 1]].tolist()
                first = 0 if window is None else max(0, start + 1 - window)
                assert [item[0] for item in items] == [number] * len(items)
                assert (items[0][1], items[-1][2]) == (first, start + 1)
        else:
            expected = {(number, first) for first in range(0, length, TILE)}
            assert {tile for tile in tiles if tile[0] == number} == expected
    for work in step.works.values():
        assert work.num_items.tolist() == [len(work.items)] or len(work.items) > work.num_items
    assert step.outputs.tolist() == batch.outputs.tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_whatever_has_rows_has_blocks_also_where_all_is_padding(num_rows: int) -> None:
    arrays = step_arrays(
        NO_TOKENS, BLOCK, WINDOWS, num_rows=num_rows, num_decodes=0, tile_rows=TILE, has_positional_angles=True
    )
    for number in range(num_rows):
        has_rows = arrays["first_rows"][number + 1] > arrays["first_rows"][number]
        has_blocks = arrays["first_blocks"][number + 1] > arrays["first_blocks"][number]
        assert has_blocks or not has_rows
    assert arrays["tables"].tolist() == [0]


@given(starts=st.lists(st.integers(0, 40), max_size=5), num_padding=st.integers(0, 3))
@settings(max_examples=30)
def test_padding_writes_nothing_and_has_nothing_to_attend(
    stand_in: Device, starts: list[int], num_padding: int
) -> None:
    batch = build_batch([chunk_of(n, start, 1) for n, start in enumerate(starts)], BLOCK) if starts else NO_TOKENS
    num_rows = len(starts) + num_padding
    if not num_rows:
        return
    arrays = step_arrays(
        batch, BLOCK, WINDOWS, num_rows=num_rows, num_decodes=num_rows, tile_rows=TILE, has_positional_angles=True
    )
    assert arrays["blocks"][len(starts) :].tolist() == [-1] * num_padding
    assert (arrays["blocks"][: len(starts)] >= 0).all()
    for window in WINDOWS:
        first_items = arrays[f"first_items {window}"]
        assert len(first_items) == num_rows + 1
        assert (np.diff(first_items)[len(starts) :] == 0).all()
        assert first_items[-1] == arrays[f"num_items {window}"][0]
    assert len(arrays["tiles"]) == 0


def test_what_lies_in_a_bucket_is_replaced_step_by_step(stand_in: Device) -> None:
    shape = StepShape(
        num_rows=4, num_decodes=4, num_sequences=4, num_blocks=40, num_tiles=0, num_items=64, num_outputs=4
    )
    sections = shape.sections(WINDOWS)
    stager = Stager(stand_in, sections.num_ints)
    step = step_views(shape.num_decodes, sections, stager, WINDOWS)
    for starts in ([3, 9, 30], [1], [17, 2, 5, 8]) * 3:  # more often than there are host buffers
        batch = build_batch([chunk_of(number, start, 1) for number, start in enumerate(starts)], BLOCK)
        arrays = step_arrays(
            batch, BLOCK, WINDOWS, num_rows=4, num_decodes=4, tile_rows=TILE, has_positional_angles=True
        )
        stager.put(sections, arrays)
        assert step.angle_rows.tolist() == starts + [0] * (4 - len(starts))
        assert step.works[None].num_items.tolist() == [len(starts)]


def test_sections_begin_where_wide_loads_may() -> None:
    sections = Sections({"a": 1, "b": 5, "c": 0, "d": 2})
    assert [place.start % 4 for place in sections.slices.values()] == [0] * 4
    assert [place.stop - place.start for place in sections.slices.values()] == [1, 5, 0, 2]
    assert sections.num_ints == 16


def test_a_buffer_that_is_too_small_grows_and_keeps_working(stand_in: Device) -> None:
    stager = Stager(stand_in, 4)
    for size in (3, 50, 7, 500):
        sections = Sections({"values": size})
        stager.reserve(sections.num_ints)
        values = np.arange(size, dtype=np.int32)
        stager.put(sections, {"values": values})
        assert stager.views(sections)["values"].tolist() == values.tolist()
