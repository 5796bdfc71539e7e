"""Finds stop strings in text that arrives in pieces, and never lets a part of one out too early."""

from collections.abc import Sequence


class StopMatcher:
    """Watches one answer. The earliest-ending match wins; among those that end together, the longest.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        """Begin an answer.

        Args:
            stops: non-empty strings.
            include_stop: whether the matched string stays in the text.
        """
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""  # text not let out yet: the longest end of it that may begin a stop string

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Nothing may be pushed after a match.

        Returns:
            Text that is safe to send now, and the stop string that ended the answer, if one did.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        if (match := self._first_match(text)) is not None:
            end, stop = match
            self._held = ""
            return text[: end if self._include_stop else end - len(stop)], stop
        safe = len(text) - self._held_chars(text)
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """End the answer without a match: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                found = (start + len(stop), -len(stop), stop)
                best = found if best is None else min(best, found)
        return None if best is None else (best[0], best[2])

    def _held_chars(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
