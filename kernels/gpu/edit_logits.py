"""What a request asks to change in its logits before a token is chosen: held-back tokens, biases, penalties.

Only the logits that a list names are read or written, so the time is that of the longest list. A row is one program: its two
lists may name the same token, and the second must see what the first one left.
"""

import functools
import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.variant import Arch, Config, Variant, arch_of


def edit_logits_ref(
    logits: Tensor,
    bias_first: Tensor,
    bias_ids: Tensor,
    biases: Tensor,
    said_first: Tensor,
    said_ids: Tensor,
    said_counts: Tensor,
    repetitions: Tensor,
    frequencies: Tensor,
    presences: Tensor,
) -> None:
    """The specification, token by token, in place; every operation rounds to float32."""
    for row in range(len(logits)):
        for entry in range(int(bias_first[row]), int(bias_first[row + 1])):
            token, bias = bias_ids[entry], biases[entry]
            # Whatever the model said of it: adding -inf to inf or NaN would not hold it back.
            logits[row, token] = bias if bias == -math.inf else logits[row, token] + bias
        for entry in range(int(said_first[row]), int(said_first[row + 1])):
            token, count = said_ids[entry], said_counts[entry]
            value = logits[row, token]
            value = value / repetitions[row] if value > 0 else value * repetitions[row]
            value = value - frequencies[row] * count
            logits[row, token] = value - presences[row] if count > 0 else value


@triton.jit(do_not_specialize=["logits_stride"])
def _edit_logits_kernel(
    logits_ptr,
    bias_first_ptr,
    bias_ids_ptr,
    biases_ptr,
    said_first_ptr,
    said_ids_ptr,
    said_counts_ptr,
    repetitions_ptr,
    frequencies_ptr,
    presences_ptr,
    logits_stride,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    lanes = tl.arange(0, TILE)

    first = tl.load(bias_first_ptr + row)
    end = tl.load(bias_first_ptr + row + 1)
    for start in range(first, end, TILE):
        entries = start + lanes
        is_own = entries < end
        ids = tl.load(bias_ids_ptr + entries, mask=is_own, other=0)
        bias = tl.load(biases_ptr + entries, mask=is_own, other=0.0)
        value = tl.load(row_ptr + ids, mask=is_own, other=0.0)
        # Whatever the model said of a held-back token: adding -inf to inf or NaN would not hold it back.
        value = tl.where(bias == -float("inf"), bias, value + bias)
        tl.store(row_ptr + ids, value, mask=is_own)

    # The threads that load a logit below need not be those that stored it above.
    tl.debug_barrier()

    first = tl.load(said_first_ptr + row)
    end = tl.load(said_first_ptr + row + 1)
    repetition = tl.load(repetitions_ptr + row)
    frequency = tl.load(frequencies_ptr + row)
    presence = tl.load(presences_ptr + row)
    for start in range(first, end, TILE):
        entries = start + lanes
        is_own = entries < end
        ids = tl.load(said_ids_ptr + entries, mask=is_own, other=0)
        count = tl.load(said_counts_ptr + entries, mask=is_own, other=0.0)
        value = tl.load(row_ptr + ids, mask=is_own, other=0.0)
        value = tl.where(value > 0.0, tl.div_rn(value, tl.zeros_like(value) + repetition), value * repetition)
        # By way of float64, which holds the product exactly: a fused multiply-add would round once less than the CPU does.
        value -= (frequency.to(tl.float64) * count.to(tl.float64)).to(tl.float32)
        value -= tl.where(count > 0.0, presence, 0.0)
        tl.store(row_ptr + ids, value, mask=is_own)


def edit_logits(
    logits: Tensor,
    bias_first: Tensor,
    bias_ids: Tensor,
    biases: Tensor,
    said_first: Tensor,
    said_ids: Tensor,
    said_counts: Tensor,
    repetitions: Tensor,
    frequencies: Tensor,
    presences: Tensor,
) -> None:
    """Change logits in place, as `engine.sampler` does: hold tokens back, add biases, then penalise what was said.

    Row r's entries of a list are those from first[r] up to first[r + 1]; they may be none. Within a row's list a token comes
    once; it may be in both lists. Neither ids nor `first` are checked: that would need a sync.

    Args:
        logits: [n, vocab] float32, last dimension contiguous, rows any distance apart.
        bias_first: [n + 1] int32, where each row's biases begin.
        bias_ids: [b] int32, each in [0, vocab).
        biases: [b] float32, added; -inf holds the token back, whatever its logit is.
        said_first: [n + 1] int32, where each row's tokens of prompt and answer begin.
        said_ids: [s] int32, each in [0, vocab).
        said_counts: [s] float32, how often the answer has the token; 0 for one that only the prompt has.
        repetitions: [n] float32, above 0; divides a logit above 0 and multiplies one below; 1 is off.
        frequencies: [n] float32, taken off for each time the token was said; 0 is off.
        presences: [n] float32, taken off once if the answer has the token; 0 is off.
    Raises:
        ValueError: `logits` is not float32 with a contiguous last dimension.
    Source: logit bias, frequency and presence penalty as in the OpenAI API; repetition penalty: Keskar et al., 2019 (CTRL).
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"need float32 rows with stride 1; got {logits.dtype}, strides {logits.stride()}")
    if len(logits) == 0:
        return
    config = _config(arch_of(logits.device))
    _edit_logits_kernel[(len(logits),)](
        logits,
        bias_first,
        bias_ids,
        biases,
        said_first,
        said_ids,
        said_counts,
        repetitions,
        frequencies,
        presences,
        logits.stride(0),
        **config.tiles,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@functools.cache
def _config(arch: Arch) -> Config:
    # Gathers of single logits wait for memory: four per thread are under way at once.
    return Config({"TILE": 1024}, num_warps=256 // arch.warp_size)


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form of the kernel that some machine compiles."""
    signature = {
        "logits_ptr": "*fp32",
        "bias_first_ptr": "*i32",
        "bias_ids_ptr": "*i32",
        "biases_ptr": "*fp32",
        "said_first_ptr": "*i32",
        "said_ids_ptr": "*i32",
        "said_counts_ptr": "*fp32",
        "repetitions_ptr": "*fp32",
        "frequencies_ptr": "*fp32",
        "presences_ptr": "*fp32",
        "logits_stride": "i32",
        "TILE": "constexpr",
    }
    config = _config(arch)
    yield Variant(
        kernel=_edit_logits_kernel, label="edit-fp32", signature=signature, constants=config.tiles, config=config
    )
