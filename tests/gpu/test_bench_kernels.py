"""The harness that times kernels: its arithmetic, and every case of it run on sizes that an interpreter can."""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.kernels import expected
from bench.kernels.__main__ import Rig, time_cases
from bench.kernels.case import Case, Inputs, Make, Outputs
from bench.kernels.cases import small_cases, timed_cases
from bench.kernels.cases_attention import DecodeAttention, PrefillAttention
from bench.kernels.cases_linear import Linear, QuantizedLinear
from bench.kernels.cases_rows import AddRmsNorm, PackBlocks, SiluMul
from bench.kernels.ceilings import H200, Ceilings, Cost, measure_ceilings
from bench.kernels.measure import candidates, gate, is_missed, measure
from bench.kernels.report import candidate_lines, timings
from bench.kernels.timing import MAX_SETS, Call, DeviceClock, HostClock, Timing, num_rounds, num_sets
from kernels.gpu.registry import OPS
from kernels.gpu.variant import ARCHS, Config

_BF16 = torch.bfloat16
_ROOT = Path(__file__).parents[2]
_SMALL = list(small_cases((torch.float32,)))


def test_a_timing_is_the_median_and_both_quartiles() -> None:
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0], 0.5, is_graph=True) == Timing(3.0, 2.0, 4.0, 5, 0.5, True)
    assert Timing.of([2.0], 0.5, is_graph=False) == Timing(2.0, 2.0, 2.0, 1, 0.5, False)


def test_inputs_are_more_than_the_cache_holds_and_replays_long_enough() -> None:
    assert num_sets(1 << 40) == 2
    assert num_sets(64 << 20) == 4
    assert num_sets((64 << 20) - 1) == 5
    assert num_sets(1) == num_sets(0) == MAX_SETS
    assert num_rounds(1, 1.0) == 1
    assert num_rounds(10, 5e-6) == 20
    assert num_rounds(64, 0.0) == 8  # nothing takes less than two microseconds


def test_the_bound_is_what_takes_longer() -> None:
    ceilings = Ceilings(copy_bytes_per_s=100.0, matmul_flops_per_s=1000.0)
    assert ceilings.bound_s(Cost(200, 1000)) == 2.0
    assert ceilings.bound_s(Cost(200, 5000)) == 5.0
    assert ceilings.is_memory_bound(Cost(200, 1000))
    assert not ceilings.is_memory_bound(Cost(200, 5000))


def test_ceilings_are_measured() -> None:
    found = measure_ceilings(torch.device("cpu"), HostClock(), scale=1e-4)
    assert 1e6 < found.copy_bytes_per_s < 1e13
    assert 1e6 < found.matmul_flops_per_s < 1e15


def test_costs_are_bytes_once_and_two_operations_a_product() -> None:
    decode = DecodeAttention(_BF16, 64, 2048).cost()
    assert decode.moved_bytes == 64 * (2048 * 2 * 8 * 128 * 2 + 2 * 32 * 128 * 2)
    assert decode.flops == 64 * 32 * 2048 * (128 + 128) * 2
    assert Linear(_BF16, 3, 5, 7).cost() == Cost((5 * 7 + 3 * 7 + 3 * 5) * 2, 2 * 3 * 5 * 7)
    assert QuantizedLinear(_BF16, 1, 256, 128, bits=4).cost().moved_bytes == 256 * 64 + 256 * 4 + (128 + 256) * 2
    assert SiluMul(_BF16, 3, 10).cost() == Cost(3 * 30 * 2, 0)
    assert AddRmsNorm(torch.float32, 3, 10).cost() == Cost((4 * 30 + 10) * 4, 0)
    assert PackBlocks(_BF16, 3, 1000).cost() == Cost(3 * 2004, 0)


@pytest.mark.parametrize(("tokens", "new"), [(7, 0), (7, 7), (7, 3), (7, 1)])
def test_causal_attention_costs_what_each_token_sees(tokens: int, new: int) -> None:
    case = PrefillAttention(_BF16, 2, tokens, num_heads=4, num_kv_heads=2, dim=8, num_new=new)
    seen = sum(range(tokens - (new or tokens) + 1, tokens + 1))
    assert case.cost().flops == 2 * 4 * seen * 8 * 2 * 2


def test_the_grid_is_what_was_asked_for() -> None:
    cases = list(timed_cases(quick=False))
    names = [(case.op, case.shape) for case in cases]
    assert len(set(names)) == len(names)
    decode = {(case.num_sequences, case.num_tokens) for case in cases if isinstance(case, DecodeAttention)}
    assert decode == {(batch, context) for batch in (1, 8, 64, 256) for context in (128, 2048, 8192, 32768)}
    assert {case.op for case in cases} == {case.op for case in timed_cases(quick=True)} == OPS.keys()
    assert {(case.op, case.shape) for case in timed_cases(quick=True)} <= set(names)


@pytest.mark.parametrize("op", OPS)
def test_timed_cases_are_of_variants_that_are_compiled_ahead(op: str) -> None:
    for arch in ARCHS:
        labels = [f"{variant.label}-" for variant in OPS[op].variants(arch) if variant.is_chosen]
        for case in timed_cases(quick=False):
            if case.op == op:
                assert any(label.startswith(f"{case.label}-") for label in labels), (case.label, labels)


@pytest.mark.parametrize("case", _SMALL, ids=lambda case: f"{case.op}, {case.shape}, {case.type_name}")
def test_a_small_case_is_right_and_one_of_each_op_is_timed(case: Case, device: torch.device) -> None:
    make = Make(device, seed=0)
    assert list(gate([case], make)) == [(case, "")]
    if case is not next(other for other in _SMALL if other.op == case.op):
        return  # one of each op is timed
    row = measure(case, make, HostClock(), H200, budget_s=0.0, with_candidates=False)
    assert "error" not in row
    assert row["ms"] > 0
    assert row["share"] == pytest.approx(H200.bound_s(case.cost()) / row["ms"] * 1e3)
    assert row["num_sets"] >= 2
    assert all(isinstance(value, float) for value in row["torch_ms"].values()), row["torch_ms"]
    assert json.loads(json.dumps(row)) == row
    (line,) = list(timings([row]))[2:]
    assert case.shape in line


def test_candidates_of_a_case_are_timed_too(device: torch.device) -> None:
    case = AddRmsNorm(torch.float32, 3, 576)
    others = candidates(case, device)
    assert others
    assert all(label.startswith("d576-fp32-") for label in others)
    row = measure(case, Make(device, 0), HostClock(), H200, budget_s=0.0, with_candidates=True)
    assert row["candidates_ms"].keys() == others.keys()
    (line,) = list(candidate_lines([row]))[2:]
    assert any(label in line for label in others)


class _Wrong(SiluMul):
    """Off by one element, NaN, or not there at all."""

    how = "off"

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        (out,) = SiluMul.call(self, inputs, config)
        if self.how == "raises":
            raise ValueError("no such tile")
        out[-1, -1] = math.nan if self.how == "nan" else out[-1, -1] + 1
        return (out,)


@pytest.mark.parametrize(("how", "message"), [("off", "off by"), ("nan", "off by nan"), ("raises", "no such tile")])
def test_an_op_with_a_wrong_result_is_not_timed(
    how: str, message: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Wrong, "how", how)
    case, make = _Wrong(torch.float32, 2, 100), Make(device, 0)
    ((_, error),) = gate([case], make)
    assert message in error
    if how == "raises":
        return
    row = measure(case, make, _NoClock(), H200, budget_s=0.0, with_candidates=False)
    assert message in row["error"]
    assert "ms" not in row
    assert "WRONG" in list(timings([row]))[-1]


@pytest.mark.parametrize("is_right", [True, False])
def test_what_is_right_is_timed_and_reported(
    is_right: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Wrong, "how", "off")
    cases: list[Case] = [PackBlocks(_BF16, 3, 6000), AddRmsNorm(torch.float32, 3, 576)]
    gated = [*cases, *([] if is_right else [_Wrong(torch.float32, 2, 100)])]
    rig = Rig(device, HostClock(), gated, cases, budget_s=0.0, scale=1e-4)
    is_ok, results = time_cases(rig, with_candidates=True, enforce_targets=False)
    printed = capsys.readouterr().out
    assert is_ok == is_right
    assert results.keys() >= ({"cases", "copy_gb_per_s", "matmul_tflop_per_s"} if is_right else {"wrong"})
    assert ("WRONG: silu_mul" in printed) != is_right
    assert ("pack, 3 blocks" in printed) == is_right
    json.dumps(results)


class _Large(SiluMul):
    def inputs(self, make: Make) -> Inputs:
        raise torch.OutOfMemoryError


def test_a_case_that_fails_or_does_not_fit_costs_no_other_its_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Wrong, "how", "raises")
    good = AddRmsNorm(torch.float32, 3, 576)
    for other, is_fine in ((_Wrong(torch.float32, 2, 100), False), (_Large(torch.float32, 2, 100), True)):
        rig = Rig(device, HostClock(), [], [other, good], budget_s=0.0, scale=1e-4)
        is_ok, results = time_cases(rig, with_candidates=False, enforce_targets=True)
        assert is_ok == is_fine
        assert results["cases"][-1]["ms"] > 0
        printed = capsys.readouterr().out
        assert ("WRONG: ValueError: no such tile" in printed) != is_fine
        assert ("too large for this device's memory: silu_mul" in printed) == is_fine


class _Device:
    """As much of `torch.cuda` as a clock needs: a device on which every call takes a millisecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, can_capture: bool) -> None:
        self.now_ms, self.captured, self.num_replays = 0.0, 0, 0
        self._can_capture, self._is_capturing = can_capture, False
        for name in ("Event", "CUDAGraph", "graph", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def call(self) -> None:
        if self._is_capturing:
            if not self._can_capture:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.captured += 1
        else:
            self.now_ms += 1

    def Event(self, enable_timing: bool) -> Any:
        at: list[float] = []
        return SimpleNamespace(at=at, record=lambda: at.append(self.now_ms), elapsed_time=lambda end: end.at[0] - at[0])

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=self._replay)

    def _replay(self) -> None:
        self.num_replays += 1
        self.now_ms += self.captured

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def synchronize(self) -> None:
        assert not self._is_capturing


@pytest.mark.parametrize("can_capture", [True, False])
def test_a_device_is_timed_by_its_events(can_capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Device(monkeypatch, can_capture)
    timing = DeviceClock().time([fake.call] * 3, expected_s=1e-4, budget_s=0.1)
    assert timing.median_s == pytest.approx(1e-3)
    assert timing.is_graph == can_capture
    assert fake.captured == (3 * 4 if can_capture else 0)  # a millisecond of work, were it as fast as expected
    assert timing.num_samples == int(0.1 / 12e-3)
    assert fake.num_replays == (timing.num_samples + 2 if can_capture else 0)


class _NoClock:
    """Whoever asks it has not checked the result."""

    def time(self, calls: Sequence[Call], expected_s: float, budget_s: float) -> Timing:
        raise AssertionError


class _FixedClock:
    """Every call takes as long."""

    def __init__(self, seconds: float) -> None:
        self._timing = Timing.of([seconds], 1e-5, is_graph=True)

    def time(self, calls: Sequence[Call], expected_s: float, budget_s: float) -> Timing:
        return self._timing


@pytest.mark.parametrize(
    ("share", "is_large", "missed"), [(0.81, True, False), (0.79, True, True), (0.1, False, False)]
)
def test_a_target_is_for_cases_long_enough(share: float, is_large: bool, missed: bool, device: torch.device) -> None:
    case = PackBlocks(_BF16, 2, 6000)
    ceilings = Ceilings(case.cost().moved_bytes / (1e-3 if is_large else 1e-5), 1.0)
    clock = _FixedClock(ceilings.bound_s(case.cost()) / share)
    row = measure(case, Make(device, 0), clock, ceilings, budget_s=0.0, with_candidates=False)
    assert row["share"] == pytest.approx(share)
    assert is_missed(row) == missed
    assert ("BELOW 80%" in list(timings([row]))[-1]) == missed


def test_expected_numbers_are_those_of_the_cases() -> None:
    text = expected.FILE.read_text()
    assert expected.updated(text) == text, "run `python -m bench.kernels.expected`"


def test_launches_are_of_listed_variants_whatever_the_batch() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernels.launches"],
        cwd=_ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_interpreter_is_not_timed() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernels"], cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "unset TRITON_INTERPRET" in done.stderr


def test_cases_are_of_the_dtype_they_say() -> None:
    case = dataclasses.replace(AddRmsNorm(_BF16, 3, 10), dtype=torch.float16)
    x, residual, weight = case.inputs(Make(torch.device("cpu"), 0))
    assert {x.dtype, residual.dtype, weight.dtype} == {torch.float16}
    assert case.difference(case.expected((x, residual, weight)), case.expected((x.float(), residual, weight))) != ""
