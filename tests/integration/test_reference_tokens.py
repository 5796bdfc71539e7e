"""The tokens that come through router, prefill and decode are the model's own, whatever path they took."""

import pytest

from baton.v1 import inference_pb2 as pb
from tests.asking import ask, ask_all, chat_request, ids_request, text_request
from tests.integration.reference import Row, reference_rows, unexcused
from tests.processes import Stack

NUM_TOKENS = 48
ROUNDING_MARGIN = 0.005  # float32: what the order of additions may turn around

in_float32 = pytest.mark.xdist_group("float32")
in_bfloat16 = pytest.mark.xdist_group("bfloat16")


def requests_of(rows: list[Row], num_tokens: int = NUM_TOKENS, logprobs: int = 0) -> list[pb.GenerateRequest]:
    sampling = {"max_tokens": num_tokens, "ignore_eos": True, "logprobs": logprobs}
    return [ids_request(row.prompt_token_ids, **sampling) for row in rows]


def check_float32(stack: Stack, at_once: int) -> None:
    rows = reference_rows()
    answers = ask_all(stack.grpc[0], requests_of(rows), at_once)
    wrong = []
    for row, answer in zip(rows, answers, strict=True):
        wrong.append(unexcused(row, answer.token_ids, ROUNDING_MARGIN))
        assert (answer.done.finish_reason, answer.done.path) == ("length", "disaggregated")
        assert (answer.done.prompt_tokens, answer.done.completion_tokens) == (len(row.prompt_token_ids), NUM_TOKENS)
        if answer.token_ids == row.token_ids:
            assert answer.logprobs == pytest.approx(row.logprobs, abs=1e-2), row.id
    assert not any(wrong), [line for line in wrong if line]


@in_float32
@pytest.mark.timeout(400)
def test_float32_gives_the_reference_tokens_sixteen_at_a_time(float32_stack: Stack) -> None:
    check_float32(float32_stack, at_once=16)


@in_float32
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_float32_gives_the_reference_tokens_one_at_a_time(float32_stack: Stack) -> None:
    check_float32(float32_stack, at_once=1)


@in_float32
def test_a_prompt_sent_as_text_or_chat_has_the_reference_prompt_tokens(float32_stack: Stack) -> None:
    rows = sorted(reference_rows(), key=lambda row: len(row.prompt_token_ids))
    rows = [row for kind in ("chat", "text") for row in [row for row in rows if row.kind == kind][:4]]
    make = {"chat": chat_request, "text": text_request}
    requests = [make[row.kind](row.prompt, max_tokens=2, ignore_eos=True) for row in rows]
    answers = ask_all(float32_stack.grpc[0], requests, at_once=8)
    assert [a.done.prompt_tokens for a in answers] == [len(row.prompt_token_ids) for row in rows]
    assert [a.token_ids for a in answers] == [row.token_ids[:2] for row in rows]


def check_bfloat16(stack: Stack, rows: list[Row], at_once: int) -> None:
    requests = requests_of(rows, logprobs=2)
    disaggregated, aggregated = (ask_all(endpoint, requests, at_once) for endpoint in stack.grpc)
    assert {answer.done.path for answer in disaggregated} == {"disaggregated"}
    assert {answer.done.path for answer in aggregated} == {"aggregated"}
    for row, left, right in zip(rows, disaggregated, aggregated, strict=True):
        assert left.token_ids == right.token_ids, row.id
        assert left.logprobs == right.logprobs, row.id


def shortest(number: int) -> list[Row]:
    return sorted(reference_rows(), key=lambda row: len(row.prompt_token_ids))[:number]


@in_bfloat16
@pytest.mark.parametrize("at_once", [1, 8])
def test_bfloat16_disaggregated_is_aggregated_bit_for_bit(bfloat16_cluster: Stack, at_once: int) -> None:
    check_bfloat16(bfloat16_cluster, shortest(8), at_once)


@in_bfloat16
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("at_once", [1, 16])
def test_bfloat16_disaggregated_is_aggregated_on_every_reference_prompt(bfloat16_cluster: Stack, at_once: int) -> None:
    check_bfloat16(bfloat16_cluster, reference_rows(), at_once)


@in_bfloat16
def test_disaggregated_is_aggregated_on_a_prompt_of_our_own(bfloat16_cluster: Stack) -> None:
    request = text_request("The capital of France is", max_tokens=8, ignore_eos=True)
    apart, together = (ask(endpoint, request) for endpoint in bfloat16_cluster.grpc)
    assert apart.token_ids == together.token_ids
    assert "Paris" in apart.text
    assert apart.text == together.text
