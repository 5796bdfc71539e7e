"""The registry against a real Valkey: records live by heartbeats, request ids by their owners, outages cost no time."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from redis import asyncio as aioredis
from redis.exceptions import RedisError

from core.clock import ManualClock
from core.errors import ConfigError
from core.layout import Fingerprint
from services.cli.stack import free_port
from services.common import registry as registry_module
from services.common.registry import Capacity, Registry, WorkerRecord
from services.router import request_keys as request_keys_module
from services.router.placement import Placement
from services.router.request_keys import RequestKeys
from tests.eventually import eventually, eventually_async
from tests.valkey import Valkey

TTL_S = 60.0
PREFIX = "baton:test:"
FINGERPRINT = Fingerprint(
    model="m",
    revision="r",
    weights_hash="w",
    dtype="float32",
    kv_dtype="float32",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    block_tokens=16,
)


def record(number: int = 0, role: str = "decode") -> WorkerRecord:
    return WorkerRecord(
        worker_id=f"{role}@127.0.0.1:{number}",
        role=role,
        incarnation=f"life{number}",
        state="ready",
        endpoint=f"127.0.0.1:{number}",
        http_endpoint=f"127.0.0.1:{1000 + number}",
        kv_endpoint=f"tcp://127.0.0.1:{2000 + number}",
        fingerprint=FINGERPRINT,
        capacity=Capacity(total_blocks=64, max_sequences=8, max_model_len=1024, vocab_size=256),
    )


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a second is not an outage of Redis."""
    monkeypatch.setattr(registry_module, "COMMAND_TIMEOUT_S", 30.0)
    monkeypatch.setattr(registry_module, "CLAIM_TIMEOUT_S", 30.0)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
async def client(valkey: Valkey) -> AsyncIterator["aioredis.Redis"]:
    client = aioredis.from_url(valkey.url, decode_responses=True)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
async def registry(valkey: Valkey, client: "aioredis.Redis") -> AsyncIterator[Registry]:
    registry = Registry.from_url(valkey.url, "test")
    yield registry
    await registry.aclose()


async def keys(client: "aioredis.Redis") -> set[str]:
    return set(await client.keys("*"))


async def test_a_record_comes_back_as_it_was_written(registry: Registry, client: "aioredis.Redis") -> None:
    assert await registry.workers() == []
    await registry.heartbeat(record(2), {"running": 3}, TTL_S)
    await registry.heartbeat(record(1, "prefill"), {}, TTL_S)
    assert await registry.workers() == [record(2), record(1, "prefill")]
    assert await client.hget(f"{PREFIX}worker:{record(2).worker_id}", "load") == '{"running":3}'
    changed = msgspec.structs.replace(record(2), state="draining", incarnation="another")
    await registry.heartbeat(changed, {}, TTL_S)
    assert await registry.workers() == [changed, record(1, "prefill")]


async def test_a_record_lives_as_long_as_its_heartbeats(registry: Registry, client: "aioredis.Redis") -> None:
    await registry.heartbeat(record(0), {}, 0.05)
    await registry.heartbeat(record(1), {}, TTL_S)
    assert 50_000 < await client.pttl(f"{PREFIX}worker:{record(1).worker_id}") <= 60_000

    async def only_one() -> bool:
        return await registry.workers() == [record(1)]

    await eventually_async(only_one)
    assert await client.smembers(f"{PREFIX}workers") == {record(1).worker_id}, "ids of dead workers do not pile up"


async def test_withdrawing_leaves_nothing(registry: Registry, client: "aioredis.Redis") -> None:
    await registry.heartbeat(record(), {}, TTL_S)
    await registry.withdraw(record().worker_id)
    assert await registry.workers() == []
    assert await keys(client) == set()


async def test_a_flush_is_healed_by_the_next_heartbeat(registry: Registry, client: "aioredis.Redis") -> None:
    await registry.heartbeat(record(), {}, TTL_S)
    await client.flushall()
    assert await registry.workers() == []
    await registry.heartbeat(record(), {}, TTL_S)
    assert await registry.workers() == [record()]


@pytest.mark.parametrize(
    "broken",
    [
        {"fingerprint": "not json"},
        {"fingerprint": '{"model": "m"}'},
        {"capacity": '{"total_blocks": "many"}'},
        {"capacity": "[]"},
        {"role": None},
        {"kv_endpoint": None},
    ],
)
async def test_an_unreadable_record_is_skipped_and_hides_nobody(
    broken: dict[str, str | None],
    registry: Registry,
    client: "aioredis.Redis",
    caplog: pytest.LogCaptureFixture,
) -> None:
    await registry.heartbeat(record(0), {}, TTL_S)
    await registry.heartbeat(record(1), {}, TTL_S)
    key = f"{PREFIX}worker:{record(0).worker_id}"
    for field, value in broken.items():
        await (client.hdel(key, field) if value is None else client.hset(key, field, value))
    with caplog.at_level(logging.WARNING):
        assert await registry.workers() == [record(1)]
    assert record(0).worker_id in caplog.text


async def test_clusters_share_a_server_without_seeing_each_other(registry: Registry, valkey: Valkey) -> None:
    other = Registry.from_url(valkey.url, "other")
    await registry.heartbeat(record(), {}, TTL_S)
    assert await registry.claim_request("a", "owner", TTL_S)
    assert await other.workers() == []
    assert await other.claim_request("a", "owner", TTL_S)
    await other.aclose()


async def test_a_request_id_has_one_owner_at_a_time(registry: Registry, client: "aioredis.Redis") -> None:
    claims = await asyncio.gather(*(registry.claim_request("a", f"owner{n}", TTL_S) for n in range(20)))
    assert claims.count(True) == 1
    owner = await client.hget(f"{PREFIX}request:a", "owner")
    await registry.write_requests({}, {"a": "somebody else"}, TTL_S)
    assert not await registry.claim_request("a", "owner x", TTL_S), "only its owner gives it back"
    await registry.write_requests({}, {"a": owner}, TTL_S)
    assert await keys(client) == set()
    assert await registry.claim_request("a", "owner x", TTL_S)


async def test_a_claim_expires_unless_it_is_refreshed(registry: Registry, client: "aioredis.Redis") -> None:
    assert await registry.claim_request("left", "dead router", 0.05)
    assert await registry.claim_request("kept", "router", 0.05)
    await registry.write_requests({"kept": {"owner": "router"}}, {}, TTL_S)

    async def is_gone() -> bool:
        return await keys(client) == {f"{PREFIX}request:kept"}

    await eventually_async(is_gone)
    assert await registry.claim_request("left", "another", TTL_S)


async def test_a_key_says_where_its_request_runs(registry: Registry, client: "aioredis.Redis") -> None:
    assert await registry.claim_request("a", "owner", TTL_S)
    fields = {"owner": "owner", "prefill": "p", "decode": "d", "phase": "running"}
    await registry.write_requests({"a": fields}, {}, TTL_S)
    assert await client.hgetall(f"{PREFIX}request:a") == fields
    await registry.write_requests({"a": {"owner": "another", "phase": "running"}}, {}, TTL_S)
    assert await client.hgetall(f"{PREFIX}request:a") == fields, "a key is written by its owner only"


async def test_a_claim_sent_again_is_still_ones_own(registry: Registry) -> None:
    assert await registry.claim_request("a", "owner", TTL_S)
    assert await registry.claim_request("a", "owner", TTL_S), "the client repeats a command whose reply was lost"


def test_a_url_that_cannot_be_one_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        Registry.from_url("redis://host:port/0")


async def test_an_outage_costs_one_failure_and_then_no_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry_module, "REST_AFTER_FAILURE_S", 3600.0)
    registry = Registry.from_url(f"redis://127.0.0.1:{free_port()}/0", "test")
    assert not registry.is_resting
    with caplog.at_level(logging.WARNING):
        assert await registry.claim_request("a", "owner", TTL_S), "without Redis the answer is yes"
        assert registry.is_resting
        for _ in range(1000):
            assert await registry.claim_request("a", "other", TTL_S)
    assert caplog.text.count("going on without Redis") == 1
    with pytest.raises((RedisError, OSError)):
        await registry.workers()
    await registry.aclose()


async def test_a_registry_comes_back_by_itself_after_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "REST_AFTER_FAILURE_S", 1.0)
    with Valkey(tmp_path) as server:
        registry = Registry.from_url(server.url, "test")
        await registry.heartbeat(record(), {}, TTL_S)
        server.kill()
        assert await registry.claim_request("a", "owner", TTL_S)
        assert registry.is_resting
        server.start()
        await eventually(lambda: not registry.is_resting)
        assert await registry.workers() == [], "the new server knows nothing"
        await registry.heartbeat(record(), {}, TTL_S)
        assert await registry.workers() == [record()]
        assert await registry.claim_request("a", "owner", TTL_S)
        assert not await registry.claim_request("a", "other", TTL_S)
        await registry.aclose()


async def test_a_call_never_swallows_its_cancellation(registry: Registry) -> None:
    """redis-py does, now and then, with Python 3.11: a process whose loop that hits never exits after SIGTERM."""

    async def call() -> None:
        await registry.write_requests({}, {"a": "owner"}, TTL_S)
        await asyncio.Event().wait()

    for attempt in range(300):
        task = asyncio.create_task(call())
        for _ in range(attempt % 30):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=30)
        assert done, f"attempt {attempt} goes on"


class Keeper:
    """Request keys that are being written."""

    def __init__(self, registry: Registry) -> None:
        self.clock = ManualClock()
        self.keys = RequestKeys(registry, self.clock)
        self._task = asyncio.create_task(self.keys.run())

    async def stop(self) -> None:
        self._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._task


@pytest.fixture
async def keeper(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeper]:
    monkeypatch.setattr(request_keys_module, "GATHER_S", 0.001)
    monkeypatch.setattr(request_keys_module, "REFRESH_S", 0.05)
    keeper = Keeper(registry)
    yield keeper
    await keeper.stop()


async def test_a_request_s_key_lives_from_claim_to_end(keeper: Keeper, client: "aioredis.Redis") -> None:
    assert await keeper.keys.claim("a", "router-0")
    assert not await keeper.keys.claim("a", "router-1")
    keeper.keys.placed("a", Placement(prefill="p", decode="d"))

    async def is_placed() -> bool:
        return await client.hget(f"{PREFIX}request:a", "decode") == "d"

    await eventually_async(is_placed)
    keeper.keys.end("a", "router-0")

    async def is_gone() -> bool:
        return await keys(client) == set()

    await eventually_async(is_gone)


async def test_an_id_can_be_used_again_the_moment_its_request_has_ended(keeper: Keeper) -> None:
    for life in range(20):
        assert await keeper.keys.claim("a", f"router-{life}")
        keeper.keys.end("a", f"router-{life}")


async def test_ending_a_request_whose_id_was_refused_leaves_the_other_s_key(
    keeper: Keeper, registry: Registry, client: "aioredis.Redis"
) -> None:
    assert await registry.claim_request("a", "other router", TTL_S)
    assert not await keeper.keys.claim("a", "router-0")
    keeper.keys.end("a", "router-0")
    await keeper.keys.flush()
    assert await client.hget(f"{PREFIX}request:a", "owner") == "other router"


async def test_a_long_request_s_key_is_refreshed(keeper: Keeper, client: "aioredis.Redis") -> None:
    assert await keeper.keys.claim("a", "router-0")
    await client.pexpire(f"{PREFIX}request:a", 5_000)

    async def is_refreshed() -> bool:
        keeper.clock.advance(1.0)
        return await client.pttl(f"{PREFIX}request:a") > 10_000

    await eventually_async(is_refreshed)


async def test_keys_that_could_not_be_removed_are_removed_after_the_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "REST_AFTER_FAILURE_S", 1.0)
    monkeypatch.setattr(registry_module, "COMMAND_TIMEOUT_S", 1.0)
    monkeypatch.setattr(request_keys_module, "RETRY_S", 0.02)
    with Valkey(tmp_path) as server:
        registry = Registry.from_url(server.url, "test")
        keeper = Keeper(registry)
        assert await keeper.keys.claim("a", "router-0")
        server.freeze()
        keeper.keys.end("a", "router-0")
        await eventually(lambda: registry.is_resting)
        server.thaw()
        client = aioredis.from_url(server.url)

        async def is_gone() -> bool:
            return await client.keys("*") == []

        await eventually_async(is_gone)
        await client.aclose()
        await keeper.stop()
        await registry.aclose()
