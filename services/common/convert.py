"""Internal protobuf messages to core types and back. Only here do the two meet."""

from collections.abc import Iterable

from baton.v1 import inference_pb2, worker_pb2
from core.sampling import SamplingParams
from core.sequence import TokenLogprobs


def sampling_to_pb(sampling: SamplingParams) -> worker_pb2.Sampling:
    """Everything the engine needs; `stop` and the text options stay in the router."""
    assert sampling.max_tokens is not None, "the router resolves max_tokens"
    assert sampling.seed is not None, "the router resolves seed"
    return worker_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def sampling_from_pb(message: worker_pb2.Sampling) -> SamplingParams:
    """The inverse of `sampling_to_pb`. Raises InvalidRequestError as SamplingParams does."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        seed=message.seed,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def logprobs_to_pb(entries: Iterable[TokenLogprobs]) -> list[inference_pb2.TokenLogprobs]:
    """One message per position."""
    return [
        inference_pb2.TokenLogprobs(
            chosen=inference_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob),
            top=[inference_pb2.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in entry.top],
        )
        for entry in entries
    ]


def logprobs_from_pb(messages: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """The inverse of `logprobs_to_pb`."""
    return tuple(
        TokenLogprobs(
            message.chosen.token_id, message.chosen.logprob, tuple((top.token_id, top.logprob) for top in message.top)
        )
        for message in messages
    )
