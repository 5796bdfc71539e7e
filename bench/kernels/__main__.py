"""`python -m bench.kernels`: how fast the GPU kernels are, as a share of what the device can do, and what they take of it.

On a machine with a GPU every op is first compared with its reference, then timed. Without one, or with `--ahead-of-time`,
every variant is compiled for every kind of device, and what the compiler says of it is reported. Tables and one JSON line
go to stdout. It needs torch, triton and numpy, and nothing else of this project's dependencies.

Exit status: 0 done, 1 a wrong result, a variant that is not as it must be or a missed target, 2 wrong usage.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from bench.kernels import resources
from bench.kernels.ahead_of_time import Compiled, Key, compile_all, digest, keyed_variants, one_of_each
from bench.kernels.case import Case, Make
from bench.kernels.cases import small_cases, timed_cases
from bench.kernels.ceilings import measure_ceilings
from bench.kernels.measure import Row, failed_row, gate, is_missed, measure
from bench.kernels.report import candidate_lines, ceilings_line, timings
from bench.kernels.timing import Clock, DeviceClock
from bench.peers.report import environment, finish, parser
from bench.process import commit
from kernels.gpu.registry import OPS
from kernels.gpu.variant import ARCHS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the correctness gate
_BUDGET_S, _QUICK_BUDGET_S = 0.2, 0.05


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line. Exits with 2 where it is wrong."""
    made = parser("Speed and resources of GPU kernels.")
    made.prog = "python -m bench.kernels"
    made.add_argument("--op", action="append", choices=sorted(OPS), help="only this one; may be repeated")
    made.add_argument(
        "--quick", action="store_true", help="fewer shapes; ahead of time: only what changed, and one of each"
    )
    made.add_argument("--candidates", action="store_true", help="time the configurations that were not chosen, too")
    made.add_argument("--enforce-targets", action="store_true", help="exit with 1 where a target is missed, too")
    made.add_argument("--ahead-of-time", action="store_true", help="compile and report, whatever the machine has")
    made.add_argument("--arch", action="append", choices=[arch.name for arch in ARCHS], help="compile for this only")
    made.add_argument("--write", action="store_true", help="ahead of time: write the committed tables")
    made.add_argument("--cache-dir", type=Path, help="where compiled kernels are kept; else where Triton keeps them")
    made.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="that compile at once")
    args = made.parse_args(arguments)
    args.ahead_of_time = args.ahead_of_time or args.write or not torch.cuda.is_available()
    if args.write and (args.quick or args.op or args.arch):
        made.error("--write: the committed tables have every variant, so no --quick, --op or --arch")
    return args


def compile_variants(args: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    """Compile, print what every variant takes, and compare it with what is committed.

    Returns:
        Whether all is as it must be, and the results.
    """

    def is_wanted(key: Key) -> bool:
        return (args.arch is None or key.arch in args.arch) and (args.op is None or key.op in args.op)

    every = {key: variant for arch in ARCHS for key, variant in keyed_variants(arch).items()}
    known = {key: variant for key, variant in every.items() if is_wanted(key)}
    digests = {op: digest(op) for op in OPS}
    committed = resources.read()
    quick = one_of_each(known)
    changed = sorted(op for op in OPS if digests[op] != committed.digests.get(op))

    def is_due(key: Key) -> bool:
        return not args.quick or key in quick or key.op in changed

    wanted = {key: variant.is_chosen for key, variant in known.items() if is_due(key)}
    began = time.perf_counter()
    results: dict[Key, Compiled] = {}
    for key, compiled in compile_all(wanted, args.cache_dir, args.processes):
        results[key] = compiled
        if len(results) % 100 == 0:
            print(f"{len(results)} of {len(wanted)} compiled", file=sys.stderr)
    seconds = time.perf_counter() - began
    print("\n".join(resources.readable(results)))
    failures, changes = list(resources.failures(results)), []
    if args.write and all(compiled.resources for compiled in results.values()):
        committed = resources.Committed(triton.__version__, digests, results)
        resources.write(committed)
    is_comparable = committed.triton == triton.__version__
    if is_comparable:
        before = {key: compiled for key, compiled in committed.results.items() if is_wanted(key)}
        changes = list(resources.differences(results, before, known.keys()))
    else:
        print(f"NOT COMPARED: {resources.TABLE.name} is of Triton {committed.triton}, this is {triton.__version__}")
    for line in failures:
        print(f"WRONG: {line}")
    for line in changes:
        print(f"WRONG: {line} in {resources.TABLE.name}")
    if changes:
        print("If the kernels must be so, commit what --write makes of that table.")
    print(f"{len(results)} variants, {seconds:.0f} s, {len(failures) + len(changes)} wrong")
    return not failures and not changes, {
        "seconds": round(seconds, 1),
        "changed": changed,
        "failures": failures,
        "is_compared": is_comparable,
        "changes": changes,
        "variants": {"/".join(key): resources.figures(compiled) for key, compiled in sorted(results.items())},
    }


@dataclass(frozen=True, slots=True)
class Rig:
    """Where and what to time."""

    device: torch.device
    clock: Clock
    gated: Sequence[Case]  # compared with their references first
    cases: Sequence[Case]
    budget_s: float  # for the samples of one thing timed
    scale: float = 1.0  # of what the ceilings are measured with


def time_cases(rig: Rig, with_candidates: bool, enforce_targets: bool) -> tuple[bool, dict[str, Any]]:
    """Compare every op with its reference, then time it.

    Returns:
        Whether every result was right (and every target reached), and the results.
    """
    make = Make(rig.device, seed=time.time_ns() % 2**32)
    wrong = [f"{case.op}, {case.shape}, {case.type_name}: {error}" for case, error in gate(rig.gated, make) if error]
    if wrong:
        print("\n".join(f"WRONG: {line}" for line in wrong))
        return False, {"wrong": wrong}
    ceilings = measure_ceilings(rig.device, rig.clock, rig.scale)
    rows: list[Row] = []
    skipped: list[str] = []
    for case in rig.cases:
        print(f"{case.op}, {case.shape}", file=sys.stderr)
        try:
            rows.append(measure(case, make, rig.clock, ceilings, rig.budget_s, with_candidates))
        except torch.OutOfMemoryError:
            skipped.append(f"{case.op}, {case.shape}")
        except Exception as error:  # noqa: BLE001 - whatever it is, the other cases are timed
            rows.append(failed_row(case, f"{type(error).__name__}: {error}".partition("\n")[0]))
        torch.cuda.empty_cache()
    print("\n".join(timings(rows)))
    if with_candidates:
        print("\n".join(candidate_lines(rows)))
    print(ceilings_line(ceilings))
    if skipped:
        print(f"too large for this device's memory: {'; '.join(skipped)}")
    wrong = [f"{row['op']}, {row['shape']}: {row['error']}" for row in rows if "error" in row]
    missed = [f"{row['op']}, {row['shape']}: {row['share']:.0%}" for row in rows if is_missed(row)]
    return not wrong and not (missed and enforce_targets), {
        "copy_gb_per_s": round(ceilings.copy_bytes_per_s / 1e9, 1),
        "matmul_tflop_per_s": round(ceilings.matmul_flops_per_s / 1e12, 1),
        "wrong": wrong,
        "missed": missed,
        "skipped": skipped,
        "cases": rows,
    }


def main() -> None:
    """Run the command line and exit with its status."""
    args = parse_arguments(sys.argv[1:])
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("python -m bench.kernels: an interpreter is neither compiled nor fast: unset TRITON_INTERPRET")
    if args.ahead_of_time:
        is_ok, results = compile_variants(args)
    else:
        rig = Rig(
            torch.device("cuda"),
            DeviceClock(),
            [case for case in small_cases(_DTYPES) if args.op is None or case.op in args.op],
            [case for case in timed_cases(args.quick) if args.op is None or case.op in args.op],
            _QUICK_BUDGET_S if args.quick else _BUDGET_S,
        )
        is_ok, results = time_cases(rig, args.candidates, args.enforce_targets)
    gpu = None if args.ahead_of_time else torch.cuda.get_device_name()
    env = environment(commit=commit(), torch=torch.__version__, triton=triton.__version__, gpu=gpu, quick=args.quick)
    finish("kernels", env, results, args.output, is_ok=is_ok)
    sys.exit(0 if is_ok else 1)


if __name__ == "__main__":
    main()
