"""Fixtures of the service tests."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from kvtransfer.inproc import InprocTransport
from tests.local_stack import Stack, running_stack
from tests.scripted_parts import Valkey

MakeStack = Callable[..., AbstractAsyncContextManager[Stack]]


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[Valkey]:
    """One Valkey for every test that leaves it alone."""
    valkey = Valkey()
    valkey.start()
    yield valkey
    valkey.close()


@pytest.fixture
def own_valkey() -> Iterator[Valkey]:
    """A Valkey that the test may stop."""
    valkey = Valkey()
    valkey.start()
    yield valkey
    valkey.close()


@pytest.fixture
def make_stack(shared_valkey: Valkey) -> MakeStack:
    """Starts stacks whose KV travels in process."""

    def make(valkey: Valkey | None = None, **options: Any) -> AbstractAsyncContextManager[Stack]:
        network = InprocTransport()
        return running_stack(valkey or shared_valkey, lambda: network, **options)

    return make


@pytest.fixture
async def stack(make_stack: MakeStack) -> AsyncIterator[Stack]:
    """One router, one prefill, one decode worker."""
    async with make_stack() as running:
        yield running
