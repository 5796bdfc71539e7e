"""The one place that chooses what computes: which device a flag means, and what a step on it may hold."""

from types import SimpleNamespace

import pytest
import torch

from core.errors import ConfigError
from engine import backend
from engine.backend import find_place, step_limits
from engine.scheduler import StepLimits


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of the GPU that seems to be here: an H100's."""
    found = SimpleNamespace(shared_memory_per_block_optin=227 << 10, warp_size=32)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, properties: SimpleNamespace) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "find_spec", lambda _: object())


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_gpu_is_taken_where_there_is_one(gpu: None) -> None:
    assert [find_place(name).type for name in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]


def test_without_a_gpu_a_cpu_computes_unless_a_gpu_is_insisted_on(no_gpu: None) -> None:
    assert [find_place(name).type for name in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match=r"device=cuda: torch .* finds no CUDA or ROCm device; use cpu"):
        find_place("cuda")


def test_a_gpu_needs_triton_and_an_unknown_device_is_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda _: None)
    assert find_place("cpu").type == "cpu"
    for name in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="needs triton"):
            find_place(name)
    with pytest.raises(ConfigError, match="device=tpu: must be auto, cpu or cuda"):
        find_place("tpu")


def test_a_gpu_without_room_for_the_kernels_programs_is_named(
    gpu: None, properties: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties.shared_memory_per_block_optin = 99 << 10
    for name in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=f"device={name}: some GPU has 99 KiB of shared memory.* instead of 163"):
            find_place(name)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match="waves of 32 lanes instead of 64"):
        find_place("auto")
    properties.warp_size = 64
    assert find_place("auto").type == "cuda"


def test_a_step_holds_what_its_device_computes_well(gpu: None) -> None:
    assert step_limits("cpu", None, None) == StepLimits(max_batched_tokens=512, max_sequences=64)
    assert step_limits("auto", None, None) == StepLimits(max_batched_tokens=2048, max_sequences=256)


def test_what_is_asked_for_is_taken_and_a_default_makes_room_for_it(no_gpu: None) -> None:
    assert step_limits("auto", 100, 20) == StepLimits(max_batched_tokens=100, max_sequences=20)
    assert step_limits("auto", None, 600) == StepLimits(max_batched_tokens=600, max_sequences=600)
    with pytest.raises(ConfigError, match="max_batched_tokens=100 is below max_sequences=600"):
        step_limits("auto", 100, 600)
