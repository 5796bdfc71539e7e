"""What was timed, as tables to read: plain Markdown, since the machines that have GPUs often have little else."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bench.kernels.ceilings import Ceilings
from bench.kernels.measure import Row, is_missed
from bench.kernels.resources import table

_HEADINGS = ("op", "shape", "ms", "GB/s", "TFLOP/s", "of", "share", "torch / ours", "host us", "")


def timings(rows: Iterable[Row]) -> Iterator[str]:
    """One line for each case."""
    yield from table(_HEADINGS, map(_line, rows))


def _line(row: Row) -> list[str]:
    if "error" in row:
        return [row["op"], row["shape"], *[""] * (len(_HEADINGS) - 3), f"WRONG: {row['error']}"]
    best = fastest(row["torch_ms"])
    return [
        row["op"],
        row["shape"],
        f"{row['ms']:.4f}",
        f"{row['gb_per_s']:,.0f}",
        f"{row['tflop_per_s']:,.1f}" if row["flops"] else "",
        row["bound"],
        f"{row['share']:.0%}",
        f"{best[1] / row['ms']:.2f} {best[0]}" if best else "",
        f"{row['host_us']:.0f}",
        f"BELOW {row['target']:.0%}" if is_missed(row) else "ok" if row["target"] else "",
    ]


def fastest(times: Mapping[str, Any]) -> tuple[str, float] | None:
    """The name and time of the fastest; None where none was timed."""
    timed = [(value, name) for name, value in times.items() if isinstance(value, float)]
    return (min(timed)[1], min(timed)[0]) if timed else None


def candidate_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Where another configuration than the chosen one was the faster, the fastest of them."""
    lines = []
    for row in rows:
        best = fastest(row.get("candidates_ms", {}))
        if best:
            gain = row["ms"] / best[1]
            lines.append([row["op"], row["shape"], f"{row['ms']:.4f}", best[0], f"{best[1]:.4f}", f"{gain:.2f}"])
    yield from table(("op", "shape", "chosen, ms", "best candidate", "ms", "faster by"), lines)


def ceilings_line(ceilings: Ceilings) -> str:
    """Both rates, for people."""
    copied, multiplied = ceilings.copy_bytes_per_s / 1e9, ceilings.matmul_flops_per_s / 1e12
    return f"torch copies {copied:,.0f} GB/s (read and written), multiplies {multiplied:,.1f} TFLOP/s in bfloat16"
