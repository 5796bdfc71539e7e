"""gRPC and OpenAI HTTP give one answer, and the limits of prompts and answers are exactly where they are said to be."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import openai
import pytest

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.asking import Answer, ask, ask_all, chat_request, ids_request, text_request
from tests.processes import BLOCK_TOKENS as B
from tests.processes import CONTEXT_TOKENS, SHARED_DATA, Stack

pytestmark = pytest.mark.xdist_group("float32")

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
SONNET = """From fairest creatures we desire increase,
That thereby beauty's rose might never die,
But as the riper should by time decease,
His tender heir might bear his memory:
But thou contracted to thine own bright eyes,
Feed'st thy light's flame with self-substantial fuel,
Making a famine where abundance lies,
Thy self thy foe, to thy sweet self too cruel:
Thou that art now the world's fresh ornament,
And only herald to the gaudy spring,
Within thine own bud buriest thy content,
And tender churl mak'st waste in niggarding."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture
def client(float32_stack: Stack) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, as its users have it."""
    url = f"http://{float32_stack.http[0]}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120.0) as each:
        yield each


def tokens_of(endpoint: str, text: str) -> list[int]:
    with grpc.insecure_channel(endpoint) as channel:
        request = pb.TokenizeRequest(text=text)
        return list(inference_pb2_grpc.InferenceStub(channel).Tokenize(request, timeout=30.0).token_ids)


def usage_of(answer: Answer) -> tuple[int, int]:
    return answer.done.prompt_tokens, answer.done.completion_tokens


def test_the_openai_client_streams_the_chat_answer_of_grpc(float32_stack: Stack, client: openai.OpenAI) -> None:
    expected = ask(float32_stack.grpc[0], chat_request(QUESTION, max_tokens=24))
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == expected.text
    assert "Paris" in expected.text
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [expected.done.finish_reason]
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == usage_of(expected)
    assert usage.total_tokens == sum(usage_of(expected))


def test_the_openai_client_gets_the_whole_chat_answer_of_grpc(float32_stack: Stack, client: openai.OpenAI) -> None:
    expected = ask(float32_stack.grpc[0], chat_request(QUESTION, max_tokens=4))
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_completion_tokens=4
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.done.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == usage_of(expected)


@pytest.mark.parametrize("prompt", ["Once upon a time", [1, 520, 9531, 198]], ids=["text", "ids"])
def test_the_openai_client_streams_the_completion_of_grpc(
    float32_stack: Stack, client: openai.OpenAI, prompt: str | list[int]
) -> None:
    make = text_request if isinstance(prompt, str) else ids_request
    expected = ask(float32_stack.grpc[0], make(prompt, max_tokens=6))  # type: ignore[arg-type]
    stream = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=6, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == expected.text
    assert choices[-1].finish_reason == expected.done.finish_reason


def test_the_openai_client_sees_the_served_model(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL
    assert card.model_dump()["max_model_len"] == CONTEXT_TOKENS


def test_an_unknown_model_is_404_and_not_found(float32_stack: Stack, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="x", max_tokens=1)
    request = text_request("x", max_tokens=1)
    request.model = "no-such-model"
    with pytest.raises(grpc.RpcError, match="no-such-model") as refused:
        ask(float32_stack.grpc[0], request)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_prompt_over_the_limit_is_400_and_invalid_argument(float32_stack: Stack, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT_TOKENS)):
        client.completions.create(model=MODEL, prompt=[5] * (CONTEXT_TOKENS + 1), max_tokens=1)
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT_TOKENS)):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 4000}])


@pytest.mark.parametrize("max_chars", [400, pytest.param(10**9, marks=pytest.mark.slow)])
def test_awkward_texts_are_answered_alike_on_both_edges(
    float32_stack: Stack, client: openai.OpenAI, max_chars: int
) -> None:
    file = SHARED_DATA / "prompts" / "edge_cases.jsonl"
    if not file.is_file():
        pytest.skip(f"no awkward prompts: {file} is missing")
    prompts = [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(prompts) >= 33
    prompts = [prompt for prompt in prompts if len(prompt) <= max_chars]
    expected = ask_all(float32_stack.grpc[0], [text_request(prompt, max_tokens=8) for prompt in prompts], at_once=16)

    def over_http(prompt: str) -> str:
        stream = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(over_http, prompts))
    assert answers == [each.text for each in expected]
    # A prompt that has the character itself may well be answered with it.
    pairs = zip(prompts, answers, strict=True)
    assert not [answer for prompt, answer in pairs if REPLACEMENT in answer and REPLACEMENT not in prompt]


@pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 2 * B, 8 * B + 1])
def test_a_prompt_around_a_block_border_goes_on_as_decode_did(float32_stack: Stack, num_tokens: int) -> None:
    endpoint = float32_stack.grpc[0]
    prompt = tokens_of(endpoint, SONNET)[:num_tokens]
    answer = ask(endpoint, ids_request(prompt, max_tokens=3, ignore_eos=True))
    assert usage_of(answer) == (num_tokens, 3)
    assert answer.done.path == "disaggregated"
    # What decode computed from KV that was handed over, prefill computes anew.
    longer = ask(endpoint, ids_request([*prompt, *answer.token_ids[:2]], max_tokens=1, ignore_eos=True))
    assert longer.token_ids == answer.token_ids[2:]


@pytest.mark.parametrize("max_tokens", [1, 2, B])
def test_exactly_max_tokens_are_answered(float32_stack: Stack, max_tokens: int) -> None:
    answer = ask(float32_stack.grpc[0], text_request("One, two, three,", max_tokens=max_tokens, ignore_eos=True))
    assert len(answer.token_ids) == answer.done.completion_tokens == max_tokens
    assert answer.done.finish_reason == "length"


def test_a_prompt_one_below_the_limit_is_answered_with_the_one_token_left(float32_stack: Stack) -> None:
    answer = ask(float32_stack.grpc[0], ids_request([28] * (CONTEXT_TOKENS - 1), ignore_eos=True))
    assert usage_of(answer) == (CONTEXT_TOKENS - 1, 1)
    assert answer.done.finish_reason == "length"


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens"), [(CONTEXT_TOKENS, 1), (CONTEXT_TOKENS + 1, 1), (CONTEXT_TOKENS - 4, 5)]
)
def test_a_prompt_and_answer_beyond_the_limit_are_refused(
    float32_stack: Stack, num_tokens: int, max_tokens: int
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        ask(float32_stack.grpc[0], ids_request([28] * num_tokens, max_tokens=max_tokens))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{num_tokens} tokens" in refused.value.details()
    assert f"{CONTEXT_TOKENS} tokens" in refused.value.details()


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 2},
    {"temperature": 0.9, "seed": -4, "top_p": 0.9, "frequency_penalty": 1.0, "presence_penalty": -0.5, "n": 3},
    {"temperature": 0.0, "logit_bias": {28: 100.0, 30: -100.0}, "min_p": 0.1},
    {"temperature": 1.2, "seed": 8, "top_k": 20, "prompt_logprobs": 1, "logprobs": 0},
]


@pytest.mark.parametrize("fields", SAMPLING, ids=str)
def test_every_sampling_field_means_the_same_on_both_edges(
    float32_stack: Stack, client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. The quick brown fox"
    texts: dict[int, str] = {}
    about_prompt: list[float] = []
    with grpc.insecure_channel(float32_stack.grpc[0]) as channel:
        request = pb.GenerateRequest(text=prompt, sampling=pb.SamplingParams(max_tokens=8, **fields))
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120.0):
            texts[response.chunk.index] = texts.get(response.chunk.index, "") + response.chunk.text
            about_prompt += [entry.chosen.logprob for entry in response.chunk.prompt_logprobs]
    known = {"temperature", "seed", "n", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs"}
    body = {name: value for name, value in fields.items() if name in known}
    extra = {name: value for name, value in fields.items() if name not in known}
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, extra_body=extra, **body)
    assert {choice.index: choice.text for choice in answer.choices} == texts
    assert len(set(texts.values())) == fields.get("n", 1), "each answer has draws of its own"
    if "prompt_logprobs" in fields:
        first, *entries = answer.choices[0].model_dump()["prompt_logprobs"]
        assert first is None
        assert [next(iter(entry.values()))["logprob"] for entry in entries] == pytest.approx(about_prompt, abs=1e-5)
