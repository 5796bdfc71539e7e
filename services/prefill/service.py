"""The prefill worker: compute a prompt in chunks, push each chunk's blocks while the next one computes, hand over.

A sequence's states here, in order: waiting -> computing -> handed over (first token sent, COMMIT sent) -> ended. Its blocks
are the engine's until the last chunk, then the holding's until the transfer has ended.
"""

from dataclasses import dataclass, replace

from baton.v1 import worker_pb2
from core.errors import InvalidRequestError, TransferError, UnavailableError
from core.hashing import hash_tokens
from core.sequence import SequenceOutput, StepResult
from kvtransfer.sender import KVSender
from kvtransfer.ticket import Committed, Ticket, TransferOutcome
from services.common.engine_parts import EngineParts
from services.common.ledger import Holding
from services.common.worker_host import WorkerHost
from services.common.worker_metrics import WorkerMetrics


@dataclass(slots=True, kw_only=True)
class _Detail:
    known: tuple[int, ...]  # the prompt, and what the client has from workers that are gone
    ticket: Ticket
    num_cached_blocks: int  # the decode worker's; blocks are sent from here on
    num_pushed_blocks: int = 0  # from the prompt's first one on


class PrefillService:
    """Decisions of the prefill worker; `servicer` translates, `host` keeps.

    Args:
        parts: what computes, and where.
        sender: the start of KV transfers.
        metrics: of the worker.
        incarnation: of this process.
    """

    def __init__(
        self,
        *,
        parts: EngineParts,
        sender: KVSender,
        metrics: WorkerMetrics,
        incarnation: str,
    ) -> None:
        self._sender = sender
        self._layout = parts.layout
        self._metrics = metrics
        self.host: WorkerHost[_Detail] = WorkerHost(
            parts=parts,
            stop_uses=self._stop_uses,
            peers=sender.peers,
            metrics=metrics,
            incarnation=incarnation,
            role_unready=lambda: "" if sender.peers() else "not connected to a decode worker yet",
        )

    def start(self) -> None:
        """Start the engine."""
        self.host.start(self._on_output)

    def prefill(self, message: worker_pb2.Sequence, ticket: Ticket, num_cached_blocks: int) -> None:
        """Queue a prompt whose KV goes where the ticket says, without its first `num_cached_blocks` blocks.

        Raises:
            ServingError: nothing is held then.
        """
        spec = replace(self.host.spec(message), prefill_only=True)
        known = spec.prompt + spec.output
        if num_cached_blocks + ticket.num_blocks != self._layout.blocks_for(len(known)):
            raise InvalidRequestError(
                "ticket",
                f"{ticket.num_blocks} blocks after {num_cached_blocks} cached ones are not those of {len(known)} tokens",
            )
        detail = _Detail(
            known=known, ticket=ticket, num_cached_blocks=num_cached_blocks, num_pushed_blocks=num_cached_blocks
        )
        holding = self.host.admit(message, len(known), {"engine", "transfer"}, detail)
        # BEGIN goes out now, not with the first block: the receiver's reservation stays alive while the prompt waits here.
        try:
            self._sender.open(ticket, on_end=lambda outcome: self._on_transfer_end(holding, outcome))
        except TransferError as error:
            holding.has_ended = True
            self.host.ledger.end_use(holding, "engine")
            self.host.ledger.end_use(holding, "transfer")
            raise InvalidRequestError("ticket", str(error)) from error
        self.host.engine.submit(spec)

    def _on_output(
        self, holding: Holding[_Detail], output: SequenceOutput, _: StepResult
    ) -> worker_pb2.SequenceUpdate | None:
        if output.has_ended:
            holding.blocks = list(output.block_table)  # from now on ours to release
        is_handed_over = not holding.has_ended and "transfer" in holding.uses
        update = self.host.token_update(holding, output)  # first: aborting the transfer would report a lesser error
        if is_handed_over:
            self._hand_over(holding, output)
        if update is not None and output.finish_reason is None:
            holding.has_ended = False  # its router must still hear of a transfer that fails
        return update

    def _hand_over(self, holding: Holding[_Detail], output: SequenceOutput) -> None:
        detail = holding.detail
        if output.finish_reason == "error":
            self._sender.abort(detail.ticket.transfer_id, "prefill failed")
            return
        is_complete = output.num_computed_tokens >= len(detail.known)
        table = output.block_table
        num_final = len(table) if is_complete else output.num_computed_tokens // self._layout.block_tokens
        if num_final > detail.num_pushed_blocks and output.finish_reason is None:
            blocks = list(table[detail.num_pushed_blocks : num_final])
            first = detail.num_pushed_blocks - detail.num_cached_blocks
            self._sender.push(detail.ticket.transfer_id, blocks, first)
            detail.num_pushed_blocks = num_final
        if output.token_ids:
            committed = Committed(
                first_token=output.token_ids[0],
                num_prompt_tokens=len(detail.known),
                prompt_hash=hash_tokens(detail.known),
                is_finished=output.finish_reason is not None,
            )
            self._sender.commit(detail.ticket.transfer_id, committed)

    def _on_transfer_end(self, holding: Holding[_Detail], outcome: TransferOutcome) -> None:
        if outcome.is_done:
            self._metrics.transfer_seconds.observe(outcome.duration_s)
        else:
            self.host.fail(holding, UnavailableError(f"KV transfer {outcome.result}: {outcome.reason}"))
        self.host.ledger.end_use(holding, "transfer")

    def _stop_uses(self, holding: Holding[_Detail]) -> None:
        if "transfer" in holding.uses:
            self._sender.abort(holding.detail.ticket.transfer_id, "the request ended")
        if "engine" in holding.uses:
            self.host.engine.abort(holding.sequence_id)
