"""gRPC `baton.v1.Inference`: translate, delegate, translate back."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from grpc import aio

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from core.errors import CancelledError, InvalidRequestError, ServingError
from core.sampling import SamplingParams
from services.common import rpc
from services.common.convert import logprobs_to_pb
from services.router.api import ChatMessage, Chunk, Done, GenerateCall
from services.router.router import Router

Context = aio.ServicerContext[Any, Any]

# Fields whose feature this version does not have. Set, they are refused by name.
_LATER_SAMPLING = ("json_schema", "regex", "grammar", "choice")
_LATER_REQUEST = ("lora_name", "session_id")
PROMPT_LOGPROBS_PER_MESSAGE = 2048  # with 20 alternatives each, well below the 4 MB a gRPC client takes


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Translates; `Router` decides.

    Args:
        router: serves.
        stall_timeout_s: a client that takes nothing for this long is cut off.
    """

    def __init__(self, router: Router, stall_timeout_s: float) -> None:
        self._router = router
        self._stall_timeout_s = stall_timeout_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Stream one answer. A client that goes away, or does not read, frees what its request holds."""
        try:
            call = _call_from(request, _time_left(context))
            async with aclosing(self._router.generate(call)) as events:
                async for event in events:
                    try:
                        async with asyncio.timeout(self._stall_timeout_s):
                            for response in _responses(event, request.return_timings):
                                await context.write(response)
                    except TimeoutError:
                        raise CancelledError(
                            f"the stream was not read for {self._stall_timeout_s:.0f} s; the request was cancelled"
                        ) from None
        except ServingError as error:
            await rpc.abort_with(context, error)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: ARG002, N802
        """End a request by its id; its stream ends with finish_reason "abort"."""
        return pb.AbortResponse(found=self._router.abort(request.request_id))

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """The served model's limits."""
        try:
            self._router.intake.require_model(request.model)
        except ServingError as error:
            await rpc.abort_with(context, error)
        card = self._router.model.card
        return pb.GetModelInfoResponse(
            model=card.name,
            revision=card.revision,
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            eos_token_ids=self._router.model.config.eos_token_ids,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:  # noqa: ARG002, N802
        """What every worker last reported, and the router's own queue."""
        workers = [
            pb.WorkerLoad(
                worker_id=worker.worker_id,
                role=worker.record.role,
                state=worker.state,
                running=worker.load.running,
                waiting=worker.load.waiting,
                waiting_tokens=worker.load.waiting_tokens,
                free_blocks=worker.load.free_blocks,
                total_blocks=worker.load.total_blocks,
            )
            for worker in self._router.fleet
        ]
        return pb.GetLoadsResponse(workers=workers, queued=self._router.num_queued)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Text to token ids, as a bare prompt would be."""
        try:
            return pb.TokenizeResponse(token_ids=await self._router.tokenize(request.model, request.text))
        except ServingError as error:
            await rpc.abort_with(context, error)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Token ids to text, special tokens kept."""
        try:
            return pb.DetokenizeResponse(text=await self._router.detokenize(request.model, tuple(request.token_ids)))
        except ServingError as error:
            await rpc.abort_with(context, error)


def _time_left(context: Context) -> float | None:
    seconds = context.time_remaining()
    # grpc answers a date far in the future for a call without a deadline.
    return None if seconds is None or not math.isfinite(seconds) or seconds > 365 * 86400 else max(seconds, 0.001)


def _call_from(request: pb.GenerateRequest, timeout_s: float | None) -> GenerateCall:
    for field in _LATER_REQUEST:
        if value := getattr(request, field):
            raise InvalidRequestError(
                field, f"{value!r} is set, and this version does not have that feature; leave it out"
            )
    if request.HasField("slo"):
        raise InvalidRequestError("slo", "is set, and this version does not have that feature; leave it out")
    prompt = request.WhichOneof("prompt")
    chat = tuple(ChatMessage(role=message.role, content=message.content) for message in request.chat.messages)
    if prompt == "chat" and not chat:
        raise InvalidRequestError("chat", "has no messages; at least 1 is needed")
    return GenerateCall(
        request_id=request.request_id,
        model=request.model,
        text=request.text if prompt == "text" else None,
        token_ids=tuple(request.token_ids.ids) if prompt == "token_ids" else None,
        chat=chat if prompt == "chat" else None,
        sampling=_sampling_from(request.sampling),
        n=request.sampling.n if request.sampling.HasField("n") else 1,
        timeout_s=timeout_s,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def _sampling_from(message: pb.SamplingParams) -> SamplingParams:
    present = [field for field in _LATER_SAMPLING if message.HasField(field)]
    if present:
        raise InvalidRequestError(
            f"sampling.{present[0]}", "is set, and this version does not have that feature; leave it out"
        )
    optional = (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "max_tokens", "min_tokens", "include_stop", "ignore_eos", "seed", "logprobs", "prompt_logprobs",
        "skip_special_tokens",
    )  # fmt: skip
    given = {field: getattr(message, field) for field in optional if message.HasField(field)}
    return SamplingParams(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(message.logit_bias.items()),
        **given,
    )


def _responses(event: Chunk | Done, with_timings: bool) -> Iterator[pb.GenerateResponse]:
    if isinstance(event, Done):
        yield pb.GenerateResponse(done=_done(event, with_timings))
        return
    prompt = event.prompt_logprobs
    for first in range(0, len(prompt), PROMPT_LOGPROBS_PER_MESSAGE):
        piece = logprobs_to_pb(prompt[first : first + PROMPT_LOGPROBS_PER_MESSAGE])
        yield pb.GenerateResponse(chunk=pb.GenerateChunk(index=event.index, prompt_logprobs=piece))
    if event.text or event.token_ids:
        chunk = pb.GenerateChunk(
            index=event.index,
            text=event.text,
            token_ids=event.token_ids,
            logprobs=logprobs_to_pb(event.logprobs),
        )
        yield pb.GenerateResponse(chunk=chunk)


def _done(event: Done, with_timings: bool) -> pb.GenerateDone:
    return pb.GenerateDone(
        index=event.index,
        finish_reason=event.finish_reason,
        matched_stop=event.matched_stop,
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        cached_tokens=event.cached_tokens,
        timings=pb.Timings(**asdict(event.timings)) if with_timings else None,
        prefill_worker=event.prefill_worker,
        decode_worker=event.decode_worker,
        path=event.path,
    )
