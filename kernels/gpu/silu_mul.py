"""The gate of a SwiGLU feed-forward layer, on a GPU."""

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.variant import TRITON_TYPES, Arch, Config, Variant, arch_of
from kernels.silu_mul import silu_mul_ref as silu_mul_ref


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, gate_up_stride, DIM: tl.constexpr, TILE: tl.constexpr):
    # One grid axis for rows and tiles together: a second one ends at 65,535.
    num_tiles: tl.constexpr = (DIM + TILE - 1) // TILE
    row = (tl.program_id(0) // num_tiles).to(tl.int64)  # int64: 65,536 rows of 2 * 16,384 pass 2**31
    cols = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
    mask = cols < DIM
    gates = gate_up_ptr + row * gate_up_stride + cols
    gate = tl.load(gates, mask=mask, other=0.0)
    up = tl.load(gates + DIM, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    out = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out_ptr + row * DIM + cols, out.to(gate.dtype), mask=mask)


def silu_mul(gate_up: Tensor, config: Config | None = None) -> Tensor:
    """silu(gate) * up, where one projection gave both.

    Args:
        gate_up: [n, 2 * dim] bfloat16, float16 or float32, gate first; each row contiguous, rows any stride apart.
        config: instead of the chosen one, to time it.
    Returns:
        [n, dim] in the same dtype, contiguous.
    Raises:
        ValueError: a row is not contiguous, or of odd length.
    Source: GLU variants (Shazeer, 2020).
    """
    n, width = gate_up.shape
    if width % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"need contiguous rows of even length; got {width}, stride {gate_up.stride(1)}")
    dim = width // 2
    config = config or _config(arch_of(gate_up.device))
    out = torch.empty((n, dim), dtype=gate_up.dtype, device=gate_up.device)
    grid = (n * -(-dim // config.tiles["TILE"]),)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), DIM=dim, **options, **config.tiles)
    return out


@functools.cache
def _config(arch: Arch) -> Config:
    # 8 elements a thread: 16 bytes of 16-bit values from each half at once.
    return Config({"TILE": 1024}, num_warps=1024 // 8 // arch.warp_size)


def _candidates(arch: Arch) -> Iterator[Config]:
    for tile, lane_elements in ((512, 8), (2048, 8), (2048, 16)):
        yield Config({"TILE": tile}, num_warps=tile // lane_elements // arch.warp_size)


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form of the kernel that `arch` compiles."""
    for dim in (1536, 8192, 14336):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield _variant(_config(arch), dim, dtype, is_chosen=True)
            for config in _candidates(arch):
                yield _variant(config, dim, dtype, is_chosen=False)


def _variant(config: Config, dim: int, dtype: torch.dtype, is_chosen: bool) -> Variant:
    pointer = f"*{TRITON_TYPES[dtype]}"
    label = f"d{dim}-{TRITON_TYPES[dtype]}"
    return Variant(
        kernel=_silu_mul_kernel,
        label=label if is_chosen else f"{label}-t{config.tiles['TILE']}w{config.num_warps}",
        signature={
            "gate_up_ptr": pointer,
            "out_ptr": pointer,
            "gate_up_stride": "i32",
            "DIM": "constexpr",
            "TILE": "constexpr",
        },
        constants={"DIM": dim, **config.tiles},
        config=config,
        is_chosen=is_chosen,
        aligned=frozenset({"gate_up_stride"}),
    )
