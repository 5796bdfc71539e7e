"""Log-probabilities of chosen tokens, and of the best ones beside each."""

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.sampling import MIN_LOGPROB
from kernels.gpu.variant import Arch, Config, Variant, arch_of

_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))


def top_logprobs_ref(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The specification: a log-softmax in float64 and a stable sort."""
    wide = logits.double().log_softmax(-1).clamp_min(MIN_LOGPROB)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    missing = (0, num_top - order.shape[1])
    ids = torch.nn.functional.pad(order.int(), missing, value=-1)
    values = torch.nn.functional.pad(wide.gather(1, order).float(), missing, value=MIN_LOGPROB)
    return wide.gather(1, tokens.long()[:, None])[:, 0].float(), ids, values


@triton.jit(do_not_specialize=["vocab", "stride", "num_top"])
def _top_logprobs_kernel(
    logits_ptr, tokens_ptr, chosen_ptr, ids_ptr, values_ptr, vocab, stride, num_top,
    floor, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    lanes = tl.arange(0, TILE)
    best = -float("inf")
    total = 0.0
    for start in range(0, vocab, TILE):
        ids = start + lanes
        scaled = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf")) * _LOG2_E
        higher = tl.maximum(best, tl.max(scaled, axis=0))
        # A tile of nothing but -inf before any other would give -inf - -inf.
        pivot = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp2(best - pivot) + tl.sum(tl.exp2(scaled - pivot), axis=0)
        best = higher
    log_total = (best + tl.log2(total)) * _LN_2
    logit = tl.load(row_ptr + tl.load(tokens_ptr + row))
    tl.store(chosen_ptr + row, tl.maximum(logit - log_total, floor))

    last_logit = float("inf")
    last_id = -1
    for rank in range(num_top):
        # The best of those behind the last one, in the order of (-logit, id).
        next_logit = -float("inf")
        next_id = vocab
        for start in range(0, vocab, TILE):
            ids = start + lanes
            values = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf"))
            is_behind = (ids < vocab) & ((values < last_logit) | ((values == last_logit) & (ids > last_id)))
            tile_logit = tl.max(tl.where(is_behind, values, -float("inf")), axis=0)
            tile_id = tl.min(tl.where(is_behind & (values == tile_logit), ids, vocab), axis=0)
            is_better = (tile_id < vocab) & ((tile_logit > next_logit) | (next_id == vocab))
            next_logit = tl.where(is_better, tile_logit, next_logit)
            next_id = tl.where(is_better, tile_id, next_id)
        place = row * num_top + rank
        tl.store(ids_ptr + place, tl.where(next_id < vocab, next_id, -1))
        tl.store(values_ptr + place, tl.maximum(tl.where(next_id < vocab, next_logit - log_total, floor), floor))
        last_logit = next_logit
        last_id = next_id


def top_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int, config: Config | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-softmax of chosen tokens, and the best tokens with theirs; a row sees nothing of the others.

    The row is read once for its sum and once for each of the best: nobody asks for many, and few ask at all.

    Args:
        logits: [n, vocab] float32, last dimension contiguous, rows any distance apart. Of a row with a NaN, or without a
            finite logit, the results mean nothing.
        tokens: [n] int32, each in [0, vocab). Not range-checked: that would need a sync.
        num_top: how many of the best, at least 0.
        config: other tile sizes than the chosen ones.
    Returns:
        Log-probabilities of `tokens`, [n] float32; ids of the best, [n, num_top] int32, best first, equal ones by id, -1
        where the vocabulary has no more; and their log-probabilities, [n, num_top] float32. None is below MIN_LOGPROB.
    Raises:
        ValueError: `logits` is not float32 with a contiguous last dimension, or `tokens` not int32.
    Source: the online sum of Milakov and Gimelshein, 2018.
    """
    n, vocab = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or tokens.dtype != torch.int32:
        raise ValueError(
            f"need float32 rows of stride 1, int32 tokens; got {logits.dtype}, {logits.stride()}, {tokens.dtype}"
        )
    config = config or _config(arch_of(logits.device))
    chosen = torch.empty(n, dtype=torch.float32, device=logits.device)
    ids = torch.empty((n, num_top), dtype=torch.int32, device=logits.device)
    values = torch.empty((n, num_top), dtype=torch.float32, device=logits.device)
    if n:
        _top_logprobs_kernel[(n,)](
            logits, tokens, chosen, ids, values, vocab, logits.stride(0), num_top, MIN_LOGPROB,
            **config.tiles, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return chosen, ids, values


def _config(arch: Arch, tile: int = 4096) -> Config:
    return Config({"TILE": tile}, num_warps=16 if arch.backend == "cuda" else 8, num_stages=2)


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form of the kernel that a device of this kind may be asked to compile."""
    for tile in (4096, 8192):
        config = _config(arch, tile)
        yield Variant(
            kernel=_top_logprobs_kernel,
            label="f32" if tile == 4096 else f"f32-t{tile}",
            signature={
                "logits_ptr": "*fp32",
                "tokens_ptr": "*i32",
                "chosen_ptr": "*fp32",
                "ids_ptr": "*i32",
                "values_ptr": "*fp32",
                "vocab": "i32",
                "stride": "i32",
                "num_top": "i32",
                "floor": "fp32",
                "TILE": "constexpr",
            },
            constants=dict(config.tiles),
            config=config,
            is_chosen=tile == 4096,
        )
