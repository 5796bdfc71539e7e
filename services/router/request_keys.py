"""`request:<id>` keys in Redis: ids in flight across all routers, written in batches beside the requests.

A key's life: claimed when the request arrives -> placed -> refreshed while it runs -> removed when it ends, or expired when
its router died.
"""

import asyncio
from collections.abc import Mapping

from redis.exceptions import RedisError

from core.clock import Clock, monotonic
from services.common.registry import Registry

TTL_S = 15.0
REFRESH_S = 5.0
GATHER_S = 0.05  # changes within this leave in one round trip
RETRY_S = 1.0


class RequestKeys:
    """The keys of one router's requests. Lives on one event loop."""

    def __init__(self, registry: Registry, clock: Clock = monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._live: dict[str, str] = {}  # request id -> owner
        self._placed: dict[str, Mapping[str, str]] = {}
        self._ended: dict[str, str] = {}
        self._has_changes = asyncio.Event()

    async def claim(self, request_id: str, owner: str) -> bool:
        """Take an id for the cluster; False when another router has it in flight. `end` must follow in any case."""
        # An earlier request of this router may have ended under the same id without its key being gone yet.
        if request_id in self._ended:
            await self._flush({}, [])
        is_free = await self._registry.claim_request(request_id, owner, TTL_S)
        if is_free:
            self._live[request_id] = owner
        return is_free

    def placed(self, request_id: str, fields: Mapping[str, str]) -> None:
        """Say which workers hold it, soon."""
        self._placed[request_id] = fields
        self._has_changes.set()

    def end(self, request_id: str, owner: str) -> None:
        """Remove the key, soon, if it is the owner's."""
        self._live.pop(request_id, None)
        self._placed.pop(request_id, None)
        self._ended[request_id] = owner
        self._has_changes.set()

    async def run(self) -> None:
        """Write changes and refresh until cancelled."""
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
            placed, self._placed = self._placed, {}
            if await self._flush(placed, list(self._live) if is_due else []):
                refreshed_at = self._clock() if is_due else refreshed_at
            else:
                self._has_changes.set()
                await asyncio.sleep(RETRY_S)

    async def flush(self) -> None:
        """Write what is left; called once at the end."""
        await self._flush({}, [])

    async def _flush(self, placed: Mapping[str, Mapping[str, str]], refreshed: list[str]) -> bool:
        ended = dict(self._ended)
        if not (placed or refreshed or ended):
            return True
        try:
            await self._registry.write_requests(placed, refreshed, ended, TTL_S)
        except (RedisError, OSError) as error:
            self._registry.note_failure("writing request keys", error)
            if len(self._ended) > 100_000:
                self._ended.clear()  # they expire by themselves
            return False
        for request_id, owner in ended.items():
            if self._ended.get(request_id) == owner:
                del self._ended[request_id]
        return True
