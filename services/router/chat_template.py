"""A model's chat template: messages to the prompt text it was trained on.

Templates come with models and are run in jinja2's sandbox with what Hugging Face gives them (transformers,
`utils/chat_template_utils.py`): `raise_exception`, `strftime_now`, `tojson`, loop controls, the `generation` tag, the
special tokens by name. A rendered prompt has its own special tokens: tokenise it with `add_special=False`.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import InvalidRequestError, ModelError
from services.router.api import ChatMessage
from services.router.tokenizer import MAX_CHARS_PER_TOKEN, read_tokenizer_config

INLINE_MESSAGES = 64  # about a millisecond of rendering; more goes to a thread
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One model's template, compiled. Holds no request state."""

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile a template.

        Args:
            source: jinja2; None for a model without one, which then refuses chats.
            special_tokens: what the template may name, e.g. `bos_token`.
            now: the local time, for templates that print the date.
        Raises:
            ModelError: it does not compile.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._template = None if source is None else _environment(now).from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"chat template: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `chat_template.jinja`, else the template in `tokenizer_config.json`, else have none.

        Raises:
            ModelError: a file is malformed or the template does not compile.
        """
        config = read_tokenizer_config(folder)
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else _default_template(config.get("chat_template"))
        tokens = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
        return cls(source, tokens)

    def render(self, messages: Sequence[ChatMessage], *, max_model_len: int) -> str:
        """The prompt of a chat, ready for the assistant's answer.

        Args:
            messages: oldest first.
            max_model_len: the model's context in tokens; bounds the work and the result.
        Raises:
            InvalidRequestError: the model has no template, it refuses the messages, or the prompt gets too long.
        """
        if self._template is None:
            raise InvalidRequestError(
                "messages", "this model has no chat template; use completions with a whole prompt"
            )
        if not messages:
            raise InvalidRequestError("messages", "must hold at least one message")
        if len(messages) > max_model_len:
            raise InvalidRequestError(
                "messages", f"{len(messages)} messages cannot fit a context of {max_model_len} tokens"
            )
        variables = {
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            **self._special_tokens,
        }
        try:
            return self._render_bounded(variables, max_model_len * MAX_CHARS_PER_TOKEN)
        except InvalidRequestError:
            raise
        except Exception as error:
            # A template is the model author's code run on the client's data: it may raise anything.
            raise InvalidRequestError("messages", f"the model's chat template refused them: {error}") from error

    async def render_async(self, messages: Sequence[ChatMessage], *, max_model_len: int) -> str:
        """As `render`, but a long chat is rendered in a worker thread, so that no stream waits for it."""
        if len(messages) <= INLINE_MESSAGES:
            return self.render(messages, max_model_len=max_model_len)
        return await asyncio.to_thread(self.render, messages, max_model_len=max_model_len)

    def _render_bounded(self, variables: dict[str, Any], max_chars: int) -> str:
        assert self._template is not None
        parts: list[str] = []
        left = max_chars
        for part in self._template.generate(variables):
            left -= len(part)
            if left < 0:
                raise InvalidRequestError("messages", f"their prompt is longer than {max_chars} characters, the limit")
            parts.append(part)
        return "".join(parts)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; serving only needs the words."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:  # noqa: A002 - templates may pass it by name
        return now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, does not escape for HTML: models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _default_template(entry: object) -> str | None:
    """The configuration holds one template, or a list of named ones of which `default` is for chats."""
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, list):
        for named in entry:
            if isinstance(named, dict) and named.get("name") == "default":
                return str(named.get("template"))
        return None
    raise ModelError("tokenizer_config.json: chat_template must be a string or a list of named templates")


def _content(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)
