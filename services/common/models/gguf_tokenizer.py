"""`tokenizer.json` and `tokenizer_config.json` from the vocabulary a GGUF file carries.

Two kinds: byte-level BPE (`tokenizer.ggml.model` = gpt2), whose word splitting GGUF only names, and SentencePiece BPE (llama).
"""

from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from core.errors import ConfigError, ModelError
from services.common.models.gguf_file import GGUFFile
from services.common.models.pretokenizers import PRETOKENIZERS, Pretokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece spells a space


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        ModelError: its kind or its word splitting is unknown to Baton; it is named.
        ConfigError: the vocabulary is damaged.
    """
    kind = file.require("tokenizer.ggml.model", str)
    if file.get("tokenizer.ggml.add_eos_token", bool, False):
        raise ModelError(
            f"{file.path}: needs add_eos_token, an end token after every prompt, which Baton does not have"
        )
    tokens = file.require("tokenizer.ggml.tokens", list)
    for key in ("token_type", "scores") if kind == "llama" else ("token_type",):
        if (num_values := len(file.require(f"tokenizer.ggml.{key}", list))) != len(tokens):
            raise ConfigError(f"{file.path}: tokenizer.ggml.{key} has {num_values} values for {len(tokens)} tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError(f"{file.path}: needs a vocabulary with {len(tokens) - len(vocab)} repeated tokens")
    if kind == "gpt2":
        pre = _pretokenizer(file)
        tokenizer, adds_bos = _byte_level(file, vocab, pre), pre.adds_bos
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(file, vocab), True
    else:
        raise ModelError(
            f"{file.path}: needs tokenizer {kind}; Baton has gpt2 (byte-level BPE) and llama (SentencePiece)"
        )
    tokenizer.add_tokens(_added_tokens(file, tokens))
    if file.get("tokenizer.ggml.add_bos_token", bool, adds_bos):
        tokenizer.post_processor = _bos_template(tokens, _token_id(file, "bos"))
    return tokenizer


def tokenizer_config(file: GGUFFile, max_tokens: int) -> dict[str, Any]:
    """The content of `tokenizer_config.json`: the special tokens by role and the chat template.

    Args:
        file: the GGUF file.
        max_tokens: the model's context length.
    """
    tokens = file.require("tokenizer.ggml.tokens", list)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": file.get("tokenizer.ggml.add_bos_token", bool, _adds_bos(file)),
        "add_eos_token": False,
    }
    for role, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if file.has(f"tokenizer.ggml.{name}_token_id"):
            config[f"{role}_token"] = tokens[_token_id(file, name)]
    if file.has("tokenizer.chat_template"):
        config["chat_template"] = file.require("tokenizer.chat_template", str)
    return config


def _adds_bos(file: GGUFFile) -> bool:
    return file.require("tokenizer.ggml.model", str) == "llama" or _pretokenizer(file).adds_bos


def _pretokenizer(file: GGUFFile) -> Pretokenizer:
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in PRETOKENIZERS:
        raise ModelError(f"{file.path}: needs pre-tokenizer {name}; Baton has {', '.join(sorted(PRETOKENIZERS))}")
    return PRETOKENIZERS[name]


def _token_id(file: GGUFFile, name: str) -> int:
    token_id = file.require(f"tokenizer.ggml.{name}_token_id", int)
    num_tokens = len(file.require("tokenizer.ggml.tokens", list))
    if not 0 <= token_id < num_tokens:
        raise ConfigError(f"{file.path}: {name}_token_id={token_id} is not in the vocabulary of {num_tokens}")
    return token_id


def _byte_level(file: GGUFFile, vocab: dict[str, int], pre: Pretokenizer) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges", list)]
    for merge in merges:
        if len(merge) != 2 or not vocab.keys() >= {*merge, "".join(merge)}:
            raise ConfigError(f"{file.path}: merge {' '.join(merge)!r} does not join two tokens into a third")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignores_merges))
    if pre.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    scores = file.require("tokenizer.ggml.scores", list)
    types = file.require("tokenizer.ggml.token_type", list)
    unknown = next((token for token, kind in zip(vocab, types, strict=True) if kind == TokenType.UNKNOWN), None)
    pieces = [
        (token, score) for token, score, kind in zip(vocab, scores, types, strict=True) if kind == TokenType.NORMAL
    ]
    model = models.BPE(
        vocab=vocab, merges=merges_from_scores(pieces, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    adds_space = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if adds_space else spaces
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return tokenizer


def merges_from_scores(pieces: list[tuple[str, float]], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merge list that makes BPE choose as SentencePiece does: the pair whose union scores best goes first.

    Args:
        pieces: (token, score) of every token that merging may produce.
        vocab: token -> id, of those and of single characters.
    """
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score in pieces:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _added_tokens(file: GGUFFile, tokens: list[str]) -> list[AddedToken]:
    types = file.require("tokenizer.ggml.token_type", list)
    # Phi-3 was trained with the white space after its control tokens dropped; GGUF has no field for it.
    is_phi3 = file.architecture == "phi3" and file.require("tokenizer.ggml.model", str) == "llama"
    return [
        AddedToken(
            token,
            special=kind != TokenType.USER_DEFINED,
            normalized=False,
            rstrip=is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
    ]


def _bos_template(tokens: list[str], bos_id: int) -> Any:
    bos = tokens[bos_id]
    return processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, bos_id)]
    )
