"""Chat templates: what models' templates rely on, and that a bad one or bad messages cost a precise error."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from core.errors import InvalidRequestError, ModelError
from services.router.api import ChatMessage
from services.router.chat_template import INLINE_MESSAGES, ChatTemplate

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = (ChatMessage(role="user", content="Hello"),)


def render(source: str | None, messages: tuple[ChatMessage, ...] = HELLO, *, max_model_len: int = 1000) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 7, 26))
    return template.render(messages, max_model_len=max_model_len)


def test_a_chat_ends_where_the_assistant_begins() -> None:
    assert render(CHATML) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}x", "<s>x"),
        ("{{ strftime_now('%d %B %Y') }}", "26 July 2026"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for m in messages %}{% break %}{% endfor %}done", "done"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hello"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("  {% if true %}\nline\n  {% endif %}\nend", "line\nend"),
        ("{{ tools is none }}{{ eos_token is defined }}", "TrueFalse"),
    ],
)
def test_what_templates_rely_on(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "no chat template; use completions"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refused them"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "longer than 32000 characters"),
    ],
)
def test_a_refusal_is_the_requests_error_and_names_the_field(source: str | None, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        render(source)
    assert caught.value.field == "messages"


def test_no_messages_and_too_many_messages_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one"):
        render(CHATML, ())
    with pytest.raises(InvalidRequestError, match="3 messages cannot fit"):
        render(CHATML, HELLO * 3, max_model_len=2)


async def test_a_long_chat_renders_the_same_in_a_thread() -> None:
    template, messages = ChatTemplate(CHATML, {}), HELLO * (INLINE_MESSAGES + 1)
    assert await template.render_async(messages, max_model_len=1000) == template.render(messages, max_model_len=1000)


def test_a_template_is_found_where_models_keep_it(tmp_path: Path) -> None:
    def loaded(config: dict[str, object]) -> str:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return ChatTemplate.load(tmp_path).render(HELLO, max_model_len=100)

    assert loaded({"chat_template": "plain {{ eos_token }}", "eos_token": {"content": "</s>"}}) == "plain </s>"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]
    assert loaded({"chat_template": named, "eos_token": None}) == "named"
    with pytest.raises(InvalidRequestError, match="no chat template"):
        loaded({})
    with pytest.raises(ModelError, match="string or a list"):
        loaded({"chat_template": 3})
    (tmp_path / "chat_template.jinja").write_text("file")
    assert loaded({"chat_template": "plain"}) == "file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match="chat template"):
        loaded({})
