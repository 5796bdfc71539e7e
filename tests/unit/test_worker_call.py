"""What the failure of a call to a worker means for the request: place it again, or tell the client."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import aio

from baton.v1 import worker_pb2, worker_pb2_grpc
from core.errors import (
    BatonError,
    CancelledError,
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from services.common import rpc
from services.router.worker_call import BrokenWorkerError, RefusedError, call_worker

WORKER: Any = SimpleNamespace(worker_id="decode@here")
SILENCE_S = 60.0


class Servicer(worker_pb2_grpc.WorkerServicer):
    """Fails as it is told, or does not answer."""

    def __init__(self) -> None:
        self.error: BatonError | None = None
        self.is_called = asyncio.Event()

    async def Abort(self, request: worker_pb2.AbortSequencesRequest, context: Any) -> Any:
        self.is_called.set()
        if self.error is None:
            await asyncio.Event().wait()
        assert self.error is not None
        await rpc.abort_with(context, self.error)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Servicer, aio.Server, Any]]:
    servicer, server = Servicer(), aio.server(options=rpc.SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.CHANNEL_OPTIONS) as channel:
        yield servicer, server, worker_pb2_grpc.WorkerStub(channel).Abort
    await server.stop(None)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (CapacityError("full"), RefusedError),
        (UnavailableError("draining"), BrokenWorkerError),
        (DeadlineError("late"), BrokenWorkerError),
        (CancelledError("aborted before it arrived"), BrokenWorkerError),
        (InvalidRequestError("top_p", "2 is too much"), InvalidRequestError),
        (InternalError("a bug"), InternalError),
    ],
)
async def test_what_a_worker_says_decides(
    served: tuple[Servicer, aio.Server, Any], error: BatonError, raised: type[BatonError]
) -> None:
    servicer, _, method = served
    servicer.error = error
    with pytest.raises(BatonError) as caught:
        await call_worker(WORKER, method, worker_pb2.AbortSequencesRequest(), SILENCE_S)
    assert type(caught.value) is raised


@pytest.mark.parametrize("grace_s", [None, 0.01])
async def test_a_worker_that_shuts_down_under_a_call_is_broken_and_the_request_is_not(
    served: tuple[Servicer, aio.Server, Any], grace_s: float | None
) -> None:
    servicer, server, method = served
    call = asyncio.create_task(call_worker(WORKER, method, worker_pb2.AbortSequencesRequest(), SILENCE_S))
    await servicer.is_called.wait()
    await server.stop(grace_s)
    with pytest.raises(BrokenWorkerError):
        await call


async def test_the_requests_own_cancel_stays_one(served: tuple[Servicer, aio.Server, Any]) -> None:
    servicer, _, method = served
    call = asyncio.create_task(call_worker(WORKER, method, worker_pb2.AbortSequencesRequest(), SILENCE_S))
    await servicer.is_called.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
