"""100,000 random operations on pool, scheduler and engine, with what must hold checked at every step."""

import pytest

from tests.random_engine import RandomEngine

NUM_OPERATIONS = 100_000
SEEDS = range(8)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_tokens_are_right_and_every_block_has_its_holders(
    seed: int, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.layout.GROWTH_BLOCKS", 1)  # so that preemption is common
    engine = RandomEngine(
        seed,
        NUM_OPERATIONS // len(SEEDS) // 2,
        num_swap_blocks=[0, 8, 200][seed % 3],
        num_priorities=1 + seed % 2 * 2,
        is_ahead=is_ahead,
    )
    engine.go()
    assert engine.counts["length"] > 250
    assert engine.max_preemptions < 10
