"""Calls from the router to a worker, and what their failures mean for the request."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message
from grpc import aio

from core.errors import CancelledError, CapacityError, DeadlineError, UnavailableError
from services.common import rpc
from services.router.fleet import RemoteWorker

# Accepting a sequence takes a worker microseconds; one that may be silent for longer than this gets that long.
RPC_TIMEOUT_S = 5.0


class RefusedError(CapacityError):
    """A worker had no room for a sequence after all."""

    def __init__(self, worker: RemoteWorker, message: str) -> None:
        super().__init__(message)
        self.worker = worker


class BrokenWorkerError(UnavailableError):
    """A worker could not take a sequence for reasons of its own."""

    def __init__(self, worker: RemoteWorker, message: str) -> None:
        super().__init__(message)
        self.worker = worker


async def call_worker(
    worker: RemoteWorker, method: Callable[..., Awaitable[Any]], request: Message, worker_silence_s: float
) -> Any:
    """Call a worker. Raises RefusedError, BrokenWorkerError, or the ServingError that the request itself earned."""
    try:
        return await method(request, timeout=max(RPC_TIMEOUT_S, worker_silence_s))
    except (aio.UsageError, asyncio.CancelledError) as closed:
        task = asyncio.current_task()
        if isinstance(closed, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the request was cancelled, not the call
        # The worker was replaced or left: its channel is closed, which cancels the calls on it.
        raise BrokenWorkerError(worker, f"worker {worker.worker_id} left") from closed
    except aio.AioRpcError as call_error:
        error = rpc.error_of(call_error)
        text = f"worker {worker.worker_id}: {error}"
        if isinstance(error, CapacityError):
            raise RefusedError(worker, text) from call_error
        # A DeadlineError here is the RPC's own timeout: the worker does not answer. And nobody but a server that shuts down
        # cancels a call from afar: a client's own cancel never comes as a status.
        if isinstance(error, UnavailableError | DeadlineError | CancelledError):
            raise BrokenWorkerError(worker, text) from call_error
        raise error from call_error
