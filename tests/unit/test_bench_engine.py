"""`baton bench engine` on a tiny model: what it prints, what it refuses, and that it times what it says."""

import getpass
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.ceilings import Costs
from bench.engine import parse_arguments
from bench.engine_points import Decode, Loop, Point, Prefill, Rig, why_not
from bench.peers.compare import figures
from core.errors import InternalError
from core.model_config import parse_model_config
from engine.build import BuiltEngine, build_engine
from engine.scheduler import StepLimits
from tests.processes import run_baton
from tests.unit.tiny_model import TINY_CONFIG, write_tiny_model

BLOCK_TOKENS = 4
LIMITS = StepLimits(max_batched_tokens=16, max_sequences=4)


@pytest.fixture
def built(tmp_path: Path) -> BuiltEngine:
    return build_engine(
        write_tiny_model(tmp_path),
        model="tiny",
        dtype="float32",
        device="cpu",
        block_tokens=BLOCK_TOKENS,
        num_blocks=64,
        kv_memory_bytes=0,
        threads=1,
        limits=LIMITS,
    )


@pytest.fixture
def rig(built: BuiltEngine) -> Iterator[Rig]:
    rig = Rig(built, 64, LIMITS, visit_s=0.0)
    yield rig
    rig.close()


def test_the_command_ends_with_one_json_line_of_everything_it_measured(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    flags = ("--batch", "1,3", "--context", "20,4096", "--prompt", "40", "--rounds", "2", "--max-batched-tokens", "16")
    sizes = ("--quick", "--kv-memory", "1MiB", "--block-tokens", "4", "--output", str(tmp_path / "out.json"))
    done = run_baton(tmp_path, "bench", "engine", "--model", str(model), *flags, *sizes)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert (tmp_path / "out.json").read_text() == line + "\n"
    assert not [name for name in (str(tmp_path), socket.gethostname(), getpass.getuser()) if f'"{name}' in line]

    report = json.loads(line)
    assert (report["bench"], report["ok"]) == ("engine", True)
    env, results = report["env"], report["results"]
    assert env.keys() >= {"cpu", "cores", "date", "commit", "torch", "isa", "decoder"}
    assert (env["model"], env["dtype"], env["threads"], env["rounds"]) == ("tiny", "float32", 1, 2)
    decode, loop, (prefill,) = results["decode"], results["loop"], results["prefill"]
    assert [(row["batch"], row["context_tokens"]) for row in decode] == [(1, 20), (3, 20)]
    assert [(row["batch"], row["context_tokens"]) for row in loop] == [(1, 20), (3, 20)]
    assert prefill["prompt_tokens"] == 40
    for row, time_name, num_tokens in [
        *((row, "step_ms", row["batch"]) for row in decode),
        *((row, "itl_ms", row["batch"]) for row in loop),
        (prefill, "ms", 40),
    ]:
        assert row["p25_ms"] <= row[time_name] <= row["p75_ms"]
        assert 0 < row["overhead_ms"] <= row["p75_ms"]
        assert row["tokens_per_s"] == pytest.approx(num_tokens / row[time_name] * 1e3, rel=0.01)
        assert row["num_samples"] >= 2
        assert row["cpu_ms"] > 0
        assert row["gemm_share"] >= 0
        assert row["memory_share"] >= 0
    assert len(results["skipped"]) == 2  # two batches of the longer context; the loop takes the first
    assert all("the model takes 128 tokens" in line for line in results["skipped"])
    assert "skipped: Decode(batch=3, context=4096): the model takes 128 tokens" in done.stderr
    assert min(results["ceilings"]["read_gb_per_s"].values()) > 0
    assert min(results["ceilings"]["gemm_gflop_per_s"].values()) > 0
    memory = results["memory"]
    assert 0 < memory["now_without_kv_bytes"] <= memory["peak_without_kv_bytes"]
    assert (
        memory["kv_bytes"] == 3 * 11 * 4 * 2 * 2 * 2 * 8 * 4
    )  # batch x blocks of 20 + 20 + 1 tokens, each of tokens ...
    assert 0 < results["start"]["imports_s"] < results["start"]["ready_s"]
    assert figures(results).keys() == {"decode 1, ms a token", "decode 1, tokens/s"}  # the peers' table can read it


def test_a_model_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    done = run_baton(tmp_path, "bench", "engine", "--model", "absent", "--quick")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("baton bench engine: model 'absent'")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--batch", "0"], "--batch"),
        (["--batch", "1,x"], "--batch"),
        (["--context", "8,1"], "--context"),
        (["--rounds", "-1"], "--rounds"),
        (["--cores", "100000"], "--cores"),
        (["--cores", ""], "--cores"),
        (["--dtype", "int3"], "--dtype"),
        (["--sideways"], "--sideways"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_flag(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        parse_arguments(arguments)
    assert exited.value.code == 2
    assert named in capsys.readouterr().err


def test_quick_gives_way_to_what_is_given() -> None:
    args = parse_arguments(["--quick", "--batch", "5,5,2", "--prompt", ""])
    assert (args.batch, args.prompt, args.rounds) == ((5, 2), (), 2)


@pytest.mark.parametrize("point", [Decode(4, 33), Prefill(50, 16), Prefill(3, 16), Loop(4, 7, 9)])
def test_a_visit_times_its_point_and_returns_all_blocks(rig: Rig, point: Point) -> None:
    samples = point.visit(rig)
    assert samples
    assert all(0 < sample.model_s < sample.seconds for sample in samples)
    rig.pool.check()
    assert rig.pool.num_available == 64


def test_a_loop_counts_only_the_steps_that_gave_every_sequence_a_token(rig: Rig) -> None:
    for _ in range(3):  # from one end to the next: one less than there were steps of all
        assert 1 <= len(Loop(4, 10, 9).visit(rig)) <= 8


@pytest.mark.parametrize("point", [Decode(2, 9), Loop(2, 9, 4)])
def test_a_step_that_fails_ends_the_run(built: BuiltEngine, rig: Rig, point: Point) -> None:
    built.cache.fill_(torch.nan)
    with pytest.raises(InternalError, match="failed"):
        point.visit(rig)


def test_what_does_not_fit_is_not_measured() -> None:
    config = parse_model_config(TINY_CONFIG)
    assert why_not(Decode(2, 128), config, 16, max_blocks=16) is None
    assert why_not(Decode(2, 128), config, 16, max_blocks=15) == "needs 16 KV blocks, --kv-memory holds 15"
    assert why_not(Decode(1, 129), config, 16, max_blocks=99) == "the model takes 128 tokens"
    assert why_not(Loop(1, 120, 8), config, 16, max_blocks=99) == "the model takes 128 tokens"


def costs(**changes: Any) -> Costs:
    return Costs(parse_model_config(TINY_CONFIG | changes), layer_weight_bytes=2, head_weight_bytes=3, kv_bytes=4)


LATE = 48 * 48 + 3 * 48 * 64  # weights in the products of one layer of TINY_CONFIG: those behind attention,
LAYER = 48 * (48 + 2 * 16) + LATE  # and all
HEAD = 101 * 48
KV = 2 * 2 * 8 * 4  # bytes of one token in one layer


def test_a_decode_step_reads_the_weights_once_and_each_context() -> None:
    work = Decode(3, 20).work(costs())
    assert work.flops == 2 * 3 * (2 * LAYER + HEAD)
    assert work.read_bytes == 2 * 2 * LAYER + 3 * HEAD + 3 * 20 * 2 * KV


def test_a_prompt_reads_the_weights_once_a_chunk_and_the_head_once() -> None:
    work = Prefill(10, 4).work(costs())
    assert work.flops == 2 * (10 * (2 * LAYER - LATE) + LATE + HEAD)
    assert work.read_bytes == 2 * (3 * 2 * LAYER - 2 * LATE) + 3 * HEAD + (4 + 8 + 10) * 2 * KV


def test_a_sliding_window_bounds_what_is_read() -> None:
    windowed = costs(architectures=["MistralForCausalLM"], sliding_window=8)
    assert Decode(1, 20).work(costs()).read_bytes - Decode(1, 20).work(windowed).read_bytes == (20 - 8) * 2 * KV
