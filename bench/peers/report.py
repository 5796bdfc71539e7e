"""What all benchmarks share: where a number was taken, and the one JSON line that each of them ends with."""

import argparse
import json
import os
import platform
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BATCHES = (1, 8, 32, 64)  # sequences decoded at once
CONTEXT_TOKENS = 64  # of each of them, before its first decoded token
OUTPUT_TOKENS = 128
PROMPTS = (512, 2048, 4000)  # tokens of one prefill

Row = dict[str, Any]

_ISA = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
_LOWEST_PLAIN_TOKEN = 100  # below it lie the special tokens of the demo model's vocabulary


def parser(description: str) -> argparse.ArgumentParser:
    """A parser that knows `--output`."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--output", type=new_file, help="write the JSON line to this file too")
    return made


def new_file(text: str) -> Path:
    """An argparse type: a file that can be written, found out before anything is measured."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is no file in a folder that can be written to")
    return path


def environment(**more: Any) -> dict[str, Any]:
    """The machine, the cores this process may use and the load on it now, with `more` (versions, flags) added."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    flags = set(_first(cpuinfo, "flags").split())
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _first(cpuinfo, "model name"),
        "isa": [name for name in _ISA if name in flags],
        "cores": sorted(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **more,
    }


def random_tokens(count: int, vocabulary: int) -> list[int]:
    """`count` ordinary token ids, different at every call: no cache of prompts can know them."""
    return random.choices(range(_LOWEST_PLAIN_TOKEN, vocabulary), k=count)  # noqa: S311


def decode_row(batch: int, context_tokens: int, output_tokens: int, step_s: float, tokens_per_s: float) -> Row:
    """One line of a decode sweep: `batch` sequences that grow from `context_tokens` by `output_tokens`.

    `step_s` is the median time from one token of a sequence to its next.
    """
    return {
        "batch": batch,
        "context_tokens": context_tokens,
        "output_tokens": output_tokens,
        "step_ms": round(step_s * 1e3, 3),
        "tokens_per_s": round(tokens_per_s, 1),
    }


def prefill_row(prompt_tokens: int, seconds: float) -> Row:
    """One line of a prefill sweep."""
    return {
        "prompt_tokens": prompt_tokens,
        "ms": round(seconds * 1e3, 2),
        "tokens_per_s": round(prompt_tokens / seconds, 1),
    }


def finish(
    bench: str, env: dict[str, Any], results: dict[str, Any], output: Path | None, *, is_ok: bool = True
) -> None:
    """Print the JSON line, and write it to `output` where one was asked for."""
    line = json.dumps({"bench": bench, "ok": is_ok, "env": env, "results": results})
    print(line)
    if output is not None:
        output.write_text(line + "\n")


def _first(cpuinfo: str, field: str) -> str:
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == field), "")
