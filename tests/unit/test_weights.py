"""Loading weights: every tensor accounted for, everything else refused by name; the hash."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from core.errors import ModelError
from core.model_config import load_model_config
from engine.weights import WeightReader, weight_files, weights_hash
from tests.unit.tiny_model import tiny_weights, write_tiny_model


def open_reader(folder: Path, dtype: torch.dtype = torch.float32) -> WeightReader:
    return WeightReader(folder, load_model_config(folder), dtype)


def write_shards(folder: Path, shards: dict[str, dict[str, Tensor]]) -> None:
    write_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_converted_stacked_and_counted(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, weights = write_tiny_model(tmp_path), tiny_weights()
    steps: list[tuple[int, int]] = []
    names = sorted(weights)
    with WeightReader(folder, load_model_config(folder), dtype, lambda *step: steps.append(step)) as reader:
        stacked = reader.take("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight")
        for name in names:
            if "layers.0.self_attn.q_" not in name and "layers.0.self_attn.k_" not in name:
                torch.testing.assert_close(reader.take(name), weights[name].to(dtype), rtol=0, atol=0)
    expected = [weights[f"model.layers.0.self_attn.{part}_proj.weight"].to(dtype) for part in "qk"]
    assert torch.equal(stacked, torch.cat(expected))
    total = sum(tensor.numel() for tensor in weights.values()) * dtype.itemsize
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert {all_bytes for _, all_bytes in steps} == {total}
    assert steps[-1] == (total, total)


def test_loaded_tensors_outlive_the_file(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    with open_reader(folder) as reader:
        tensor = reader.take("model.norm.weight")
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(tensor, tiny_weights()["model.norm.weight"])


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    weights = tiny_weights()
    head = {name: weights[name] for name in sorted(weights)[:3]}
    rest = {name: weights[name] for name in sorted(weights)[3:]}
    write_shards(tmp_path, {"a.safetensors": head, "b.safetensors": rest})
    with open_reader(tmp_path) as reader:
        assert all(torch.equal(reader.take(name), weights[name]) for name in weights)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"not there: b\.safetensors"):
        open_reader(tmp_path)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": {"x": "../x.safetensors"}}', '{"weight_map": [1]}'])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json"):
        open_reader(tmp_path)


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, which Baton does not load"):
        weight_files(tmp_path)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    weights = tiny_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.1.mlp.up_proj.bias"] = torch.zeros(64)
    folder = write_tiny_model(tmp_path, weights)
    with pytest.raises(ModelError, match=r"lacks .*up_proj\.weight and has unexpected .*up_proj\.bias"):
        open_reader(folder)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, {"model.norm.weight": torch.zeros(48)})
    with pytest.raises(ModelError, match="and 14 more"):
        open_reader(folder)


def test_a_wrong_shape_is_refused_with_both(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, tiny_weights() | {"model.norm.weight": torch.zeros(47)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(47,\), config.json asks for \(48,\)"):
        open_reader(folder)


def test_rotary_tables_and_a_tied_head_are_ignored(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "lm_head.weight": torch.zeros(101, 48)}
    open_reader(write_tiny_model(tmp_path / "tied", tiny_weights() | extra)).__exit__()
    untied = write_tiny_model(tmp_path / "untied", tiny_weights(), tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        open_reader(untied)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        open_reader(tmp_path)


def test_the_hash_is_of_the_contents(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "a")
    content = (folder / "model.safetensors").read_bytes()
    steps: list[tuple[int, int]] = []
    assert weights_hash(folder, lambda *step: steps.append(step)) == hashlib.sha256(content).hexdigest()
    assert steps[-1] == (len(content), len(content))
    assert weights_hash(write_tiny_model(tmp_path / "b")) == weights_hash(folder)
    changed = tiny_weights()
    changed["model.norm.weight"][0] += 1
    assert weights_hash(write_tiny_model(tmp_path / "c", changed)) != weights_hash(folder)


def test_the_hash_of_shards_covers_every_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a.safetensors": {"x": torch.zeros(2)}, "b.safetensors": {"y": torch.zeros(2)}})
    before = weights_hash(tmp_path)
    save_file({"y": torch.ones(2)}, tmp_path / "b.safetensors")
    assert weights_hash(tmp_path) != before


def test_known_checksums_are_trusted_and_broken_ones_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "checksums.json").write_text(json.dumps({"model.safetensors": "ab" * 32}))
    assert weights_hash(folder) == "ab" * 32
    (folder / "checksums.json").write_text("[]")
    with pytest.raises(ModelError, match=r"checksums\.json"):
        weights_hash(folder)
