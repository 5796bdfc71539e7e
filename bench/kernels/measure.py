"""One case after the other: first that its result is right, then how long it takes and what share of the device that is."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from bench.kernels.case import Case, Inputs, Make
from bench.kernels.ceilings import Ceilings
from bench.kernels.timing import Clock, Timing, num_sets
from kernels.gpu.registry import OPS
from kernels.gpu.variant import Config, arch_of

Row = dict[str, Any]

# A shorter case is judged by its latency: launch and tail are as long as the work.
TARGET_FROM_S = 1e-4


def gate(cases: Iterable[Case], make: Make) -> Iterator[tuple[Case, str]]:
    """Compare small cases with their references on fresh inputs.

    Yields:
        Each case, and what is wrong with it, "" if nothing is.
    """
    for case in cases:
        yield case, _checked(case, make)


def _checked(case: Case, make: Make) -> str:
    try:
        inputs = case.inputs(make)
        wanted = case.expected(inputs)  # first: the call may change its inputs
        return case.difference(case.call(inputs, None), wanted)
    except Exception as error:  # noqa: BLE001 - whatever it is, this op is not to be timed
        return f"{type(error).__name__}: {error}"


def measure(case: Case, make: Make, clock: Clock, ceilings: Ceilings, budget_s: float, with_candidates: bool) -> Row:
    """Time one case, what torch has for it, and its other configurations.

    Args:
        case: what to time.
        make: of the inputs.
        clock: of the device.
        ceilings: measured on the same device.
        budget_s: for the samples of each thing timed, about.
        with_candidates: else only the chosen configuration.
    Returns:
        Numbers, and "error" where the result is wrong: then nothing is timed.
    """
    sets = list(case.input_sets(make))
    if error := case.wrong_at_size(sets[0]):
        return failed_row(case, error)
    cost, bound_s = case.cost(), ceilings.bound_s(case.cost())

    def timed(config: Config | None) -> Timing:
        adapted = sets if config is None else [case.adapted(inputs, config) for inputs in sets]
        return clock.time([partial(case.call, inputs, config) for inputs in adapted], bound_s, budget_s)

    timing = timed(None)
    row = _named(case) | {
        "ms": timing.median_s * 1e3,
        "p25_ms": timing.p25_s * 1e3,
        "p75_ms": timing.p75_s * 1e3,
        "num_samples": timing.num_samples,
        "num_sets": len(sets),
        "host_us": timing.host_s * 1e6,
        "is_graph": timing.is_graph,
        "moved_bytes": cost.moved_bytes,
        "flops": cost.flops,
        "gb_per_s": cost.moved_bytes / timing.median_s / 1e9,
        "tflop_per_s": cost.flops / timing.median_s / 1e12,
        "bound": "copy" if ceilings.is_memory_bound(cost) else "matmul",
        "bound_ms": bound_s * 1e3,
        "share": bound_s / timing.median_s,
        "target": case.target if bound_s >= TARGET_FROM_S else None,
    }
    row["torch_ms"] = _alternatives(case, sets[: num_sets(case.set_bytes())], clock, bound_s, budget_s)
    if with_candidates:
        row["candidates_ms"] = {
            label: timed(config).median_s * 1e3 for label, config in candidates(case, make.device).items()
        }
    return row


def failed_row(case: Case, error: str) -> Row:
    """Of a case that was not timed."""
    return _named(case) | {"error": error}


def candidates(case: Case, device: torch.device) -> dict[str, Config]:
    """The configurations of a case's variants that a launch does not choose, each by one of its labels."""
    found: dict[str, Config] = {}
    for variant in OPS[case.op].variants(arch_of(device)):
        is_other = not variant.is_chosen and variant.config not in found.values()
        if is_other and variant.label.startswith(f"{case.label}-"):
            found[variant.label] = variant.config
    return found


def is_missed(row: Row) -> bool:
    """Whether a case has a target and is below it."""
    return bool(row.get("target")) and row["share"] < row["target"]


def _named(case: Case) -> Row:
    return {"op": case.op, "shape": case.shape, "dtype": case.type_name}


def _alternatives(case: Case, sets: list[Inputs], clock: Clock, bound_s: float, budget_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        others = [case.alternatives(inputs) for inputs in sets]
    except torch.OutOfMemoryError:  # torch wants a contiguous copy of the cache
        return found
    for name in others[0]:
        try:
            found[name] = clock.time([other[name] for other in others], bound_s, budget_s).median_s * 1e3
        except RuntimeError as error:  # not on this device, or not with this version of torch
            found[name] = str(error).partition("\n")[0]
    return found
