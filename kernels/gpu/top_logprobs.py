"""Log-probabilities of chosen tokens, and of the best ones beside them.

`_peak_kernel` reads all rows once, with the whole device, and leaves the highest logit of each group of 128 and the weight of
each tile. `_top_kernel` has one program for each row. The `num_top` best tokens lie in the `num_top` best groups, where groups
go by their highest logit, equal ones by number: each of those has a token that comes before any token of another group. So
only these groups are read again, and the best of at most 4096 values are taken one after the other.

Reads of a row: 1, and at most 16 KiB. Estimated for 64 rows of 128k logits on an H200: 8 to 12 us for the read from L2 (3 to
4 TB/s), then less than 1 us for each of the `num_top`.
"""

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.sampling import MAX_TOP_LOGPROBS, MIN_LOGPROB
from kernels.gpu.best_first import key_of, logit_of
from kernels.gpu.variant import Arch, Config, Variant, arch_of, round_up_to_power_of_2

GROUP = 128
TILE = 2048
MAX_TILES = 256  # in a row
MAX_VOCAB = MAX_TILES * TILE
NONE = tl.constexpr(-(2**63) + 1)  # below the packed form of every logit


def top_logprobs_ref(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The specification, by a full sort."""
    n, vocab = logits.shape
    is_usable = logits.max(dim=-1).values.isfinite()  # the maximum of a row with a NaN is NaN
    logprobs = logits.double().log_softmax(-1).float().clamp(min=MIN_LOGPROB)
    chosen = logprobs.gather(1, tokens.long().clamp(min=0)[:, None])[:, 0]
    chosen = torch.where(is_usable & (tokens >= 0), chosen, torch.nan)
    ids = torch.full((n, num_top), -1, dtype=torch.int32, device=logits.device)
    values = torch.full((n, num_top), MIN_LOGPROB, device=logits.device)
    count = min(num_top, vocab)
    order = logits.sort(descending=True, stable=True).indices[:, :count]
    ids[:, :count] = torch.where(is_usable[:, None], order, -1)
    values[:, :count] = torch.where(is_usable[:, None], logprobs.gather(1, order), MIN_LOGPROB)
    return chosen, ids, values


@triton.jit
def _peak_kernel(
    logits_ptr,
    work_ptr,
    vocab,
    logits_stride,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    WORK: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1)
    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, mask=ids < vocab, other=-float("inf"))
    # An infinite best makes the row unusable, as a NaN has to; comparisons would lose the NaN.
    logits = tl.where(logits == logits, logits, float("inf"))
    heads = tl.max(logits, axis=1)
    tl.store(work_ptr + row * WORK + groups, heads)
    peak = tl.max(heads, axis=0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    weights = tl.exp2((logits - base) * 1.4426950408889634)
    tl.store(work_ptr + row * WORK + MAX_GROUPS + tile, peak)
    tl.store(
        work_ptr + row * WORK + MAX_GROUPS + MAX_GROUPS * GROUP // TILE + tile, tl.sum(tl.sum(weights, axis=1), axis=0)
    )


@triton.jit
def _sortable(logits, numbers, is_real):
    """Integers in the order of the logits, equal ones by falling number; NONE for what is not real."""
    packed = (key_of(logits).to(tl.int64) << 32) | (0x7FFFFFFF - numbers).to(tl.int64)
    return tl.where(is_real, packed, NONE)


@triton.jit(do_not_specialize=["num_top"])
def _top_kernel(
    logits_ptr,
    tokens_ptr,
    work_ptr,
    chosen_ptr,
    ids_ptr,
    values_ptr,
    vocab,
    logits_stride,
    num_top,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    WORK: tl.constexpr,
    TOP: tl.constexpr,
    FLOOR: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    work_ptr += row * WORK
    groups = tl.arange(0, MAX_GROUPS)
    is_group = groups * GROUP < vocab
    heads = tl.load(work_ptr + groups, mask=is_group, other=-float("inf"))
    best = tl.max(heads, axis=0)
    is_usable = (best > -float("inf")) & (best < float("inf"))

    tiles = tl.arange(0, MAX_GROUPS * GROUP // TILE)
    is_tile = tiles * TILE < vocab
    peaks = tl.load(work_ptr + MAX_GROUPS + tiles, mask=is_tile, other=-float("inf"))
    weights = tl.load(work_ptr + MAX_GROUPS + MAX_GROUPS * GROUP // TILE + tiles, mask=is_tile, other=0.0)
    weights *= tl.exp2((peaks - best) * 1.4426950408889634)
    log_total = best.to(tl.float64) + tl.log(tl.sum(weights.to(tl.float64), axis=0))

    token = tl.load(tokens_ptr + row)
    is_token = (token >= 0) & (token < vocab)
    logit = tl.load(row_ptr + token, mask=is_token, other=0.0)
    value = tl.maximum(logit.to(tl.float64) - log_total, FLOOR).to(tl.float32)
    tl.store(chosen_ptr + row, tl.where(is_usable & is_token, value, float("nan")))

    slots = tl.arange(0, TOP)
    best_groups = tl.full([TOP], -1, tl.int32)
    packed = _sortable(heads, groups, is_group)
    for slot in range(num_top):
        first = tl.max(packed, axis=0)
        is_real = (first != NONE) & is_usable
        group = tl.where(is_real, 0x7FFFFFFF - (first & 0xFFFFFFFF), -1).to(tl.int32)
        best_groups = tl.where(slots == slot, group, best_groups)
        packed = tl.where(packed == first, NONE, packed)

    ids = best_groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_real_id = (best_groups[:, None] >= 0) & (ids < vocab)
    logits = tl.load(row_ptr + ids, mask=is_real_id, other=0.0)
    packed = _sortable(logits, ids, is_real_id)
    for slot in range(num_top):
        first = tl.max(tl.max(packed, axis=1), axis=0)
        is_real = first != NONE
        best_id = tl.where(is_real, 0x7FFFFFFF - (first & 0xFFFFFFFF), -1).to(tl.int32)
        logprob = tl.maximum(logit_of((first >> 32).to(tl.int32)).to(tl.float64) - log_total, FLOOR)
        tl.store(ids_ptr + row * num_top + slot, best_id)
        tl.store(values_ptr + row * num_top + slot, tl.where(is_real, logprob, FLOOR).to(tl.float32))
        packed = tl.where(packed == first, NONE, packed)


def top_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under a softmax of whole rows: of one token each, and of the best ones.

    What is less likely than MIN_LOGPROB has that. `tokens` are not checked beyond what memory safety takes.

    Args:
        logits: [n, vocab] float32, last dimension contiguous, rows any distance apart; not changed.
        tokens: [n] int32; one outside the vocabulary, such as -1, has no log-probability.
        num_top: how many of the best to name, 0 to 20.
    Returns:
        [n] float32, each token's; NaN where it has none, or its row has a NaN or a best logit that is not finite. [n, num_top]
        int32, the best tokens, best first, equal ones by id; -1 past the end of the vocabulary and in an unusable row.
        [n, num_top] float32, theirs; MIN_LOGPROB for -1.
    Raises:
        ValueError: `logits` is not float32 with a contiguous last dimension or more than MAX_VOCAB wide, or `num_top` is out
            of range.
    """
    n, vocab = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"need float32 rows of stride 1; got {logits.dtype}, {tuple(logits.shape)}, {logits.stride()}")
    if not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise ValueError(f"num_top={num_top} is not in [0, {MAX_TOP_LOGPROBS}]")
    device = logits.device
    chosen = torch.empty(n, dtype=torch.float32, device=device)
    ids = torch.empty((n, num_top), dtype=torch.int32, device=device)
    values = torch.empty((n, num_top), dtype=torch.float32, device=device)
    if n == 0:
        return chosen, ids, values
    config = _config(arch_of(device))
    tiles = config.tiles
    work = torch.empty((n, tiles["WORK"]), dtype=torch.float32, device=device)
    _peak_kernel[(triton.cdiv(vocab, tiles["TILE"]), n)](
        logits, work, vocab, logits.stride(0), **tiles, num_warps=4, num_stages=1
    )
    _top_kernel[(n,)](
        logits,
        tokens,
        work,
        chosen,
        ids,
        values,
        vocab,
        logits.stride(0),
        num_top,
        **tiles,
        TOP=round_up_to_power_of_2(MAX_TOP_LOGPROBS),
        FLOOR=MIN_LOGPROB,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return chosen, ids, values


@functools.cache
def _config(arch: Arch) -> Config:
    max_groups = MAX_VOCAB // GROUP
    tiles = {"TILE": TILE, "GROUP": GROUP, "MAX_GROUPS": max_groups, "WORK": max_groups + 2 * MAX_TILES}
    return Config(tiles, num_warps=256 // arch.warp_size)


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form of the kernels that some machine compiles: for rows that vector loads can read, and for others."""
    config = _config(arch)
    row = {"vocab": "i32", "logits_stride": "i32"}
    peak = {"logits_ptr": "*fp32", "work_ptr": "*fp32", **row}
    top = {
        "logits_ptr": "*fp32",
        "tokens_ptr": "*i32",
        "work_ptr": "*fp32",
        "chosen_ptr": "*fp32",
        "ids_ptr": "*i32",
        "values_ptr": "*fp32",
        **row,
        "num_top": "i32",
    }
    constants = {**config.tiles, "TOP": round_up_to_power_of_2(MAX_TOP_LOGPROBS), "FLOOR": MIN_LOGPROB}
    for suffix, aligned in (("", frozenset(row)), ("-odd", frozenset[str]())):
        yield Variant(
            kernel=_peak_kernel,
            label=f"peak-fp32{suffix}",
            signature=peak | dict.fromkeys(config.tiles, "constexpr"),
            constants=config.tiles,
            config=Config(config.tiles, num_warps=4),
            aligned=aligned,
        )
        yield Variant(
            kernel=_top_kernel,
            label=f"top-fp32{suffix}",
            signature=top | dict.fromkeys(constants, "constexpr"),
            constants=constants,
            config=config,
            aligned=aligned,
        )
