"""`baton bench engine`: how fast one engine computes a model here, and how much of what this machine could do that is.

Every point of the sweeps is timed a little in each of several rounds, every other round backwards, so that a machine
which slows down slows all of them; a point that was timed for a minute is done. Tables go to stderr, one JSON line to
stdout. It reads /proc: Linux only.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.ceilings import Ceilings, Costs
from bench.engine_points import Decode, Loop, Point, Prefill, Rig, Sample, why_not
from bench.engine_report import ceilings_row, memory_row, rows, tables
from bench.peers.report import environment, finish, new_file
from bench.process import Memory, age_s, commit
from core.errors import BatonError, ConfigError
from engine.build import BuiltEngine, build_engine
from engine.kv_cache import DTYPES
from engine.scheduler import StepLimits
from engine.weights import checkpoint_dtype
from services.cli.home import baton_home
from services.cli.progress import progress_bars
from services.common.models.store import ModelStore
from services.common.options import parse_cores, parse_size

FULL: dict[str, Any] = {
    "batch": (1, 8, 32, 64),
    "context": (128, 1024, 4096, 8192),
    "prompt": (128, 512, 2048, 4000, 8192),
    "rounds": 5,
}
QUICK: dict[str, Any] = {"batch": (1, 8), "context": (128,), "prompt": (128, 512), "rounds": 2}
FULL_VISIT_S, QUICK_VISIT_S = 0.5, 0.1  # how long a point is timed in one round, at least
MAX_POINT_S = 60.0  # a point that was timed for so long is not visited in further rounds
LOOP_STEPS = 20
# Of one weight of the layers, and of the head, which is int8 in both; with the scale of each 32, int4 also a minimum.
QUANTIZED_BYTES = {"int8": (1.125, 1.125), "int4": (0.75, 1.125)}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line, with what was not given filled in. Exits with 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="baton bench engine",
        description="Decode and prefill speed of one engine, beside this machine's own limits.",
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, a .gguf file or a fetched name")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--device", default="cpu", choices=("cpu",), help="GPUs: see python -m bench.kernels")
    parser.add_argument("--threads", type=_threads, default=1, help="compute threads, at most one for each core")
    parser.add_argument("--cores", type=_cores, help="pin this process to these cores, e.g. 0 or 2,3")
    parser.add_argument("--batch", type=_counts, help="sequences decoded at once, e.g. 1,8,32")
    parser.add_argument("--context", type=_counts, help="tokens that each of them has; the loop takes the first")
    parser.add_argument("--prompt", type=_counts, help="tokens of one prefill")
    parser.add_argument("--rounds", type=_count, help="how often every point is visited")
    parser.add_argument("--quick", action="store_true", help="fewer points and rounds, where they are not given")
    parser.add_argument("--max-batched-tokens", type=_count, default=512, help="tokens of one prompt chunk")
    parser.add_argument("--block-tokens", type=_count, default=16, help="tokens in one KV block")
    parser.add_argument(
        "--kv-memory", type=_size, default="4GiB", help="for KV blocks at most; points that need more are skipped"
    )
    parser.add_argument(
        "--quantization", choices=["none", "int8", "int4"], default="none", help="of the weights, on load"
    )
    parser.add_argument("--deterministic", action="store_true", help="results that do not depend on the batch")
    parser.add_argument("--output", type=new_file, help="write the JSON line to this file too")
    args = parser.parse_args(arguments)
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if 1 in args.context:
        parser.error("--context: a decode step has at least 2 tokens: one of prompt, and the one it computes")
    return args


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _threads(text: str) -> int:
    threads, num_cores = _count(text), len(os.sched_getaffinity(0))
    if threads > num_cores:
        raise argparse.ArgumentTypeError(f"{text!r} is more than the {num_cores} cores this process may use")
    return threads


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _counts(text: str) -> tuple[int, ...]:
    """Of "1,8,32", each once; of "", none."""
    return tuple(dict.fromkeys(_count(part) for part in text.split(","))) if text else ()


def _cores(text: str) -> frozenset[int]:
    try:
        cores = parse_cores(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    allowed = os.sched_getaffinity(0)
    if not cores or not cores <= allowed:
        raise argparse.ArgumentTypeError(f"{text!r}: want some of {','.join(map(str, sorted(allowed)))}")
    return cores


def choose(args: argparse.Namespace, built: BuiltEngine) -> tuple[list[Point], list[str]]:
    """The points of the three sweeps that can be measured, and a line for each that cannot."""
    wanted: list[Point] = [Decode(batch, context) for context in args.context for batch in args.batch]
    wanted += [Prefill(prompt, args.max_batched_tokens) for prompt in args.prompt]
    wanted += [Loop(batch, context, LOOP_STEPS) for context in args.context[:1] for batch in args.batch]
    max_blocks = built.memory.num_blocks
    reasons = {point: why_not(point, built.config, args.block_tokens, max_blocks) for point in wanted}
    skipped = [f"{point}: {reason}" for point, reason in reasons.items() if reason is not None]
    return [point for point in wanted if reasons[point] is None], skipped


def load(args: argparse.Namespace, folder: Path, limits: StepLimits) -> BuiltEngine:
    """The engine as a worker builds it. Raises ConfigError."""
    with progress_bars() as report:
        return build_engine(
            folder,
            model=folder.name,
            dtype=args.dtype,
            device=args.device,
            block_tokens=args.block_tokens,
            num_blocks=0,
            kv_memory_bytes=args.kv_memory,
            threads=args.threads,
            limits=limits,
            deterministic=args.deterministic,
            quantization=None if args.quantization == "none" else args.quantization,
            load_progress=lambda done, total: report("load", done, total),
        )


def run(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the model and measure.

    Returns:
        Where it was measured, and the results.
    Raises:
        BatonError: the model or a value cannot work, or a step failed.
    """
    imports_s = age_s()
    with progress_bars() as report:
        folder = ModelStore(baton_home()).resolve(args.model, report)
    max_batch = max(args.batch, default=1)
    limits = StepLimits(max_batched_tokens=max(args.max_batched_tokens, max_batch), max_sequences=max_batch)
    began = time.perf_counter()
    built = load(args, folder, limits)
    start = {"imports_s": imports_s, "load_s": time.perf_counter() - began, "ready_s": age_s()}
    ready = Memory.now()

    points, skipped = choose(args, built)
    for line in skipped:
        console.print(f"skipped: {line}")
    if not points:
        raise ConfigError("there is nothing to measure")
    num_blocks = max(point.num_blocks(args.block_tokens) for point in points)
    rig = Rig(built, num_blocks, limits, QUICK_VISIT_S if args.quick else FULL_VISIT_S)
    samples: dict[Point, list[Sample]] = {point: [] for point in points}
    _visit(points, samples, rig)
    memory = memory_row(ready, Memory.now(), num_blocks * built.layout.block_bytes)
    dtype = DTYPES[built.layout.dtype]
    ceilings = Ceilings(built.config, dtype, args.threads)  # after `memory`: they need some of their own
    ceilings.measure()
    for number in range(1, args.rounds):
        console.print(f"round {number} of {args.rounds} done")
        _visit(points if number % 2 == 0 else points[::-1], samples, rig)
        ceilings.measure()
    rig.close()

    stored = checkpoint_dtype(folder)
    layer_bytes, head_bytes = QUANTIZED_BYTES.get(args.quantization, (min(stored.itemsize, dtype.itemsize),) * 2)
    costs = Costs(built.config, layer_bytes, head_bytes, kv_bytes=dtype.itemsize)
    sweeps = rows(samples, ceilings, costs)
    env = environment(
        commit=commit(),
        torch=torch.__version__,
        model=folder.name,
        dtype=built.layout.dtype,
        weights=next(name for name, each in DTYPES.items() if each == stored),
        decoder=type(built.model).__name__,
        **{name: getattr(args, name) for name in ("device", "threads", "quantization", "deterministic", "rounds")},
        **{name: getattr(args, name) for name in ("block_tokens", "max_batched_tokens")},
    )
    return env, sweeps | {
        "ceilings": ceilings_row(ceilings),
        "start": {name: round(value, 2) for name, value in start.items()},
        "memory": memory,
        "skipped": skipped,
    }


def _visit(points: list[Point], samples: dict[Point, list[Sample]], rig: Rig) -> None:
    for point in points:
        if sum(sample.seconds for sample in samples[point]) < MAX_POINT_S:
            samples[point] += point.visit(rig)


def main() -> None:
    """Run the command line and exit with its status: 0 done, 2 wrong usage or configuration, 1 failed."""
    args = parse_arguments(sys.argv[1:])
    if args.cores:
        os.sched_setaffinity(0, args.cores)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        env, results = run(args, console)
        for table in tables(results):
            console.print(table)
        finish("engine", env, results, args.output)
    except (BatonError, OSError) as error:
        print(f"baton bench engine: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
