"""What kernels take of a device: occupancy, what compilers say, and the committed table of both."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.kernels import resources
from bench.kernels.ahead_of_time import Compiled, Key
from bench.kernels.compiler import parse_amdgcn, parse_ptxas
from bench.kernels.occupancy import Resources, resident_programs
from kernels.gpu.decode_attention import _per_multiprocessor
from kernels.gpu.registry import all_variants
from kernels.gpu.variant import ARCHS, GFX942, SM_80, SM_90, SM_100, TRITON_TYPES, Arch


def _used(registers: int, warps: int, shared_kib: float = 0, columns: int = 0, scalars: int = 0) -> Resources:
    return Resources(registers, scalars, 0, 0, int(shared_kib * 1024), columns, warps)


@pytest.mark.parametrize(
    ("arch", "used", "programs"),
    [
        (SM_90, _used(32, 4), 16),  # 64 warps
        (SM_90, _used(32, 1), 32),  # no more programs than that
        (SM_90, _used(33, 4), 12),  # registers come by 8 to a thread
        (SM_90, _used(168, 8), 1),
        (SM_90, _used(104, 1), 16),  # 4 warps in each partition: 19 would fit the multiprocessor's registers
        (SM_90, _used(128, 4), 4),
        (SM_90, _used(255, 8), 1),
        (SM_90, _used(255, 16), 0),
        (SM_90, _used(32, 4, 113), 2),  # one KiB of each program is the driver's
        (SM_90, _used(32, 4, 114), 1),
        (SM_90, _used(32, 4, 227), 1),
        (SM_90, _used(32, 4, 228), 0),
        (SM_80, _used(32, 4, 81), 2),
        (SM_80, _used(32, 4, 82), 1),
        (SM_100, _used(32, 4, 0, columns=256), 2),
        (GFX942, _used(64, 4), 8),  # 32 waves
        (GFX942, _used(65, 4), 7),
        (GFX942, _used(128, 4), 4),
        (GFX942, _used(129, 4), 3),
        (GFX942, _used(512, 4), 1),
        (GFX942, _used(32, 1), 32),
        (GFX942, _used(32, 2), 16),
        (GFX942, _used(32, 4, 33), 1),
        (GFX942, _used(32, 4, 65), 0),
        (GFX942, _used(32, 4, scalars=106), 7),
    ],
)
def test_occupancy_is_that_of_the_vendors_calculators(arch: Arch, used: Resources, programs: int) -> None:
    assert resident_programs(arch, used) == programs


@given(
    arch=st.sampled_from(ARCHS),
    registers=st.integers(1, 255),
    warps=st.sampled_from([1, 2, 4, 8, 16]),
    shared=st.integers(0, 64),
)
def test_who_takes_more_is_never_more_often_there(arch: Arch, registers: int, warps: int, shared: int) -> None:
    programs = resident_programs(arch, _used(registers, warps, shared))
    assert programs * warps <= arch.max_warps
    assert programs * shared * 1024 <= arch.shared_total_bytes
    assert programs * warps * arch.warp_size * registers <= arch.num_registers
    for more in (
        _used(registers + 1, warps, shared),
        _used(registers, 2 * warps, shared),
        _used(registers, warps, shared + 1),
    ):
        assert resident_programs(arch, more) <= programs


def test_what_ptxas_says_is_read() -> None:
    log = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    40 bytes stack frame, 32 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 40 bytes cumulative stack size, 16 bytes smem
"""
    used = parse_ptxas(log, num_warps=8, shared_bytes=1000, tensor_columns=0)
    assert used == Resources(168, 0, 32, 40, 1016, 0, 8)
    with pytest.raises(ValueError, match="does not say"):
        parse_ptxas("", 4, 0, 0)


def test_what_llvm_says_is_read() -> None:
    assembly = """amdhsa.kernels:
  - .agpr_count:     8
    .group_segment_fixed_size: 0
    .private_segment_fixed_size: 20
    .sgpr_count:     106
    .sgpr_spill_count: 38
    .vgpr_count:     121
    .vgpr_spill_count: 2
"""
    assert parse_amdgcn(assembly, num_warps=4, shared_bytes=512) == Resources(121, 106, 40, 20, 512, 0, 4)
    with pytest.raises(ValueError, match="vgpr_count 2 times"):
        parse_amdgcn(assembly * 2, 4, 0)


def _compiled(registers: int = 32, spills: int = 0, is_chosen: bool = True, programs: int = 8) -> Compiled:
    return Compiled(is_chosen, Resources(registers, 0, spills, 0, 1024, 0, 4), programs)


_KEY = Key("sm_90", "op", "_op_kernel", "d128-bf16")


def test_what_must_not_be_committed_is_told() -> None:
    assert list(resources.failures({_KEY: _compiled()})) == []
    assert "spills 8" in "".join(resources.failures({_KEY: _compiled(spills=8)}))
    assert list(resources.failures({_KEY: _compiled(spills=8, is_chosen=False)})) == []
    assert "does not fit" in "".join(resources.failures({_KEY: _compiled(programs=0)}))
    broken = Compiled(False, None, error="no such type")
    assert "does not compile: no such type" in "".join(resources.failures({_KEY: broken}))


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (_compiled(), ""),
        (_compiled(registers=24), ""),
        (_compiled(registers=40), "40 registers instead of 32"),
        (_compiled(programs=7), "28 resident warps instead of 32"),
        (_compiled(spills=4), "4 spills instead of 0"),
        (_compiled(is_chosen=False), "not chosen any more"),
    ],
)
def test_what_is_worse_than_the_committed_table_is_told(now: Compiled, told: str) -> None:
    found = "\n".join(resources.differences({_KEY: now}, {_KEY: _compiled()}, {_KEY}))
    assert found == (f"{_KEY}: {told}" if told else "")


def test_a_table_with_too_few_or_too_many_variants_is_told() -> None:
    other = _KEY._replace(label="d64-bf16")
    assert list(resources.differences({}, {other: _compiled()}, {_KEY})) == [
        f"{_KEY} is missing",
        f"{other}, which is no more, is",
    ]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    results = {_KEY: _compiled(), _KEY._replace(arch="gfx942", label="d64-bf16-m16"): _compiled(40, 3, False, 2)}
    committed = resources.Committed("3.9", {"op": "1234", "other": "5678"}, results)
    resources.write(committed, tmp_path / "table.json", tmp_path / "table.md")
    assert resources.read(tmp_path / "table.json") == committed
    text = (tmp_path / "table.md").read_text()
    assert "with Triton 3.9" in text
    assert "| 32, 1 KiB, 32/64" in text
    assert "(40, 1 KiB, 8/32, SPILLS 3)" in text


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_decode_attention_launches_no_more_programs_than_run_at_once(arch: Arch, dim: int, dtype: torch.dtype) -> None:
    key = Key(arch.name, "decode_attention", "_decode_attention_kernel", f"d{dim}-{TRITON_TYPES[dtype]}")
    resident = resources.read().results[key].programs
    assert min(resident, 2) <= _per_multiprocessor(arch, dtype, dim) <= resident


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_variants_have_labels_of_their_own_and_arguments_in_order(arch: Arch) -> None:
    forms = list(all_variants(arch))
    assert len({(op, form.kernel.__name__, form.label) for op, form in forms}) == len(forms)
    for _, form in forms:
        assert list(form.signature) == list(form.kernel.arg_names)
        assert {name for name, kind in form.signature.items() if kind == "constexpr"} == set(form.constants)
