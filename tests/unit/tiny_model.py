"""A tiny random Llama folder, written without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from core.model_config import parse_model_config
from engine.weights import expected_shapes

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def tiny_weights(**changes: Any) -> dict[str, Tensor]:
    """Random float32 tensors for TINY_CONFIG with some keys changed; always the same ones."""
    generator = torch.Generator().manual_seed(11)
    shapes = expected_shapes(parse_model_config(TINY_CONFIG | changes))
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0)
        for name, shape in sorted(shapes.items())
    }


def write_tiny_model(folder: Path, weights: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """Write config.json and model.safetensors; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG | changes))
    save_file(tiny_weights(**changes) if weights is None else weights, folder / "model.safetensors")
    return folder
