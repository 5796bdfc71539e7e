"""Stop strings: whatever the pieces, the answer is the one that searching the whole text gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.stop_strings import StopMatcher


def search_whole(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The specification: at the first position where stop strings end, the longest of them ends the answer."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            stop = max(endings, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def feed(pieces: list[str], stops: list[str], include_stop: bool) -> tuple[list[str], str | None]:
    matcher, sent = StopMatcher(stops, include_stop=include_stop), []
    for piece in pieces:
        safe, matched = matcher.push(piece)
        sent.append(safe)
        if matched is not None:
            return sent, matched
    return [*sent, matcher.finish()], None


SHORT = st.text(alphabet="ab🙂", max_size=12)


@given(st.lists(SHORT, max_size=8), st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=4), st.booleans())
def test_any_split_equals_searching_the_whole_text(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    sent, matched = feed(pieces, stops, include_stop)
    assert ("".join(sent), matched) == search_whole("".join(pieces), stops, include_stop)


@given(st.lists(SHORT, max_size=8), st.lists(st.text("ab🙂", min_size=1, max_size=5), min_size=1, max_size=4))
def test_no_more_is_held_back_than_could_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher, sent, seen = StopMatcher(stops, include_stop=False), "", ""
    for piece in pieces:
        safe, matched = matcher.push(piece)
        if matched is not None:
            return
        sent, seen = sent + safe, seen + piece
        held = seen[len(sent) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_stop_string_over_two_tokens_does_not_leak(cut: int) -> None:
    sent, matched = feed(["ABC", "DEFGHIJ"[:cut], "DEFGHIJ"[cut:] + "K"], ["DEFGHIJ"], False)
    assert (sent, matched) == (["ABC", "", ""], "DEFGHIJ")


def test_a_beginning_that_turns_out_to_be_none_is_sent() -> None:
    assert feed(["one STO", "NE"], ["STOP"], False) == (["one ", "STONE", ""], None)
    assert feed(["one STO"], ["STOP"], False) == (["one ", "STO"], None)


def test_without_stop_strings_nothing_waits() -> None:
    assert StopMatcher([], include_stop=False).push("any") == ("any", None)
