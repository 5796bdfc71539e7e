"""How text is cut into words before BPE, by the name GGUF gives it (`tokenizer.ggml.pre`).

The expressions are the ones of the models' own tokenizer.json; GGUF carries none, only a name that llama.cpp resolves.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_PUNCTUATION_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_LLAMA3 = _CONTRACTIONS + rf"|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}" + _PUNCTUATION + _TAIL
_QWEN2 = _CONTRACTIONS + rf"|{_LEAD}\p{{L}}+|\p{{N}}" + _PUNCTUATION + _TAIL
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}" + _PUNCTUATION_SLASH + _TAIL
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    + _PUNCTUATION_SLASH
    + _TAIL
)


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """One way of cutting text into words, and what llama.cpp ties to its name."""

    pattern: str | None = None  # None: GPT-2's own
    splits_digits: bool = False  # every digit is a word of its own
    is_nfc: bool = False
    ignores_merges: bool = False  # a word that is a token is taken whole
    adds_bos: bool = False  # when the file does not say

    def build(self) -> Any:
        """The `tokenizers` object, ending in the byte-level alphabet."""
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        if self.splits_digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if self.pattern is None:
            return byte_level
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(self.pattern), "isolated"), byte_level])


_GPT2 = Pretokenizer()
_DIGITS = Pretokenizer(splits_digits=True)

PRETOKENIZERS: dict[str, Pretokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    # llama.cpp and SmolLM's own tokenizer.json cut at digits before anything else, transformers' GGUF reader does not. No merge
    # joins digits, so only white space before one differs ("\\n    0" is "\\n   ", " ", "0" here); the reference tokens decide.
    "smollm": _GPT2,
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
        Pretokenizer(_LLAMA3, ignores_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), Pretokenizer(_LLAMA3)),
    "qwen2": Pretokenizer(_QWEN2, is_nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), Pretokenizer(_QWEN2)),
    "tekken": Pretokenizer(_TEKKEN, ignores_merges=True, adds_bos=True),
    "gpt-4o": Pretokenizer(_GPT4O),
}
