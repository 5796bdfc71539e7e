"""config.json in both spellings, and the refusal of everything Baton does not have."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import ModelError
from core.model_config import RopeConfig, load_model_config, parse_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def changed(**changes: Any) -> dict[str, Any]:
    """LLAMA with some keys replaced, and those set to ... removed."""
    return {key: value for key, value in (LLAMA | changes).items() if value is not ...}


def family(name: str, **changes: Any) -> dict[str, Any]:
    return changed(architectures=[name], **changes)


def test_a_plain_llama_config_is_read() -> None:
    config = parse_model_config(LLAMA)
    assert (config.family, config.head_dim, config.num_kv_heads, config.max_context_tokens) == ("llama", 64, 3, 8192)
    assert config.rope == RopeConfig(theta=100000.0, rotary_dim=64, original_max_tokens=8192)
    assert config.rope_layers == (True,) * 4
    assert config.sliding_windows == (None,) * 4
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.tie_word_embeddings))
    assert config.kv_layout(16, "float32").block_bytes == 4 * 2 * 3 * 16 * 64 * 4


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, {"kind": "linear", "factor": 2.0}),
        ({"rope_type": "dynamic", "factor": 2}, {"kind": "dynamic", "factor": 2.0}),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2048,
            },
            {"kind": "llama3", "factor": 32.0, "original_max_tokens": 2048},
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "attention_factor": 1.2},
            {"kind": "yarn", "factor": 4.0, "original_max_tokens": 2048, "attention_factor": 1.2},
        ),
    ],
    ids=["linear", "dynamic", "llama3", "yarn"],
)
def test_both_spellings_of_rope_scaling_mean_the_same(scaling: dict[str, Any], expected: dict[str, Any]) -> None:
    old = parse_model_config(changed(rope_scaling=scaling))
    new = parse_model_config(changed(rope_theta=..., rope_parameters={"rope_theta": 100000.0, **scaling}))
    assert old == new
    assert old.rope.theta == 100000.0
    assert {name: getattr(old.rope, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
    ],
)
def test_the_context_limit_counts_the_scaling(scaling: dict[str, Any], tokens: int) -> None:
    assert parse_model_config(changed(rope_scaling=scaling)).max_context_tokens == tokens


def test_yarn_infers_the_attention_factor_and_the_factor() -> None:
    config = parse_model_config(changed(rope_scaling={"type": "yarn", "original_max_position_embeddings": 2048}))
    assert config.rope.factor == 4.0
    assert config.rope.attention_factor == pytest.approx(1.1386294361)


def test_families_set_their_own_pieces() -> None:
    assert parse_model_config(family("Qwen2ForCausalLM")).qkv_bias
    assert not parse_model_config(family("Qwen2ForCausalLM")).o_bias
    qwen3 = parse_model_config(family("Qwen3ForCausalLM"))
    assert qwen3.qk_norm
    assert qwen3.head_dim == 128  # its default where the file says nothing
    smollm3 = parse_model_config(family("SmolLM3ForCausalLM", rope_theta=...))
    assert smollm3.rope_layers == (True, True, True, False)
    assert smollm3.tie_word_embeddings
    assert smollm3.rope.theta == 2_000_000.0
    phi3 = parse_model_config(family("Phi3ForCausalLM", partial_rotary_factor=0.75))
    assert phi3.has_fused_projections
    assert phi3.rope.rotary_dim == 48


def test_no_rope_layers_win_over_the_interval() -> None:
    config = parse_model_config(family("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0, 1], no_rope_layer_interval=2))
    assert config.rope_layers == (False, True, True, False)


@pytest.mark.parametrize(
    ("name", "settings", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None, None)),
        ("Phi3ForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (None, None, None, None)),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
        ("SmolLM3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (None, None, None, 8)),
    ],
)
def test_sliding_windows_by_layer(name: str, settings: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse_model_config(family(name, **settings)).sliding_windows == windows


def test_end_tokens_of_both_files_are_merged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(eos_token_id=[7, 5])))
    assert load_model_config(tmp_path).eos_token_ids == (7, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert load_model_config(tmp_path).eos_token_ids == (7, 5, 9)
    assert parse_model_config(changed(eos_token_id=None), {"eos_token_id": 3}).eos_token_ids == (3,)
    assert parse_model_config(changed(eos_token_id=...)).eos_token_ids == ()
    assert parse_model_config(changed(eos_token_id=[49151, 49152, -1])).eos_token_ids == (49151,)


def test_the_model_type_stands_in_for_missing_architectures() -> None:
    assert parse_model_config(changed(architectures=..., model_type="qwen3")).family == "qwen3"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": ..., "model_type": "gpt2"}, "gpt2"),
        ({"architectures": ..., "model_type": ...}, "None"),
        ({"architectures": [["x"]]}, "architecture"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope"),
        ({"rope_scaling": {"type": "su"}}, "'su'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "mrope"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "yarn"),
        ({"rope_scaling": [1]}, "must be a JSON object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor=-1"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor=True"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": "big", "mscale_all_dim": 1}}, "mscale='big'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rms_norm_eps": ...}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"num_attention_heads": 10, "num_key_value_heads": 5}, "num_attention_heads=10"),
        ({"head_dim": 63}, "rotary dimension is 63"),
        ({"max_position_embeddings": ...}, "max_position_embeddings"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window=0"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "yarn", "factor": 2}}, "phi3"),
    ],
)
def test_what_baton_lacks_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_config(changed(**changes))
    assert named in str(caught.value)


def test_a_missing_or_broken_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_model_config(tmp_path)
    for text in ("{", "[]", "\x00"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            load_model_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)
