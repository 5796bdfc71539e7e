"""What a Hugging Face model folder asks for, read from its config.json; what Baton does not have is refused by name.

Standard library only: the router reads it too (vocabulary, context, end tokens).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from core.errors import ModelError
from core.layout import KVLayout

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Family = Literal["llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3"]

ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
}
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
_MAX_SIZE = 2**31 - 1  # every size fits an int32, so that kernels may index with one


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; fields a kind does not use keep their defaults."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    rotary_dim: int  # leading dimensions of a head that rotate; even
    factor: float = 1.0
    original_max_tokens: int = 0  # context the model was trained with, before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # multiplies cos and sin


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder of the Llama family. Per-layer fields have `num_layers` entries."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context_tokens: int  # prompt and answer together
    rope: RopeConfig
    rope_layers: tuple[bool, ...]  # False: the layer has no position embedding (NoPE)
    sliding_windows: tuple[int | None, ...]  # a token sees itself and the window - 1 tokens before it; None: all
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def has_fused_projections(self) -> bool:
        """Whether the checkpoint stores Q, K, V as one tensor, and gate and up as one."""
        return self.family == "phi3"

    @property
    def max_shared_prompt_tokens(self) -> int:
        """Longest prompt whose KV is that of any other prompt with the same beginning: with dynamic scaling, longer ones
        are rotated by their own length.
        """
        return self.rope.original_max_tokens if self.rope.kind == "dynamic" else self.max_context_tokens

    def kv_layout(self, block_tokens: int, dtype: str) -> KVLayout:
        """The layout of this model's KV blocks."""
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_tokens=block_tokens,
            dtype=dtype,
        )


def load_model_config(folder: Path) -> ModelConfig:
    """Read and check config.json, and the end tokens of generation_config.json where there is one.

    Args:
        folder: a Hugging Face model folder.
    Raises:
        ModelError: a file is missing or broken, a number is impossible, or the model needs a piece Baton does not have.
    """
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    return parse_model_config(config, generation)


def parse_model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The same from parsed JSON objects. Raises ModelError."""
    family = _family(config)
    _refuse_unsupported(config)
    hidden_size = _size(config, "hidden_size")
    num_layers = _size(config, "num_hidden_layers")
    num_heads = _size(config, "num_attention_heads")
    num_kv_heads = _size(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    vocab_size = _size(config, "vocab_size")
    max_positions = _size(config, "max_position_embeddings")
    rope = _rope(config, family, head_dim, max_positions)
    attention_bias = family in ("llama", "qwen3", "smollm3") and _flag(config, "attention_bias")
    rope_layers = _rope_layers(config, family, num_layers)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(config, "rms_norm_eps"),
        max_context_tokens=_max_context_tokens(rope, max_positions),
        rope=rope,
        rope_layers=rope_layers,
        sliding_windows=_sliding_windows(config, family, rope_layers),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family in ("llama", "smollm3") and _flag(config, "mlp_bias"),
        qk_norm=family == "qwen3",
        tie_word_embeddings=_flag(config, "tie_word_embeddings", default=family == "smollm3"),
        eos_token_ids=_eos_token_ids(config, generation or {}, vocab_size),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}; a model folder needs a config.json") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures")
    if isinstance(names, list) and names:
        name = names[0]
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    else:
        name = config.get("model_type")
        if name in ARCHITECTURES.values():
            return cast(Family, name)
    raise ModelError(f"architecture {name!r} is not supported; Baton runs {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(f"quantization_config (quant_method {method!r}) is not supported; use unquantised weights")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported; only 'silu' is")
    for key in ("num_local_experts", "num_experts"):
        if config.get(key):
            raise ModelError(f"mixture of experts ({key}={config[key]}) is not supported")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json lacks {key}")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
        raise ModelError(f"{key}={value!r}: must be a whole number from 1 to {_MAX_SIZE}")
    return value


def _positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json lacks {key}")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"{key}={value!r}: must be a number above 0")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"{key}={value!r}: must be true or false")
    return value


def _head_dim(config: Mapping[str, Any], family: Family, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and family != "qwen3" and hidden_size % num_heads:
        raise ModelError(f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}")
    return _size(config, "head_dim", 128 if family == "qwen3" else hidden_size // num_heads)


def _rope(config: Mapping[str, Any], family: Family, head_dim: int, max_positions: int) -> RopeConfig:
    # transformers 4 wrote `rope_theta` beside `rope_scaling`; transformers 5 writes both into `rope_parameters`.
    params = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(params, dict):
        raise ModelError(f"rope parameters {params!r}: must be a JSON object")
    if any(isinstance(value, dict) for value in params.values()):
        raise ModelError(f"rope parameters per layer type ({', '.join(params)}) are not supported")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in ROPE_KINDS or (family == "phi3" and kind != "default"):
        raise ModelError(f"rope type {kind!r} is not supported for {family}; Baton has {', '.join(ROPE_KINDS)}")
    shared = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    params = {**shared, **{key: value for key, value in params.items() if value is not None}}
    fraction = _positive(params, "partial_rotary_factor", 1.0)
    if fraction > 1.0 or (fraction != 1.0 and family != "phi3"):
        raise ModelError(f"partial_rotary_factor={fraction} is not supported for {family}")
    rotary_dim = int(head_dim * fraction)
    if rotary_dim % 2 or rotary_dim == 0:
        raise ModelError(f"the rotary dimension is {rotary_dim} (head_dim={head_dim}); it must be even")
    theta = _positive(params, "rope_theta", 2_000_000.0 if family == "smollm3" else 10_000.0)
    rope = RopeConfig(kind=kind, theta=theta, rotary_dim=rotary_dim, original_max_tokens=max_positions)
    return _scaled(rope, params, config, max_positions)


def _scaled(rope: RopeConfig, params: Mapping[str, Any], config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """`rope` with the fields of its kind."""
    match rope.kind:
        case "default":
            return rope
        case "linear" | "dynamic":
            if rope.kind == "dynamic" and rope.rotary_dim <= 2:
                raise ModelError("dynamic rope needs a rotary dimension above 2")
            return replace(rope, factor=_positive(params, "factor"))
        case "llama3" | "yarn":
            # A value beside the rope parameters wins over one inside, as in transformers.
            outer = config if config.get("original_max_position_embeddings") is not None else params
            original = _size(outer, "original_max_position_embeddings", max_positions)
            if rope.kind == "yarn":
                return _yarn(rope, params, original, max_positions)
            low, high = _positive(params, "low_freq_factor"), _positive(params, "high_freq_factor")
            if low >= high:
                raise ModelError(f"llama3 rope: low_freq_factor={low} must be below high_freq_factor={high}")
            return replace(
                rope,
                factor=_positive(params, "factor"),
                original_max_tokens=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )


def _yarn(rope: RopeConfig, params: Mapping[str, Any], original: int, max_positions: int) -> RopeConfig:
    """Source: YaRN (Peng et al., ICLR 2024); the attention factor is inferred as transformers does."""
    factor = _positive(params, "factor", max_positions / original)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    inferred = magnitude(1.0)
    if params.get("mscale") and params.get("mscale_all_dim"):
        inferred = magnitude(_positive(params, "mscale")) / magnitude(_positive(params, "mscale_all_dim"))
    return replace(
        rope,
        factor=factor,
        original_max_tokens=original,
        beta_fast=_positive(params, "beta_fast", 32.0),
        beta_slow=_positive(params, "beta_slow", 1.0),
        truncate=_flag(params, "truncate", default=True),
        attention_factor=_positive(params, "attention_factor", inferred),
    )


def _max_context_tokens(rope: RopeConfig, max_positions: int) -> int:
    # For linear and llama3, max_position_embeddings counts the scaled context already. For dynamic it is the unscaled
    # one by definition of the formula, and yarn configs are written both ways.
    if rope.kind == "dynamic":
        return int(max_positions * rope.factor)
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max_tokens * rope.factor))
    return max_positions


def _rope_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[bool, ...]:
    if family != "smollm3":
        return (True,) * num_layers
    flags = config.get("no_rope_layers")  # despite its name, 1 means: with RoPE
    if flags is None:
        interval = _size(config, "no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise ModelError(f"no_rope_layers={flags!r}: must list 0 or 1 for each of {num_layers} layers")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _sliding_windows(
    config: Mapping[str, Any], family: Family, rope_layers: tuple[bool, ...]
) -> tuple[int | None, ...]:
    layers = range(len(rope_layers))
    window: int | None = None
    if config.get("sliding_window") is not None and family != "llama":
        window = _size(config, "sliding_window")
    if family in ("qwen2", "qwen3", "smollm3") and not _flag(config, "use_sliding_window"):
        window = None
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != len(layers):
            raise ModelError(f"layer_types={types!r}: must name the attention of each of {len(layers)} layers")
        for name in types:
            if name not in ("full_attention", "sliding_attention"):
                raise ModelError(f"layer type {name!r} is not supported")
            if name == "sliding_attention" and window is None:
                raise ModelError("layer_types asks for sliding_attention, but no sliding_window is in use")
        return tuple(window if name == "sliding_attention" else None for name in types)
    if family in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ModelError(f"max_window_layers={first!r}: must be a whole number")
        return tuple(window if layer >= first else None for layer in layers)
    if family == "smollm3":
        return tuple(None if rope_layers[layer] else window for layer in layers)
    return (window,) * len(rope_layers)


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    ids: dict[int, None] = {}  # ordered, each once
    for source in (config, generation):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ModelError(f"eos_token_id={value!r}: must be a token id or a list of them")
            if 0 <= token < vocab_size:  # any other can never be sampled
                ids[token] = None
    return tuple(ids)
