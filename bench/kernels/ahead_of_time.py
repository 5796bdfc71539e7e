"""Every variant compiled for every kind of device, on a machine that has none of them, by all cores."""

import functools
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.kernels.occupancy import Resources, resident_programs
from kernels.gpu.registry import all_variants
from kernels.gpu.variant import ARCHS, Arch, Variant

_OPS_WITH_PRODUCTS = frozenset(
    {"decode_attention", "prefill_attention", "linear", "quantized_linear"}
)  # slow to compile
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


def is_everyday(op: str, variant: Variant) -> bool:
    """Whether a variant is one of those that an ordinary test run has the time to compile: what most models are served with."""
    kinds = set(variant.signature.values())
    return variant.is_chosen and "*fp16" not in kinds and ("*bf16" in kinds or op not in _OPS_WITH_PRODUCTS)


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
