"""Connections that die in silence: a worker behind a proxy that swallows, stalls, delays and cuts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.cli.stack import free_port
from tests.chaos import DEADLINE_S, Cluster, Node, ask_once, load_on
from tests.chaos_proxy import ChaosProxy
from tests.eventually import eventually_async

pytestmark = [pytest.mark.xdist_group("chaos"), pytest.mark.timeout(120)]

BEHIND_PROXY = "127.0.0.2"  # workers listen on 127.0.0.1 and tell the others this address


@dataclass
class Network:
    """A router, a prefill and a decode worker, and every connection to decode and to Redis under control."""

    cluster: Cluster
    router: Node
    to_decode: ChaosProxy
    to_decode_kv: ChaosProxy
    to_redis: ChaosProxy

    @property
    def proxies(self) -> tuple[ChaosProxy, ...]:
        return self.to_decode, self.to_decode_kv, self.to_redis

    async def answers_within(self, seconds: float) -> None:
        async def is_answered() -> bool:
            return (await ask_once(self.router)).is_answered

        await eventually_async(is_answered, seconds, "an answer")


@asynccontextmanager
async def network(folder: Path, silence_s: float = 60.0) -> AsyncIterator[Network]:
    port, kv_port = free_port(), free_port()
    async with AsyncExitStack() as stack:
        cluster = stack.enter_context(Cluster(folder, step_ms=1.0, silence_s=silence_s))
        target = f"127.0.0.1:{cluster.valkey.port}"
        to_redis = await stack.enter_async_context(ChaosProxy(target))
        pairs = [(f"127.0.0.1:{each}", f"{BEHIND_PROXY}:{each}") for each in (port, kv_port)]
        to_decode, to_kv = [await stack.enter_async_context(ChaosProxy(*pair)) for pair in pairs]
        redis = ["--redis-url", f"redis://{to_redis.endpoint}/0"]
        decode = cluster.launch(
            "decode",
            *redis,
            *("--port", str(port), "--kv-bind", f"tcp://127.0.0.1:{kv_port}", "--advertise-host", BEHIND_PROXY),
        )
        nodes = [cluster.launch("router", *redis), cluster.launch("prefill", *redis), decode]
        await asyncio.gather(*(node.wait_ready() for node in nodes))
        decode.endpoints["http"] = decode.endpoints["http"].replace(BEHIND_PROXY, "127.0.0.1")  # not proxied
        await cluster.settled()
        yield Network(cluster, nodes[0], to_decode, to_kv, to_redis)


async def test_idle_connections_that_were_black_holed(tmp_path: Path) -> None:
    """As a NAT or a firewall does that forgets them: no end is told."""
    async with network(tmp_path, silence_s=3.0) as net:
        assert (await ask_once(net.router)).is_answered
        for proxy in net.proxies:
            assert proxy.num_connections > 0
            proxy.black_hole_open_connections()
        outcome = await ask_once(net.router)  # before anybody can have noticed
        assert outcome.duration_s < DEADLINE_S, outcome
        await net.answers_within(20.0)
        await net.cluster.blocks_return(30.0)
        await net.cluster.no_request_keys()


@pytest.mark.parametrize("which", ["kv", pytest.param("decode", marks=pytest.mark.slow)])
async def test_a_connection_cut_under_load(tmp_path: Path, which: str) -> None:
    async with network(tmp_path) as net, load_on([net.router], 8, seed=1, max_answer=20) as load:
        proxy = net.to_decode if which == "decode" else net.to_decode_kv
        for _ in range(3):
            await load.progress(8)
            proxy.cut()
        await load.progress(8)
        assert set(await load.finish()) <= {"", "UNAVAILABLE"}
        await net.cluster.blocks_return(30.0)
        await net.cluster.no_request_keys()


async def test_a_stall_shorter_than_any_deadline_only_delays(tmp_path: Path) -> None:
    async with network(tmp_path) as net, load_on([net.router], 8, seed=2, max_answer=20) as load:
        await load.progress(8)
        net.to_decode.stall()
        net.to_decode_kv.stall()
        await asyncio.sleep(1.0)  # the stall itself, not a wait for something
        net.to_decode.flow()
        net.to_decode_kv.flow()
        await load.progress(8)
        assert set(await load.finish()) == {""}
        await net.cluster.blocks_return()
