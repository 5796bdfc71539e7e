"""Baton beside its peers in one run: every program measured in turn, several rounds, one table of medians.

Programs that measure themselves are commands; servers that already run are URLs (`openai_stream` asks them):

    python -m bench.peers.compare --rounds 3 \\
        --command "llama.cpp=/tmp/peers/llama/bin/python -m bench.peers.llama_cpp FILE.gguf" \\
        --server vllm=http://127.0.0.1:8100 \\
        --command "baton=.venv/bin/baton bench engine --batch 1,8,32,64 --context 128 --prompt 512,2048,4000 --rounds 2"

A command runs pinned to `--core` and ends its stdout with a benchmark's JSON line, whose results hold `decode` rows
(batch, step_ms, tokens_per_s) and `prefill` rows (prompt_tokens, tokens_per_s). The client of a server runs on
`--client-core`; the server is pinned by whoever starts it (`serve_vllm.sh`).
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from typing import Any, NamedTuple
from urllib.request import urlopen

from bench.peers.report import BATCHES, PROMPTS, environment, finish, parser

Figures = dict[str, float]  # metric -> value


class Program(NamedTuple):
    """One column of the table."""

    name: str
    command: list[str]
    core: int


def measure(program: Program) -> Figures:
    """Run the program once, pinned.

    Raises:
        RuntimeError: it failed, or its last line is no result.
    """
    pinned = ["taskset", "--cpu-list", str(program.core), *program.command]
    ran = subprocess.run(pinned, capture_output=True, text=True, check=False)  # noqa: S603
    if ran.returncode != 0:
        raise RuntimeError(f"{shlex.join(pinned)} ended with {ran.returncode}: {ran.stderr[-2000:]}")
    last = ran.stdout.strip().rpartition("\n")[2]
    try:
        return figures(json.loads(last)["results"])
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise RuntimeError(f"{program.name} does not end with a benchmark's JSON line but with {last!r}") from error


def figures(results: dict[str, list[dict[str, Any]]]) -> Figures:
    """The rows every program measures, by the name they have in the table.

    Raises:
        ValueError: there are several decode rows for one batch: only one context can be compared.
    """
    batches = [row["batch"] for row in results["decode"]]
    if len(set(batches)) != len(batches):
        raise ValueError(f"decode rows for batches {batches}: measure one context")
    found: Figures = {}
    for row in results["decode"]:
        if row["batch"] in BATCHES:
            found[f"decode {row['batch']}, ms a token"] = row["step_ms"]
            found[f"decode {row['batch']}, tokens/s"] = row["tokens_per_s"]
    for row in results["prefill"]:
        if row["prompt_tokens"] in PROMPTS:
            found[f"prefill {row['prompt_tokens']}, tokens/s"] = row["tokens_per_s"]
    return found


def table(rounds: dict[str, list[Figures]], subject: str) -> str:
    """Markdown: median (lowest to highest) of each program, then the subject's median over each other's."""
    others = [name for name in rounds if name != subject]
    lines = [
        "| | " + " | ".join([*rounds, *(f"{subject} / {name}" for name in others)]) + " |",
        "|---|" + "---|" * (len(rounds) + len(others)),
    ]
    for metric in rounds[subject][0]:
        values = {name: [run[metric] for run in runs if metric in run] for name, runs in rounds.items()}
        cells = [spread(values[name]) for name in rounds]
        cells += [ratio(values[subject], values[name]) for name in others]
        lines.append(f"| {metric} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    if not values:
        return "not measured"
    return f"{statistics.median(values):,.1f} ({min(values):,.1f} to {max(values):,.1f})"


def ratio(values: list[float], others: list[float]) -> str:
    if not values or not others or statistics.median(others) == 0:
        return ""
    return f"{statistics.median(values) / statistics.median(others):.2f}"


def named(text: str) -> tuple[str, str]:
    """An argparse type: NAME=VALUE."""
    name, _, value = text.partition("=")
    if not (name and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def above_0(text: str) -> int:
    """An argparse type: a number of times."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def programs(args: Any) -> list[Program]:
    """The commands and servers of the command line."""
    found = []
    for name, command in args.command:
        found.append(Program(name, shlex.split(command), args.core))
    for name, url in args.server:
        client = [sys.executable, "-m", "bench.peers.openai_stream", url, "--model", args.model]
        client += shlex.split(args.server_options)
        found.append(Program(name, client, args.client_core))
    return found


def require_ready(name: str, url: str) -> None:
    """Raise RuntimeError unless the server is up: one that still compiles would take the core from all the others."""
    try:
        with urlopen(f"{url}/health", timeout=5):  # noqa: S310 - a server the user named
            pass
    except OSError as error:
        raise RuntimeError(f"{name} at {url} is not ready ({error}): wait until {url}/health answers") from error


def main() -> None:
    args_parser = parser("Measure several engines in turn and compare their medians.")
    args_parser.add_argument("--command", type=named, action="append", default=[], metavar="NAME=COMMAND")
    args_parser.add_argument("--server", type=named, action="append", default=[], metavar="NAME=URL")
    args_parser.add_argument("--model", default="m", help="the name the servers serve it under")
    args_parser.add_argument("--server-options", default="", help="of openai_stream, e.g. '--batch 1 --prompt 512'")
    args_parser.add_argument("--subject", default="baton", help="whose medians are divided by the others'")
    args_parser.add_argument("--rounds", type=above_0, default=3)
    args_parser.add_argument("--core", type=int, default=1, help="where commands run")
    args_parser.add_argument("--client-core", type=int, default=0, help="where the client of a server runs")
    args = args_parser.parse_args()

    columns = programs(args)
    names = {column.name for column in columns}
    if len(names) < len(columns):
        args_parser.error("every program needs a name of its own")
    for name, url in args.server:
        require_ready(name, url)
    if args.subject not in names:
        args_parser.error(f"--subject {args.subject}: not among the given commands and servers")
    env = environment(rounds=args.rounds, commands={column.name: shlex.join(column.command) for column in columns})
    rounds: dict[str, list[Figures]] = defaultdict(list)
    for number in range(args.rounds):
        for column in columns:
            print(f"round {number + 1} of {args.rounds}: {column.name}", file=sys.stderr)
            rounds[column.name].append(measure(column))
    print(table(rounds, args.subject))
    finish("peers.compare", env, {"rounds": rounds}, args.output)


if __name__ == "__main__":
    main()
