"""Every variant compiled for every kind of device, on a machine that has none of them, by all cores."""

import functools
import hashlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from bench.kernels.occupancy import Resources, resident_programs
from kernels.gpu import variant as variant_module
from kernels.gpu.registry import OPS, all_variants
from kernels.gpu.variant import ARCHS, Arch, Variant

_Result = tuple[Resources, int, float]  # with resident programs and seconds
_ARCHS = {arch.name: arch for arch in ARCHS}


class Key(NamedTuple):
    """One variant on one kind of device."""

    arch: str
    op: str
    kernel: str
    label: str

    def __str__(self) -> str:
        return f"{self.op}/{self.kernel}/{self.label} on {self.arch}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one variant takes, or why it could not be compiled."""

    is_chosen: bool
    resources: Resources | None
    programs: int = 0  # resident on one multiprocessor
    error: str = ""
    cpu_s: float = field(default=0.0, compare=False)  # to compile it, or to find it compiled

    @property
    def resident_warps(self) -> int:
        """On one multiprocessor."""
        return self.programs * self.resources.warps if self.resources else 0


def keyed_variants(arch: Arch) -> dict[Key, Variant]:
    """Every variant of one kind of device by its name."""
    found: dict[Key, Variant] = {}
    for op, variant in all_variants(arch):
        key = Key(arch.name, op, variant.kernel.__name__, variant.label)
        assert key not in found, f"two variants have the name {key}"
        found[key] = variant
    return found


def one_of_each(variants: Mapping[Key, Variant]) -> set[Key]:
    """One chosen variant of every kernel on every kind of device, in bfloat16 where there is one."""

    def order(key: Key) -> tuple[bool, Key]:
        return "*bf16" not in variants[key].signature.values(), key

    chosen = sorted((key for key, variant in variants.items() if variant.is_chosen), key=order)
    return set({(key.arch, key.kernel): key for key in reversed(chosen)}.values())


def digest(op: str) -> str:
    """Of all that an op's kernels are compiled from: the text of its file and of those it imports, and its variants."""
    modules, found = [OPS[op]], set[ModuleType]()
    while modules:
        module = modules.pop()
        if module not in found:
            found.add(module)
            names = {str(getattr(value, "__module__", "")) for value in vars(module).values()}
            modules += [sys.modules[name] for name in names if name.startswith("kernels.gpu.")]
    text = hashlib.sha256()
    # What `variant` says of tiles and devices is in the variants.
    for path in sorted(str(module.__file__) for module in found - {variant_module}):
        text.update(Path(path).read_bytes())
    for arch in ARCHS:
        for each in OPS[op].variants(arch):
            parts = (each.kernel.__name__, each.label, each.signature, each.constants, each.config, each.is_chosen)
            text.update(repr((arch, *parts, sorted(each.aligned))).encode())
    return text.hexdigest()[:16]


def compile_all(keys: Mapping[Key, bool], cache_dir: Path | None, processes: int) -> Iterator[tuple[Key, Compiled]]:
    """Compile variants, each as soon as a process is free.

    Args:
        keys: of the variants; whether each is a chosen one.
        cache_dir: of the compiled kernels; None: where Triton keeps them.
        processes: that compile at the same time.
    Yields:
        Each variant in the order in which they got done.
    """
    # Not forked: torch has threads by now. Not the interpreter's either, whatever this process itself runs with.
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), initializer=_use_cache, initargs=(cache_dir,)
        ) as pool:
            jobs: dict[Future[_Result | str], Key] = {pool.submit(_compile, key): key for key in keys}
            for job in as_completed(jobs):
                yield jobs[job], _outcome(job, keys[jobs[job]])
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret


def _outcome(job: "Future[_Result | str]", is_chosen: bool) -> Compiled:
    try:
        result = job.result()
    except BrokenProcessPool:
        return Compiled(is_chosen, None, error="the compiler ended its process at this variant or at one beside it")
    if isinstance(result, str):
        return Compiled(is_chosen, None, error=result)
    resources, programs, cpu_s = result
    return Compiled(is_chosen, resources, programs, cpu_s=cpu_s)


def _use_cache(cache_dir: Path | None) -> None:
    from triton import knobs

    if cache_dir is not None:
        knobs.cache.dir = str(cache_dir)


def _compile(key: Key) -> _Result | str:
    from bench.kernels.compiler import compile_variant

    arch = _ARCHS[key.arch]
    began = sum(os.times()[:4])  # of this process and those it waited for, as ptxas is
    try:
        resources = compile_variant(_variants(key.arch)[key], arch)
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this variant
        return f"{type(error).__name__}: {error}"
    return resources, resident_programs(arch, resources), sum(os.times()[:4]) - began


@functools.cache
def _variants(arch: str) -> dict[Key, Variant]:
    return keyed_variants(_ARCHS[arch])
