"""What a kernel is compiled for: the devices, the tile sizes chosen for each, and every form that some machine compiles."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton


@dataclass(frozen=True, slots=True, eq=False)
class Arch:
    """One kind of device, as far as tile sizes depend on it; there is one object of each."""

    name: str  # as the compiler calls it
    backend: str  # "cuda" or "hip"
    warp_size: int
    shared_bytes: int  # one program may use
    num_registers: int  # of 32 bits, of one multiprocessor
    max_warps: int  # on one multiprocessor
    shared_total_bytes: int  # of one multiprocessor


SM_80 = Arch("sm_80", "cuda", 32, 163 << 10, 65536, 64, 164 << 10)
SM_90 = Arch("sm_90", "cuda", 32, 227 << 10, 65536, 64, 228 << 10)
SM_100 = Arch("sm_100", "cuda", 32, 227 << 10, 65536, 64, 228 << 10)
# 512 registers of each of 64 lanes on each of 4 SIMDs; at most 8 waves on a SIMD.
GFX942 = Arch("gfx942", "hip", 64, 64 << 10, 4 * 512 * 64, 32, 64 << 10)
ARCHS = (SM_80, SM_90, SM_100, GFX942)

TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes of a kernel, by the names of its constants, and how a program is laid out on the device."""

    tiles: Mapping[str, int]
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One form of a kernel: what a launch of it compiles.

    `signature` has every argument of the kernel in its order: "*bf16", "*i32", "i32", "fp32", or "constexpr" for those that
    `constants` gives (a pointer that is None is a constant too).
    """

    kernel: Any  # a triton.jit function
    label: str  # unique among a kernel's variants: "d128-bf16", "d128-bf16-m64n64"
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    config: Config
    is_chosen: bool = True  # what the public call launches; the others are candidates that only `bench.kernels` times
    aligned: frozenset[str] = field(default_factory=frozenset)  # integers known to divide by 16; pointers always do


@functools.cache
def arch_of(device: torch.device) -> Arch:
    """The kind of a device; for one newer than those known, the newest known one. The interpreter takes sm_80's tiles."""
    if device.type == "cpu":
        return SM_80
    if torch.version.hip:
        return GFX942
    major, _ = torch.cuda.get_device_capability(device)
    return SM_100 if major >= 10 else SM_90 if major == 9 else SM_80


def why_unfit(device: torch.device) -> str:
    """Why the tile sizes do not fit a GPU, of another kind than those they were chosen for; empty: they do."""
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        warp_size = GFX942.warp_size
        return "" if found.warp_size == warp_size else f"waves of {found.warp_size} lanes instead of {warp_size}"
    shared_bytes: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    if shared_bytes >= SM_80.shared_bytes:
        return ""
    return f"{shared_bytes >> 10} KiB of shared memory for a program instead of {SM_80.shared_bytes >> 10}"


def round_up_to_power_of_2(value: int) -> int:
    """The least power of two that is not below `value`."""
    return int(triton.next_power_of_2(value))
