"""Errors and options over a real gRPC connection."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.v1 import worker_pb2, worker_pb2_grpc
from core.errors import (
    STATUS,
    BatonError,
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    UnavailableError,
    error_from_status,
)
from services.cli.stack import free_port
from services.common import rpc


class Failing(worker_pb2_grpc.WorkerServicer):
    """Answers every Abort with the error it holds."""

    error: BatonError

    async def Abort(self, request: Any, context: Any) -> Any:
        await rpc.abort_with(context, self.error)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Failing, worker_pb2_grpc.WorkerStub]]:
    server, servicer = aio.server(options=rpc.SERVER_OPTIONS), Failing()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.CHANNEL_OPTIONS) as channel:
        yield servicer, worker_pb2_grpc.WorkerStub(channel)
    await server.stop(None)


async def failure(stub: worker_pb2_grpc.WorkerStub, request: worker_pb2.AbortSequencesRequest) -> BatonError:
    with pytest.raises(aio.AioRpcError) as raised:
        await stub.Abort(request, timeout=60)
    return rpc.error_of(raised.value)


@pytest.mark.parametrize("kind", STATUS)
async def test_an_error_crosses_a_connection(
    kind: type[BatonError], served: tuple[Failing, worker_pb2_grpc.WorkerStub]
) -> None:
    servicer, stub = served
    servicer.error = kind("top_p", "2 is too much: é, 日本") if kind is InvalidRequestError else kind("why: é, 日本")
    error = await failure(stub, worker_pb2.AbortSequencesRequest())
    assert type(error) is kind
    assert str(error) == str(servicer.error)


async def test_the_advice_when_to_come_again_crosses_too(
    served: tuple[Failing, worker_pb2_grpc.WorkerStub],
) -> None:
    servicer, stub = served
    servicer.error = CapacityError("full", retry_after_ms=1700)
    error = await failure(stub, worker_pb2.AbortSequencesRequest())
    assert isinstance(error, CapacityError)
    assert error.retry_after_ms == 1700


async def test_a_message_above_the_limit_is_refused_and_the_connection_goes_on(
    served: tuple[Failing, worker_pb2_grpc.WorkerStub],
) -> None:
    servicer, stub = served
    servicer.error = DeadlineError("late")
    huge = worker_pb2.AbortSequencesRequest(sequence_ids=["x" * (rpc.MAX_MESSAGE_BYTES + 1)])
    assert isinstance(await failure(stub, huge), CapacityError)
    assert isinstance(await failure(stub, worker_pb2.AbortSequencesRequest()), DeadlineError)


async def test_nobody_there_is_unavailable() -> None:
    async with aio.insecure_channel(f"127.0.0.1:{free_port()}", options=rpc.CHANNEL_OPTIONS) as channel:
        error = await failure(worker_pb2_grpc.WorkerStub(channel), worker_pb2.AbortSequencesRequest())
    assert isinstance(error, UnavailableError)


async def test_two_servers_cannot_share_a_port_silently() -> None:
    first, second = aio.server(options=rpc.SERVER_OPTIONS), aio.server(options=rpc.SERVER_OPTIONS)
    port = first.add_insecure_port("127.0.0.1:0")
    await first.start()
    with pytest.raises(RuntimeError, match="bind"):
        second.add_insecure_port(f"127.0.0.1:{port}")
    await first.stop(None)


@given(st.text(max_size=200))
@settings(max_examples=200)
def test_any_text_of_an_invalid_request_error_survives(text: str) -> None:
    error = error_from_status("INVALID_ARGUMENT", str(InvalidRequestError("stop", text)))
    assert isinstance(error, InvalidRequestError)
    assert (error.field, str(error)) == ("stop", f"stop: {text}")
