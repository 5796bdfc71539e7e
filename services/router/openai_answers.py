"""OpenAI answers: chunks and ends of `RouterCore.generate` to JSON, whole or as server-sent events.

All JSON is ASCII (U+2028 inside an event confuses clients) and strict (no Infinity). The role is in the first token's
event, not sent before: clients take the first event for the first token.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.sequence import TokenLogprobs
from services.router.api import Chunk, Done

MIN_LOGPROB = -9999.0  # stands for -inf, which JSON cannot say
DONE_EVENT = b"data: [DONE]\n\n"

TokenText = Callable[[int], str]
_MARK = "\x00"


@dataclass(slots=True)
class Answer:
    """One prompt's answer as far as it is known."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    done: Done | None = None

    def add(self, part: Chunk | Done) -> None:
        """Take the next part of the stream."""
        if isinstance(part, Done):
            self.done = part
            return
        self.text.append(part.text)
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs


class Choices(Protocol):
    """How one of the two calls spells a choice; keeps what must go on from chunk to chunk."""

    object_name: str  # of a whole answer
    chunk_object_name: str  # of an event

    def delta(self, index: int, part: Chunk, finish_reason: str | None) -> dict[str, Any]:
        """A choice of an event."""

    def whole(self, index: int, answer: Answer) -> dict[str, Any]:
        """A choice of a whole answer."""


class ChatChoices:
    """Choices of `chat/completions`."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, token_text: TokenText, *, has_logprobs: bool) -> None:
        self._token_text = token_text
        self._has_logprobs = has_logprobs
        self._begun: set[int] = set()

    def delta(self, index: int, part: Chunk, finish_reason: str | None) -> dict[str, Any]:
        """As `Choices.delta`."""
        delta: dict[str, Any] = {}
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": part.text}
        elif finish_reason is None:
            delta = {"content": part.text}
        logprobs = self._logprobs(part.logprobs) if part.logprobs else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def whole(self, index: int, answer: Answer) -> dict[str, Any]:
        """As `Choices.whole`."""
        assert answer.done is not None
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(answer.text), "refusal": None},
            "logprobs": self._logprobs(answer.logprobs) if self._has_logprobs else None,
            "finish_reason": answer.done.finish_reason,
        }

    def _logprobs(self, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
        content = []
        for token in tokens:
            top = [self._token(token_id, logprob) for token_id, logprob in token.top]
            content.append(self._token(token.token_id, token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        # A token that is a part of a character has no text of its own, so its bytes are not known here.
        own_bytes = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": own_bytes}


class CompletionChoices:
    """Choices of `completions`."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, token_text: TokenText, *, has_logprobs: bool) -> None:
        self._token_text = token_text
        self._has_logprobs = has_logprobs
        self._offsets: dict[int, int] = {}  # per index: where the next token's text begins

    def delta(self, index: int, part: Chunk, finish_reason: str | None) -> dict[str, Any]:
        """As `Choices.delta`."""
        logprobs = self._logprobs(index, part.logprobs) if part.logprobs else None
        return {"index": index, "text": part.text, "logprobs": logprobs, "finish_reason": finish_reason}

    def whole(self, index: int, answer: Answer) -> dict[str, Any]:
        """As `Choices.whole`."""
        assert answer.done is not None
        return {
            "index": index,
            "text": "".join(answer.text),
            "logprobs": self._logprobs(index, answer.logprobs) if self._has_logprobs else None,
            "finish_reason": answer.done.finish_reason,
        }

    def _logprobs(self, index: int, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        texts, values, offsets, tops = [], [], [], []
        for token in tokens:
            text = self._token_text(token.token_id)
            texts.append(text)
            values.append(_finite(token.logprob))
            offsets.append(offset)
            offset += len(text)
            top = {self._token_text(token_id): _finite(logprob) for token_id, logprob in token.top}
            tops.append(top | {text: _finite(token.logprob)})  # the chosen token is always among them
        self._offsets[index] = offset
        return {"tokens": texts, "token_logprobs": values, "text_offset": offsets, "top_logprobs": tops}


class AnswerWriter:
    """Writes one POST's answer, whole or event by event."""

    def __init__(
        self, choices: Choices, *, answer_id: str, model: str, created: int, with_usage: bool, with_token_ids: bool
    ) -> None:
        """Begin an answer.

        Args:
            choices: the call's spelling.
            answer_id: the public id.
            model: the name the client knows.
            created: unix time in whole seconds.
            with_usage: a stream ends in a usage event.
            with_token_ids: every choice carries its token ids.
        """
        self._choices = choices
        self._with_token_ids = with_token_ids
        self._with_usage = with_usage
        self._head: dict[str, Any] = {"id": answer_id, "object": "", "created": created, "model": model}
        self._plain: dict[int, tuple[bytes, bytes]] = {}  # per index: what surrounds the text of a plain token's event

    def event(self, index: int, part: Chunk) -> bytes:
        """The event of one chunk."""
        if index in self._plain and not part.logprobs and not self._with_token_ids:
            before, after = self._plain[index]
            return before + json.dumps(part.text).encode("ascii") + after
        event = self._choice_event(index, part, None)
        if index not in self._plain:
            # Only the text differs from now on: encode the rest once, not once a token.
            template = self._choice_event(index, Chunk(text=_MARK), None)
            before, _, after = template.rpartition(json.dumps(_MARK).encode("ascii"))
            self._plain[index] = before, after
        return event

    def end_event(self, index: int, done: Done) -> bytes:
        """The event with the finish reason."""
        return self._choice_event(index, Chunk(), done)

    def usage_event(self, ends: Iterable[Done]) -> bytes:
        """The last event before `DONE_EVENT`, for a client that asked for usage."""
        return self._encode_event([], usage(ends))

    def whole(self, answers: Iterable[Answer]) -> bytes:
        """The whole answer as one JSON object."""
        answers = list(answers)
        choices = []
        for index, answer in enumerate(answers):
            assert answer.done is not None
            choice = self._choices.whole(index, answer)
            self._add_extras(choice, answer.token_ids, answer.done)
            choices.append(choice)
        head = self._head | {"object": self._choices.object_name}
        ends = [answer.done for answer in answers if answer.done is not None]
        return encode_json(head | {"choices": choices, "usage": usage(ends)})

    def _choice_event(self, index: int, part: Chunk, done: Done | None) -> bytes:
        choice = self._choices.delta(index, part, None if done is None else done.finish_reason)
        self._add_extras(choice, part.token_ids, done)
        return self._encode_event([choice], None)

    def _add_extras(self, choice: dict[str, Any], token_ids: Iterable[int], done: Done | None) -> None:
        if self._with_token_ids:
            choice["token_ids"] = list(token_ids)
        if done is not None and done.matched_stop:
            choice["stop_reason"] = done.matched_stop

    def _encode_event(self, choices: list[dict[str, Any]], usage_value: dict[str, Any] | None) -> bytes:
        payload = self._head | {"object": self._choices.chunk_object_name, "choices": choices}
        if self._with_usage:
            payload["usage"] = usage_value
        return event_of(payload)


def usage(ends: Iterable[Done]) -> dict[str, Any]:
    """Token counts over all prompts of a call."""
    prompt = completion = cached = 0
    for done in ends:
        prompt += done.prompt_tokens
        completion += done.completion_tokens
        cached += done.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def event_of(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(payload) + b"\n\n"


def encode_json(payload: dict[str, Any]) -> bytes:
    """Strict JSON in ASCII."""
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).encode("ascii")


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
