"""KV layout and fingerprint: sizes by hand, and a mismatch that names every field with both values."""

from dataclasses import fields, replace

import pytest

from core.errors import ConfigError, FingerprintError
from core.layout import GROWTH_BLOCKS, Fingerprint, KVLayout, growth_blocks

FINGERPRINT = Fingerprint(
    model="m",
    revision="r",
    weights_hash="w",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_tokens=16,
)


@pytest.mark.parametrize("field", [field.name for field in fields(Fingerprint)])
def test_each_field_that_differs_is_named_with_both_values_this_side_first(field: str) -> None:
    mine = getattr(FINGERPRINT, field)
    theirs = mine + 1 if isinstance(mine, int) else f"other-{mine}"
    other = replace(FINGERPRINT, **{field: theirs})
    with pytest.raises(FingerprintError) as refusal:
        FINGERPRINT.require_equal(other)
    assert str(refusal.value) == f"KV blocks are not interchangeable: {field}: {mine} here, {theirs} there"


def test_several_differences_are_all_named() -> None:
    with pytest.raises(FingerprintError, match=r"model: m here, x there; block_tokens: 16 here, 32 there"):
        FINGERPRINT.require_equal(replace(FINGERPRINT, model="x", block_tokens=32))


def test_equal_ones_pass() -> None:
    FINGERPRINT.require_equal(replace(FINGERPRINT))


def test_a_block_s_bytes_and_the_blocks_of_a_prompt() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16)
    assert layout.block_bytes == 30 * 2 * 3 * 16 * 64 * 2
    assert [layout.blocks_for(tokens) for tokens in (0, 1, 15, 16, 17, 32, 129)] == [0, 1, 1, 1, 2, 2, 9]


@pytest.mark.parametrize("block_tokens", [0, -16, 3, 24])
def test_a_block_size_that_is_no_power_of_two_is_refused(block_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"block_tokens={block_tokens}: must be a power of two, e.g. 16"):
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=block_tokens)


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="dtype=int8: must be one of bfloat16, float16, float32"):
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="int8")


@pytest.mark.parametrize(
    ("known", "most", "again", "blocks"),
    [
        (1, 16, 0, 0),  # the block it has holds it all
        (16, 17, 0, 1),
        (17, 32, 0, 0),
        (100, 100, 0, 0),  # a prompt that is handed over
        (10, 10 + 16 * GROWTH_BLOCKS, 0, GROWTH_BLOCKS),
        (10, 10_000, 0, GROWTH_BLOCKS),
        (10, 10_000, 1, 2 * GROWTH_BLOCKS),
        (10, 10_000, 3, 8 * GROWTH_BLOCKS),
        (10, 10_000, 10_000, 624),  # 625 in all
        (1_000, 10, 0, 0),
    ],
)
def test_growth_doubles_with_each_preemption_up_to_what_can_be_used(
    known: int, most: int, again: int, blocks: int
) -> None:
    assert growth_blocks(known, most, 16, again) == blocks
