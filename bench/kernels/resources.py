"""What every kernel takes, as a committed table: a change of a kernel that makes it worse is seen before it meets a device."""

import json
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import asdict, astuple, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.kernels.ahead_of_time import Compiled, Key
from bench.kernels.occupancy import Resources
from kernels.gpu.variant import ARCHS

TABLE = Path(__file__).with_name("resources.json")
READABLE = Path(__file__).with_name("resources.md")

_COLUMNS = ["is_chosen", "programs", *(field.name for field in fields(Resources))]
Results = Mapping[Key, Compiled]

_PREAMBLE = """# What the kernels take of a device

Written by `python -m bench.kernels --ahead-of-time --write`, with Triton {version}; the same in numbers: `resources.json`.

In each cell: registers of a thread, shared memory of a program, warps that one multiprocessor holds at once of the most it
could hold, and registers that did not fit and are kept in memory (bytes; on gfx942 their number), should there be any.
Of 65,536 registers and 64 warps on sm_80, sm_90 and sm_100; on gfx942 of 512 registers of a lane and 32 waves.
What is in brackets is a candidate: timed by `python -m bench.kernels --candidates`, never launched while serving.
"""


def failures(results: Results) -> Iterator[str]:
    """What must not be, whatever was committed: a variant without code, a chosen one that spills or has no room."""
    for key, compiled in sorted(results.items()):
        if compiled.resources is None:
            yield f"{key} does not compile: {compiled.error}"
        elif compiled.is_chosen:
            if compiled.resources.spills:
                yield f"{key} spills {compiled.resources.spills}"
            if compiled.programs == 0:
                yield f"{key} does not fit a multiprocessor: {compiled.resources}"


def differences(results: Results, committed: Results, known: Set[Key]) -> Iterator[str]:
    """How the committed table is wrong, or the kernels are worse than it says.

    Args:
        results: of this code.
        committed: what `read` gave, of the same compiler.
        known: every variant there is, compiled or not.
    """
    yield from (f"{key} is missing" for key in sorted(known - committed.keys()))
    yield from (f"{key}, which is no more, is" for key in sorted(committed.keys() - known))
    for key, compiled in sorted(results.items()):
        if key in committed and compiled.resources is not None:
            yield from (f"{key}: {change}" for change in _worse(compiled, committed[key]))


def _worse(now: Compiled, before: Compiled) -> Iterator[str]:
    assert now.resources is not None
    assert before.resources is not None
    if now.is_chosen != before.is_chosen:
        yield "chosen" if now.is_chosen else "not chosen any more"
    for name in ("registers", "spills", "shared_bytes"):
        was, value = getattr(before.resources, name), getattr(now.resources, name)
        if value > was:
            yield f"{value} {name} instead of {was}"
    if now.resident_warps < before.resident_warps:
        yield f"{now.resident_warps} resident warps instead of {before.resident_warps}"


def figures(compiled: Compiled) -> dict[str, Any]:
    """For the JSON line."""
    if compiled.resources is None:
        return {"is_chosen": compiled.is_chosen, "error": compiled.error}
    found = {"is_chosen": compiled.is_chosen, "programs": compiled.programs, "cpu_s": round(compiled.cpu_s, 2)}
    return found | asdict(compiled.resources)


@dataclass(frozen=True, slots=True)
class Committed:
    """The committed table."""

    triton: str  # the version that it was written with
    digests: Mapping[str, str]  # of what each op's kernels were compiled from
    results: Results


def read(path: Path = TABLE) -> Committed:
    """The committed table."""
    table = json.loads(path.read_text())
    assert table["columns"] == _COLUMNS, f"{path.name} has other columns; write it anew"
    results = {}
    for name, (is_chosen, programs, *figures) in table["kernels"].items():
        key = Key(*name.split("/"))
        results[key] = Compiled(bool(is_chosen), Resources(*figures), programs)
    return Committed(table["triton"], table["digests"], results)


def write(committed: Committed, path: Path = TABLE, readable_path: Path = READABLE) -> None:
    """Write both tables. Every variant must have compiled."""
    rows = []
    for key, compiled in sorted(committed.results.items()):
        assert compiled.resources is not None
        figures = [int(compiled.is_chosen), compiled.programs, *astuple(compiled.resources)]
        rows.append(f'    "{"/".join(key)}": {json.dumps(figures)}')
    body = ",\n".join(rows)
    head = f'  "triton": "{committed.triton}",\n  "digests": {json.dumps(committed.digests, indent=4)[:-1]}  }},\n'
    path.write_text(f'{{\n{head}  "columns": {json.dumps(_COLUMNS)},\n  "kernels": {{\n{body}\n  }}\n}}\n')
    preamble = _PREAMBLE.format(version=committed.triton)
    readable_path.write_text("\n".join([preamble, *readable(committed.results)]) + "\n")


def readable(results: Results) -> Iterator[str]:
    """Markdown: a table for each op, a line for each variant, a column for each kind of device."""
    archs = [arch.name for arch in ARCHS if any(key.arch == arch.name for key in results)]
    keys = sorted({key._replace(arch="") for key in results})
    for op, lines in groupby(keys, key=lambda key: key.op):
        yield f"## {op}\n"
        yield from table(("variant", *archs), [_line(results, key, archs) for key in lines])
        yield ""


def _line(results: Results, key: Key, archs: Iterable[str]) -> list[str]:
    found = [results.get(key._replace(arch=arch)) for arch in archs]
    name = f"{key.kernel.strip('_').removesuffix('_kernel')} {key.label}"
    is_chosen = any(compiled is not None and compiled.is_chosen for compiled in found)
    return [name if is_chosen else f"({name})", *map(_cell, found, archs)]


def _cell(compiled: Compiled | None, arch: str) -> str:
    if compiled is None:
        return ""
    if compiled.resources is None:
        return "does not compile"
    used = compiled.resources
    max_warps = next(each.max_warps for each in ARCHS if each.name == arch)
    kib = round(used.shared_bytes / 1024, 1)
    parts = [f"{used.registers}", f"{kib:g} KiB", f"{compiled.resident_warps}/{max_warps}"]
    text = ", ".join(parts + ([f"SPILLS {used.spills}"] if used.spills else []))
    return text if compiled.is_chosen else f"({text})"


def table(headings: Iterable[str], lines: Iterable[Iterable[str]]) -> Iterator[str]:
    """Markdown that is as easy to read unrendered."""
    rows = [list(headings), *map(list, lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
