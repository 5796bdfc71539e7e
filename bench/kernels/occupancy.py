"""How many programs of a kernel one multiprocessor holds at once: what hides the latency of its memory."""

from dataclasses import dataclass

from kernels.gpu.variant import Arch

_CUDA_MAX_PROGRAMS = 32  # on one multiprocessor, of sm_80, sm_90 and sm_100
_CUDA_PARTITIONS = 4  # of a multiprocessor, each with its own registers
_CUDA_REGISTER_UNIT = 256  # a warp gets registers in multiples of these
_CUDA_SHARED_UNIT = 128
_CUDA_SHARED_RESERVED = 1024  # bytes of each program that the driver keeps
_CUDA_TENSOR_COLUMNS = 512  # of tensor memory, of one multiprocessor

_HIP_SIMDS = 4  # of a compute unit
_HIP_MAX_WAVES = 8  # of a SIMD
_HIP_VECTOR_REGISTERS = 512  # of a lane, accumulation registers among them
_HIP_VECTOR_UNIT = 8
_HIP_SCALAR_REGISTERS = 800  # of a SIMD
_HIP_SCALAR_UNIT = 16
_HIP_SHARED_UNIT = 512
_HIP_MAX_PROGRAMS = 16  # of more than one wave: each needs a barrier


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiler says that one program of a kernel takes."""

    registers: int  # of a thread; on ROCm vector registers, accumulation registers among them
    scalar_registers: int  # of a wave, ROCm only
    spills: int  # bytes stored to memory; on ROCm registers, scalar ones among them
    stack_bytes: int  # of a thread, spilled registers among them
    shared_bytes: int
    tensor_columns: int  # of tensor memory, sm_100 only
    warps: int


def resident_programs(arch: Arch, used: Resources) -> int:
    """Programs that one multiprocessor holds at once; 0 where it cannot hold even one.

    Source: cuda_occupancy.h of the CUDA toolkit; LLVM's AMDGPU usage guide and AMD's CDNA 3 instruction set.
    """
    if used.shared_bytes > arch.shared_bytes:
        return 0
    return _cuda_programs(arch, used) if arch.backend == "cuda" else _hip_programs(arch, used)


def _cuda_programs(arch: Arch, used: Resources) -> int:
    registers_of_warp = _round_up(used.registers * arch.warp_size, _CUDA_REGISTER_UNIT)
    # A warp's registers lie in one partition, so what is left over in each of them is lost.
    warps = arch.num_registers // _CUDA_PARTITIONS // registers_of_warp * _CUDA_PARTITIONS
    shared = _round_up(used.shared_bytes + _CUDA_SHARED_RESERVED, _CUDA_SHARED_UNIT)
    limits = [_CUDA_MAX_PROGRAMS, min(warps, arch.max_warps) // used.warps, arch.shared_total_bytes // shared]
    if used.tensor_columns:
        limits.append(_CUDA_TENSOR_COLUMNS // used.tensor_columns)
    return min(limits)


def _hip_programs(arch: Arch, used: Resources) -> int:
    waves = min(
        _HIP_MAX_WAVES,
        _HIP_VECTOR_REGISTERS // _round_up(used.registers, _HIP_VECTOR_UNIT),
        _HIP_SCALAR_REGISTERS // _round_up(used.scalar_registers, _HIP_SCALAR_UNIT),
    )
    limits = [waves * _HIP_SIMDS // used.warps]
    if used.warps > 1:
        limits.append(_HIP_MAX_PROGRAMS)
    if used.shared_bytes:
        limits.append(arch.shared_total_bytes // _round_up(used.shared_bytes, _HIP_SHARED_UNIT))
    return min(limits)


def _round_up(value: int, unit: int) -> int:
    return -(-max(value, 1) // unit) * unit
