"""Tiny GGUF files of every family, written as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2
HEAD_DIM = HIDDEN // HEADS
TOKENS = ["<|end|>", "<tool>", *"abcdefgh", "Ġ", "Ċ", "0", "1", "ab", "Ġa"]
TYPES = [3, 4, *[1] * (len(TOKENS) - 2)]
MERGES = ["a b", "Ġ a"]

Tensors = dict[str, npt.NDArray[np.float32]]


def tensors(arch: str = "llama", seed: int = 0) -> Tensors:
    """Random tensors by their GGUF names."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
    layer |= {"attn_output.weight": (HIDDEN, q), "ffn_down.weight": (HIDDEN, INNER)}
    if arch == "phi3":
        layer |= {"attn_qkv.weight": (q + 2 * kv, HIDDEN), "ffn_up.weight": (2 * INNER, HIDDEN)}
    else:
        layer |= {"attn_q.weight": (q, HIDDEN), "attn_k.weight": (kv, HIDDEN), "attn_v.weight": (kv, HIDDEN)}
        layer |= {"ffn_gate.weight": (INNER, HIDDEN), "ffn_up.weight": (INNER, HIDDEN)}
    if arch == "qwen2":
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if arch == "qwen3":
        layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    for index in range(LAYERS):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    arch: str = "llama",
    *,
    data: Tensors | None = None,
    quantise: gguf.GGMLQuantizationType | None = None,
    **metadata: Any,
) -> Path:
    """Write one file.

    Args:
        path: where.
        arch: llama.cpp's name of the architecture.
        data: its tensors; random ones by default.
        quantise: the type of its matrices; float32 by default.
        metadata: more keys, `__` for a dot, in place of the defaults; None leaves a key out.
    """
    values: dict[str, Any] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 64,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 0,
    }
    values |= {key.replace("__", "."): value for key, value in metadata.items()}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in (tensors(arch) if data is None else data).items():
        if quantise is not None and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quantize(tensor, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """What llama.cpp's converter does to Q and K of a Hugging Face model."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
