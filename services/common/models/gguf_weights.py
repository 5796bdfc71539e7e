"""The tensors of a GGUF file under Hugging Face names, Q and K in Hugging Face's rotary order."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import ConfigError, ModelError
from services.common.models.files import Progress
from services.common.models.gguf_config import family_of
from services.common.models.gguf_file import GGUFFile

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_NORMS = {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
_SPLIT = {
    **_NORMS,
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_QKV_BIAS = {f"attn_{name}.bias": f"self_attn.{name}_proj.bias" for name in "qkv"}
_QK_NORM = {f"attn_{name}_norm.weight": f"self_attn.{name}_norm.weight" for name in "qk"}
_FUSED = {
    **_NORMS,
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_LAYER_NAMES = {
    "llama": _SPLIT,
    "smollm3": _SPLIT,
    "qwen2": {**_SPLIT, **_QKV_BIAS},
    "qwen3": {**_SPLIT, **_QK_NORM},
    "phi3": _FUSED,
}
_DERIVED = {"rope_freqs.weight"}  # became `rope_scaling` in config.json
_CHUNK_ELEMENTS = 1 << 22  # 16 MiB of float32


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor to write."""

    gguf_name: str
    hf_name: str
    shape: tuple[int, ...]
    is_permuted: bool


def weights_of(file: GGUFFile, config: dict[str, Any]) -> list[Weight]:
    """Every tensor of the model, in the order of its layers.

    Args:
        file: the GGUF file.
        config: its `config.json`.
    Raises:
        ModelError: the file holds a tensor the family has no place for; it is named.
        ConfigError: the family needs a tensor the file lacks, or of another shape; it is named.
    """
    is_interleaved = family_of(file).is_rope_interleaved
    names = _expected(file.architecture, config["num_hidden_layers"])
    for name in file.tensors:
        if name not in names and name not in _DERIVED:
            raise ModelError(f"{file.path}: needs tensor {name}, which {file.architecture} has no place for in Baton")
    shapes = _shapes(config)
    weights = []
    for name in names:
        if name == "output.weight" and config["tie_word_embeddings"]:
            continue
        piece = name.split(".", 2)[2] if name.startswith("blk.") else name
        if file.shape(name) != shapes[piece]:
            raise ConfigError(f"{file.path}: tensor {name} has shape {file.shape(name)}, expected {shapes[piece]}")
        is_permuted = is_interleaved and piece in ("attn_q.weight", "attn_k.weight")
        weights.append(Weight(name, names[name], shapes[piece], is_permuted))
    return weights


def read_weights(
    file: GGUFFile, weights: list[Weight], head_dim: int, progress: Progress
) -> Iterator[npt.NDArray[np.float32]]:
    """The values of `weights` one after the other, cut into chunks of whole rows so that memory stays bounded."""
    total = sum(int(file.tensors[weight.gguf_name].n_bytes) for weight in weights)
    done = 0
    for weight in weights:
        rows, columns = weight.shape[0], int(np.prod(weight.shape[1:]))
        # A head's rows change places among themselves, so a chunk holds whole heads.
        step = head_dim * max(1, _CHUNK_ELEMENTS // (head_dim * columns))
        for start in range(0, rows, step):
            values = file.rows(weight.gguf_name, start, min(start + step, rows))
            yield undo_rotary_permutation(values, head_dim) if weight.is_permuted else values
        done += int(file.tensors[weight.gguf_name].n_bytes)
        progress("import", done, total)


def undo_rotary_permutation(values: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Give the rows of Q or K their Hugging Face order back.

    llama.cpp rotates neighbouring pairs of a head's rows, Hugging Face the two halves; its converter reordered the rows.

    Args:
        values: [heads * head_dim, columns].
    Returns:
        A copy of the same shape.
    """
    pairs = values.reshape(-1, head_dim // 2, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    vectors = dict.fromkeys(("output_norm.weight", *_NORMS), (hidden,))
    embeddings = dict.fromkeys(("token_embd.weight", "output.weight"), (config["vocab_size"], hidden))
    return {
        **vectors,
        **embeddings,
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_q.bias": (queries,),
        "attn_k.bias": (keys,),
        "attn_v.bias": (keys,),
        "attn_q_norm.weight": (head_dim,),
        "attn_k_norm.weight": (head_dim,),
        "attn_qkv.weight": (queries + 2 * keys, hidden),
        "attn_output.weight": (hidden, queries),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner if config["model_type"] != "phi3" else 2 * inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }


def _expected(architecture: str, num_layers: int) -> dict[str, str]:
    names = dict(_OUTER)
    for layer in range(num_layers):
        for ours, theirs in _LAYER_NAMES[architecture].items():
            names[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    return names
