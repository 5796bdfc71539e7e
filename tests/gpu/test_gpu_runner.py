"""The engine over the GPU runner, steps in flight and graphs included, beside the plain torch model on the CPU."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import ConfigError, DeviceLostError, ModelError
from core.model_config import load_model_config
from core.sampling import SamplingParams
from core.sequence import SequenceOutput, SequenceSpec
from engine.block_pool import BlockPool
from engine.gpu.device import HostDevice, find_device, loss
from engine.gpu.graphs import bucket_sizes
from engine.gpu.load import LoadedGpu, load_gpu
from engine.gpu.model import GpuLimits
from engine.gpu.runner import GpuRunner
from engine.loop import EngineLoop
from engine.model import Model
from engine.plan import Chunk, Runner, StepPlan
from engine.scheduler import StepLimits
from engine.sequence import Sequence
from engine.torch_runner import TorchRunner
from engine.weights import WeightReader
from tests.engine_harness import Recorder
from tests.unit.tiny_model import write_tiny_model

pytestmark = pytest.mark.usefixtures("unchecked_overflows")

BLOCK_TOKENS = 4
NUM_BLOCKS = 48
LIMITS = GpuLimits(max_batched_tokens=24, max_sequences=5, max_context_tokens=96, block_tokens=BLOCK_TOKENS)
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "head_dim": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), **SMALL)


def load(folder: Path, device: torch.device, dtype: str = "float32", **changes: Any) -> LoadedGpu:
    config = load_model_config(folder)
    settings: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS,
        "kv_memory_bytes": None,
        "memory_share": 0.9,
        "deterministic": False,
        "quantization": None,
    }
    with WeightReader(folder, config, getattr(torch, dtype)) as reader:
        layout = config.kv_layout(BLOCK_TOKENS, dtype)
        return load_gpu(config, reader, find_device(device), layout, LIMITS, **settings | changes)


@pytest.fixture(scope="module")
def warm(folder: Path, device: torch.device) -> Iterator[LoadedGpu]:
    loaded = load(folder, device)
    loaded.runner.warm_up()
    yield loaded
    loaded.blocks.close()


@pytest.fixture
def gpu(warm: LoadedGpu) -> LoadedGpu:
    warm.cache.fill_(float("nan"))  # nothing but what was written may be read
    return warm


def plain_runner(folder: Path) -> TorchRunner:
    config = load_model_config(folder)
    with WeightReader(folder, config, torch.float32) as reader:
        model = Model(config, reader, torch.device("cpu"))
    shape = (NUM_BLOCKS, config.num_layers, 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim)
    return TorchRunner(model, torch.full(shape, float("nan")))


WHOLE = StepLimits(max_batched_tokens=LIMITS.max_batched_tokens, max_sequences=LIMITS.max_sequences)


def answers(
    runner: Runner,
    specs: list[SequenceSpec],
    num_blocks: int = NUM_BLOCKS,
    limits: StepLimits = WHOLE,
    on_start: Callable[[], None] | None = None,
) -> dict[str, list[SequenceOutput]]:
    """What an engine over the runner says to sequences that are submitted at once; every block is free afterwards."""
    pool = BlockPool(num_blocks)
    loop, recorder = EngineLoop(runner, limits, pool, BLOCK_TOKENS, on_start=on_start), Recorder()
    loop.start(recorder)
    for spec in specs:
        loop.submit(spec)
    for spec in specs:
        recorder.end_of(spec.sequence_id)
    loop.stop()
    assert pool.num_available == pool.num_total
    return {spec.sequence_id: recorder.of(spec.sequence_id) for spec in specs}


def a_spec(name: str, num_prompt_tokens: int, **sampling: Any) -> SequenceSpec:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "seed": len(name)} | sampling)
    prompt = tuple((7 * position + 3 * num_prompt_tokens) % 101 for position in range(num_prompt_tokens))
    return SequenceSpec(sequence_id=name, prompt=prompt, sampling=params, eos_token_ids=(), hash_seed=b"tests")


def the_same(ours: list[SequenceOutput], theirs: list[SequenceOutput]) -> None:
    """The same tokens, ends and log-probabilities."""
    assert [one.token_ids for one in ours if one.token_ids] == [one.token_ids for one in theirs if one.token_ids]
    assert (ours[-1].finish_reason, ours[-1].error) == (theirs[-1].finish_reason, theirs[-1].error)
    for get in (lambda one: one.logprobs, lambda one: one.prompt_logprobs):
        left = [entry for one in ours for entry in get(one)]
        right = [entry for one in theirs for entry in get(one)]
        assert [entry.token_id for entry in left] == [entry.token_id for entry in right]
        assert [[token for token, _ in entry.top] for entry in left] == [
            [token for token, _ in entry.top] for entry in right
        ]
        for a, b in zip(left, right, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [value for _, value in a.top] == pytest.approx([value for _, value in b.top], abs=1e-4)


MIXED = [
    a_spec("short", 1),
    a_spec("one block", BLOCK_TOKENS, max_tokens=1),
    a_spec("long", 33),
    a_spec("drawn", 9, temperature=1.0),
    a_spec("filtered", 17, temperature=0.7, top_k=9, top_p=0.8, min_p=0.01),
    a_spec("biased", 5, logit_bias=((3, 50.0), (4, -100.0)), logprobs=3),
    a_spec("penalised", 15, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.2, logprobs=0),
    a_spec("explained", 30, prompt_logprobs=2, logprobs=20),
]


def test_mixed_requests_are_answered_as_by_the_plain_model(gpu: LoadedGpu, folder: Path) -> None:
    theirs = answers(plain_runner(folder), MIXED)
    for name, ours in answers(gpu.runner, MIXED).items():
        the_same(ours, theirs[name])


def test_without_graphs_and_with_them_it_is_the_same(folder: Path, device: torch.device, gpu: LoadedGpu) -> None:
    specs = [a_spec(f"s{number}", 1 + 3 * number, temperature=0.5, max_tokens=5) for number in range(3)]
    eager = load(folder, device)  # not warmed up: nothing is captured
    try:
        expected = answers(eager.runner, specs)
    finally:
        eager.blocks.close()
    for name, ours in answers(gpu.runner, specs).items():
        the_same(ours, expected[name])


def test_padding_of_a_bucket_writes_no_block(gpu: LoadedGpu) -> None:
    [outputs] = answers(gpu.runner, [a_spec("one", 3, max_tokens=4)], num_blocks=2).values()
    assert outputs[-1].finish_reason == "length"
    assert gpu.cache[2:].isnan().all()


def test_a_single_token_of_a_cut_prompt_samples_nothing_and_mixes_nothing_up(gpu: LoadedGpu, folder: Path) -> None:
    specs = [a_spec("decoding", 5), a_spec("cut", 9), a_spec("other", 7)]
    limits = StepLimits(max_batched_tokens=3, max_sequences=3)  # prompts advance by a token beside those that decode
    theirs = answers(plain_runner(folder), specs, limits=limits)
    for name, ours in answers(gpu.runner, specs, limits=limits).items():
        the_same(ours, theirs[name])


def test_a_thread_that_begins_computes_as_before(gpu: LoadedGpu, folder: Path) -> None:
    specs = [a_spec("one", 6, max_tokens=3)]
    ours = answers(gpu.runner, specs, on_start=gpu.runner.begin)
    the_same(ours["one"], answers(plain_runner(folder), specs)["one"])


def test_what_stops_with_a_step_in_flight_says_nothing_more(gpu: LoadedGpu, folder: Path) -> None:
    [free] = answers(plain_runner(folder), [a_spec("free", 9, max_tokens=8)]).values()
    tokens = [token for output in free for token in output.token_ids]
    stop = replace(a_spec("free", 9, max_tokens=8, stop_token_ids=(tokens[3],)))
    [stopped] = answers(gpu.runner, [stop]).values()
    assert [token for output in stopped for token in output.token_ids] == tokens[: tokens.index(tokens[3]) + 1]
    assert stopped[-1].finish_reason == "stop"


def test_a_row_that_is_no_distribution_ends_its_own_sequence_only(gpu: LoadedGpu, folder: Path) -> None:
    everything = tuple(range(101))
    bad = a_spec("bad", 5, min_tokens=2, stop_token_ids=everything)
    specs = [a_spec("good", 7), bad]
    ours = answers(gpu.runner, specs)
    assert ours["bad"][-1].finish_reason == "error"
    assert "min_tokens" in ours["bad"][-1].error
    the_same(ours["good"], answers(plain_runner(folder), specs[:1])["good"])


def test_answers_are_right_when_sequences_have_to_yield(gpu: LoadedGpu, folder: Path) -> None:
    specs = [replace(a_spec(f"s{number}", 6 + number, max_tokens=20), hash_seed=None) for number in range(4)]
    theirs = answers(plain_runner(folder), specs)
    for name, ours in answers(gpu.runner, specs, num_blocks=12).items():
        the_same(ours, theirs[name])


def test_the_deterministic_mode_gives_the_same_tokens(folder: Path, device: torch.device) -> None:
    loaded = load(folder, device, deterministic=True)
    loaded.runner.warm_up()
    specs = [a_spec(f"s{number}", 2 + 9 * number, max_tokens=4) for number in range(3)]
    try:
        theirs = answers(plain_runner(folder), specs)
        for name, ours in answers(loaded.runner, specs).items():
            the_same(ours, theirs[name])
    finally:
        loaded.blocks.close()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_are_near_the_others(quantization: str, folder: Path, device: torch.device) -> None:
    loaded = load(folder, device, quantization=quantization)
    try:
        [ours] = answers(loaded.runner, [a_spec("s", 9, max_tokens=1, logprobs=0, logit_bias=((5, 100.0),))]).values()
        [theirs] = answers(
            plain_runner(folder), [a_spec("s", 9, max_tokens=1, logprobs=0, logit_bias=((5, 100.0),))]
        ).values()
    finally:
        loaded.blocks.close()
    difference = abs(ours[-1].logprobs[0].logprob - theirs[-1].logprobs[0].logprob)
    assert 0 < difference < (0.2 if quantization == "int8" else 2.0)


def test_weights_that_compute_nothing_usable_are_refused_at_warm_up(tmp_path: Path, device: torch.device) -> None:
    folder = write_tiny_model(tmp_path / "a", **SMALL)
    loaded = load(folder, device)
    loaded.model._norm.fill_(float("nan"))
    with pytest.raises(ModelError, match="damaged"):
        loaded.runner.warm_up()
    loaded.blocks.close()


def test_what_the_device_has_left_becomes_blocks(folder: Path, device: torch.device) -> None:
    if device.type == "cuda":
        loaded = load(folder, device, num_blocks=None, memory_share=0.05)
        assert loaded.blocks.num_blocks > 1000
        loaded.blocks.close()
        return
    config = load_model_config(folder)
    layout = config.kv_layout(BLOCK_TOKENS, "float32")
    with WeightReader(folder, config, torch.float32) as reader:
        place = HostDevice(num_bytes=8 << 30, held_bytes=1 << 30)
        loaded = load_gpu(
            config, reader, place, layout, LIMITS, num_blocks=None, kv_memory_bytes=None, memory_share=0.9,
            deterministic=False, quantization=None,
        )  # fmt: skip
    logits_bytes = 4 * LIMITS.max_sequences * config.vocab_size
    graph_bytes = (2 << 30) + logits_bytes + (512 << 20)
    # A step takes a quarter, graphs as much and more. What others of the device's memory have is not this worker's to lose.
    assert (
        loaded.blocks.num_blocks == (round(7.2 * (1 << 30)) - (1 << 30) - (2 << 30) - graph_bytes) // layout.block_bytes
    )
    loaded.blocks.close()


def test_workers_that_share_a_device_each_get_their_part(folder: Path) -> None:
    class Shared(HostDevice):
        """Others hold five of eight GiB, this worker half of one."""

        def memory(self) -> tuple[int, int, int]:
            return 5 << 29, 8 << 30, 1 << 29

        def peak_bytes(self, run: Callable[[], object]) -> int:
            return 1 << 20

    config = load_model_config(folder)
    layout = config.kv_layout(BLOCK_TOKENS, "float32")
    steps_bytes = (2 << 20) + 4 * LIMITS.max_sequences * config.vocab_size + (512 << 20)
    for share, expected in ((0.25, (2 << 30) - (1 << 29)), (0.9, 5 << 29)):
        with WeightReader(folder, config, torch.float32) as reader:
            loaded = load_gpu(
                config, reader, Shared(), layout, LIMITS, num_blocks=None, kv_memory_bytes=None, memory_share=share,
                deterministic=False, quantization=None,
            )  # fmt: skip
        assert loaded.blocks.num_blocks == (expected - steps_bytes) // layout.block_bytes
        loaded.blocks.close()


def test_a_device_without_room_for_one_block_says_what_to_do(folder: Path, device: torch.device) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_share=1e-06.*Raise it"):
        load(folder, device, num_blocks=None, memory_share=1e-6)


def test_a_lost_device_ends_the_engine_and_other_failures_their_step(
    gpu: LoadedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = gpu.runner._sampler.launch
    fails_with: list[Exception] = [RuntimeError("out of luck")]

    def fail(*args: Any) -> Any:
        if fails_with:
            raise fails_with.pop()
        return launch(*args)

    monkeypatch.setattr(gpu.runner._sampler, "launch", fail)
    waits: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(type(gpu.runner._device.mark()), "wait", lambda _: waits.append(len(fails_with)))
        fails_with.append(ValueError("a bug of ours"))
        with pytest.raises(ValueError, match="a bug"):
            gpu.runner.launch(StepPlan((Chunk(Sequence(replace(a_spec("s", 3), block_table=(0, 1, 2))), 3),)))
        assert waits[-1] < waits[0], "it waits for what was launched before it fails"
    [outputs] = answers(gpu.runner, [a_spec("unlucky", 3)]).values()
    assert (outputs[-1].finish_reason, outputs[-1].error) == ("error", "engine step failed: RuntimeError")
    [outputs] = answers(gpu.runner, [a_spec("lucky", 3)]).values()
    assert outputs[-1].finish_reason == "length"
    for words in (
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
    ):
        assert loss(RuntimeError(words)) == ""
    for words in ("CUDA error: device-side assert triggered\nmore", "Triton Error [HIP]: an illegal memory access"):
        fails_with.append(RuntimeError(words))
        with pytest.raises(DeviceLostError, match="the device is lost: "):
            gpu.runner.launch(StepPlan((Chunk(Sequence(replace(a_spec("s", 3), block_table=(0, 1, 2))), 3),)))


def test_buckets_waste_little(device: torch.device) -> None:
    for most in (1, 2, 5, 8, 9, 64, 100, 256):
        sizes = bucket_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for n in range(1, most + 1):
            size = min(size for size in sizes if size >= n)
            assert size - n < max(8, n / 4)


def test_steps_are_in_flight_while_the_next_is_planned(gpu: LoadedGpu) -> None:
    class Watched:
        """Counts the steps that are launched and not yet asked for."""

        def __init__(self, runner: GpuRunner) -> None:
            self._runner = runner
            self.in_flight = self.most_in_flight = 0
            self.lock = threading.Lock()

        def launch(self, plan: Any) -> Any:
            launched = self._runner.launch(plan)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            return Later(self, launched)

    class Later:
        def __init__(self, watched: Watched, launched: Any) -> None:
            self._watched, self._launched = watched, launched
            self.is_ahead = launched.is_ahead

        def results(self) -> Any:
            self._watched.in_flight -= 1
            return self._launched.results()

    watched = Watched(gpu.runner)
    answers(watched, [a_spec("a", 9), a_spec("b", 3)])
    assert watched.most_in_flight == 2
    watched.most_in_flight = 0
    answers(watched, [a_spec("a", 9, presence_penalty=1.0)])  # must know each token before the next step
    assert watched.most_in_flight == 1
