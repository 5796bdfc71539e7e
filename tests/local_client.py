"""A client of a local stack's gRPC edge: requests in short, answers in whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from baton.v1 import inference_pb2 as pb


@dataclass
class Answered:
    """What a client got."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    done: pb.GenerateDone | None = None

    def add(self, response: pb.GenerateResponse) -> None:
        assert self.done is None, "something came after done"
        if response.WhichOneof("event") == "done":
            self.done = response.done
            return
        self.tokens += response.chunk.token_ids
        self.text += response.chunk.text
        self.logprobs += response.chunk.logprobs

    @property
    def finish(self) -> str:
        assert self.done is not None
        return self.done.finish_reason


async def collect(call: Any, into: Answered | None = None) -> Answered:
    """Read a stream to its end. Raises AioRpcError; `into` then has what came before."""
    answered = Answered() if into is None else into
    while isinstance(response := await call.read(), pb.GenerateResponse):
        answered.add(response)
    if await call.code() != grpc.StatusCode.OK:
        raise aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )
    assert answered.done is not None, "the stream ended without done"
    return answered


def generate(prompt: Sequence[int] = (), **fields: Any) -> pb.GenerateRequest:
    """A request for greedy tokens after `prompt`; `text`, `chat`, `request_id` go to the request, the rest to sampling."""
    outer = {name: fields.pop(name) for name in list(fields) if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name}
    if not outer.keys() & {"text", "chat", "token_ids"}:
        outer["token_ids"] = pb.TokenIds(ids=prompt)
    sampling = pb.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **fields})
    return pb.GenerateRequest(sampling=sampling, return_timings=True, **outer)
