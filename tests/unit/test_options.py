"""Flags: every wrong value is refused with its name, its value and the way out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from services.cli.flags import arguments_of
from services.cli.up import worker_engines
from services.common.options import ClusterOptions, EngineOptions, RouterLimits, limit_context, parse_cores, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1000", 1000),
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        (" 1.5KiB ", 1536),
        ("3GB", 3 * 10**9),
        ("7B", 7),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e3", "2 gib", "2Gi", "1,5GiB", "nan", "inf", "0x10", "1 2"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"e\.g\. 2GiB"):
        parse_size(text)


def test_cores() -> None:
    assert parse_cores("") == frozenset()
    assert parse_cores("3") == {3}
    assert parse_cores("0,2-4,3") == {0, 2, 3, 4}


@pytest.mark.parametrize("text", ["a", "-1", "1-", "3-2", "1,,2", "1 2", "0x1", "99999"])
def test_what_names_no_cores_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"e\.g\. 0 or 0,2 or 2-5"):
        parse_cores(text)


@given(st.integers(0, 2**40), st.sampled_from([("KiB", 2**10), ("MB", 10**6)]))
def test_whole_sizes_are_exact(count: int, unit: tuple[str, int]) -> None:
    if count * unit[1] < 2**53:
        assert parse_size(f"{count}{unit[0]}") == count * unit[1]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ClusterOptions, "redis_url", "localhost:6379"),
        (ClusterOptions, "port", 65536),
        (ClusterOptions, "port", -1),
        (ClusterOptions, "http_port", 70000),
        (ClusterOptions, "drain_timeout_s", 0.0),
        (ClusterOptions, "worker_ttl_s", float("nan")),
        (EngineOptions, "block_tokens", 0),
        (EngineOptions, "max_sequences", 0),
        (EngineOptions, "max_batched_tokens", -5),
        (EngineOptions, "threads", 0),
        (EngineOptions, "kv_blocks", -1),
        (EngineOptions, "kv_memory", "much"),
        (EngineOptions, "swap_memory", "-1"),
        (EngineOptions, "cores", "one"),
        (RouterLimits, "max_queued", 0),
        (RouterLimits, "max_attempts", 0),
        (RouterLimits, "max_queue_s", 0.0),
        (RouterLimits, "request_timeout_s", float("nan")),
        (RouterLimits, "stall_timeout_s", -1.0),
        (RouterLimits, "worker_silence_s", 0.0),
    ],
)
def test_a_wrong_value_is_refused_by_name(kind: type[object], field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field.split('_')[0]}|size") as refusal:
        kind(**{field: value})
    assert str(value) in str(refusal.value)


def test_the_address_told_to_others_is_the_advertised_one() -> None:
    assert ClusterOptions(host="0.0.0.0", advertise_host="10.0.0.7").reachable_host == "10.0.0.7"
    assert ClusterOptions(host="10.0.0.8").reachable_host == "10.0.0.8"


def test_the_context_limit_is_the_model_s_or_less() -> None:
    assert limit_context(0, 2048) == 2048
    assert limit_context(2048, 2048) == 2048
    assert limit_context(1, 2048) == 1
    for asked in (2049, -1):
        with pytest.raises(ConfigError, match=f"max_model_len={asked}: must be 0 to 2048"):
            limit_context(asked, 2048)


def test_flags_of_a_child_process_give_it_the_same_options() -> None:
    given = EngineOptions(prefix_cache=False, deterministic=True, cores="1", kv_blocks=7)
    flags = arguments_of(given)
    assert flags == ["--kv-blocks", "7", "--no-prefix-cache", "--cores", "1", "--deterministic"]
    assert arguments_of(EngineOptions()) == []


def test_workers_of_one_machine_share_a_gpu_and_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 1, 2, 7})
    engines = worker_engines(EngineOptions(threads=2, gpu_memory_share=0.8), 2)
    assert [(each.cores, each.gpu_memory_share) for each in engines] == [("1,2", 0.4), ("4,7", 0.4)]
    for options in (
        EngineOptions(threads=1),
        EngineOptions(threads=2, cores="1"),
    ):  # cores are left over, or were given
        assert [each.cores for each in worker_engines(options, 2)] == [options.cores] * 2
