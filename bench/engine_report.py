"""What `bench.engine` found, as rows of numbers and as tables to read."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from rich.table import Table

from bench.ceilings import Ceilings, Costs
from bench.engine_points import Decode, Loop, Point, Prefill, Sample
from bench.process import Memory

Row = dict[str, Any]
_MIB = 2**20
_HEADINGS = {
    "context_tokens": "context",
    "prompt_tokens": "prompt",
    "p25_ms": "p25",
    "p75_ms": "p75",
    "tokens_per_s": "tokens/s",
    "cpu_ms": "cpu",
    "overhead_ms": "overhead",
    "gemm_share": "gemm",
    "memory_share": "memory",
}


def rows(samples: Mapping[Point, Seq[Sample]], ceilings: Ceilings, costs: Costs) -> dict[str, list[Row]]:
    """The sweeps, in the order the points were given; times in ms, medians, with both quartiles.

    `cpu_ms` is the processor time of the same work; where it is well below, something else had the core. `overhead_ms` is
    what is spent outside the model: on batches and sampling, in the loop on plans, blocks and outputs too.

    Args:
        samples: of every point.
        ceilings: measured in the same rounds.
        costs: of the model.
    """
    gemm_rate, read_rate = max(ceilings.gemm_rates().values()), max(ceilings.read_rates().values())
    found: dict[str, list[Row]] = {"decode": [], "prefill": [], "loop": []}
    for point, timed in samples.items():
        seconds = [sample.seconds for sample in timed]
        median_s = statistics.median(seconds)
        work = point.work(costs)
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        overhead_s = statistics.median(sample.seconds - sample.model_s for sample in timed)
        measured = {
            "num_samples": len(timed),
            "p25_ms": _ms(quartiles[0]),
            "p75_ms": _ms(quartiles[2]),
            "cpu_ms": _ms(statistics.median(sample.cpu_s for sample in timed)),
            "overhead_ms": _ms(overhead_s),
            "gemm_share": round(work.flops / gemm_rate / median_s, 3),
            "memory_share": round(work.read_bytes / read_rate / median_s, 3),
        }
        match point:
            case Prefill(prompt, _):
                row = {"prompt_tokens": prompt, "ms": _ms(median_s), "tokens_per_s": round(prompt / median_s, 1)}
                found["prefill"].append(row | measured)
            case Decode(batch, context) | Loop(batch, context):
                name, time_name = ("decode", "step_ms") if isinstance(point, Decode) else ("loop", "itl_ms")
                row = {"batch": batch, "context_tokens": context, time_name: _ms(median_s)}
                found[name].append(row | {"tokens_per_s": round(batch / median_s, 1)} | measured)
    return found


def ceilings_row(ceilings: Ceilings) -> Row:
    """The rate of every way that was tried, the fastest first: it is the ceiling."""
    read = {name: round(rate / 1e9, 2) for name, rate in ceilings.read_rates().items()}
    gemm = {name: round(rate / 1e9, 1) for name, rate in ceilings.gemm_rates().items()}
    return {"read_gb_per_s": read, "gemm_gflop_per_s": gemm}


def memory_row(ready: Memory, measured: Memory, kv_bytes: int) -> Row:
    """Resident memory.

    Args:
        ready: after loading and warm-up, when next to none of the KV pool had been touched.
        measured: after every point was run once, with the whole pool touched.
        kv_bytes: of the pool.
    """
    return {
        "ready_bytes": ready.rss_bytes,
        "now_without_kv_bytes": measured.rss_bytes - kv_bytes,
        "peak_without_kv_bytes": max(ready.peak_rss_bytes, measured.peak_rss_bytes - kv_bytes),
        "kv_bytes": kv_bytes,
    }


def tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Everything in `results` but the skipped points, for people."""
    titles = {
        "decode": "One decode step",
        "prefill": "One prompt, in chunks",
        "loop": "From token to token through the engine's loop",
    }
    for name, title in titles.items():
        if results[name]:
            columns = [column for column in results[name][0] if column != "num_samples"]
            yield _table(title, columns, ([_shown(name, row[name]) for name in columns] for row in results[name]))
    ceilings, start, memory = results["ceilings"], results["start"], results["memory"]
    facts = [
        ("memory read, GB/s", _listed(ceilings["read_gb_per_s"])),
        ("products, GFLOP/s", _listed(ceilings["gemm_gflop_per_s"])),
        ("start, s", _listed(start)),
        ("memory, MiB", _listed({name.removesuffix("_bytes"): size // _MIB for name, size in memory.items()})),
    ]
    yield _table("Ceilings, start, memory", ("", ""), facts)


def _table(title: str, columns: Seq[str], lines: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), show_header=any(columns))
    for column in columns:
        table.add_column(_HEADINGS.get(column, column), justify="right")
    for line in lines:
        table.add_row(*line)
    return table


def _shown(column: str, value: float) -> str:
    if column.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in values.items())


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
