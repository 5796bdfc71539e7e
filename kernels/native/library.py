"""The native library as ctypes sees it: its structs, its functions, and which build this CPU takes."""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from kernels.native.build import BUILT, Level, levels, library_path

CPU_INFO = Path("/proc/cpuinfo")


class LinearStruct(Structure):
    """`baton_linear`."""

    _fields_ = (
        ("num_outputs", c_int64),
        ("num_inputs", c_int64),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("format", c_int32),
        ("is_gated", c_int32),
    )


class LayerStruct(Structure):
    """`baton_layer`."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("post_norm", c_void_p),
        ("qkv", LinearStruct),
        ("o", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("has_rope", c_int32),
        ("window", c_int32),
    )


class ModelStruct(Structure):
    """`baton_model`."""

    _fields_ = (
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("num_layers", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary_half", c_int64),
        ("norm_eps", c_float),
        ("layers", POINTER(LayerStruct)),
        ("embedding", LinearStruct),
        ("head", LinearStruct),
        ("final_norm", c_void_p),
    )


class BatchStruct(Structure):
    """`baton_batch`."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_sequences", c_int64),
        ("token_ids", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("first_row", c_void_p),
        ("start", c_void_p),
        ("tables", c_void_p),
        ("first_block", c_void_p),
        ("cache", c_void_p),
        ("block_tokens", c_int64),
        ("cache_dtype", c_int32),
        ("has_token_angles", c_int32),
        ("num_outputs", c_int64),
        ("outputs", c_void_p),
    )


_MODEL, _BATCH, _LINEAR = POINTER(ModelStruct), POINTER(BatchStruct), POINTER(LinearStruct)
_FUNCTIONS = {  # name: (result, arguments)
    "baton_pool_create": (c_void_p, (c_int,)),
    "baton_pool_destroy": (None, (c_void_p,)),
    "baton_packed_bytes": (c_int64, (_LINEAR,)),
    "baton_pack": (c_int, (_LINEAR, c_void_p, c_int64, c_int64, c_int)),
    "baton_unpack_row": (None, (_LINEAR, c_int64, c_void_p)),
    "baton_multiply": (c_int, (c_void_p, _LINEAR, c_void_p, c_void_p, c_int64, c_void_p)),
    "baton_rms_norm": (
        None,
        (c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int),
    ),
    "baton_silu_mul": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "baton_can_attend": (c_int, (c_int64, c_int64, c_int64)),
    "baton_attend": (None, (c_void_p, _MODEL, _BATCH, c_int64, c_void_p, c_void_p, c_int)),
    "baton_weigh": (None, (c_void_p, c_int64, c_float, c_float, c_void_p, c_void_p)),
    "baton_forward": (c_int, (c_void_p, _MODEL, _BATCH, c_void_p)),
    "baton_logits": (c_int, (c_void_p, _MODEL, c_void_p, c_int64, c_void_p, c_void_p)),
}


def load_library(path: Path) -> ctypes.CDLL:
    """Load one build and declare its functions. Calls release the interpreter lock."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def cpu_features(cpu_info: Path = CPU_INFO) -> frozenset[str]:
    """What the CPU can do, in the kernel's words; nothing where the kernel does not say."""
    if not cpu_info.is_file():
        return frozenset()
    for line in cpu_info.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def usable_levels(features: frozenset[str]) -> list[Level]:
    """The levels a CPU with these features takes, best first."""
    return [level for level in levels() if level.cpu_features <= features]


def find_library(built: Path = BUILT) -> Path | None:
    """The best build this CPU takes that belongs to the sources as they are; None: there is none."""
    paths = (library_path(level, built=built) for level in usable_levels(cpu_features()))
    return next((path for path in paths if path.is_file()), None)
