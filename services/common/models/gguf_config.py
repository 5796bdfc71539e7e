"""`config.json` and `generation_config.json` from GGUF metadata; what Baton cannot compute is refused by name."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import ConfigError, ModelError
from services.common.models.gguf_file import GGUFFile


@dataclass(frozen=True, slots=True)
class Family:
    """How one llama.cpp architecture is spelled by Hugging Face."""

    model_type: str
    architecture: str
    is_rope_interleaved: bool  # llama.cpp permuted the rows of Q and K


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", is_rope_interleaved=True),  # Llama, Mistral, SmolLM 1 and 2
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", is_rope_interleaved=False),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", is_rope_interleaved=False),
    "phi3": Family("phi3", "Phi3ForCausalLM", is_rope_interleaved=False),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", is_rope_interleaved=True),
}

# Metadata that changes the computation; absent or equal to the value, it does not.
_NEUTRAL: dict[str, float] = {
    "expert_count": 0,
    "logit_scale": 0,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
    "attention.clamp_kqv": 0,
    "rope.scale_linear": 1,
}
_SMOLLM3_NO_ROPE_INTERVAL = 4  # fixed in llama.cpp too: no metadata carries it
# GGUF keeps Llama 3's scaling as one factor per frequency; every published model was made with these three.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def family_of(file: GGUFFile) -> Family:
    """The family of a file; ModelError names one that Baton does not run."""
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise ModelError(f"{file.path}: needs architecture {file.architecture}; Baton has {', '.join(FAMILIES)}")
    return family


def model_config(file: GGUFFile) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        ModelError: the model needs a piece that Baton does not have; the message names it.
        ConfigError: a required key is missing.
    """
    family, arch = family_of(file), file.architecture
    _refuse_extras(file)
    hidden = file.require(f"{arch}.embedding_length", int)
    heads = file.require(f"{arch}.attention.head_count", int)
    layers = file.require(f"{arch}.block_count", int)
    if min(hidden, heads, layers) < 1:
        raise ConfigError(f"{file.path}: {hidden} dimensions, {heads} heads, {layers} layers: none may be 0")
    head_dim = file.get(f"{arch}.attention.key_length", int, hidden // heads)
    _refuse_other(file, "attention.value_length", head_dim, "values of another width than keys")
    _refuse_other(file, "rope.dimension_count", head_dim, "rotary embedding of a part of the head")
    context = file.require(f"{arch}.context_length", int)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": file.require(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(f"{arch}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(file.require(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(file.get(f"{arch}.rope.freq_base", float, 10000.0)),
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": context,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        # Always written: left out, transformers' classes fall back to their first model's ids.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **_token_ids(file),
    }
    scaling = _rope_scaling(file, config["rope_theta"], head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    window = file.get(f"{arch}.attention.sliding_window", int, 0)
    config["sliding_window"] = window if 0 < window < context else None
    if arch == "smollm3":
        config["no_rope_layer_interval"] = _SMOLLM3_NO_ROPE_INTERVAL
        config["no_rope_layers"] = [int((layer + 1) % _SMOLLM3_NO_ROPE_INTERVAL != 0) for layer in range(layers)]
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The content of `generation_config.json`: every id that ends an answer, the EOS first."""
    ids = _token_ids(file)
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    ends = dict.fromkeys(file.require(key, int) for key in keys if file.has(key))
    return {**ids, "eos_token_id": list(ends)} if len(ends) > 1 else ids


def _vocab_size(file: GGUFFile) -> int:
    rows, num_tokens = file.shape("token_embd.weight")[0], len(file.require("tokenizer.ggml.tokens", list))
    if rows < num_tokens:  # more rows are padding
        raise ConfigError(f"{file.path}: {num_tokens} tokens but {rows} embeddings")
    return rows


def _token_ids(file: GGUFFile) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "padding": "pad"}
    keys = {f"{short}_token_id": f"tokenizer.ggml.{name}_token_id" for name, short in names.items()}
    return {ours: file.require(key, int) for ours, key in keys.items() if file.has(key)}


def _refuse_extras(file: GGUFFile) -> None:
    for key, neutral in _NEUTRAL.items():
        value = file.get(f"{file.architecture}.{key}", float, neutral)
        if value != neutral:
            raise ModelError(f"{file.path}: needs {key}={value:g}, which Baton does not have")


def _refuse_other(file: GGUFFile, key: str, only: int, piece: str) -> None:
    value = file.get(f"{file.architecture}.{key}", int, only)
    if value != only:
        raise ModelError(
            f"{file.path}: needs {piece} ({key}={value}, head dimension {only}), which Baton does not have"
        )


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    prefix = f"{file.architecture}.rope.scaling"
    if "rope_factors_long.weight" in file.tensors:
        raise ModelError(f"{file.path}: needs longrope scaling, which Baton does not have")
    if "rope_freqs.weight" in file.tensors:
        size = file.shape("rope_freqs.weight")[0]
        return _llama3_scaling(file, file.rows("rope_freqs.weight", 0, size), theta, head_dim)
    kind = file.get(f"{prefix}.type", str, "none")
    if kind == "none":
        return None
    factor = _shortest(file.require(f"{prefix}.factor", float))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ModelError(f"{file.path}: needs {kind} rope scaling; Baton has linear, yarn and llama3")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = file.require(f"{prefix}.original_context_length", int)
    for name in ("beta_fast", "beta_slow"):
        if file.has(f"{prefix}.yarn_{name}"):
            scaling[name] = _shortest(file.require(f"{prefix}.yarn_{name}", float))
    return scaling


def _llama3_scaling(
    file: GGUFFile, factors: npt.NDArray[np.float32], theta: float, head_dim: int
) -> dict[str, Any] | None:
    if np.all(factors == 1):
        return None
    factor = _shortest(float(factors.max()))
    if factors.shape != (head_dim // 2,) or not np.allclose(
        factors, llama3_factors(factor, theta, head_dim), rtol=1e-4
    ):
        raise ModelError(f"{file.path}: needs the frequency factors of rope_freqs.weight, which are not Llama 3's")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def llama3_factors(factor: float, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """What Llama 3 divides each rotary frequency by.

    Returns:
        float64 `[head_dim / 2]`: 1 for short wavelengths, `factor` for long ones, a smooth way between.
    Source: the Llama 3.1 reference code's `apply_scaling`.
    """
    low, high, context = _LLAMA3.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _shortest(value: float) -> float:
    """GGUF stores float32; 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))
