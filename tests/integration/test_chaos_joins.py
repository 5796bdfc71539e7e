"""Workers join, leave and come back at run time in any order, at new addresses and at old ones."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.cli.stack import free_port
from tests.chaos import DEADLINE_S, Cluster, Node, ask_once, load_on, serves_soon
from tests.eventually import eventually_async

pytestmark = [pytest.mark.xdist_group("chaos"), pytest.mark.timeout(120)]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    with Cluster(tmp_path, step_ms=1.0) as cluster:
        yield cluster


async def answers(router: Node, within_s: float = 20.0) -> None:
    """The router answers a request, soon."""

    async def is_answered() -> bool:
        return (await ask_once(router)).is_answered

    await eventually_async(is_answered, within_s, "an answer")


async def is_unready(node: Node) -> bool:
    return (await node.get("/readyz")).status_code == 503


async def test_valkey_comes_last(cluster: Cluster) -> None:
    cluster.valkey.kill()
    router, _, _ = await cluster.start("router", "prefill", "decode")
    assert await is_unready(router)
    outcome = await ask_once(router)
    assert outcome.details.startswith("no live worker"), "refused at once, not after a timeout"
    assert outcome.duration_s < DEADLINE_S
    cluster.valkey.start()
    await answers(router)


async def test_the_router_comes_first_and_workers_come_and_go(cluster: Cluster) -> None:
    router, decode = await cluster.start("router", "decode")
    assert await is_unready(router)
    assert not (await ask_once(router)).is_answered, "decode alone serves nobody"
    (prefill,) = await cluster.start("prefill")
    await answers(router)
    async with load_on([router], 8, seed=1, max_answer=10) as load:
        await load.progress(5)
        newer, newer_prefill = await cluster.start("decode", "prefill")
        await serves_soon(router, newer)
        await serves_soon(router, newer_prefill)
        await cluster.stop(decode)
        await load.progress(5)
        await cluster.stop(prefill)
        await load.progress(5)
        assert set(await load.finish()) == {""}, "a worker that leaves in order costs nobody anything"
    await cluster.settled()
    await cluster.stop(newer)

    async def is_refused() -> bool:
        return await is_unready(router) and not (await ask_once(router)).is_answered

    await eventually_async(is_refused, what="unready without a decode worker")
    (last,) = await cluster.start("decode")
    await serves_soon(router, last)


async def restart_again_and_again(cluster: Cluster, role: str, times: int) -> None:
    """Restart one worker at the same addresses, each life serving at once; the odd ones die without a goodbye."""
    others = {"prefill": "decode", "decode": "prefill"}
    flags = ["--port", str(free_port())]
    if role == "decode":
        flags += ["--kv-bind", f"tcp://127.0.0.1:{free_port()}"]
    router, _ = await cluster.start("router", others[role])
    for life in range(times):
        node = await cluster.launch(role, *flags).wait_ready()
        await answers(router)
        for seed in range(3):
            assert (await ask_once(router, seed)).is_answered, f"life {life} of {node.worker_id}"
        if life % 2:
            cluster.kill(node)
        else:
            await cluster.stop(node)
    await cluster.launch(role, *flags).wait_ready()
    await cluster.settled()


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
async def test_quick_restarts_at_the_same_address(cluster: Cluster, role: str) -> None:
    await restart_again_and_again(cluster, role, times=2)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_twenty_restarts_at_the_same_address(cluster: Cluster, role: str) -> None:
    await restart_again_and_again(cluster, role, times=20)


async def test_a_restarted_router_finds_every_worker(cluster: Cluster) -> None:
    workers = await cluster.start("prefill", "prefill", "decode", "decode")
    ids = {worker.worker_id for worker in workers}
    port = str(free_port())
    for _ in range(2):
        router = await cluster.launch("router", "--port", port).wait_ready()
        await cluster.settled()
        seen: set[str] = set()

        async def all_seen(router: Node = router, seen: set[str] = seen) -> bool:
            outcomes = await asyncio.gather(*(ask_once(router, seed, max_tokens=2) for seed in range(8)))
            for outcome in outcomes:
                assert outcome.done is not None, outcome.details
                seen |= {outcome.done.prefill_worker, outcome.done.decode_worker}
            return seen == ids

        await eventually_async(all_seen, 20.0, "every worker in some answer")
        cluster.kill(router)


async def test_every_process_says_that_it_lives_and_whether_it_serves(cluster: Cluster) -> None:
    nodes = await cluster.start("router", "prefill", "decode")
    await cluster.settled()
    for node in nodes:
        for path in ("/healthz", "/health", "/readyz", "/metrics"):
            assert (await node.get(path)).status_code == httpx.codes.OK, (node.role, path)
