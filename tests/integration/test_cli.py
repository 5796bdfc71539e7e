"""The `baton` command as a person, a script or an init system uses it."""

import json
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import typer

from services.cli.main import app
from tests.asking import Answer, ask, text_request
from tests.processes import (
    Process,
    Stack,
    baton_command,
    baton_up,
    children_of,
    environment,
    is_alive,
    make_home,
    run_baton,
    wait_until,
)
from tests.unit.tiny_model import write_tiny_model

TIMELINE = ("queue", "route", "reserve", "prefill", "transfer", "adopt", "first_decode", "decode")


@pytest.fixture
def home(demo_model: Path, tmp_path: Path) -> Path:
    """A BATON_HOME of its own that has the demo model."""
    return make_home(tmp_path / "home", demo_model.parent)


@pytest.fixture
def tiny_model(demo_model: Path, tmp_path: Path) -> Path:
    """A random model of two layers with the demo model's tokenizer: it starts in the time its imports take."""
    folder = write_tiny_model(tmp_path / "tiny", vocab_size=49152, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo_model / name, folder / name)
    return folder


def test_demo_answers_paris_and_shows_where_the_time_went(home: Path) -> None:
    done = run_baton(home, "demo", BATON_WORKER_SILENCE_S="60", BATON_WORKER_GRACE_S="60")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    parts = dict(re.findall(r"^ *(\w+) +([\d.]+) ms", done.stdout, re.MULTILINE))
    end_to_end = re.search(r"end to end ([\d.]+) ms", done.stdout)
    assert end_to_end is not None
    assert sum(float(parts[name]) for name in TIMELINE) == pytest.approx(float(end_to_end[1]), rel=0.02)


@pytest.mark.xdist_group("float32")
def test_generate_prints_json_lines_that_end_with_timings(float32_stack: Stack, home: Path) -> None:
    flags = ("--max-tokens", "5", "--temperature", "0", "--endpoint", float32_stack.grpc[0])
    done = run_baton(home, "generate", "The capital of France is", "--json", *flags)
    assert done.returncode == 0, done.stderr
    *chunks, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert {chunk["event"] for chunk in chunks} == {"chunk"}
    assert sum(len(chunk["token_ids"]) for chunk in chunks) == last["completion_tokens"] == 5
    timings = last["timings"]
    assert sum(timings[f"{name}_ms"] for name in TIMELINE) == pytest.approx(timings["e2e_ms"], rel=0.02)
    plain = run_baton(home, "generate", "The capital of France is", *flags)
    assert plain.stdout == "".join(chunk["text"] for chunk in chunks) + "\n"


@pytest.mark.xdist_group("float32")
def test_generate_as_chat_applies_the_template(float32_stack: Stack, home: Path) -> None:
    flags = ("--chat", "--temperature", "0", "--json", "--max-tokens", "2")
    done = run_baton(home, "generate", "Hi", *flags, BATON_ENDPOINT=float32_stack.grpc[0])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["prompt_tokens"] > 20


@pytest.mark.xdist_group("float32")
def test_a_chat_over_a_pipe_answers_each_line_and_prints_no_prompt(float32_stack: Stack, home: Path) -> None:
    flags = ("--endpoint", float32_stack.grpc[0], "--max-tokens", "3", "--temperature", "0")
    done = run_baton(home, "chat", *flags, given="Say yes.\n\nAgain.\n")
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line]) == 2
    assert ">" not in done.stdout


@pytest.mark.xdist_group("float32")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max-tokens", "0"), "max_tokens: 0"),
        (("--max-tokens", "3000000000"), "3000000000"),
        (("--temperature", "nan"), "temperature: nan"),
        (("--top-p", "7"), "top_p: 7.0"),
        (("--stop", "",), "stop: "),
        (("--max-tokens", "99999"), "99999"),
    ],
)  # fmt: skip
def test_a_request_the_router_refuses_is_wrong_usage(
    float32_stack: Stack, home: Path, flags: tuple[str, ...], said: str
) -> None:
    done = run_baton(home, "generate", "Hi", "--endpoint", float32_stack.grpc[0], *flags)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-such-command",), "no-such-command"),
        (("generate",), "prompt"),
        (("up", "--prefill", "0"), "prefill=0"),
        (("up", "--dtype", "int3"), "int3"),
        (("up", "--kv-memory", "2XB"), "2XB"),
        (("up", "--port", "80000"), "port=80000"),
        (("up", "--redis-url", "nonsense"), "nonsense"),
        (("up", "--model", "no-such-model"), "no-such-model"),
        (("demo", "--model", "no-such-model"), "no-such-model"),
        (("decode", "--max-sequences", "0"), "max_sequences=0"),
        (("router", "--max-model-len", "999999"), "max_model_len=999999"),
        (("model", "import", "no-such-file.gguf"), "no-such-file.gguf"),
        (("model", "fetch", "no-such-model"), "no-such-model"),
    ],
)
def test_wrong_usage_is_status_2_and_names_the_value(home: Path, arguments: tuple[str, ...], said: str) -> None:
    done = run_baton(home, *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_part_that_refuses_its_options_ends_up_with_its_words_and_status_2(home: Path, tiny_model: Path) -> None:
    done = run_baton(home, "up", "--model", str(tiny_model), "--block-tokens", "3")
    assert done.returncode == 2, done.stderr
    assert "block_tokens=3: must be a power of two" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "Hi", "--endpoint", "127.0.0.1:1"), "127.0.0.1:1"),
        (("up", "--redis-url", "redis://127.0.0.1:1/0"), "redis://127.0.0.1:1/0"),
    ],
)
def test_what_cannot_be_reached_is_status_1_and_named(home: Path, arguments: tuple[str, ...], said: str) -> None:
    done = run_baton(home, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_model_list_shows_what_is_stored(home: Path) -> None:
    done = run_baton(home, "model", "list")
    assert done.returncode == 0
    assert "smollm2-135m-instruct" in done.stdout
    assert "LlamaForCausalLM" in done.stdout


@pytest.mark.parametrize("command", ["up", "router", "prefill", "decode", "demo"])
def test_every_flag_is_an_environment_variable_too(command: str) -> None:
    group: Any = typer.main.get_command(app)
    flags = {param.opts[0]: param.envvar for param in group.commands[command].params if param.opts[0] != "--question"}
    assert len(flags) > 10
    assert flags == {name: "BATON_" + name.removeprefix("--").replace("-", "_").upper() for name in flags}


def test_an_environment_variable_is_obeyed(home: Path) -> None:
    done = run_baton(home, "decode", BATON_MAX_SEQUENCES="-7")
    assert done.returncode == 2
    assert "max_sequences=-7" in done.stderr


def test_an_interrupted_aggregated_stack_finishes_its_stream_and_ends_with_0(home: Path) -> None:
    context_tokens = 40
    flags = ("--mode", "aggregated", "--max-model-len", str(context_tokens), "--dtype", "float32")
    with baton_up(home, *flags, "--kv-blocks", "16") as process:
        stack = process.stack()
        has_begun, answers = threading.Event(), list[Answer]()
        request = text_request("Once upon a time", ignore_eos=True)  # max_tokens: the rest of the context

        def read() -> None:
            answers.append(ask(stack.grpc[0], request, on_token=has_begun.set))

        reader = threading.Thread(target=read)
        reader.start()
        assert has_begun.wait(60)
        process.signal(signal.SIGINT)
        assert process.wait() == 0, process.output()
        reader.join(60)
        (answer,) = answers
        assert answer.done.path == "aggregated"
        assert answer.done.finish_reason == "length"
        assert len(answer.token_ids) == context_tokens - answer.done.prompt_tokens
        assert len(process.ready_lines()) == 1


def test_two_of_each_serve_together_and_none_outlives_a_killed_parent(home: Path, tiny_model: Path) -> None:
    flags = ("--prefill", "2", "--decode", "2", "--routers", "2", "--model", str(tiny_model), "--kv-blocks", "64")
    with baton_up(home, *flags) as process:
        stack = process.stack()
        assert len(stack.grpc) == len(stack.http) == 2
        children = children_of(process.pid)
        assert len(children) == 7  # and Valkey
        # READY means that each router has one pair; the other workers join within moments.
        answers: set[tuple[int, ...]] = set()
        used: set[str] = set()

        def are_all_used() -> bool:
            for endpoint in stack.grpc:
                answer = ask(endpoint, text_request("Hi", max_tokens=4))
                answers.add(tuple(answer.token_ids))
                used.update((answer.done.prefill_worker, answer.done.decode_worker))
            return len(used) == 4

        wait_until(are_all_used, "every worker in some answer", timeout_s=60.0)
        assert len(answers) == 1
        process.signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any(map(is_alive, children)), "the end of every child", timeout_s=30.0)


def test_a_stack_told_to_stop_while_it_starts_leaves_nothing_behind(home: Path, tiny_model: Path) -> None:
    command = baton_command("up", "--model", str(tiny_model))
    with Process("up", command, environment(home), home / "up.log") as process:
        wait_until(lambda: len(children_of(process.pid)) == 4, "the start of every child", timeout_s=60.0)
        children = children_of(process.pid)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0, process.output()
        assert not process.ready_lines()
        assert not any(map(is_alive, children))
