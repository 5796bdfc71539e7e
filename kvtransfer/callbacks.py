"""What both ends do around their callers' code and their own background tasks."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

HELD_UP_S = 0.5

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


def notify(callback: Callable[[_T], None], value: _T) -> bool:
    """Call a caller's function; an exception in it is logged and ends nothing else. Returns whether it went well."""
    try:
        callback(value)
        return True
    except Exception:  # a bug in one caller must not stop every other transfer of this worker
        _logger.exception("callback of a KV transfer failed")
        return False


async def every(interval_s: float, action: Callable[[], None]) -> None:
    """Run `action` for ever, whether or not anything else happens.

    After the loop was held up, what came meanwhile is read first: a deadline is not missed because this end was slow.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        if loop.time() - due > HELD_UP_S:
            await asyncio.sleep(interval_s)
        action()


async def stop(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait until they are gone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
