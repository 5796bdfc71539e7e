"""The decode worker: reserve, receive KV, adopt, decode. Or run a whole request alone.

A sequence's states here, in order: reserved (blocks held, ticket given) -> receiving -> adopted (its KV is complete, the
engine decodes it) -> ended. `run` starts at the last but one, with nothing computed.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from baton.v1 import worker_pb2
from core.clock import Clock, monotonic
from core.errors import TransferError, UnavailableError
from core.hashing import hash_tokens
from core.sequence import SequenceOutput, SequenceSpec, StepResult
from kvtransfer.receiver import KVReceiver
from kvtransfer.ticket import Committed, Ticket, TransferOutcome
from services.common.engine_parts import EngineParts
from services.common.ledger import Holding, Use
from services.common.worker_host import WorkerHost
from services.common.worker_metrics import WorkerMetrics


class Reserved(NamedTuple):
    """What a reservation answers: where to send the KV, and how many of the prompt's first blocks are here already."""

    ticket: Ticket
    num_cached_blocks: int


@dataclass(slots=True, kw_only=True)
class _Detail:
    spec: SequenceSpec
    transfer_id: bytes = b""  # empty: no KV comes from elsewhere
    committed_at: float | None = None  # until the first decode step after it


class DecodeService:
    """Decisions of the decode worker; `servicer` translates, `host` keeps.

    Args:
        parts: what computes, and where.
        receiver: the end of KV transfers.
        metrics: of the worker.
        incarnation: of this process.
        clock: for the durations in updates.
    """

    def __init__(
        self,
        *,
        parts: EngineParts,
        receiver: KVReceiver,
        metrics: WorkerMetrics,
        incarnation: str,
        clock: Clock = monotonic,
    ) -> None:
        self._receiver = receiver
        self._layout = parts.layout
        self._metrics = metrics
        self._clock = clock
        self.host: WorkerHost[_Detail] = WorkerHost(
            parts=parts,
            stop_uses=self._stop_uses,
            peers=tuple,
            metrics=metrics,
            incarnation=incarnation,
        )

    def start(self) -> None:
        """Start the engine."""
        self.host.start(self._on_output)

    def reserve(self, message: worker_pb2.Sequence) -> Reserved:
        """Hold blocks for a prompt, and some for its answer, and open the receiving end.

        Raises:
            ServingError: nothing is held then.
        """
        holding = self._admit(message, {"transfer"})
        spec = holding.detail.spec
        self._metrics.prefix_queries.inc(len(spec.prompt) + len(spec.output))
        self._metrics.prefix_hits.inc(holding.num_cached_blocks * self._layout.block_tokens)
        try:
            ticket: Ticket = self._receiver.open(
                holding.blocks[holding.num_cached_blocks :],
                hash_tokens(spec.prompt + spec.output),
                on_end=lambda outcome: self._on_transfer_end(holding, outcome),
                on_commit=lambda committed: self._adopt(holding, committed),
            )
        except TransferError as error:
            self.host.ledger.end_use(holding, "transfer")
            raise UnavailableError(f"no KV can be received: {error}") from error
        holding.detail.transfer_id = ticket.transfer_id
        return Reserved(ticket, holding.num_cached_blocks)

    def run(self, message: worker_pb2.Sequence) -> None:
        """Compute a whole request here. Raises ServingError; nothing is held then."""
        holding = self._admit(message, {"engine"})
        self.host.engine.submit(holding.detail.spec)

    def _admit(self, message: worker_pb2.Sequence, uses: set[Use]) -> Holding[_Detail]:
        max_tokens = len(message.prompt) + message.sampling.max_tokens
        return self.host.admit(message, max_tokens, uses, _Detail(spec=self.host.spec(message)))

    def _adopt(self, holding: Holding[_Detail], committed: Committed) -> None:
        if committed.is_finished or holding.has_ended:
            return  # the first token ended the answer, or nobody wants it any more: the transfer's end frees the blocks
        holding.detail.committed_at = self._clock()
        holding.num_published_tokens += 1  # the first token went from prefill to the router
        holding.uses.add("engine")
        # The engine's own hold: it may give the blocks up before the transfer's last word, or long after it.
        self.host.ledger.pool.share(holding.blocks)
        promise, holding.num_promised_blocks = holding.num_promised_blocks, 0
        spec = holding.detail.spec
        self.host.engine.submit(
            replace(
                spec,
                block_table=tuple(holding.blocks),
                num_promised_blocks=promise,
                num_computed_tokens=committed.num_prompt_tokens,
                output=(*spec.output, committed.first_token),
            )
        )

    def _on_output(
        self, holding: Holding[_Detail], output: SequenceOutput, step: StepResult
    ) -> worker_pb2.SequenceUpdate | None:
        update = self.host.token_update(holding, output)
        if update is not None and holding.detail.committed_at is not None and output.token_ids:
            update.first_decode_ms = step.step_s * 1000
            update.adopt_ms = max((self._clock() - holding.detail.committed_at - step.step_s) * 1000, 0.0)
            holding.detail.committed_at = None
        return update

    def _on_transfer_end(self, holding: Holding[_Detail], outcome: TransferOutcome) -> None:
        if outcome.is_done:
            self._metrics.transfer_seconds.observe(outcome.duration_s)
        elif outcome.result != "aborted":  # whoever aborts on purpose tells the router why
            self.host.fail(holding, UnavailableError(f"KV transfer {outcome.result}: {outcome.reason}"))
        self.host.ledger.end_use(holding, "transfer")

    def _stop_uses(self, holding: Holding[_Detail]) -> None:
        if "transfer" in holding.uses:
            self._receiver.abort(holding.detail.transfer_id, "the request ended")
        if "engine" in holding.uses:
            self.host.engine.abort(holding.sequence_id)
