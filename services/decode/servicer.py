"""gRPC of the decode worker: translate, delegate, translate back."""

from typing import Any

from grpc import aio

from baton.v1 import worker_pb2, worker_pb2_grpc
from core.errors import ServingError
from services.common import rpc
from services.decode.service import DecodeService

Context = aio.ServicerContext[Any, Any]


class DecodeServicer(worker_pb2_grpc.DecodeWorkerServicer):
    """Translates; `DecodeService` decides."""

    def __init__(self, service: DecodeService) -> None:
        self._service = service

    async def Reserve(self, request: worker_pb2.ReserveRequest, context: Context) -> worker_pb2.Ticket:
        """Hold blocks for a request and open the receiving end of its transfer."""
        try:
            ticket, num_cached_blocks = self._service.reserve(request.sequence)
        except ServingError as error:
            await rpc.abort_with(context, error)
        return worker_pb2.Ticket(
            transfer_id=ticket.transfer_id,
            epoch=ticket.epoch,
            endpoint=ticket.endpoint,
            num_blocks=ticket.num_blocks,
            lease_ms=ticket.lease_ms,
            num_cached_blocks=num_cached_blocks,
        )

    async def Run(self, request: worker_pb2.RunRequest, context: Context) -> worker_pb2.Accepted:
        """Run a whole request here."""
        try:
            self._service.run(request.sequence)
        except ServingError as error:
            await rpc.abort_with(context, error)
        return worker_pb2.Accepted()
