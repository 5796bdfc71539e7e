"""What launches would compile on a CUDA device, seen without one: `python -m bench.kernels.launches`.

A form that `variants` does not list is compiled while serving, in the middle of a step. Exit status: 0 all are listed, 1 not.
"""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bench.kernels.case import Case, Make
from bench.kernels.cases import launched_cases
from kernels.gpu.registry import all_variants
from kernels.gpu.variant import Arch, Variant, arch_of


@dataclass(frozen=True, slots=True)
class Form:
    """What tells two compiled kernels of one function apart."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, str], ...]
    divisible: frozenset[str]  # arguments that are multiples of 16
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, variant: Variant) -> "Form":
        """What a variant says."""
        pointers = {name for name, kind in variant.signature.items() if kind.startswith("*")}
        return cls(
            variant.kernel.__name__,
            tuple(variant.signature.items()),
            _named(variant.constants),
            frozenset(pointers | variant.aligned),
            variant.config.num_warps,
            variant.config.num_stages,
        )

    def unlike(self, other: "Form") -> str:
        """In what this form of a kernel differs from another one."""
        here, there = (dict(form.signature) | dict(form.constants) for form in (self, other))
        here |= {f"{name} % 16": "0" for name in self.divisible}
        there |= {f"{name} % 16": "0" for name in other.divisible}
        here |= {"num_warps": str(self.num_warps), "num_stages": str(self.num_stages)}
        there |= {"num_warps": str(other.num_warps), "num_stages": str(other.num_stages)}
        names = [name for name in sorted(here | there) if here.get(name) != there.get(name)]
        return ", ".join(f"{name}: {here.get(name)} instead of {there.get(name)}" for name in names)


@contextlib.contextmanager
def recorded_launches(arch: Arch) -> Iterator[list[Form]]:
    """Within it a launch is written down instead of compiled and run; outputs keep whatever was in their memory.

    Args:
        arch: a CUDA one, that launches are told they are on.
    """
    seen: list[Form] = []

    def record(*, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:  # noqa: A002 - Triton's name for it
        names = fn.jit_function.arg_names
        (divisible,) = compile["configs"]
        seen.append(
            Form(
                fn.name.rpartition(".")[2],
                tuple(compile["signature"].items()),
                _named({names[position]: value for (position, *_), value in compile["constants"].items()}),
                frozenset(names[position] for (position, *_), attributes in divisible.items() if attributes),
                compile["num_warps"],
                compile["num_stages"],
            )
        )
        return True  # as if another had it

    before = driver._active
    driver.set_active(_NoDevice(GPUTarget(arch.backend, int(arch.name.removeprefix("sm_")), arch.warp_size)))
    try:
        with knobs.runtime.scope():
            knobs.runtime.jit_cache_hook = record
            yield seen
    finally:
        driver._active = before


class _NoDevice:
    """As much of a driver as a launch asks before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return self._target


def _named(constants: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, str(value)) for name, value in constants.items()))


class _Unset(Make):
    """Inputs that nobody looks at."""

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:  # noqa: ARG002
        return torch.empty(shape, dtype=dtype, device=self.device)


def unlisted(cases: Iterable[Case]) -> Iterator[str]:
    """What cases launch that no variant has, and in what it differs from the variant that is most like it."""
    make = _Unset(torch.device("cpu"), seed=0)
    arch = arch_of(make.device)
    listed: dict[str, dict[Form, str]] = defaultdict(dict)
    for _, variant in all_variants(arch):
        listed[variant.kernel.__name__][Form.of(variant)] = variant.label
    for case in cases:
        inputs = case.inputs(make)
        with recorded_launches(arch) as launches:
            case.call(inputs, None)
        for launched in launches:
            alike = listed[launched.kernel]
            if launched not in alike:
                changes = {label: launched.unlike(form) for form, label in alike.items()}
                label = min(changes, key=lambda label: changes[label].count(":"), default="")
                yield f"{case.op}, {case.shape}, {case.type_name}: {launched.kernel} like {label}, {changes.get(label)}"


def main() -> None:
    """Print what is not listed and exit with 1 if there is any."""
    lines = list(dict.fromkeys(unlisted(launched_cases())))
    print("\n".join(lines))
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
