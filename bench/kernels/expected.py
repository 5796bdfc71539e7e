"""The table of `bench/expected.md`, computed from the cases that are timed: `python -m bench.kernels.expected` writes it."""

from collections.abc import Iterator
from pathlib import Path

from bench.kernels.cases import timed_cases
from bench.kernels.ceilings import H200
from bench.kernels.measure import TARGET_FROM_S
from bench.kernels.resources import table

FILE = Path(__file__).parents[1] / "expected.md"
_BEGIN, _END = "<!-- begin: python -m bench.kernels.expected -->\n", "<!-- end -->\n"
_HEADINGS = ("op", "shape", "MB", "GFLOP", "bound", "us at the bound", "target", "us at the target")


def lines() -> Iterator[str]:
    """One line for each case, on an H200."""
    rows = []
    for case in timed_cases(quick=False):
        cost, bound_s = case.cost(), H200.bound_s(case.cost())
        target = case.target if bound_s >= TARGET_FROM_S else None
        rows.append(
            [
                case.op,
                case.shape,
                f"{cost.moved_bytes / 1e6:,.2f}",
                f"{cost.flops / 1e9:,.2f}" if cost.flops else "",
                "copy" if H200.is_memory_bound(cost) else "matmul",
                f"{bound_s * 1e6:,.2f}",
                f"{target:.0%}" if target else "",
                f"{bound_s / target * 1e6:,.0f}" if target else "",
            ]
        )
    yield from table(_HEADINGS, rows)


def updated(text: str) -> str:
    """The file's text with its table computed anew."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return before + _BEGIN + "\n" + "\n".join(lines()) + "\n\n" + _END + after


if __name__ == "__main__":
    FILE.write_text(updated(FILE.read_text()))
