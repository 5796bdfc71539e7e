"""OpenAI answers: chunks and ends of `RouterCore.generate` to JSON, whole or as server-sent events.

All JSON is ASCII (U+2028 inside an event confuses clients) and strict (no Infinity). The role is in the first token's
event, not sent before: clients take the first event for the first token.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.sequence import TokenLogprobs
from services.router.api import Chunk, Done
from services.router.openai_schema import HttpCall

DONE_EVENT = b"data: [DONE]\n\n"

TokenText = Callable[[int], str]
_MARK = "\x00"


@dataclass(slots=True)
class Prompt:
    """What is known of one prompt of a call, for those who want it back."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of every token but the first

    def add(self, part: Chunk) -> None:
        """Take what a part of the stream says about it."""
        if part.echoed is not None:
            self.text, self.token_ids = part.echoed.text, part.echoed.token_ids
        self.logprobs += part.prompt_logprobs


@dataclass(slots=True)
class Answer:
    """One choice as far as it is known."""

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
    has_own_prompt: bool  # each choice tells of its prompt, not the answer of the one that all share

    def delta(self, index: int, part: Chunk, finish_reason: str | None, echoed: Prompt | None) -> dict[str, Any]:
        """A choice of an event; `echoed` with its first one, if it begins with its prompt."""

    def whole(self, index: int, answer: Answer, echoed: Prompt | None) -> dict[str, Any]:
        """A choice of a whole answer, which begins with its prompt if that is given."""


class ChatChoices:
    """Choices of `chat/completions`."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    has_own_prompt = False

    def __init__(self, token_text: TokenText, *, logprobs: int | None) -> None:
        self._token_text = token_text
        self._has_logprobs = logprobs is not None
        self._begun: set[int] = set()

    def delta(self, index: int, part: Chunk, finish_reason: str | None, echoed: Prompt | None) -> dict[str, Any]:
        """As `Choices.delta`."""
        assert echoed is None, "a chat is not echoed"
        delta: dict[str, Any] = {}
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": part.text}
        elif finish_reason is None:
            delta = {"content": part.text}
        logprobs = self._logprobs(part.logprobs) if part.logprobs else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def whole(self, index: int, answer: Answer, echoed: Prompt | None) -> dict[str, Any]:
        """As `Choices.whole`."""
        assert answer.done is not None
        assert echoed is None, "a chat is not echoed"
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
        return {"token": text, "logprob": logprob, "bytes": own_bytes}


class CompletionChoices:
    """Choices of `completions`."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"
    has_own_prompt = True

    def __init__(self, token_text: TokenText, *, logprobs: int | None) -> None:
        self._token_text = token_text
        self._has_logprobs = logprobs is not None
        self._num_top = logprobs or 0  # a prompt may come with more
        self._offsets: dict[int, int] = {}  # per index: where the next token's text begins

    def delta(self, index: int, part: Chunk, finish_reason: str | None, echoed: Prompt | None) -> dict[str, Any]:
        """As `Choices.delta`."""
        text = part.text if echoed is None else echoed.text + part.text
        has_logprobs = bool(part.logprobs) or (echoed is not None and self._has_logprobs)
        logprobs = self._logprobs(index, part.logprobs, echoed) if has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def whole(self, index: int, answer: Answer, echoed: Prompt | None) -> dict[str, Any]:
        """As `Choices.whole`."""
        assert answer.done is not None
        return {
            "index": index,
            "text": ("" if echoed is None else echoed.text) + "".join(answer.text),
            "logprobs": self._logprobs(index, answer.logprobs, echoed) if self._has_logprobs else None,
            "finish_reason": answer.done.finish_reason,
        }

    def _logprobs(self, index: int, tokens: Iterable[TokenLogprobs], echoed: Prompt | None) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        texts: list[str] = []
        values: list[float | None] = []
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        if echoed is not None:
            first = self._token_text(echoed.token_ids[0])
            texts, values, offsets, tops = [first], [None], [offset], [None]  # nothing before it could foretell it
            offset += len(first)
            tokens = [*echoed.logprobs, *tokens]
        for token in tokens:
            text = self._token_text(token.token_id)
            texts.append(text)
            values.append(token.logprob)
            offsets.append(offset)
            offset += len(text)
            top = {self._token_text(token_id): logprob for token_id, logprob in token.top[: self._num_top]}
            tops.append(top | {text: token.logprob})  # the chosen token is always among them
        self._offsets[index] = offset
        return {"tokens": texts, "token_logprobs": values, "text_offset": offsets, "top_logprobs": tops}


class AnswerWriter:
    """Writes one POST's answer, whole or event by event."""

    def __init__(
        self, choices: Choices, call: HttpCall, token_text: TokenText, *, answer_id: str, model: str, created: int
    ) -> None:
        """Begin an answer.

        Args:
            choices: the call's spelling.
            call: says what the answer shows.
            token_text: how a token reads alone.
            answer_id: the public id.
            model: the name the client knows.
            created: unix time in whole seconds.
        """
        self._choices = choices
        self._call = call
        self._token_text = token_text
        self._head: dict[str, Any] = {"id": answer_id, "object": "", "created": created, "model": model}
        self._prompts: defaultdict[int, Prompt] = defaultdict(Prompt)
        self._begun: set[int] = set()
        self._plain: dict[int, tuple[bytes, bytes]] = {}  # per index: what surrounds the text of a plain token's event

    def take_prompt(self, index: int, part: Chunk) -> None:
        """Keep what a part says about its prompt, which is said once, for all choices of that prompt."""
        if part.echoed is not None or part.prompt_logprobs:
            self._prompts[index // self._call.n].add(part)

    def event(self, index: int, part: Chunk) -> bytes:
        """The event of one chunk."""
        if index in self._plain and not part.logprobs and not self._call.return_token_ids:
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
        return self._encode_event([], {}, usage(ends))

    def whole(self, answers: Iterable[Answer]) -> bytes:
        """The whole answer as one JSON object."""
        answers = list(answers)
        choices = []
        extra: dict[str, Any] = {}
        for index, answer in enumerate(answers):
            assert answer.done is not None
            choice = self._choices.whole(index, answer, self._echoed(index))
            self._add_extras(choice, answer.token_ids, answer.done)
            self._add_prompt_logprobs(choice if self._choices.has_own_prompt else extra, index)
            choices.append(choice)
        head = self._head | {"object": self._choices.object_name}
        ends = [answer.done for answer in answers if answer.done is not None]
        return encode_json(head | {"choices": choices, "usage": usage(ends)} | extra)

    def _choice_event(self, index: int, part: Chunk, done: Done | None) -> bytes:
        is_first = index not in self._begun
        self._begun.add(index)
        reason = None if done is None else done.finish_reason
        choice = self._choices.delta(index, part, reason, self._echoed(index) if is_first else None)
        self._add_extras(choice, part.token_ids, done)
        extra: dict[str, Any] = {}
        if is_first:
            self._add_prompt_logprobs(choice if self._choices.has_own_prompt else extra, index)
        return self._encode_event([choice], extra, None)

    def _echoed(self, index: int) -> Prompt | None:
        return self._prompts[index // self._call.n] if self._call.echo else None

    def _add_extras(self, choice: dict[str, Any], token_ids: Iterable[int], done: Done | None) -> None:
        if self._call.return_token_ids:
            choice["token_ids"] = list(token_ids)
        if done is not None and done.matched_stop:
            choice["stop_reason"] = done.matched_stop

    def _add_prompt_logprobs(self, place: dict[str, Any], index: int) -> None:
        """In vLLM's form: by position, then by token id; the first token has none."""
        if self._call.prompt_logprobs is None or "prompt_logprobs" in place:
            return
        num_top = self._call.prompt_logprobs
        entries = self._prompts[index // self._call.n].logprobs
        place["prompt_logprobs"] = [None, *(self._prompt_entry(entry, num_top) for entry in entries)]

    def _prompt_entry(self, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
        # A token that is not among the best has a rank that nobody counted.
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top[:num_top], start=1)}
        values = {entry.token_id: entry.logprob} | dict(entry.top[:num_top])
        return {
            str(token_id): {
                "logprob": logprob,
                "rank": ranks.get(token_id),
                "decoded_token": self._token_text(token_id),
            }
            for token_id, logprob in values.items()
        }

    def _encode_event(
        self, choices: list[dict[str, Any]], extra: dict[str, Any], usage_value: dict[str, Any] | None
    ) -> bytes:
        payload = self._head | {"object": self._choices.chunk_object_name, "choices": choices} | extra
        if self._call.include_usage:
            payload["usage"] = usage_value
        return event_of(payload)


def usage(ends: Iterable[Done]) -> dict[str, Any]:
    """Token counts over all prompts of a call, each prompt counted once, and all answers."""
    prompt = completion = cached = 0
    for done in ends:
        completion += done.completion_tokens
        if done.index == 0:
            prompt += done.prompt_tokens
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
