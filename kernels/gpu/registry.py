"""Every kernel there is: what is compiled ahead of time, warmed up and timed."""

from collections.abc import Iterator, Mapping
from types import ModuleType

from kernels.gpu import (
    add_rms_norm,
    decode_attention,
    draw_tokens,
    edit_logits,
    linear,
    pack_blocks,
    prefill_attention,
    qkv_rope_write,
    quantized_linear,
    silu_mul,
    top_logprobs,
)
from kernels.gpu.variant import Arch, Variant

_MODULES: tuple[ModuleType, ...] = (
    add_rms_norm,
    decode_attention,
    draw_tokens,
    edit_logits,
    linear,
    pack_blocks,
    prefill_attention,
    qkv_rope_write,
    quantized_linear,
    silu_mul,
    top_logprobs,
)

OPS: Mapping[str, ModuleType] = {module.__name__.rpartition(".")[2]: module for module in _MODULES}


def all_variants(arch: Arch) -> Iterator[tuple[str, Variant]]:
    """Every form of every kernel that a machine of this kind may compile, and the op that it belongs to."""
    for op, module in OPS.items():
        for variant in module.variants(arch):
            yield op, variant
