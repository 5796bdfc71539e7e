"""The tokenizer a GGUF file only describes cuts text as the model's own does."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from core.errors import ConfigError, ModelError
from services.common.models.gguf_file import GGUFFile
from services.common.models.gguf_tokenizer import SPACE, merges_from_scores, tokenizer_config, tokenizer_from_gguf
from services.common.models.pretokenizers import PRETOKENIZERS
from tests.unit import tiny_gguf

REFERENCE = Path(__file__).parents[2] / "../shared/data/reference/smollm2_135m_greedy.jsonl"


def tokenizer_of(tmp_path: Path, arch: str = "llama", **metadata: Any) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(tiny_gguf.write(tmp_path / "tiny.gguf", arch, **metadata)))


def words(name: str, text: str) -> list[str]:
    """The words of `text`, spaces and newlines in the byte-level alphabet."""
    return [word for word, _ in PRETOKENIZERS[name].build().pre_tokenize_str(text)]


def test_the_demo_model_tokenises_as_the_reference(demo_model: Path) -> None:
    if not REFERENCE.is_file():
        pytest.skip(f"{REFERENCE} is missing: no reference tokens to compare with")
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    config = json.loads((demo_model / "tokenizer_config.json").read_text())
    template = jinja2.Environment(autoescape=False, keep_trailing_newline=True).from_string(config["chat_template"])
    rows = [json.loads(line) for line in REFERENCE.read_text().splitlines()]
    assert len(rows) == 64
    for row in rows:
        chat = [{"role": "user", "content": row["prompt"]}]
        is_chat = row["kind"] == "chat"
        text = template.render(messages=chat, add_generation_prompt=True) if is_chat else row["prompt"]
        assert tokenizer.encode(text).ids == row["prompt_token_ids"], row["id"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "it's 123  a", ["it", "'s", "Ġ123", "Ġ", "Ġa"]),
        ("starcoder", "it's 123  a", ["it", "'s", "Ġ", "1", "2", "3", "Ġ", "Ġa"]),
        ("llama-bpe", "IT'S 12345\n\n x", ["IT", "'S", "Ġ", "123", "45", "ĊĊ", "Ġx"]),
        ("qwen2", "IT'S 12345\n\n x", ["IT", "'S", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "Ġx"]),
        ("tekken", "helloWorld's 12", ["hello", "World", "'s", "Ġ", "1", "2"]),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", "Ġ", "123", "4"]),
    ],
)
def test_text_is_cut_into_words_as_the_name_says(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


# As the model's own tokenizer.json writes it.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@given(st.text(alphabet=st.sampled_from(list("aÉß'sT 12\n\r\t.,é漢½²\u200b")), max_size=40))
def test_llama3_words_are_those_of_its_published_expression(text: str) -> None:
    published = pre_tokenizers.Split(Regex(LLAMA3), "isolated").pre_tokenize_str(text)
    ours = PRETOKENIZERS["llama-bpe"].build().pre_tokenize_str(text)
    assert [span for _, span in ours] == [span for _, span in published]


def test_special_tokens_are_found_in_text_and_kept_or_dropped_when_decoding(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    ids = tokenizer.encode("ab<tool>b a<|end|>").ids
    assert ids == [14, 1, 3, 15, 0]
    assert tokenizer.decode(ids) == "ab<tool>b a"  # control tokens are special, user-defined ones are text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<tool>b a<|end|>"


@pytest.mark.parametrize(
    ("metadata", "first"),
    [
        ({}, 2),
        ({"tokenizer__ggml__add_bos_token": True}, 0),
        ({"tokenizer__ggml__pre": "llama-bpe"}, 0),  # llama.cpp's default for this name
        ({"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__add_bos_token": False}, 2),
    ],
)
def test_a_start_token_is_added_when_the_file_or_its_kind_says_so(
    tmp_path: Path, metadata: dict[str, Any], first: int
) -> None:
    tokenizer = tokenizer_of(tmp_path, tokenizer__ggml__bos_token_id=0, **metadata)
    assert tokenizer.encode("a").ids[0] == first
    assert tokenizer.encode("a", add_special_tokens=False).ids == [2]


def test_qwen2_text_is_composed_first(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, tokenizer__ggml__pre="qwen2")
    assert isinstance(tokenizer.normalizer, normalizers.NFC)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tokenizer__ggml__merges": ["a b", "a zz"]}, "'a zz'"),
        ({"tokenizer__ggml__merges": ["a b c"]}, "'a b c'"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "2 values for 16 tokens"),
        ({"tokenizer__ggml__bos_token_id": 99, "tokenizer__ggml__add_bos_token": True}, "bos_token_id=99"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges"),
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tokenizer_of(tmp_path, **metadata)


def test_repeated_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="1 repeated"):
        tokenizer_of(tmp_path, tokenizer__ggml__tokens=[*tiny_gguf.TOKENS[:-1], "a"])


def test_roles_and_chat_template_reach_the_config(tmp_path: Path) -> None:
    metadata = {"tokenizer__chat_template": "{{ messages }}", "tokenizer__ggml__padding_token_id": 1}
    config = tokenizer_config(GGUFFile(tiny_gguf.write(tmp_path / "tiny.gguf", **metadata)), 64)
    assert config["chat_template"] == "{{ messages }}"
    assert (config["eos_token"], config["pad_token"]) == ("<|end|>", "<tool>")
    assert "bos_token" not in config


def test_transformers_opens_the_demo_model(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer("naïve 漢字 🙂").input_ids) == "naïve 漢字 🙂"


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [SPACE, *"abcdn", "ab", f"{SPACE}a", f"{SPACE}ab", "an", "nd"]
SCORES = [-1e9] * 6 + [-3.0, -2.0, -1.0, -5.0, -4.0]
SENTENCEPIECE = {
    "tokenizer__ggml__model": "llama",
    "tokenizer__ggml__tokens": ["<unk>", "<s>", "</s>", *BYTES, *PIECES],
    "tokenizer__ggml__token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
    "tokenizer__ggml__scores": [0.0] * 259 + SCORES,
    "tokenizer__ggml__bos_token_id": 1,
    "tokenizer__ggml__eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["<s>", f"{SPACE}ab"]),
        ("and", ["<s>", f"{SPACE}a", "nd"]),  # the best score first, not the leftmost
        ("b ab</s>d", ["<s>", SPACE, "b", f"{SPACE}ab", "</s>", SPACE, "d"]),
        ("é", ["<s>", SPACE, "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_text_merges_by_score(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert tokenizer_of(tmp_path, **SENTENCEPIECE).encode(text).tokens == expected


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("spm"), **SENTENCEPIECE)


@given(text=st.text(alphabet=st.sampled_from(list("abdn é漢\n")), max_size=30))
def test_sentencepiece_text_survives_the_round_trip(sentencepiece: Tokenizer, text: str) -> None:
    assert sentencepiece.decode(sentencepiece.encode(text).ids) == text


def test_phi3_drops_white_space_after_its_control_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "phi3", **SENTENCEPIECE)
    assert tokenizer.encode("</s>\n\nab").ids == [1, 2, tokenizer.token_to_id(f"{SPACE}ab")]


def test_merges_are_ordered_by_the_score_of_their_union() -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
    assert merges_from_scores([("ab", -2.0), ("abc", -1.0)], vocab) == [("ab", "c"), ("a", "b")]
