"""One answer: tokens in any order from two workers become one text, one end, and timings that add up."""

import asyncio
import random
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import inference_pb2, worker_pb2
from core.clock import ManualClock
from core.errors import DeadlineError, InternalError, InvalidRequestError, ServingError, UnavailableError
from core.sampling import SamplingParams
from services.router.answer import Answer, Marks
from services.router.api import Chunk, Done
from services.router.detokenizer import Detokenizer
from services.router.placement import Placement

PAIR = Placement(decode="d", prefill="p")
ALONE = Placement(decode="d")
EOS = 2
BYTES = [bytes([token]) for token in range(256)]


def make(clock: ManualClock | None = None, placement: Placement = PAIR, **sampling: object) -> Answer:
    """An answer whose tokens are bytes, begun at a pair."""
    clock = clock or ManualClock()
    params = SamplingParams(**{"max_tokens": 100, "seed": 0, **sampling})  # type: ignore[arg-type]
    detokenizer = Detokenizer(BYTES, {EOS}, strip_first_space=False)
    answer = Answer((1, 2, 3), params, detokenizer, Marks(clock()), clock)
    answer.begin_attempt("s.0")
    answer.placement = placement
    return answer


def tokens(index: int, text: str, finish: str = "", stop_id: int = -1) -> worker_pb2.SequenceUpdate:
    """One step's update: each character is a token; "$" is the EOS token."""
    ids = [EOS if char == "$" else ord(char) for char in text]
    return worker_pb2.SequenceUpdate(
        sequence_id="s.0",
        first_index=index,
        token_ids=ids,
        finish_reason=finish,
        has_ended=bool(finish),
        matched_stop_id=stop_id,
    )


async def collect(answer: Answer) -> tuple[str, list[int], Done]:
    text, ids = "", list[int]()
    async with asyncio.timeout(30):
        async for event in answer.events():
            if isinstance(event, Done):
                return text, ids, event
            text += event.text
            ids += event.token_ids
    raise AssertionError("no Done")


async def feed(answer: Answer, *updates: worker_pb2.SequenceUpdate) -> tuple[str, str, str]:
    """Text, finish reason and matched stop after these updates."""
    for update in updates:
        answer.on_update(update)
    text, ids, done = await collect(answer)
    assert ids == answer.token_ids
    assert done.completion_tokens == len(ids)
    return text, done.finish_reason, done.matched_stop


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_any_order_and_any_duplicates_give_the_same_answer(sizes: list[int], rng: random.Random) -> None:
    text = "".join(chr(97 + number % 26) for number in range(sum(sizes)))
    updates, start = [], 0
    for size in sizes:
        is_last = start + size == len(text)
        updates.append(tokens(start, text[start : start + size], "length" if is_last else ""))
        start += size
    arriving = updates + rng.sample(updates, rng.randint(0, len(updates)))
    rng.shuffle(arriving)
    assert asyncio.run(feed(make(), *arriving)) == (text, "length", "")


async def test_tokens_are_held_until_those_before_them_are_there() -> None:
    answer = make()
    answer.on_update(tokens(1, "bc"))
    assert answer.token_ids == []
    answer.on_update(tokens(0, "a"))
    assert answer.token_ids == [97, 98, 99]
    assert await feed(answer, tokens(3, "d", "length")) == ("abcd", "length", "")


async def test_what_the_client_does_not_take_gathers_into_one_chunk() -> None:
    answer = make()
    events = answer.events()
    answer.on_update(tokens(0, "a"))
    assert (await anext(events)) == Chunk(text="a", token_ids=(97,))
    for index, char in enumerate("bcd", start=1):
        answer.on_update(tokens(index, char))
    assert (await anext(events)) == Chunk(text="bcd", token_ids=(98, 99, 100))
    await events.aclose()


async def test_an_answer_goes_on_after_the_tokens_of_a_lost_worker() -> None:
    answer = make()
    for update in (tokens(0, "a"), tokens(1, "bc"), tokens(4, "late")):
        answer.on_update(update)
    answer.fail(UnavailableError("worker d is gone"), may_retry=True)
    assert answer.may_retry
    answer.on_update(tokens(3, "x"))  # the dead attempt's; nothing is taken between attempts
    assert answer.token_ids == [97, 98, 99]
    answer.begin_attempt("s.1")
    answer.placement = ALONE
    assert not answer.has_ended
    # What came early in the first attempt (index 4) must not be used in the second one.
    assert await feed(answer, tokens(3, "d"), tokens(4, "e"), tokens(5, "f", "length")) == ("abcdef", "length", "")
    assert answer.done is not None
    assert (answer.done.path, answer.done.prefill_worker, answer.done.decode_worker) == ("aggregated", "d", "d")


@pytest.mark.parametrize("cut", [[1] * 12, [3, 4, 5], [12], [5, 1, 1, 5]])
@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stop_string_over_any_token_border_ends_the_answer(cut: list[int], include_stop: bool) -> None:
    answer = make(stop=("END", "ND!"), include_stop=include_stop)
    start, updates = 0, []
    for size in cut:
        updates.append(tokens(start, "hello EN END"[start : start + size]))
        start += size
    text, reason, matched = await feed(answer, *updates)
    assert (text, reason, matched) == ("hello EN END" if include_stop else "hello EN ", "stop", "END")


async def test_nothing_after_a_stop_string_counts() -> None:
    answer = make(stop=("b",))
    assert await feed(answer, tokens(0, "abc"), tokens(3, "d", "length")) == ("a", "stop", "b")
    assert answer.token_ids == [97, 98]


async def test_a_beginning_of_a_stop_string_is_let_out_at_the_end() -> None:
    assert await feed(make(stop=("END",)), tokens(0, "xEN", "length")) == ("xEN", "length", "")


async def test_a_stop_string_within_min_tokens_does_not_count() -> None:
    answer = make(stop=("b",), min_tokens=3)
    assert await feed(answer, tokens(0, "abbc"), tokens(4, "bd")) == ("abbc", "stop", "b")


@pytest.mark.parametrize(("include_stop", "text"), [(False, "ab"), (True, "abc")])
async def test_a_stop_token_is_counted_but_shown_only_when_asked_for(include_stop: bool, text: str) -> None:
    answer = make(stop_token_ids=(ord("c"),), include_stop=include_stop)
    assert await feed(answer, tokens(0, "abc", "stop", ord("c"))) == (text, "stop", "99")
    assert answer.token_ids == [97, 98, 99]


async def test_text_before_an_eos_token_is_let_out_even_if_it_begins_a_stop_string() -> None:
    assert await feed(make(stop=("END",)), tokens(0, "xE$", "stop", EOS)) == ("xE", "stop", "2")


async def test_half_a_character_is_never_shown() -> None:
    answer = make()
    euro = "€".encode()
    for index, byte in enumerate(euro):
        answer.on_update(worker_pb2.SequenceUpdate(first_index=index, token_ids=[byte], matched_stop_id=-1))
    text, _, _ = await feed(answer, worker_pb2.SequenceUpdate(first_index=3, token_ids=[0xE2], finish_reason="length"))
    assert text == "€"


async def test_logprobs_stay_with_their_tokens() -> None:
    answer = make(logprobs=0)
    update = tokens(0, "ab", "length")
    for token in update.token_ids:
        chosen = inference_pb2.TokenLogprob(token_id=token, logprob=-0.5)
        update.logprobs.append(inference_pb2.TokenLogprobs(chosen=chosen))
    answer.on_update(update)
    chunk = await anext(answer.events())
    assert isinstance(chunk, Chunk)
    assert [entry.token_id for entry in chunk.logprobs] == [97, 98]


def about_prompt(*ids: int) -> worker_pb2.SequenceUpdate:
    """One piece of the prompt's log-probabilities."""
    entries = [
        inference_pb2.TokenLogprobs(chosen=inference_pb2.TokenLogprob(token_id=each, logprob=-1.0)) for each in ids
    ]
    return worker_pb2.SequenceUpdate(sequence_id="s.0", prompt_logprobs=entries, matched_stop_id=-1)


async def test_prompt_logprobs_come_once_and_in_order_whatever_attempt_they_are_of() -> None:
    answer = make(prompt_logprobs=0)
    events = answer.events()
    answer.on_update(about_prompt(5, 6))
    first = await anext(events)
    assert isinstance(first, Chunk)
    assert ([entry.token_id for entry in first.prompt_logprobs], first.token_ids) == ([5, 6], ())
    answer.fail(UnavailableError("worker p is gone"), may_retry=True)
    answer.begin_attempt("s.1")
    answer.placement = PAIR
    for update in (about_prompt(5), about_prompt(6, 7), about_prompt(8), tokens(0, "a")):
        answer.on_update(update)
    answer.on_update(about_prompt(5, 6, 7, 8))  # a prompt computed again after its first token
    second = await anext(events)
    assert isinstance(second, Chunk)
    assert ([entry.token_id for entry in second.prompt_logprobs], second.text) == ([7, 8], "a")
    answer.on_update(tokens(1, "b", "length"))
    assert await anext(events) == Chunk(text="b", token_ids=(98,))
    assert isinstance(await anext(events), Done)


async def test_a_worker_s_error_ends_it_and_says_whether_another_may_try() -> None:
    for code, kind, may_retry in (
        ("UNAVAILABLE", UnavailableError, True),
        ("DEADLINE_EXCEEDED", DeadlineError, False),
        ("INTERNAL", InternalError, False),
        ("INVALID_ARGUMENT", InvalidRequestError, False),
    ):
        answer = make()
        answer.on_update(worker_pb2.SequenceUpdate(error_code=code, error_message="field: why", has_ended=True))
        assert type(answer.error) is kind
        assert answer.may_retry is may_retry
        with pytest.raises(ServingError, match="why"):
            await collect(answer)


async def test_an_abort_by_a_worker_is_that_worker_s_failure() -> None:
    answer = make()
    answer.on_update(tokens(0, "a", "abort"))
    assert isinstance(answer.error, UnavailableError)
    assert answer.may_retry
    assert answer.token_ids == [97]


async def test_the_first_end_counts() -> None:
    answer = make()
    answer.on_update(tokens(0, "a", "length"))
    answer.fail(DeadlineError("late"))
    answer.cancel()
    assert await feed(answer) == ("a", "length", "")


async def test_a_cancel_ends_with_what_there_is() -> None:
    answer = make(stop=("END",))
    answer.on_update(tokens(0, "abE"))
    answer.cancel()
    assert await feed(answer) == ("abE", "abort", "")


async def test_an_end_interrupts_what_waits_for_workers() -> None:
    answer = make()
    entered = asyncio.Event()

    async def wait_for_room() -> bool:
        async with answer.interruptible():
            entered.set()
            await asyncio.Event().wait()
        return answer.has_ended

    task = asyncio.create_task(wait_for_room())
    await entered.wait()
    answer.fail(DeadlineError("late"))
    async with asyncio.timeout(30):
        assert await task


async def test_a_timeout_inside_is_not_mistaken_for_the_answer_s_end() -> None:
    answer = make()
    with pytest.raises(TimeoutError):
        async with answer.interruptible():
            raise TimeoutError("of something else")


durations = st.floats(0, 10)


@given(
    st.lists(durations, min_size=3, max_size=3),
    st.lists(durations, max_size=6),
    st.floats(0, 1),
    durations,
    durations,
    st.sampled_from([PAIR, ALONE]),
    st.sampled_from(["length", "cancel"]),
    st.integers(0, 3),
)
def test_timings_are_a_partition_whatever_happened_when(
    before: list[float],
    gaps: list[float],
    route_share: float,
    adopt_s: float,
    first_decode_s: float,
    placement: Placement,
    end: str,
    num_phases: int,
) -> None:
    clock = ManualClock(5.0)
    answer = make(clock, placement)
    marks = answer.marks
    if num_phases >= 1:
        clock.advance(before[0])
        marks.note_placed(clock(), before[0] * route_share)
    if num_phases >= 2:
        clock.advance(before[1])
        marks.note_reserved(clock())
    clock.advance(before[2])
    began = clock()
    if num_phases >= 3:
        for index in range(len(gaps) + 1):
            update = tokens(index, "a", "length" if end == "length" and index == len(gaps) else "")
            if index == 1:
                update.adopt_ms, update.first_decode_ms = adopt_s * 1000, first_decode_s * 1000
            answer.on_update(update)
            clock.advance(gaps[index] if index < len(gaps) else 0.0)
    if not answer.has_ended:
        answer.cancel()
    assert answer.done is not None
    timings = answer.done.timings
    parts = astuple(timings)[:8]
    assert sum(parts) == pytest.approx(timings.e2e_ms, abs=1e-6)
    assert min(parts) >= -1e-9
    assert timings.e2e_ms == pytest.approx((began - 5.0 + (sum(gaps) if num_phases == 3 else 0.0)) * 1000, abs=1e-6)
    if num_phases == 0:
        assert timings.queue_ms == timings.e2e_ms, "it never left the queue"
    if num_phases == 1:
        assert timings.reserve_ms == pytest.approx(before[2] * 1000, abs=1e-6), "no worker had taken it"
    if placement is ALONE:
        assert timings.transfer_ms == timings.adopt_ms == 0.0


async def test_each_part_is_the_phase_it_names() -> None:
    clock = ManualClock()
    answer = make(clock)
    clock.advance(1.0)
    answer.marks.note_placed(clock(), 0.25)
    clock.advance(2.0)
    answer.marks.note_reserved(clock())
    clock.advance(4.0)
    answer.on_update(tokens(0, "a"))
    clock.advance(8.0)
    second = tokens(1, "b")
    second.adopt_ms, second.first_decode_ms = 1500, 2500
    answer.on_update(second)
    clock.advance(16.0)
    answer.on_update(tokens(2, "c", "length"))
    _, _, done = await collect(answer)
    assert astuple(done.timings) == (750, 250, 2000, 4000, 4000, 1500, 2500, 16000, 31000, 7000)
    assert answer.marks.token_gaps_s == [8.0, 16.0]


async def test_ttft_is_the_moment_the_first_chunk_is_handed_over() -> None:
    clock = ManualClock()
    answer = make(clock)
    events = answer.events()
    clock.advance(1.0)
    answer.on_update(tokens(0, "a"))
    clock.advance(2.0)
    await anext(events)
    clock.advance(4.0)
    answer.on_update(tokens(1, "b", "length"))
    await anext(events)
    done = await anext(events)
    assert isinstance(done, Done)
    assert (done.timings.ttft_ms, done.timings.e2e_ms) == (3000, 7000)
