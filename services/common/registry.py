"""Redis (or Valkey) as the authority on which workers exist and which request ids are in flight.

Never on the per-token path; two calls per request. Everything in it can be written again by its owner: a worker's record
is rewritten whole at every heartbeat, so that a flush, an expiry or an eviction heals within one. Losing Redis stops
nothing that runs.

Keys, under `baton:<cluster>:`
    workers          set of worker ids
    worker:<id>      hash, TTL: role, endpoints, incarnation, fingerprint, capacity, load
    request:<id>     hash, TTL: owner (a router's sequence id), prefill, decode, phase
"""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec
from redis import asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from core.errors import ConfigError
from core.layout import Fingerprint

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# A Redis command that takes this long has failed; requests go on without it.
COMMAND_TIMEOUT_S = 1.0
# A request waits this long at most for its claim.
CLAIM_TIMEOUT_S = 1.0
# After a failure nothing but the periodic loops asks Redis for this long, so that an outage costs requests no time.
REST_AFTER_FAILURE_S = 3.0

# Idempotent: the client sends a command again whose reply was lost.
_CLAIM = """
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then return 1 end
if redis.call('HSETNX', KEYS[1], 'owner', ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'phase', 'queued')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
_WRITE = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
_RELEASE = "if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker can hold at most."""

    total_blocks: int
    max_sequences: int
    max_model_len: int
    vocab_size: int


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as it describes itself."""

    worker_id: str
    role: str  # prefill or decode
    incarnation: str
    state: str  # ready, unready, draining
    endpoint: str  # gRPC host:port
    http_endpoint: str
    kv_endpoint: str = ""  # decode: where KV transfers connect
    fingerprint: Fingerprint
    capacity: Capacity


def _keeps_cancellation(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Raise a cancellation that was lost on the way: redis-py sends with `asyncio.wait_for`, which before Python 3.12
    returns its result when that and the cancellation come in one turn. The loop that asked would never end then."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.current_task()
        assert task is not None, "called from a coroutine"
        num_before = task.cancelling()
        try:
            return await method(*args, **kwargs)
        finally:
            if task.cancelling() > num_before:
                raise asyncio.CancelledError

    return call


class Registry:
    """The cluster's keys.

    Args:
        client: decodes responses to str.
        cluster: name in every key; clusters may share one Redis.
    """

    def __init__(self, client: "aioredis.Redis", cluster: str = "default") -> None:
        self._client: Any = client
        self._prefix = f"baton:{cluster}:"
        self._claim = self._client.register_script(_CLAIM)
        self._write = self._client.register_script(_WRITE)
        self._release = self._client.register_script(_RELEASE)
        self._resting_until = 0.0

    @classmethod
    def from_url(cls, url: str, cluster: str = "default") -> "Registry":
        """A registry on `redis://` or `rediss://`; connects when first used. Raises ConfigError."""
        try:
            client = aioredis.from_url(
                url,
                decode_responses=True,
                socket_timeout=COMMAND_TIMEOUT_S,
                socket_connect_timeout=COMMAND_TIMEOUT_S,
                # Once, for a connection that broke while idle. The default is ten times with growing pauses: a minute.
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError as error:
            raise ConfigError(f"redis_url={url!r}: {error}") from error
        return cls(client, cluster)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @property
    def is_resting(self) -> bool:
        """Whether Redis failed just now, so that a request should not wait for it."""
        return time.monotonic() < self._resting_until

    def note_failure(self, what: str, error: Exception) -> None:
        """Log a failed call once per outage and let requests go on without Redis for a moment."""
        if not self.is_resting:
            logger.warning("%s failed, going on without Redis: %s", what, error)
        self._resting_until = time.monotonic() + REST_AFTER_FAILURE_S

    @_keeps_cancellation
    async def heartbeat(self, record: WorkerRecord, load: Mapping[str, Any], ttl_s: float) -> None:
        """Write a worker's whole record; it vanishes `ttl_s` after the last heartbeat. Raises RedisError."""
        key = f"{self._prefix}worker:{record.worker_id}"
        mapping = {
            "role": record.role,
            "state": record.state,
            "incarnation": record.incarnation,
            "endpoint": record.endpoint,
            "http_endpoint": record.http_endpoint,
            "kv_endpoint": record.kv_endpoint,
            "fingerprint": msgspec.json.encode(record.fingerprint).decode(),
            "capacity": msgspec.json.encode(record.capacity).decode(),
            "load": msgspec.json.encode(load).decode(),
        }
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping=mapping)
            pipe.pexpire(key, int(ttl_s * 1000))
            pipe.sadd(f"{self._prefix}workers", record.worker_id)
            await pipe.execute()

    @_keeps_cancellation
    async def withdraw(self, worker_id: str) -> None:
        """Remove a worker that leaves in order. Raises RedisError."""
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.delete(f"{self._prefix}worker:{worker_id}")
            pipe.srem(f"{self._prefix}workers", worker_id)
            await pipe.execute()

    @_keeps_cancellation
    async def workers(self) -> list[WorkerRecord]:
        """Every live record, read whole: nothing is missed that happened while this process was cut off.

        Ids whose record has expired are removed from the set. Raises RedisError.
        """
        worker_ids = sorted(await self._client.smembers(f"{self._prefix}workers"))
        async with self._client.pipeline(transaction=False) as pipe:
            for worker_id in worker_ids:
                pipe.hgetall(f"{self._prefix}worker:{worker_id}")
            hashes = await pipe.execute()
        gone = [worker_id for worker_id, fields in zip(worker_ids, hashes, strict=True) if not fields]
        if gone:
            await self._client.srem(f"{self._prefix}workers", *gone)
        records = []
        for worker_id, fields in zip(worker_ids, hashes, strict=True):
            if not fields:
                continue
            try:
                records.append(_record_from(worker_id, fields))
            except (KeyError, msgspec.MsgspecError) as error:
                logger.warning("record of worker %s is not readable and skipped: %s", worker_id, error)
        return records

    @_keeps_cancellation
    async def claim_request(self, request_id: str, owner: str, ttl_s: float) -> bool:
        """Take a request id for `owner`. Without Redis the answer is yes. Returns whether it was free."""
        if self.is_resting:
            return True
        try:
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                return bool(await self._claim(keys=[self._request_key(request_id)], args=[owner, int(ttl_s * 1000)]))
        except (RedisError, OSError) as error:  # OSError: TimeoutError is one
            self.note_failure("claiming a request id", error)
            return True

    @_keeps_cancellation
    async def write_requests(
        self, live: Mapping[str, Mapping[str, str]], ended: Mapping[str, str], ttl_s: float
    ) -> None:
        """One round trip for many requests.

        Args:
            live: request id -> `owner` and fields that say which workers hold it; written whole, and the TTL starts again,
                unless the key is another owner's.
            ended: request id -> owner; the key goes if it is still that owner's.
        Raises:
            RedisError: nothing is certain then; keys of ended requests expire by themselves.
        """
        async with self._client.pipeline(transaction=False) as pipe:
            for request_id, fields in live.items():
                others = [part for name, value in fields.items() if name != "owner" for part in (name, value)]
                arguments: list[str | int] = [fields["owner"], int(ttl_s * 1000), *others]
                await self._write(keys=[self._request_key(request_id)], args=arguments, client=pipe)
            for request_id, owner in ended.items():
                await self._release(keys=[self._request_key(request_id)], args=[owner], client=pipe)
            await pipe.execute()

    def _request_key(self, request_id: str) -> str:
        return f"{self._prefix}request:{request_id}"


def _record_from(worker_id: str, fields: Mapping[str, str]) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        role=fields["role"],
        incarnation=fields["incarnation"],
        state=fields["state"],
        endpoint=fields["endpoint"],
        http_endpoint=fields["http_endpoint"],
        kv_endpoint=fields["kv_endpoint"],
        fingerprint=msgspec.json.decode(fields["fingerprint"], type=Fingerprint),
        capacity=msgspec.json.decode(fields["capacity"], type=Capacity),
    )
