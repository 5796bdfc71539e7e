"""`baton demo`: a real model answers through three services, and the timeline shows where the time went."""

import asyncio
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.v1 import inference_pb2 as pb
from services.cli.client import Asked, chat_request, stream, timings_of
from services.cli.stack import Stack, running
from services.cli.up import UpOptions, start_stack

QUESTION = "What is the capital of France?"
BAR_WIDTH = 48
PARTS = ("queue", "route", "reserve", "prefill", "transfer", "adopt", "first_decode", "decode")


async def run_demo(options: UpOptions, logs: Path, question: str) -> None:
    """Start a stack, ask, print the answer and its timeline, stop everything.

    Raises:
        StackError: a part did not start.
        ServingError: the request failed.
    """
    async with running(Stack(logs, drain_timeout_s=5.0)) as stack:
        print("starting Valkey, a prefill worker, a decode worker and a router ...", file=sys.stderr, flush=True)
        up = await start_stack(stack, options)
        print(f"\n> {question}\n", flush=True)
        done: pb.GenerateDone | None = None
        request = chat_request([("user", question)], Asked(temperature=0, max_tokens=64))
        async for response in stream(up.grpc[0], request, 120.0):
            print(response.chunk.text, end="", flush=True)
            if response.WhichOneof("event") == "done":
                done = response.done
        assert done is not None, "a stream that ends without an error ends with done"
        print("\n", flush=True)
        print_timeline(done, Console())


def print_timeline(done: pb.GenerateDone, console: Console) -> None:
    """A bar per part of the request, each beginning where the one before ended."""
    timings = timings_of(done)
    e2e_ms = timings["e2e_ms"]
    table = Table(box=None, show_header=False, padding=(0, 1))
    start = 0.0
    for part in PARTS:
        length = timings[f"{part}_ms"]
        table.add_row(part, f"{length:9.2f} ms", _bar(start, length, e2e_ms))
        start += length
    total = sum(timings[f"{part}_ms"] for part in PARTS)
    table.add_row(
        "sum", f"{total:9.2f} ms", f"end to end {e2e_ms:.2f} ms, first token after {timings['ttft_ms']:.2f} ms"
    )
    console.print(table)
    console.print(
        f"{done.prompt_tokens} prompt tokens, {done.completion_tokens} answered ({done.finish_reason}); "
        f"prefill on {done.prefill_worker}, decode on {done.decode_worker}",
        highlight=False,
    )


def _bar(start: float, length: float, total: float) -> str:
    if total <= 0:
        return ""
    first, last = round(start / total * BAR_WIDTH), round((start + length) / total * BAR_WIDTH)
    return " " * first + ("█" * (last - first) or "▏")


def run(options: UpOptions, logs: Path, question: str) -> None:
    """Blocking form for the command line."""
    asyncio.run(run_demo(options, logs, question))
