"""A GGUF file becomes the Hugging Face folder it was made from; what Baton cannot run is refused by name."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from core.errors import ConfigError, ModelError
from services.common.models.files import sha256_of
from services.common.models.gguf_config import llama3_factors
from services.common.models.gguf_import import import_gguf
from services.common.models.safetensors_writer import to_bfloat16
from tests.unit import tiny_gguf
from tests.unit.tiny_gguf import HEAD_DIM, HEADS, KV_HEADS


def imported(tmp_path: Path, arch: str = "llama", **options: Any) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    import_gguf(tiny_gguf.write(tmp_path / "tiny.gguf", arch, **options), folder)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


@given(st.lists(st.floats(width=32), min_size=1, max_size=32))
def test_bfloat16_is_rounded_as_torch_rounds(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    ours = torch.from_numpy(to_bfloat16(array).view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(ours, torch.from_numpy(array).to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("arch", ["llama", "smollm3"])
def test_the_rotary_permutation_of_q_and_k_is_undone(tmp_path: Path, arch: str) -> None:
    original = tiny_gguf.tensors(arch)
    written = dict(original)
    for layer in range(tiny_gguf.LAYERS):
        for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            key = f"blk.{layer}.{name}.weight"
            written[key] = tiny_gguf.permute(original[key], heads)
    weights = load_file(imported(tmp_path, arch, data=written) / "model.safetensors")
    for ours, theirs in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")):
        expected = torch.from_numpy(original[f"blk.1.{ours}.weight"]).bfloat16()
        assert torch.equal(weights[f"model.layers.1.self_attn.{theirs}.weight"], expected)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_families_that_llama_cpp_does_not_permute_are_left_alone(tmp_path: Path, arch: str) -> None:
    data = tiny_gguf.tensors(arch)
    weights = load_file(imported(tmp_path, arch, data=data) / "model.safetensors")
    expected = torch.from_numpy(data["blk.0.attn_q.weight"]).bfloat16()
    assert torch.equal(weights["model.layers.0.self_attn.q_proj.weight"], expected)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "phi3", "smollm3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_transformers_loads_every_tensor_and_misses_none(tmp_path: Path, arch: str, is_tied: bool) -> None:
    data = tiny_gguf.tensors(arch)
    if not is_tied:
        data["output.weight"] = data["token_embd.weight"][::-1].copy()
    folder = imported(tmp_path, arch, data=data)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert model.config.tie_word_embeddings is is_tied
    assert torch.isfinite(model(torch.tensor([[2, 3, 4]])).logits).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_quantised_tensors_are_dequantised(tmp_path: Path, kind: str) -> None:
    quantise = gguf.GGMLQuantizationType[kind]
    data = tiny_gguf.tensors()
    weights = load_file(imported(tmp_path, data=data, quantise=quantise) / "model.safetensors")
    name = "blk.0.ffn_down.weight"
    expected = gguf.dequantize(gguf.quantize(data[name], quantise), quantise)
    assert torch.equal(weights["model.layers.0.mlp.down_proj.weight"], torch.from_numpy(expected).bfloat16())
    assert np.abs(expected - data[name]).max() < 0.4


def test_checksums_cover_every_file(tmp_path: Path) -> None:
    folder = imported(tmp_path)
    sums = json.loads((folder / "checksums.json").read_text())
    files = {path.name for path in folder.iterdir()} - {"checksums.json"}
    assert sums == {name: sha256_of(folder / name) for name in files}
    assert {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"} <= files


def test_config_carries_metadata_as_it_was_before_float32(tmp_path: Path) -> None:
    config = config_of(imported(tmp_path, llama__rope__freq_base=1e6, tokenizer__ggml__eot_token_id=3))
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 1e6
    assert config["head_dim"] == HEAD_DIM
    assert config["eos_token_id"] == 0
    assert "rope_scaling" not in config


def test_every_end_token_ends_generation(tmp_path: Path) -> None:
    folder = imported(tmp_path, tokenizer__ggml__eot_token_id=3, tokenizer__ggml__eom_token_id=0)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 3]


def test_smollm3_leaves_every_fourth_layer_without_rope(tmp_path: Path) -> None:
    folder = imported(tmp_path, "smollm3")
    config = config_of(folder)
    assert config["no_rope_layers"] == [1, 1]
    assert AutoConfig.from_pretrained(folder).no_rope_layers == [1, 1]


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
    ids=["linear", "yarn"],
)
def test_rope_scaling_is_carried_over(tmp_path: Path, metadata: dict[str, Any], scaling: dict[str, Any]) -> None:
    options = {f"llama__rope__scaling__{key}": value for key, value in metadata.items()}
    assert config_of(imported(tmp_path, **options))["rope_scaling"] == scaling


def test_llama3_scaling_is_recovered_from_its_frequency_factors(tmp_path: Path) -> None:
    data = tiny_gguf.tensors()
    data["rope_freqs.weight"] = llama3_factors(32.0, 500000.0, HEAD_DIM).astype(np.float32)
    folder = imported(tmp_path, data=data, llama__rope__freq_base=500000.0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = 500000.0 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    expected = plain / torch.from_numpy(data["rope_freqs.weight"]).double()
    torch.testing.assert_close(model.model.rotary_emb.inv_freq.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("arch", "metadata", "named"),
    [
        ("gemma2", {}, "gemma2"),
        ("llama", {"llama__expert_count": 8}, "expert_count"),
        ("llama", {"llama__logit_scale": 0.5}, "logit_scale"),
        ("llama", {"llama__rope__dimension_count": 4}, "rope.dimension_count"),
        ("llama", {"llama__attention__value_length": 4}, "attention.value_length"),
        ("llama", {"llama__attention__head_count": [4, 2]}, "attention.head_count"),
        ("llama", {"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 2.0}, "longrope"),
        ("llama", {"tokenizer__ggml__pre": "nobody-knows"}, "nobody-knows"),
        ("llama", {"tokenizer__ggml__pre": None}, "pre-tokenizer default"),
        ("llama", {"tokenizer__ggml__model": "bert"}, "bert"),
        ("llama", {"tokenizer__ggml__add_eos_token": True}, "add_eos_token"),
    ],
)
def test_a_missing_piece_is_refused_by_name(tmp_path: Path, arch: str, metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        imported(tmp_path, arch, **metadata)
    assert not list((tmp_path / "model").iterdir())


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("blk.0.attn_q.bias", np.zeros(HEADS * HEAD_DIM, np.float32), "blk.0.attn_q.bias"),
        ("rope_freqs.weight", np.linspace(1, 9, HEAD_DIM // 2, dtype=np.float32), "rope_freqs"),
        ("rope_factors_long.weight", np.ones(HEAD_DIM // 2, np.float32), "longrope"),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path, name: str, value: Any, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        imported(tmp_path, data={**tiny_gguf.tensors(), name: value})


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.ffn_down.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    data = tiny_gguf.tensors()
    del data[name]
    with pytest.raises(ConfigError, match=name):
        imported(tmp_path, data=data)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    data = tiny_gguf.tensors()
    data["blk.0.attn_q.weight"] = data["blk.0.attn_q.weight"][:-4]
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.weight has shape \(28, 32\), expected \(32, 32\)"):
        imported(tmp_path, data=data)


@pytest.mark.parametrize("keep", [0, 3, 40, 700, -100])
def test_a_file_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    whole = tiny_gguf.write(tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[:keep])
    with pytest.raises(ConfigError, match=r"short\.gguf"):
        import_gguf(tmp_path / "short.gguf", tmp_path)
