"""Sampling parameters and logprobs survive the way between processes, every field, bit for bit."""

import math
import struct
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import worker_pb2
from core.errors import InvalidRequestError
from core.sampling import SamplingParams
from core.sequence import TokenLogprobs
from services.common.convert import logprobs_from_pb, logprobs_to_pb, sampling_from_pb, sampling_to_pb

STAYS_IN_THE_ROUTER = {"stop", "include_stop", "skip_special_tokens"}
biases = st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100.0, 100.0), max_size=30)
int32 = st.integers(0, 2**31 - 1)


@st.composite
def resolved(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 2**31 - 1))
    return SamplingParams(
        temperature=draw(st.just(0.0) | st.floats(1e-4, 100.0)),
        top_p=draw(st.floats(0.0, 1.0, exclude_min=True)),
        top_k=draw(int32),
        min_p=draw(st.floats(0.0, 1.0)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=256))),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        frequency_penalty=draw(st.floats(-2.0, 2.0)),
        presence_penalty=draw(st.floats(-2.0, 2.0)),
        repetition_penalty=draw(st.floats(0.01, 10.0)),
        logit_bias=tuple(sorted(draw(biases).items())),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
    )


@given(resolved())
def test_every_field_survives_bit_for_bit(sampling: SamplingParams) -> None:
    wire = sampling_to_pb(sampling).SerializeToString()
    assert sampling_from_pb(worker_pb2.Sampling.FromString(wire)) == sampling


def test_a_field_added_later_cannot_be_forgotten() -> None:
    """Each field changed alone must change what arrives, unless it is known to stay in the router."""
    plain = SamplingParams(max_tokens=50, seed=1)
    other = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        max_tokens=60,
        min_tokens=3,
        stop=("x",),
        stop_token_ids=(7, 8),
        include_stop=True,
        ignore_eos=True,
        seed=-5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.3,
        logit_bias=((3, -100.0), (9, 0.1)),
        logprobs=0,
        prompt_logprobs=0,
        skip_special_tokens=False,
    )
    for field in fields(SamplingParams):
        value = getattr(other, field.name)
        assert value != getattr(plain, field.name), f"{field.name} is not exercised"
        arrived = sampling_from_pb(sampling_to_pb(replace(plain, **{field.name: value})))
        expected = getattr(plain if field.name in STAYS_IN_THE_ROUTER else other, field.name)
        assert getattr(arrived, field.name) == expected, field.name


def test_no_logprobs_and_zero_logprobs_are_not_the_same() -> None:
    for value in (None, 0):
        params = SamplingParams(max_tokens=1, seed=0, logprobs=value, prompt_logprobs=value)
        arrived = sampling_from_pb(sampling_to_pb(params))
        assert arrived.logprobs is arrived.prompt_logprobs is value


def test_what_arrives_is_checked_as_any_other() -> None:
    message = sampling_to_pb(SamplingParams(max_tokens=1, seed=0))
    message.temperature = math.nan
    with pytest.raises(InvalidRequestError, match="temperature"):
        sampling_from_pb(message)


def as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


logprob = st.floats(-1e4, 0.0, width=32)


@given(
    st.lists(
        st.builds(
            TokenLogprobs,
            st.integers(0, 2**32 - 1),
            logprob,
            st.lists(st.tuples(st.integers(0, 2**32 - 1), logprob), max_size=20).map(tuple),
        ),
        max_size=5,
    )
)
def test_logprobs_survive_as_float32(entries: list[TokenLogprobs]) -> None:
    again = logprobs_from_pb(logprobs_to_pb(entries))
    assert list(again) == entries
    for entry in again:
        assert entry.logprob == as_float32(entry.logprob)
