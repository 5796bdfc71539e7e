"""A cluster of real processes to be mistreated, and clients that check every token while it is.

Every process is a `tests.scripted_worker`, so each answer is known in advance. A request passes when it ends with exactly
those tokens, or with a status that says why before its deadline, having received nothing but a beginning of them.
"""

import asyncio
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import grpc
import httpx
from grpc import aio
from redis import asyncio as aioredis

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.eventually import eventually, eventually_async
from tests.processes import Process, environment
from tests.scripted_parts import EOS, expected
from tests.valkey import Valkey

DEADLINE_S = 20.0
GRACE_S = 10.0  # on a busy machine, between a deadline and the client's notice of it
HONEST = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}


class Node:
    """One process of the cluster, and where it answers."""

    def __init__(self, role: str, process: Process) -> None:
        self.role = role
        self.process = process
        self.endpoints: dict[str, str] = {}
        self.is_frozen = False

    @property
    def grpc(self) -> str:
        return self.endpoints["grpc"]

    @property
    def worker_id(self) -> str:
        return f"{self.role}@{self.grpc}"

    async def wait_ready(self) -> "Node":
        self.endpoints = await asyncio.to_thread(self.process.wait_ready)
        return self

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=30.0) as client:
            return await client.get(f"http://{self.endpoints['http']}{path}")

    async def metric(self, name: str, **labels: str) -> float:
        """One value of /metrics; the sum over other labels."""
        total = 0.0
        for line in (await self.get("/metrics")).text.splitlines():
            found = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                total += float(found[2])
        return total

    async def free_blocks(self) -> int:
        """Blocks nobody holds; some keep content for whoever asks the like again."""
        free, cached = [await self.metric("baton_kv_blocks", state=state) for state in ("free", "cached")]
        return int(free + cached)

    def kill(self) -> None:
        """kill -9, and wait until the kernel has taken it."""
        self.process.signal(signal.SIGKILL)
        self.process.wait()

    def freeze(self) -> None:
        self.process.signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        self.process.signal(signal.SIGCONT)
        self.is_frozen = False


class Cluster:
    """A Valkey and any number of nodes. Use as a context manager: everything ends with it.

    Args:
        folder: gets the logs.
        step_ms: duration of every engine step.
        blocks: of every worker.
        silence_s, grace_s: of every router. The shorter, the likelier that a machine that stands still looks like a death.
    """

    def __init__(
        self,
        folder: Path,
        step_ms: float = 5.0,
        blocks: int = 2000,
        silence_s: float = 60.0,
        grace_s: float = 8.0,
    ) -> None:
        self.valkey = Valkey(folder)
        self.nodes: list[Node] = []
        self.blocks = blocks
        self._folder = folder
        self._step_ms = step_ms
        self._patience = ["--silence-s", str(silence_s), "--grace-s", str(grace_s)]
        self._num_started = 0

    def __enter__(self) -> "Cluster":
        self.valkey.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for node in self.nodes:
            if node.is_frozen:
                node.thaw()
            node.process.signal(signal.SIGKILL)
            node.process.end()
        self.valkey.stop()

    def of(self, role: str) -> list[Node]:
        """The nodes of one role, dead ones forgotten."""
        return [node for node in self.nodes if node.role == role]

    def launch(self, role: str, *flags: str) -> Node:
        """Start a process without waiting for it."""
        self._num_started += 1
        name = f"{role}-{self._num_started}"
        command = [sys.executable, "-m", "tests.scripted_worker", role, "--redis-url", self.valkey.url]
        command += ["--step-ms", str(self._step_ms), "--blocks", str(self.blocks), *self._patience, *flags]
        node = Node(role, Process(name, command, environment(self._folder), self._folder / f"{name}.log"))
        self.nodes.append(node)
        return node

    async def start(self, *roles: str) -> list[Node]:
        """Start processes side by side; returns when all are ready."""
        nodes = [self.launch(role) for role in roles]
        return list(await asyncio.gather(*(node.wait_ready() for node in nodes)))

    def kill(self, node: Node) -> None:
        """kill -9 one node and forget it."""
        node.kill()
        self.nodes.remove(node)

    async def stop(self, node: Node) -> None:
        """SIGTERM one node; it must drain and exit 0."""
        node.process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(node.process.wait) == 0, node.process.output()
        self.nodes.remove(node)

    async def settled(self, timeout_s: float = 30.0) -> None:
        """Every router knows all workers as ready and every pair as connected, and nothing is held anywhere."""
        workers = {node.worker_id for node in self.nodes if node.role != "router"}

        async def is_settled() -> bool:
            for router in self.of("router"):
                text = (await router.get("/metrics")).text
                ready = set(re.findall(r'worker_state\{state="ready",worker="([^"]+)"\} 1\.0', text))
                if ready != workers or (await router.get("/readyz")).status_code != 200:
                    return False
            return True

        await eventually_async(is_settled, timeout_s, "every router attached to every worker")
        await self.blocks_return(timeout_s)

    async def blocks_return(self, timeout_s: float = 30.0) -> None:
        """Every worker's pool is wholly free again."""

        async def held() -> bool:
            free = [await node.free_blocks() for node in self.nodes if node.role != "router"]
            return free == [self.blocks] * len(free)

        await eventually_async(held, timeout_s, "all KV blocks of all workers free")

    async def request_keys(self) -> list[str]:
        """`request:*` keys in Redis."""
        async with aioredis.from_url(self.valkey.url, decode_responses=True) as client:
            return [key async for key in client.scan_iter("baton:*:request:*", count=1000)]

    async def no_request_keys(self, timeout_s: float = 20.0) -> None:
        """No request has left a key."""

        async def are_gone() -> bool:
            return not await self.request_keys()

        await eventually_async(are_gone, timeout_s, "no request keys in Redis")


@dataclass
class Outcome:
    """How one request ended."""

    router: str
    prompt: Sequence[int]
    max_tokens: int
    seed: int | None
    tokens: list[int] = field(default_factory=list)
    done: pb.GenerateDone | None = None
    status: grpc.StatusCode | None = None
    details: str = ""
    duration_s: float = 0.0

    @property
    def is_answered(self) -> bool:
        return self.done is not None

    def check(self) -> None:
        """Wrong, missing, repeated tokens, or a late or meaningless end: AssertionError."""
        right = expected(self.prompt, self.max_tokens, self.seed)
        if self.done is not None:
            assert self.tokens == right, f"wrong tokens: {self.tokens} instead of {right}; {self.done}"
            assert (self.done.finish_reason, self.done.completion_tokens) == ("length", self.max_tokens)
        else:
            assert self.status in HONEST, f"{self.status}: {self.details}"
            assert self.tokens == right[: len(self.tokens)], "what came before the failure was wrong"
        assert self.duration_s < DEADLINE_S + GRACE_S, f"ended after {self.duration_s:.1f} s"


async def ask(
    stub: inference_pb2_grpc.InferenceStub,
    router: str,
    prompt: Sequence[int],
    max_tokens: int,
    seed: int | None = None,
    on_token: Callable[[], None] = lambda: None,
) -> Outcome:
    """One request to its end, however it ends."""
    outcome = Outcome(router, prompt, max_tokens, seed)
    sampling = pb.SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=max_tokens)
    started = time.monotonic()
    try:
        call = stub.Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling), timeout=DEADLINE_S
        )
        async for response in call:
            if response.WhichOneof("event") == "done":
                assert outcome.done is None, "two ends"
                outcome.done = response.done
            else:
                outcome.tokens += response.chunk.token_ids
                on_token()
        assert outcome.done is not None, "an OK status without a done"
    except aio.AioRpcError as error:
        outcome.status, outcome.details = error.code(), error.details() or ""
    outcome.duration_s = time.monotonic() - started
    return outcome


class Load:
    """Clients that ask one request after another and keep what came of each.

    Args:
        endpoints: gRPC addresses of the routers; each client stays at one.
        num_clients: in all.
        seed: of their requests.
        max_prompt, max_answer: tokens.
    """

    def __init__(
        self, endpoints: Sequence[str], num_clients: int, seed: int, max_prompt: int = 200, max_answer: int = 50
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.num_streaming = 0  # requests that have tokens and are not over
        self._max_prompt, self._max_answer = max_prompt, max_answer
        self._channels = [aio.insecure_channel(endpoint) for endpoint in endpoints]
        self._is_ending = False
        self._tasks = [
            asyncio.create_task(self._client(endpoints[n % len(endpoints)], n, random.Random(f"{seed} {n}")))
            for n in range(num_clients)
        ]

    async def _client(self, endpoint: str, number: int, rng: random.Random) -> None:
        stub = inference_pb2_grpc.InferenceStub(self._channels[number % len(self._channels)])
        while not self._is_ending:
            prompt = [rng.randrange(EOS + 1, 256) for _ in range(rng.randint(1, self._max_prompt))]
            seed = rng.choice([None, rng.randrange(2**40)])
            is_streaming = False

            def on_token() -> None:
                nonlocal is_streaming
                self.num_streaming += not is_streaming
                is_streaming = True

            outcome = await ask(stub, endpoint, prompt, rng.randint(1, self._max_answer), seed, on_token)
            self.num_streaming -= is_streaming
            self.outcomes.append(outcome)
            if not outcome.is_answered:
                await asyncio.sleep(0.2)  # as a client does that was refused

    async def under_way(self, num_streaming: int) -> None:
        """Wait until so many answers are streaming at once."""
        await eventually(lambda: self.num_streaming >= num_streaming, what=f"{num_streaming} streams at once")

    async def progress(self, num_more: int, timeout_s: float = 15.0) -> None:
        """Wait until so many more requests were answered."""
        goal = self.num_answered + num_more
        await eventually(lambda: self.num_answered >= goal, timeout_s, f"{num_more} more answers")

    @property
    def num_answered(self) -> int:
        return sum(outcome.is_answered for outcome in self.outcomes)

    async def finish(self) -> Counter[str]:
        """Let what runs end, check every outcome, and count them by status ("" is an answer)."""
        self._is_ending = True
        async with asyncio.timeout(DEADLINE_S + 2 * GRACE_S):
            await asyncio.gather(*self._tasks)
        for channel in self._channels:
            await channel.close()
        for outcome in self.outcomes:
            outcome.check()
        return Counter(outcome.status.name if outcome.status else "" for outcome in self.outcomes)

    async def abandon(self) -> None:
        """Cancel every client."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()


@asynccontextmanager
async def load_on(routers: Sequence[Node], num_clients: int, seed: int, **sizes: int) -> AsyncIterator[Load]:
    """Clients that run during the block; a block that ends well has called `finish`."""
    load = Load([router.grpc for router in routers], num_clients, seed, **sizes)
    try:
        yield load
    finally:
        await load.abandon()


async def ask_once(router: Node, seed: int = 0, num_prompt: int = 40, max_tokens: int = 8) -> Outcome:
    """One request over a new connection, checked."""
    rng = random.Random(seed)
    prompt = [rng.randrange(EOS + 1, 256) for _ in range(num_prompt)]
    async with aio.insecure_channel(router.grpc) as channel:
        outcome = await ask(inference_pb2_grpc.InferenceStub(channel), router.grpc, prompt, max_tokens)
    outcome.check()
    return outcome


async def serves_soon(router: Node, worker: Node, within_s: float = 20.0) -> None:
    """A worker that is ready takes part in answers through `router` within this time."""

    async def took_part() -> bool:
        outcome = await ask_once(router, random.randrange(2**31))
        done = outcome.done
        return done is not None and worker.worker_id in (done.prefill_worker, done.decode_worker)

    await eventually_async(took_part, within_s, f"an answer by {worker.worker_id}")
