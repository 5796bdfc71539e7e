"""OpenAI request bodies: JSON bytes to `GenerateCall`s, or an error that names the field as the client spelled it.

Unknown fields are ignored, null is absent. A known field whose feature Baton does not have is taken while it has the value
that changes nothing, and refused by name otherwise: to ignore it would answer another question than the one asked.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from core.errors import InvalidRequestError
from core.ids import REQUEST_ID
from core.sampling import MAX_TOP_LOGPROBS, SamplingParams
from services.router.api import ChatMessage, GenerateCall

MAX_PROMPTS = 64  # of one completions call

# Per field: the values that change nothing. None (null) is always one.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "grammar": (),
    "choice": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "lora_name": ("",),
}

_Later = msgspec.defstruct("_Later", [(name, Any, None) for name in _NEUTRAL])

T = TypeVar("T")


class _StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class _TextPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class _Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[_TextPart] | None = None
    tool_calls: list[Any] | None = None


class _Body(msgspec.Struct, kw_only=True):
    """What both calls share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[_Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """One POST as understood: its calls in the order of their `index`, and how the client wants the answer."""

    request_id: str
    calls: tuple[GenerateCall, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    prompt_logprobs: int | None = None  # how many beside each prompt token the answer shows in vLLM's form
    is_score_only: bool = False  # max_tokens=0: the prompt is echoed and nothing is added to it

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return self.calls[0].n

    @property
    def echo(self) -> bool:
        """Whether every answer begins with its prompt."""
        return self.calls[0].echo

    @property
    def logprobs(self) -> int | None:
        """How many log-probabilities are shown beside each token's own; None for none at all."""
        return self.calls[0].sampling.logprobs


def parse_chat(data: bytes, request_id: str) -> HttpCall:
    """Understand the body of `POST /v1/chat/completions`.

    Raises:
        InvalidRequestError: the body or a field is wrong, or asks for something Baton does not have.
    """
    body = _decode(data, _ChatBody)
    if not body.messages:
        raise InvalidRequestError("messages", "at least one message is required")
    logprobs = None
    if body.logprobs:
        logprobs = 0 if body.top_logprobs is None else body.top_logprobs
        _check_range("top_logprobs", logprobs, 0, MAX_TOP_LOGPROBS)
    elif body.top_logprobs:
        raise InvalidRequestError("top_logprobs", f"{body.top_logprobs} needs logprobs=true")
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
        _check_range("max_completion_tokens", max_tokens, 1, 2**31 - 1)
    if body.echo:
        raise InvalidRequestError("echo", "is for completions; leave the field out")
    call = GenerateCall(
        request_id=request_id,
        chat=tuple(_chat_message(index, message) for index, message in enumerate(body.messages)),
        **_shared(body, _sampling(body, max_tokens, logprobs, body.prompt_logprobs)),
    )
    return _http_call(body, request_id, (call,))


def parse_completion(data: bytes, request_id: str) -> HttpCall:
    """Understand the body of `POST /v1/completions`.

    Raises:
        InvalidRequestError: the body or a field is wrong, or asks for something Baton does not have.
    """
    body = _decode(data, _CompletionBody)
    if body.logprobs is not None:
        _check_range("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    # To score a prompt, the engine computes it and samples one token, which nobody gets to see.
    is_score_only = bool(body.echo) and body.max_tokens == 0
    shared = _shared(body, _sampling(body, 1 if is_score_only else body.max_tokens, body.logprobs, prompt_logprobs))
    prompts = _prompts(body.prompt)
    calls = []
    for index, prompt in enumerate(prompts):
        call_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
        if not REQUEST_ID.fullmatch(call_id):
            raise InvalidRequestError("X-Request-Id", f"{len(request_id)} characters is too long for several prompts")
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        calls.append(GenerateCall(request_id=call_id, text=text, token_ids=ids, echo=bool(body.echo), **shared))
    return _http_call(body, request_id, tuple(calls), is_score_only=is_score_only)


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        later = msgspec.json.decode(data, type=_Later)
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except msgspec.DecodeError as error:
        raise _not_json(data, str(error)) from None
    except RecursionError:
        raise InvalidRequestError("body", "JSON nested too deeply") from None
    for name, neutral in _NEUTRAL.items():
        value = getattr(later, name)
        if value is not None and value not in neutral:
            raise InvalidRequestError(name, f"{_shown(value)} is not supported; leave the field out")
    return body


_ERROR_PATH = re.compile(r"(?P<reason>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(\w+)`")


def _wrong_type(message: str) -> InvalidRequestError:
    """Turn msgspec's "Expected `int | null`, got `str` - at `$.max_tokens`" into an error of that field."""
    match = _ERROR_PATH.fullmatch(message)
    assert match is not None, message
    path, reason = match["path"] or "", match["reason"]
    if missing := _MISSING_FIELD.fullmatch(reason):
        return InvalidRequestError(f"{path}.{missing[1]}" if path else missing[1], "is required")
    return InvalidRequestError(path or "body", reason[:1].lower() + reason[1:])


def _not_json(data: bytes, reason: str) -> InvalidRequestError:
    """Say what is wrong with bytes that msgspec refuses; half a surrogate pair is legal JSON and gets its field's name."""
    try:
        loose = json.loads(data.decode())
    except (ValueError, RecursionError):
        return InvalidRequestError("body", f"not JSON: {reason}")
    for path, text in _strings(loose):
        for position, char in enumerate(text):
            if "\ud800" <= char <= "\udfff":
                return InvalidRequestError(
                    path, f"half of a surrogate pair (U+{ord(char):04X}) at character {position}"
                )
    return InvalidRequestError("body", f"not strict JSON: {reason}")


def _strings(value: object) -> Iterator[tuple[str, str]]:
    """Every string in parsed JSON with its path. Iterative: the nesting is the client's."""
    stack = [("", value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, str):
            yield path or "body", item
        elif isinstance(item, list):
            stack += [(f"{path}[{index}]", element) for index, element in enumerate(item)]
        elif isinstance(item, dict):
            for key, element in item.items():
                yield path or "body", key
                stack.append((f"{path}.{key}" if path else key, element))


def _chat_message(index: int, message: _Message) -> ChatMessage:
    field = f"messages[{index}]"
    if message.tool_calls:
        raise InvalidRequestError(f"{field}.tool_calls", "is not supported; leave the field out")
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequestError(f"{field}.content", "is required")
        content = ""
    if isinstance(content, str):
        return ChatMessage(role=message.role, content=content)
    texts = []
    for number, part in enumerate(content):
        if part.type != "text":
            raise InvalidRequestError(
                f"{field}.content[{number}].type", f"{part.type!r} is not supported; only 'text' is"
            )
        if part.text is None:
            raise InvalidRequestError(f"{field}.content[{number}].text", "is required")
        texts.append(part.text)
    return ChatMessage(role=message.role, content="".join(texts))


def _prompts(prompt: str | list[str | int | list[int]] | None) -> list[str | tuple[int, ...]]:
    """A prompt is a text, token ids, or a list of either."""
    if prompt is None or len(prompt) == 0:
        raise InvalidRequestError("prompt", "a text or token ids are required")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [_ids("prompt", prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError("prompt", f"{len(prompt)} prompts, at most {MAX_PROMPTS} in one call")
    prompts: list[str | tuple[int, ...]] = []
    for index, item in enumerate(prompt):
        if not item:
            raise InvalidRequestError(f"prompt[{index}]", "a text or token ids are required")
        if type(item) is not type(prompt[0]) or isinstance(item, int):
            raise InvalidRequestError(
                f"prompt[{index}]", "all prompts of a call must be texts, or all lists of token ids"
            )
        prompts.append(item if isinstance(item, str) else _ids(f"prompt[{index}]", item))
    return prompts


def _ids(field: str, items: list[str | int | list[int]] | list[int]) -> tuple[int, ...]:
    ids = tuple(item for item in items if isinstance(item, int))
    if len(ids) != len(items):
        raise InvalidRequestError(field, "token ids and texts are mixed")
    return ids


def _shared(body: _Body, sampling: SamplingParams) -> dict[str, Any]:
    """The fields of `GenerateCall` that all prompts of a POST have in common."""
    n = 1 if body.n is None else body.n
    if body.best_of not in (None, n):
        raise InvalidRequestError("best_of", f"{body.best_of} is not n={n}; every answer is returned")
    return {
        "model": body.model or "",
        "sampling": sampling,
        "n": n,
        "priority": body.priority or 0,
        "cache_salt": body.cache_salt or "",
    }


def _sampling(body: _Body, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
    default = SamplingParams()
    stop = body.stop if body.stop is not None else []
    return SamplingParams(
        temperature=default.temperature if body.temperature is None else body.temperature,
        top_p=default.top_p if body.top_p is None else body.top_p,
        top_k=default.top_k if body.top_k in (None, -1) else body.top_k,
        min_p=default.min_p if body.min_p is None else body.min_p,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        seed=body.seed,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=default.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_bias(body.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            shown = key if len(key) <= 20 else f"{key[:20]}..."
            raise InvalidRequestError("logit_bias", f"{shown!r} is not a token id")
    return tuple((int(key), bias) for key, bias in given.items())


def _http_call(
    body: _Body, request_id: str, calls: tuple[GenerateCall, ...], *, is_score_only: bool = False
) -> HttpCall:
    options = body.stream_options
    return HttpCall(
        request_id=request_id,
        calls=calls,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        is_score_only=is_score_only,
    )


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(field, f"{value} is not in [{low}, {high}]")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
