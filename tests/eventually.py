"""Waiting for a condition, with a deadline, instead of sleeping."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01


async def eventually(condition: Callable[[], T], timeout_s: float = 30.0, what: str = "the condition") -> T:
    """Wait until `condition()` is true and return its value; AssertionError after `timeout_s`."""

    async def check() -> T:
        return condition()

    return await eventually_async(check, timeout_s, what)


async def eventually_async(
    condition: Callable[[], Awaitable[T]], timeout_s: float = 30.0, what: str = "the condition"
) -> T:
    """As `eventually` for a condition that must be awaited."""
    last: object = None
    try:
        async with asyncio.timeout(timeout_s):
            while not (last := await condition()):  # noqa: ASYNC110 (conditions of other processes set no event)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"{what} did not come within {timeout_s} s; last seen: {last!r}") from None
    return last  # type: ignore[return-value]
