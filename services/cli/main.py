"""The `baton` command. Exit status: 0 done, 2 wrong usage or configuration, 1 failed."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from core.errors import BatonError, ConfigError, InvalidRequestError, NotFoundError
from services.cli import processes
from services.cli.client import Asked, chat, generate_text
from services.cli.demo import QUESTION
from services.cli.demo import run as run_demo
from services.cli.flags import build, flags_of
from services.cli.home import baton_home
from services.cli.progress import progress_bars
from services.cli.up import Sizes, UpOptions, run_up
from services.common.lifecycle import run_until_stopped
from services.common.logs import configure_logging
from services.common.options import ClusterOptions, EngineOptions, ModelOptions, RouterLimits

DEMO_MODEL = "smollm2-135m-instruct"

app = typer.Typer(
    name="baton",
    help="Disaggregated LLM serving: prefill and decode on separate pools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
model_app = typer.Typer(help="Fetch, import and list models.", no_args_is_help=True)
app.add_typer(model_app, name="model")
bench_app = typer.Typer(help="Measure speed.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Endpoint = Annotated[str, typer.Option(envvar="BATON_ENDPOINT", help="A router's gRPC address.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer in tokens; default: the rest of the context.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default 1.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this total probability.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many likeliest tokens.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be given again.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the whole answer.")]


@app.command()
@flags_of(ClusterOptions, ModelOptions, RouterLimits)
def router(**values: Any) -> None:
    """One router: gRPC and OpenAI HTTP in, prompts out to the workers."""
    processes.run_router(values)


@app.command()
@flags_of(ClusterOptions, ModelOptions, EngineOptions)
def prefill(**values: Any) -> None:
    """One prefill worker."""
    processes.run_prefill(values)


@app.command()
@flags_of(ClusterOptions, ModelOptions, EngineOptions)
def decode(**values: Any) -> None:
    """One decode worker."""
    processes.run_decode(values)


_REDIS = (str, "", "Redis or Valkey to share; default: an embedded Valkey.")


@app.command()
@flags_of(Sizes, ModelOptions, ClusterOptions, EngineOptions, RouterLimits, without=("redis_url",), redis_url=_REDIS)
def up(**values: Any) -> None:
    """A whole local stack; prints READY once it serves, drains on Ctrl-C."""
    options = _up_options(values)
    configure_logging("up", options.cluster.log_level, options.cluster.log_format)
    processes.resolve_model(options.model)  # fetch problems show here, and a .gguf is imported once, not by each worker
    run_until_stopped(lambda stop: run_up(options, baton_home() / "logs", stop, processes.print_ready))


@app.command()
@flags_of(ModelOptions, EngineOptions, RouterLimits)
def demo(
    question: Annotated[str, typer.Option(help="What to ask.")] = QUESTION,
    **values: Any,
) -> None:
    """Start three services, ask a model, print the answer and a timeline, stop."""
    options = _up_options(values)
    if options.model.model == DEMO_MODEL:
        _fetch(DEMO_MODEL)
    processes.resolve_model(options.model)  # a wrong name shows before anything is started
    run_demo(options, baton_home() / "logs" / "demo", question)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    endpoint: Endpoint = "127.0.0.1:50051",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    timeout: Timeout = 300.0,
    as_chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, the last with timings.")] = False,
) -> None:
    """Stream one answer over gRPC."""
    asked = Asked(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        timeout_s=timeout,
    )
    asyncio.run(generate_text(endpoint, prompt, asked, as_json=as_json, is_chat=as_chat))


@app.command(name="chat")
def chat_command(
    endpoint: Endpoint = "127.0.0.1:50051",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    timeout: Timeout = 300.0,
) -> None:
    """Talk to the model; an empty line is ignored, Ctrl-D ends."""
    asked = Asked(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, timeout_s=timeout)
    is_terminal = sys.stdin.isatty()

    def read_line() -> str | None:
        try:
            return input("> " if is_terminal else "")
        except EOFError:
            return None

    asyncio.run(chat(endpoint, asked, read_line, goes_on=is_terminal))


@model_app.command(name="fetch")
def fetch_command(name: Annotated[str, typer.Argument(help="A known name, or org/name on a model hub.")]) -> None:
    """Download a model into BATON_HOME; a second call finds it there."""
    print(_fetch(name))


@model_app.command(name="import")
def import_command(
    path: Annotated[Path, typer.Argument(help="A .gguf file.")],
    name: Annotated[str, typer.Option(help="What to call it; default: the file's name.")] = "",
) -> None:
    """Turn a GGUF file into a model folder under BATON_HOME."""
    from services.common.models.store import ModelStore

    with progress_bars() as report:
        print(ModelStore(baton_home()).import_file(path, name or None, report))


@model_app.command(name="list")
def list_command() -> None:
    """List the models under BATON_HOME."""
    from services.common.models.store import ModelStore

    table = Table("name", "architecture", "size", box=None)
    for stored in ModelStore(baton_home()).list():
        table.add_row(stored.name, stored.architecture, f"{stored.size_bytes / 2**20:.0f} MiB")
    Console().print(table)


@bench_app.command(
    name="engine",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,  # its own: see bench.engine
)
def bench_engine(context: typer.Context) -> None:
    """One engine's decode and prefill speed, beside this machine's own limits."""
    # Becomes that program: nothing imports bench, and what it measures starts in a process of its own anyway.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "bench.engine", *context.args])  # noqa: S606


def _fetch(name: str) -> Path:
    from services.common.models.fetch import fetch
    from services.common.models.store import ModelStore

    with progress_bars() as report:
        return fetch(name, ModelStore(baton_home()), report)


def _up_options(values: dict[str, Any]) -> UpOptions:
    redis_url = values.pop("redis_url", "")
    return UpOptions(
        sizes=build(Sizes, values),
        model=build(ModelOptions, values),
        cluster=build(ClusterOptions, values),
        engine=build(EngineOptions, values),
        limits=build(RouterLimits, values),
        redis_url=redis_url,
    )


def main() -> None:
    """Run the command line and exit with its status."""
    sys.exit(_status_of(lambda: app()))


def _status_of(command: Callable[[], object]) -> int:
    try:
        command()
    except (ConfigError, InvalidRequestError, NotFoundError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    except (BatonError, OSError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
