"""kill -9 and freezing of every kind of process under load: exact answers or an honest status, and nothing left behind."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from redis import asyncio as aioredis

from services.router.request_keys import TTL_S
from tests.chaos import Cluster, Load, Node, Outcome, ask_once, load_on, serves_soon
from tests.eventually import eventually, eventually_async

pytestmark = [pytest.mark.xdist_group("chaos"), pytest.mark.timeout(180)]

NUM_CLIENTS = 32
SOME = 12  # answers that show that things go on
GONE = -2  # what Redis says of the TTL of a key that is none
VICTIMS = ("prefill", "decode", "router", "valkey")
FULL = ("prefill", "prefill", "decode", "decode", "router", "router")


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("chaos"), silence_s=3.0) as cluster:
        yield cluster


@pytest.fixture
async def cluster(shared_cluster: Cluster) -> Cluster:
    """Two prefill, two decode and two routers, all idle and all connected, whatever the last test has left."""
    if not shared_cluster.valkey.is_running:
        shared_cluster.valkey.start()
    for node in [node for node in shared_cluster.nodes if node.is_frozen or not node.endpoints]:
        shared_cluster.kill(node)
    for role, number in Counter(FULL).items():
        for surplus in shared_cluster.of(role)[number:]:
            shared_cluster.kill(surplus)
    await shared_cluster.start(*(Counter(FULL) - Counter(node.role for node in shared_cluster.nodes)).elements())
    await shared_cluster.settled()
    return shared_cluster


async def replaced(cluster: Cluster, role: str) -> Node:
    """A new worker, which must serve soon after it is ready."""
    (node,) = await cluster.start(role)
    await serves_soon(cluster.of("router")[0], node)
    return node


async def nothing_is_left(cluster: Cluster) -> None:
    await cluster.blocks_return()
    await cluster.no_request_keys()


async def num_retries(cluster: Cluster) -> float:
    """Requests that went on at another worker, by all routers."""
    return sum([await router.metric("baton_router_retries_total") for router in cluster.of("router")])


async def a_transfer_is_open(node: Node) -> None:
    async def is_open() -> bool:
        return await node.metric("baton_kv_transfers_inflight") > 0

    await eventually_async(is_open, what="a KV transfer under way")


async def kill_with_work(cluster: Cluster, load: Load, victim: Node) -> None:
    """Kill a worker that holds requests for certain: frozen first, it can end none between the look and the kill."""
    before = await num_retries(cluster)
    victim.freeze()
    await load.progress(SOME)  # what it had said before is heard

    async def had_work() -> bool:
        held = [
            await router.metric("baton_router_worker_inflight", worker=victim.worker_id)
            for router in cluster.of("router")
        ]
        return sum(held) > 0 or await num_retries(cluster) > before  # a slow machine: given up for dead already

    await eventually_async(had_work, what=f"a request at {victim.worker_id}")
    cluster.kill(victim)


async def test_prefill_killed_during_transfers(cluster: Cluster) -> None:
    before = await num_retries(cluster)
    async with load_on(cluster.of("router"), NUM_CLIENTS, seed=1) as load:
        await load.under_way(NUM_CLIENTS // 3)
        victim = cluster.of("prefill")[0]
        await a_transfer_is_open(victim)
        await kill_with_work(cluster, load, victim)
        await load.progress(SOME)
        await replaced(cluster, "prefill")
        await load.progress(SOME)
        assert set(await load.finish()) == {""}, "the other prefill worker takes over without the client's notice"
    assert await num_retries(cluster) > before
    await nothing_is_left(cluster)


async def test_decode_killed_during_streams(cluster: Cluster) -> None:
    before = await num_retries(cluster)
    async with load_on(cluster.of("router"), NUM_CLIENTS, seed=2) as load:
        await load.under_way(NUM_CLIENTS // 3)
        await kill_with_work(cluster, load, cluster.of("decode")[0])
        await load.progress(SOME)
        await replaced(cluster, "decode")
        await load.progress(SOME)
        assert set(await load.finish()) == {""}, "streams go on at the other decode worker, token for token"
    assert await num_retries(cluster) > before
    await nothing_is_left(cluster)


async def test_the_only_decode_worker_killed(cluster: Cluster) -> None:
    """Nobody can take over: an honest status at once, not a wait for the deadline."""
    cluster.kill(cluster.of("decode")[1])
    async with load_on(cluster.of("router"), NUM_CLIENTS, seed=3) as load:
        await load.under_way(NUM_CLIENTS // 3)
        cluster.kill(cluster.of("decode")[0])
        await eventually(lambda: load.num_streaming == 0, 15.0, "every stream ended")
        await replaced(cluster, "decode")
        await load.progress(SOME)
        ends = await load.finish()
    assert set(ends) == {"", "UNAVAILABLE"}
    await nothing_is_left(cluster)


async def test_valkey_killed_and_started_again(cluster: Cluster) -> None:
    router = cluster.of("router")[0]
    async with load_on(cluster.of("router"), NUM_CLIENTS, seed=4) as load:
        await load.under_way(NUM_CLIENTS // 3)
        cluster.valkey.kill()
        await load.progress(2 * SOME)
        lonely = cluster.launch("decode")  # comes up while there is no Redis
        await lonely.wait_ready()
        cluster.valkey.start()
        await serves_soon(router, lonely)
        await load.progress(SOME)
        assert set(await load.finish()) == {""}, "losing Redis stops nothing that runs"
    await nothing_is_left(cluster)
    cluster.kill(lonely)
    await cluster.settled()


async def test_valkey_frozen(cluster: Cluster) -> None:
    async with load_on(cluster.of("router"), NUM_CLIENTS, seed=5) as load:
        await load.under_way(NUM_CLIENTS // 3)
        cluster.valkey.freeze()
        try:
            await load.progress(2 * SOME)
        finally:
            cluster.valkey.thaw()
        assert set(await load.finish()) == {""}
    await nothing_is_left(cluster)


async def test_a_router_killed(cluster: Cluster) -> None:
    victim, survivor = cluster.of("router")
    async with load_on([victim, survivor], NUM_CLIENTS, seed=6) as load:
        await eventually(lambda: any(one.is_answered and one.router == victim.grpc for one in load.outcomes))
        await load.under_way(NUM_CLIENTS // 3)
        cluster.kill(victim)
        await load.progress(SOME)
        await load.finish()
    at = {
        router.grpc: Counter(one.status for one in load.outcomes if one.router == router.grpc)
        for router in (victim, survivor)
    }
    assert set(at[survivor.grpc]) == {None}, "the other router's requests do not notice"
    assert len(at[victim.grpc]) == 2, "some were answered before, the rest were told"
    await cluster.blocks_return()  # its requests end with it at every worker
    async with aioredis.from_url(cluster.valkey.url) as client:
        for key in await cluster.request_keys():
            ttl_ms = await client.pttl(key)
            assert 0 < ttl_ms <= TTL_S * 1000 or ttl_ms == GONE, "a dead router's keys expire by themselves"
    (newcomer,) = await cluster.start("router")

    async def serves() -> bool:
        return (await ask_once(newcomer)).is_answered

    await eventually_async(serves, 20.0, "an answer by the new router")
    async with aioredis.from_url(cluster.valkey.url) as client:
        await client.flushall()  # the keys that would take 15 s


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
async def test_a_frozen_worker(cluster: Cluster, role: str) -> None:
    router = cluster.of("router")[0]
    async with load_on(cluster.of("router"), NUM_CLIENTS, seed=7) as load:
        await load.under_way(NUM_CLIENTS // 3)
        frozen = cluster.of(role)[0]
        frozen.freeze()

        async def is_lost() -> bool:  # reported so, or forgotten since
            return await router.metric("baton_router_worker_state", worker=frozen.worker_id, state="ready") == 0

        await eventually_async(is_lost, 30.0, "the frozen worker lost")
        await load.progress(SOME)
        frozen.thaw()
        await serves_soon(router, frozen)
        assert set(await load.finish()) == {""}
    await nothing_is_left(cluster)
    await cluster.settled()


async def canary(cluster: Cluster, outcomes: list[Outcome]) -> None:
    """One checked request a second through any living router, until cancelled."""
    while True:
        ready = [router for router in cluster.of("router") if router.endpoints]
        outcomes.append(await ask_once(random.choice(ready), len(outcomes)))
        await asyncio.sleep(1.0)


async def rampage(cluster: Cluster, seed: int, roles: Sequence[str]) -> Counter[str]:
    """Kill one of each of these and start replacements, under load and a canary; nothing may be wrong, late or left."""
    rng = random.Random(seed)
    canaries: list[Outcome] = []
    watch = asyncio.create_task(canary(cluster, canaries))
    loads: list[Load] = []
    ends: Counter[str] = Counter()
    try:
        loads.append(Load([router.grpc for router in cluster.of("router")], NUM_CLIENTS, seed))
        for role in roles:
            if role == "valkey":
                cluster.valkey.kill()
                await loads[-1].progress(rng.randint(1, 20))
                cluster.valkey.start()
            else:
                cluster.kill(rng.choice(cluster.of(role)))
                await loads[-1].progress(rng.randint(1, 20))
                await cluster.start(role)
            if role == "router":  # clients of the dead one move on
                ends += await loads[-1].finish()
                await cluster.settled()
                loads.append(Load([router.grpc for router in cluster.of("router")], NUM_CLIENTS, rng.randrange(2**31)))
            else:
                await loads[-1].progress(rng.randint(10, 30))
        ends += await loads[-1].finish()
        assert not watch.done(), watch.exception()
    finally:
        watch.cancel()
        for load in loads:
            await load.abandon()
        await asyncio.gather(watch, return_exceptions=True)
    assert canaries
    assert sum(outcome.is_answered for outcome in canaries) >= len(canaries) - len(roles), (
        "a kill costs a canary at most"
    )
    await cluster.settled()
    await cluster.no_request_keys(TTL_S + 5.0)
    return ends


async def test_random_kills(cluster: Cluster) -> None:
    await rampage(cluster, seed=11, roles=random.sample(VICTIMS, len(VICTIMS)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
async def test_many_random_kills(cluster: Cluster, seed: int) -> None:
    ends = await rampage(cluster, seed, random.Random(seed).choices(VICTIMS, k=40))
    assert ends[""] > 2000
