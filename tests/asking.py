"""Asking a router over gRPC, as a plain blocking client does."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc

TIMEOUT_S = 240.0


@dataclass(slots=True)
class Answer:
    """One whole answer: its chunks joined, and the message that ended it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the chosen tokens, when asked for
    done: pb.GenerateDone = field(default_factory=pb.GenerateDone)


def greedy(**sampling: Any) -> pb.SamplingParams:
    """Sampling parameters with temperature 0."""
    return pb.SamplingParams(**{"temperature": 0.0, **sampling})


def ids_request(token_ids: Sequence[int], **sampling: Any) -> pb.GenerateRequest:
    """A greedy request whose prompt is token ids."""
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), sampling=greedy(**sampling), return_timings=True)


def text_request(text: str, **sampling: Any) -> pb.GenerateRequest:
    """A greedy request whose prompt is a bare text."""
    return pb.GenerateRequest(text=text, sampling=greedy(**sampling), return_timings=True)


def chat_request(content: str, **sampling: Any) -> pb.GenerateRequest:
    """A greedy request of one user message."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=content)])
    return pb.GenerateRequest(chat=chat, sampling=greedy(**sampling), return_timings=True)


def ask(endpoint: str, request: pb.GenerateRequest, on_token: Callable[[], None] = lambda: None) -> Answer:
    """Send one request and collect its answer.

    Args:
        endpoint: of a router.
        request: sent as it is.
        on_token: called when a part of the answer with tokens is there.
    Raises:
        grpc.RpcError: the status that ended it.
    """
    with grpc.insecure_channel(endpoint) as channel:
        return _collect(inference_pb2_grpc.InferenceStub(channel), request, on_token)


def ask_all(endpoint: str, requests: Sequence[pb.GenerateRequest], at_once: int) -> list[Answer]:
    """Send requests, `at_once` of them in flight; answers come in the order of the requests. Raises grpc.RpcError."""
    with grpc.insecure_channel(endpoint) as channel, ThreadPoolExecutor(at_once) as threads:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return list(threads.map(lambda request: _collect(stub, request), requests))


def _collect(
    stub: inference_pb2_grpc.InferenceStub, request: pb.GenerateRequest, on_token: Callable[[], None] = lambda: None
) -> Answer:
    answer = Answer()
    ended = 0
    for response in stub.Generate(request, timeout=TIMEOUT_S):
        assert ended == 0, "nothing comes after done"
        if response.WhichOneof("event") == "done":
            answer.done = response.done
            ended += 1
        else:
            answer.text += response.chunk.text
            answer.token_ids += response.chunk.token_ids
            if response.chunk.token_ids:
                on_token()
            answer.logprobs += [each.chosen.logprob for each in response.chunk.logprobs]
    assert ended == 1, "a stream without a status ends with done"
    return answer
