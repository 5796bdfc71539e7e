"""What the compiler makes of one variant for one kind of device, with no such device at hand."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from bench.kernels.occupancy import Resources
from core.errors import ConfigError
from kernels.gpu.variant import Arch, Variant

_LOG = "ptxas.log"  # kept with the kernel in Triton's cache


def compile_variant(variant: Variant, arch: Arch) -> Resources:
    """Compile as a launch on such a device would; what Triton's cache already holds is not compiled again.

    Raises:
        ConfigError: Triton's interpreter took the kernel's place.
        Exception: the compiler's own, where it cannot compile this.
    """
    if not isinstance(variant.kernel, JITFunction):
        raise ConfigError("kernels that Triton interprets cannot be compiled: unset TRITON_INTERPRET")
    target = GPUTarget(arch.backend, _target_arch(arch), arch.warp_size)
    # What a launch finds out about its arguments: PyTorch's memory begins at a multiple of 16 bytes.
    divisible = {
        (position,): [["tt.divisibility", 16]]
        for position, (name, kind) in enumerate(variant.signature.items())
        if kind.startswith("*") or name in variant.aligned
    }
    source = ASTSource(variant.kernel, dict(variant.signature), dict(variant.constants), divisible)
    options = {"num_warps": variant.config.num_warps, "num_stages": variant.config.num_stages}
    with _logged() as log:
        compiled = triton.compile(source, target=target, options=options)
    if arch.backend == "hip":
        return parse_amdgcn(compiled.asm["amdgcn"], compiled.metadata.num_warps, compiled.metadata.shared)
    return parse_ptxas(
        _ptxas_log(compiled, target, options, log.getvalue()),
        compiled.metadata.num_warps,
        compiled.metadata.shared,
        compiled.metadata.tmem_size or 0,
    )


def parse_ptxas(log: str, num_warps: int, shared_bytes: int, tensor_columns: int) -> Resources:
    """Read what `ptxas -v` says of a kernel.

    Args:
        log: of one kernel; functions it calls may be in it too.
        num_warps, shared_bytes, tensor_columns: asked for at each launch; memory laid out by ptxas is added.
    """
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, \d+ bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    if not frames or not registers:
        raise ValueError(f"ptxas does not say what the kernel takes: {log!r}")
    return Resources(
        registers=max(map(int, registers)),
        scalar_registers=0,
        spills=sum(int(stored) for _, stored in frames),
        stack_bytes=max(int(frame) for frame, _ in frames),
        shared_bytes=shared_bytes + sum(map(int, re.findall(r"(\d+) bytes smem", log))),
        tensor_columns=tensor_columns,
        warps=num_warps,
    )


def parse_amdgcn(assembly: str, num_warps: int, shared_bytes: int) -> Resources:
    """Read the metadata that LLVM writes under a kernel; `shared_bytes` are asked for at each launch."""

    def figure(name: str) -> int:
        found = re.findall(rf"^\s+\.{name}:\s+(\d+)$", assembly.replace("- .", "  ."), re.MULTILINE)
        if len(found) != 1:
            raise ValueError(f"the metadata has {name} {len(found)} times")
        return int(found[0])

    return Resources(
        registers=figure("vgpr_count"),
        scalar_registers=figure("sgpr_count"),
        spills=figure("vgpr_spill_count") + figure("sgpr_spill_count"),
        stack_bytes=figure("private_segment_fixed_size"),
        shared_bytes=max(shared_bytes, figure("group_segment_fixed_size")),
        tensor_columns=0,
        warps=num_warps,
    )


@contextlib.contextmanager
def _logged() -> Iterator[io.StringIO]:
    """Collect what ptxas says, should it run."""
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        yield log


def _ptxas_log(compiled: Any, target: GPUTarget, options: dict[str, int], fresh: str) -> str:
    cache = get_cache_manager(compiled.hash)
    if not fresh:  # it was compiled before, perhaps by a launch: then nobody kept what ptxas said
        if (kept := cache.get_file(_LOG)) is not None:
            return Path(kept).read_text()
        backend: Any = make_backend(target)
        with _logged() as log:
            backend.make_cubin(compiled.asm["ptx"], {}, backend.parse_options(dict(options)), target.arch)
        fresh = log.getvalue()
    cache.put(fresh, _LOG, binary=False)
    return fresh


def _target_arch(arch: Arch) -> int | str:
    return int(arch.name.removeprefix("sm_")) if arch.backend == "cuda" else arch.name
