"""The gRPC service every worker has: routers attach for updates and abort what they no longer want."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from grpc import aio

from baton.v1 import worker_pb2, worker_pb2_grpc
from services.common.worker_host import WorkerHost

Context = aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Translates; `WorkerHost` decides."""

    def __init__(self, host: WorkerHost[Any]) -> None:
        self._host = host

    async def Attach(self, request: worker_pb2.AttachRequest, context: Context) -> AsyncIterator[worker_pb2.StepBatch]:
        """One router's updates, one message per engine step, until either end leaves."""
        async with aclosing(self._host.streams.attach(request.router_id)) as batches:
            async for batch in batches:
                yield batch

    async def Abort(
        self, request: worker_pb2.AbortSequencesRequest, context: Context
    ) -> worker_pb2.AbortSequencesResponse:
        """End sequences; unknown ids are remembered and refused when they come."""
        self._host.abort(request.sequence_ids)
        return worker_pb2.AbortSequencesResponse()
