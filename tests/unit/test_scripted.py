"""The scripted runner feels every KV byte, so a transfer bug shows as a wrong token."""

import queue
import threading
from collections.abc import Iterable

import pytest

from core.errors import ConfigError
from core.host_blocks import ByteBlocks
from core.layout import KVLayout
from core.sampling import SamplingParams
from core.sequence import SequenceOutput, SequenceSpec, StepResult
from engine.plan import Chunk, StepPlan
from engine.scheduler import StepLimits
from engine.scripted import (
    ScriptedEngine,
    ScriptedRunner,
    StepGate,
    expected_tokens,
    scripted_engine,
    scripted_layout,
)
from engine.sequence import Sequence

EOS = 2
WAIT_S = 30.0
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, seed=0)
BIG = KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, block_tokens=4, dtype="bfloat16")  # 120 bytes a token


def run(parts: ScriptedEngine, spec: SequenceSpec) -> list[SequenceOutput]:
    """All outputs of one sequence that runs alone in a fresh engine, in the blocks it names."""
    parts.pool.release(
        [block for block in parts.pool.acquire(parts.pool.num_total).blocks if block not in spec.block_table]
    )
    results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    parts.loop.start(results.put)
    parts.loop.submit(spec)
    outputs: list[SequenceOutput] = []
    while not (outputs and outputs[-1].has_ended):
        outputs += results.get(timeout=WAIT_S).outputs
    parts.loop.stop()
    assert parts.pool.num_free == parts.pool.num_total - len(outputs[-1].block_table)
    return outputs


def tokens_of(outputs: Iterable[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def spec(
    prompt: Iterable[int], blocks: Iterable[int], sampling: SamplingParams = GREEDY, **more: object
) -> SequenceSpec:
    return SequenceSpec(
        sequence_id="a",
        prompt=tuple(prompt),
        sampling=sampling,
        eos_token_ids=(EOS,),
        block_table=tuple(blocks),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("layout", [scripted_layout(4), scripted_layout(16), BIG])
@pytest.mark.parametrize("max_batched_tokens", [1, 3, 64])
def test_tokens_do_not_depend_on_chunks_blocks_or_layout(layout: KVLayout, max_batched_tokens: int) -> None:
    limits = StepLimits(max_batched_tokens=max_batched_tokens, max_sequences=1)
    parts = scripted_engine(layout=layout, limits=limits)
    prompt = range(30, 63)
    blocks = [7, 3, 60, 0, 9, 8, 33, 1, 2, 50]  # unordered
    outputs = run(parts, spec(prompt, blocks))
    assert tokens_of(outputs) == expected_tokens(prompt, 6, layout=layout, eos_token_ids=(EOS,))


def test_the_seed_counts_when_sampling_is_not_greedy() -> None:
    warm = [
        tokens_of(run(scripted_engine(), spec([5, 6], [0], SamplingParams(max_tokens=6, temperature=0.7, seed=seed))))
        for seed in (1, 1, -2)
    ]
    assert warm[0] == warm[1] == expected_tokens([5, 6], 6, eos_token_ids=(EOS,), seed=1)
    assert warm[2] == expected_tokens([5, 6], 6, eos_token_ids=(EOS,), seed=-2) != warm[0]


def test_eos_comes_from_the_script_only() -> None:
    eos_token_ids = tuple(range(250))
    tokens = expected_tokens([1], 40, eos_token_ids=eos_token_ids)
    assert set(tokens) <= set(range(250, 256))


def hand_off(layout: KVLayout, damage: int | None = None, skip_block: int | None = None) -> tuple[list[int], list[int]]:
    """Prefill in one engine, KV copied block by block into other blocks of a second engine that decodes.

    Args:
        layout: of both.
        damage: flip one bit of this byte of the copied KV.
        skip_block: this block of the sequence is not copied.
    Returns:
        The tokens, and those of an engine that runs the whole request.
    """
    prompt, limits = range(40, 40 + 2 * layout.block_tokens + 1), StepLimits(max_batched_tokens=7, max_sequences=2)
    sources, targets = [5, 0, 3, 4, 9], [1, 8, 2, 6, 7]
    prefill, decode, whole = (scripted_engine(num_blocks=10, layout=layout, limits=limits) for _ in range(3))

    first = run(prefill, spec(prompt, sources, prefill_only=True))
    assert (first[-1].finish_reason, first[-1].num_computed_tokens) == (None, len(prompt))
    for index in range(layout.blocks_for(len(prompt))):
        if index != skip_block:
            decode.memory.view(targets[index])[:] = prefill.memory.view(sources[index])
    if damage is not None:
        block, byte = divmod(damage, layout.block_bytes)
        decode.memory.view(targets[block])[byte] ^= 1

    output = tuple(tokens_of(first))
    rest = run(decode, spec(prompt, targets, num_computed_tokens=len(prompt), output=output))
    assert rest[-1].finish_reason == "length"
    return [*output, *tokens_of(rest)], tokens_of(run(whole, spec(prompt, sources)))


@pytest.mark.parametrize("layout", [scripted_layout(4), scripted_layout(16), BIG])
def test_a_handed_off_answer_equals_the_aggregated_one(layout: KVLayout) -> None:
    handed_off, whole = hand_off(layout)
    assert handed_off == whole
    assert len(whole) == 6


@pytest.mark.parametrize("layout", [scripted_layout(4), BIG])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_wrong_bit_changes_the_answer(layout: KVLayout, where: str) -> None:
    num_bytes = (2 * layout.block_tokens + 1) * layout.block_bytes // layout.block_tokens
    handed_off, whole = hand_off(layout, damage={"first": 0, "middle": num_bytes // 2, "last": num_bytes - 1}[where])
    assert handed_off[0] == whole[0]
    assert handed_off[1:] != whole[1:]


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_missing_block_changes_the_answer(block: int) -> None:
    handed_off, whole = hand_off(scripted_layout(4), skip_block=block)
    assert handed_off[1:] != whole[1:]


def test_runner_and_memory_must_agree() -> None:
    with pytest.raises(ConfigError, match="128 bytes"):
        ScriptedRunner(memory=ByteBlocks(2, scripted_layout(16).block_bytes), layout=scripted_layout(8))
    narrow = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="bfloat16")
    with pytest.raises(ConfigError, match="4 bytes a token"):
        ScriptedRunner(memory=ByteBlocks(2, narrow.block_bytes), layout=narrow)


def test_a_view_shares_the_bytes_of_its_block_only() -> None:
    memory = ByteBlocks(3, scripted_layout(4).block_bytes)
    memory.view(1)[:] = b"\xff" * memory.block_bytes
    assert [bytes(memory.view(block)) for block in range(3)] == [bytes(32), b"\xff" * 32, bytes(32)]
    with pytest.raises(IndexError, match="block 3"):
        memory.view(3)


def test_a_failing_step_writes_nothing() -> None:
    memory = ByteBlocks(1, scripted_layout().block_bytes)
    runner = ScriptedRunner(memory=memory, layout=scripted_layout(), fail_when=lambda plan: ValueError("planned"))
    with pytest.raises(ValueError, match="planned"):
        runner.run(StepPlan([Chunk(Sequence(spec([5], [0])), 1)]))
    assert not any(memory.view(0))


def test_a_gate_lets_through_as_many_steps_as_allowed() -> None:
    gate, passed = StepGate(), queue.SimpleQueue[int]()

    def steps() -> None:
        for number in range(4):
            gate.arrive()
            passed.put(number)

    thread = threading.Thread(target=steps)
    thread.start()
    gate.wait_until_holding(WAIT_S)
    assert passed.empty()
    gate.allow(2)
    gate.wait_until_holding(WAIT_S)
    assert [passed.get(timeout=WAIT_S) for _ in range(2)] == [0, 1]
    assert passed.empty()
    gate.open()
    thread.join(WAIT_S)
    assert [passed.get(timeout=WAIT_S) for _ in range(2)] == [2, 3]
    assert not gate.is_holding
    gate.close()
    with pytest.raises(TimeoutError, match=r"no step came to the gate in 0\.0 s"):
        gate.wait_until_holding(0.0)
