"""`request:<id>` keys in Redis: ids in flight across all routers, written in batches beside the requests.

A key's life: claimed when the request arrives -> placed -> refreshed while it runs -> removed when it ends, or expired when
its router died.
"""

import asyncio

from redis.exceptions import RedisError

from core.clock import Clock, monotonic
from services.common.registry import Registry
from services.router.placement import Placement

TTL_S = 15.0
REFRESH_S = 5.0
GATHER_S = 0.05  # changes within this leave in one round trip
RETRY_S = 1.0
MAX_ENDED = 100_000


class RequestKeys:
    """The keys of one router's requests. Lives on one event loop."""

    def __init__(self, registry: Registry, clock: Clock = monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._live: dict[str, dict[str, str]] = {}  # request id -> what its key says
        self._changed: set[str] = set()  # live ones whose key does not say so yet
        self._ended: dict[str, str] = {}  # request id -> owner, until the key is gone
        self._has_changes = asyncio.Event()

    async def claim(self, request_id: str, owner: str) -> bool:
        """Take an id for the cluster; False when another router has it in flight. `end` must follow in any case."""
        # An earlier request of this router may have ended under the same id without its key being gone yet.
        if request_id in self._ended and not self._registry.is_resting:
            await self._flush(set())
        is_free = await self._registry.claim_request(request_id, owner, TTL_S)
        if is_free:
            self._live[request_id] = {"owner": owner, "phase": "queued"}
        return is_free

    def placed(self, request_id: str, placement: Placement) -> None:
        """Say which workers hold it, soon."""
        if request_id in self._live:
            workers = {"prefill": placement.prefill or "", "decode": placement.decode}
            self._live[request_id] |= workers | {"phase": "running"}
            self._changed.add(request_id)
            self._has_changes.set()

    def end(self, request_id: str, owner: str) -> None:
        """Remove the key, soon, if it is the owner's."""
        self._live.pop(request_id, None)
        self._changed.discard(request_id)
        if len(self._ended) < MAX_ENDED:  # beyond, Redis is away for long: keys expire by themselves
            self._ended[request_id] = owner
        self._has_changes.set()

    async def run(self) -> None:
        """Write changes, and everything again from time to time, until cancelled."""
        refreshed_at = self._clock()
        while True:
            try:
                async with asyncio.timeout(REFRESH_S):
                    await self._has_changes.wait()
            except TimeoutError:
                pass  # nothing changed: only refresh
            await asyncio.sleep(GATHER_S)
            self._has_changes.clear()
            is_due = self._clock() - refreshed_at >= REFRESH_S
            if not await self._flush(set(self._live) if is_due else self._changed):
                self._has_changes.set()
                await asyncio.sleep(RETRY_S)
            elif is_due:
                refreshed_at = self._clock()

    async def flush(self) -> None:
        """Write what is left; called once at the end."""
        await self._flush(self._changed)

    async def _flush(self, request_ids: set[str]) -> bool:
        live = {request_id: dict(self._live[request_id]) for request_id in request_ids}
        ended = dict(self._ended)
        if not (live or ended):
            return True
        try:
            await self._registry.write_requests(live, ended, TTL_S)
        except (RedisError, OSError) as error:
            self._registry.note_failure("writing request keys", error)
            return False
        self._changed -= {request_id for request_id, fields in live.items() if self._live.get(request_id) == fields}
        for request_id, owner in ended.items():
            if self._ended.get(request_id) == owner:
                del self._ended[request_id]
        return True
