"""gRPC of the prefill worker: translate, delegate, translate back."""

from typing import Any

from grpc import aio

from baton.v1 import worker_pb2, worker_pb2_grpc
from core.errors import InvalidRequestError, ServingError, TransferError
from kvtransfer.ticket import Ticket
from services.common import rpc
from services.prefill.service import PrefillService

Context = aio.ServicerContext[Any, Any]


class PrefillServicer(worker_pb2_grpc.PrefillWorkerServicer):
    """Translates; `PrefillService` decides."""

    def __init__(self, service: PrefillService) -> None:
        self._service = service

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: Context) -> worker_pb2.Accepted:
        """Queue a prompt; its first token leaves on the router's Attach stream, its KV for the ticket's endpoint."""
        try:
            ticket = Ticket(
                transfer_id=request.ticket.transfer_id,
                epoch=request.ticket.epoch,
                endpoint=request.ticket.endpoint,
                num_blocks=request.ticket.num_blocks,
                lease_ms=request.ticket.lease_ms,
            )
            self._service.prefill(request.sequence, ticket, request.ticket.num_cached_blocks)
        except TransferError as error:
            await rpc.abort_with(context, InvalidRequestError("ticket", str(error)))
        except ServingError as error:
            await rpc.abort_with(context, error)
        return worker_pb2.Accepted()
