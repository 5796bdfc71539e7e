"""From logits to tokens on the device: greedy, or temperature, min-p, top-k, top-p and the inverse of what remains.

Nothing is sorted. `_weigh_kernel` reads all rows once, with the whole device, and leaves each tile's best logit and weight.
`_draw_kernel` then has one program for each row:

- Greedy, and a draw without filters, look at one tile more. Min-p alone reads the tiles that have a token it keeps.
- Top-k and top-p order the tokens best first, equal ones by id. What they keep ends at an edge: a logit, and how many of the
  tokens that have exactly that one. The weight and the number of tokens above a bound say on which side of it the edge lies,
  so a few bounds at once narrow it down. As soon as no more than LIST tokens lie above the lower bound, they are put on a
  list, and the rest is done there: the edge of top-k, that of top-p within it, and the token at `uniform` of what is left,
  which is one more edge. Only where the edge lies beyond LIST tokens is the whole row read to the end.

Weights are float32, relative to the best token's; sums are monotonous in the bound and added in an order that the tile sizes
alone fix. Their error is below 1e-5 of the whole: where the uniform number (or top-p) lies so close to a border between two
tokens, the token can be the other one than the CPU's float64 chooses, never one that a filter took out.

Reads of a row: 1 (greedy, no filter), 2 (min-p alone), 1 + 1 + 1 or 2 + 2 with a list; without one, 2 + 8 to 16 for each edge.
Estimated for 64 rows of 128k logits on an H200, 32 MiB that stay in its L2 cache: 8 to 12 us for the first read (3 to 4 TB/s),
then each read takes a row's multiprocessor 6 us for its 512 KiB, or 12 us where four bounds are compared; the list some 15 us:
about 12 us greedy or unfiltered, 25 us min-p alone, 55 to 80 us with top-k or top-p, 300 us where no list holds what is kept.
"""

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.sampling import uniform_draw
from kernels.gpu.best_first import draw_best_first, next_above, nth_equal
from kernels.gpu.variant import GFX942, Arch, Config, Variant, arch_of

MAX_TILES = 256  # in a row
TILE = 2048
MAX_VOCAB = MAX_TILES * TILE


def draw_tokens_ref(
    logits: Tensor,
    temperatures: Tensor,
    min_ps: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """The specification: each row by a full sort, in float64; as `engine.draw`, which takes shorter ways."""
    tokens = []
    for row, temperature, min_p, top_k, top_p, seed, position in zip(
        logits, *(each.tolist() for each in (temperatures, min_ps, top_ks, top_ps, seeds, positions)), strict=True
    ):
        best = int(row.argmax())  # the lowest id among equals, or the first NaN
        if not row[best].isfinite():
            tokens.append(-1)
            continue
        if temperature == 0.0:
            tokens.append(best)
            continue
        is_cut = 0 < top_k < len(row)
        order = torch.arange(len(row), device=row.device)
        if is_cut or top_p < 1.0:
            order = row.sort(descending=True, stable=True).indices
        weights = ((row[order].double() - row[best].double()) / temperature).exp()
        is_kept = weights >= min_p
        order, weights = order[is_kept], weights[is_kept]
        if is_cut:
            order, weights = order[:top_k], weights[:top_k]
        if top_p < 1.0:
            sums = weights.cumsum(0)
            weights = weights[: int((sums < top_p * sums[-1]).sum()) + 1]
        sums = weights.cumsum(0)
        # Rounding can put the target on the very end; the last token there is one that has weight.
        index = min(int((sums <= uniform_draw(seed, position) * sums[-1]).sum()), int((sums < sums[-1]).sum()))
        tokens.append(int(order[index]))
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device)


@triton.jit
def _uniform(seed, position):
    """`core.sampling.uniform_draw`, bit for bit."""
    position = position.to(tl.uint64)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    zero = low ^ low
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = (first.to(tl.uint64) << 32) | second.to(tl.uint64)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _weigh_kernel(
    logits_ptr,
    temperatures_ptr,
    work_ptr,
    vocab,
    logits_stride,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WORK: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, mask=ids < vocab, other=-float("inf"))
    # An infinite best makes the row unusable, as a NaN has to; comparisons would lose the NaN.
    logits = tl.where(logits == logits, logits, float("inf"))
    peak = tl.max(logits, axis=0)
    tl.store(work_ptr + row * WORK + tile, peak)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0.0:
        scale = (1.4426950408889634 / temperature).to(tl.float32)
        base = tl.where(peak == -float("inf"), 0.0, peak)
        tl.store(work_ptr + row * WORK + TILES + tile, tl.sum(tl.exp2((logits - base) * scale), axis=0))


@triton.jit
def _draw_by_id(
    row_ptr, work_ptr, vocab, best, scale, lowest, is_filtered, uniform, TILE: tl.constexpr, TILES: tl.constexpr
):
    """The token at `uniform` of those not below `lowest`, in the order of ids."""
    lanes = tl.arange(0, TILE)
    tiles = tl.arange(0, TILES)
    is_tile = tiles * TILE < vocab
    peaks = tl.load(work_ptr + tiles, mask=is_tile, other=-float("inf"))
    weights = tl.load(work_ptr + TILES + tiles, mask=is_tile, other=0.0) * tl.exp2((peaks - best) * scale)
    if is_filtered:
        weights = tl.zeros([TILES], tl.float32)
        for start in range(0, vocab, TILE):
            if tl.load(work_ptr + start // TILE) >= lowest:
                ids = start + lanes
                logits = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf"))
                weight = tl.sum(tl.where(logits >= lowest, tl.exp2((logits - best) * scale), 0.0), axis=0)
                weights = tl.where(tiles == start // TILE, weight, weights)
    # A scan adds in the order of a tree, in which a sum can be an ulp below the one before it: no step relies on order.
    ends = tl.cumsum(weights.to(tl.float64), axis=0)
    target = uniform * tl.max(ends, axis=0)
    tile = tl.min(tl.where((ends > target) & (weights > 0.0), tiles, TILES), axis=0)
    tile = tl.minimum(tile, tl.max(tl.where(weights > 0.0, tiles, 0), axis=0))
    target -= tl.max(tl.where(tiles < tile, ends, 0.0), axis=0)
    ids = tile * TILE + lanes
    logits = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf"))
    weights = tl.where(logits >= lowest, tl.exp2((logits - best) * scale), 0.0)
    ends = tl.cumsum(weights, axis=0).to(tl.float64)
    token = tl.min(tl.where((ends > target) & (weights > 0.0), ids, vocab), axis=0)
    return tl.minimum(token, tl.max(tl.where(weights > 0.0, ids, 0), axis=0))


@triton.jit
def _draw_kernel(
    logits_ptr,
    temperatures_ptr,
    min_ps_ptr,
    top_ks_ptr,
    top_ps_ptr,
    seeds_ptr,
    positions_ptr,
    work_ptr,
    tokens_ptr,
    vocab,
    logits_stride,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WORK: tl.constexpr,
    SCAN: tl.constexpr,
    BOUNDS: tl.constexpr,
    LIST: tl.constexpr,
    LIST_SCAN: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    work_ptr += row * WORK
    tiles = tl.arange(0, TILES)
    best = tl.max(tl.load(work_ptr + tiles, mask=tiles * TILE < vocab, other=-float("inf")), axis=0)
    token = -1
    if (best > -float("inf")) & (best < float("inf")):
        temperature = tl.load(temperatures_ptr + row)
        if temperature == 0.0:
            token = nth_equal(row_ptr, work_ptr, vocab, best, 1, TILE)
        else:
            scale = (1.4426950408889634 / temperature).to(tl.float32)
            uniform = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
            min_p = tl.load(min_ps_ptr + row)
            top_k = tl.load(top_ks_ptr + row)
            top_k = tl.where(top_k < vocab, top_k, 0)
            top_p = tl.load(top_ps_ptr + row)
            is_by_id = (top_k == 0) & (top_p >= 1.0)
            # The lowest logit that min-p keeps, and that has weight at all where a search would go on below.
            bound = best.to(tl.float64) + tl.where(is_by_id, -float("inf"), -83.0 * temperature)
            if min_p > 0.0:
                bound = tl.maximum(bound, best.to(tl.float64) + temperature * tl.log(min_p))
            bound = tl.maximum(bound, -3.4028234663852886e38)
            lowest = bound.to(tl.float32)
            lowest = tl.where(lowest.to(tl.float64) < bound, next_above(lowest), lowest)
            if is_by_id:
                token = _draw_by_id(row_ptr, work_ptr, vocab, best, scale, lowest, min_p > 0.0, uniform, TILE, TILES)
            else:
                token = draw_best_first(
                    row_ptr,
                    work_ptr,
                    work_ptr + 2 * TILES,
                    vocab,
                    best,
                    scale,
                    lowest,
                    top_k,
                    top_p,
                    uniform,
                    TILE,
                    SCAN,
                    BOUNDS,
                    LIST,
                    LIST_SCAN,
                )
    tl.store(tokens_ptr + row, token)


def draw_tokens(
    logits: Tensor,
    temperatures: Tensor,
    min_ps: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
    config: Config | None = None,
) -> Tensor:
    """Choose one token of each row, as `engine.draw` does with `core.sampling.uniform_draw`; a row sees nothing of the others.

    Filters apply in the order temperature, min-p, top-k, top-p; each sees the weights that the one before it left. The values
    of the parameters are not checked.

    Args:
        logits: [n, vocab] float32, last dimension contiguous, rows any distance apart; not changed.
        temperatures: [n] float64; 0 is greedy, equal ones by the lowest id.
        min_ps: [n] float64 in [0, 1]; 0 is off.
        top_ks: [n] int32, not negative; 0 is off.
        top_ps: [n] float64 in (0, 1]; 1 is off.
        seeds: [n] int64.
        positions: [n] int32, from 0: which token of its answer a row chooses.
        config: other tile sizes than the chosen ones.
    Returns:
        [n] int32: the tokens; -1 for a row whose best logit is not finite, or that holds a NaN.
    Raises:
        ValueError: `logits` is not float32 with a contiguous last dimension or more than MAX_VOCAB wide; a parameter that
            float32 would change is not float64.
    Source: nucleus sampling (Holtzman et al., ICLR 2020), min-p (Nguyen et al., ICLR 2025); thresholds found without a sort
        as in FlashInfer (Ye et al., MLSys 2025), but deterministic; Philox (Salmon et al., SC 2011).
    """
    n, vocab = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"need float32 rows of stride 1; got {logits.dtype}, {tuple(logits.shape)}, {logits.stride()}")
    if not temperatures.dtype == min_ps.dtype == top_ps.dtype == torch.float64:
        raise ValueError("need temperatures, min_ps and top_ps in float64: rounded, a top-p just below 1 would be off")
    config = config or _config(arch_of(logits.device))
    tiles = config.tiles
    tokens = torch.empty(n, dtype=torch.int32, device=logits.device)
    if n == 0:
        return tokens
    work = torch.empty((n, tiles["WORK"]), dtype=torch.float32, device=logits.device)
    _weigh_kernel[(triton.cdiv(vocab, tiles["TILE"]), n)](
        logits,
        temperatures,
        work,
        vocab,
        logits.stride(0),
        TILE=tiles["TILE"],
        TILES=tiles["TILES"],
        WORK=tiles["WORK"],
        num_warps=4,
        num_stages=1,
    )
    _draw_kernel[(n,)](
        logits,
        temperatures,
        min_ps,
        top_ks,
        top_ps,
        seeds,
        positions,
        work,
        tokens,
        vocab,
        logits.stride(0),
        **tiles,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return tokens


@functools.cache
def _config(arch: Arch) -> Config:
    # As long as there are fewer rows than multiprocessors, a row's program has one to itself and may take all its registers.
    return _layout(4, 2048, 8) if arch is GFX942 else _layout(4, 4096, 8)


def _layout(bounds: int, scan: int, num_warps: int) -> Config:
    """Tile sizes.

    Args:
        bounds: measured at once: more mean fewer reads of a row and more work for each logit.
        scan: logits of a step through the row.
        num_warps: of a row's program.
    """
    list_tokens = 8192
    tiles = {
        "TILE": TILE,
        "TILES": MAX_TILES,
        "WORK": 2 * MAX_TILES + 2 * list_tokens,
        "SCAN": scan,
        "BOUNDS": bounds,
        "LIST": list_tokens,
        "LIST_SCAN": 2048,
    }
    return Config(tiles, num_warps)


def variants(arch: Arch) -> Iterator[Variant]:
    """Every form of the kernels that some machine compiles: for rows that vector loads can read, and for others."""
    chosen = _config(arch)
    fill = 512 // arch.warp_size
    weigh_tiles = {name: chosen.tiles[name] for name in ("TILE", "TILES", "WORK")}
    row = {"vocab": "i32", "logits_stride": "i32"}
    weigh = {"logits_ptr": "*fp32", "temperatures_ptr": "*fp64", "work_ptr": "*fp32", **row}
    draw = {
        "logits_ptr": "*fp32",
        "temperatures_ptr": "*fp64",
        "min_ps_ptr": "*fp64",
        "top_ks_ptr": "*i32",
        "top_ps_ptr": "*fp64",
        "seeds_ptr": "*i64",
        "positions_ptr": "*i32",
        "work_ptr": "*fp32",
        "tokens_ptr": "*i32",
        **row,
    }
    for suffix, aligned in (("", frozenset(row)), ("-odd", frozenset[str]())):
        yield Variant(
            kernel=_weigh_kernel,
            label=f"weigh-fp32{suffix}",
            signature=weigh | dict.fromkeys(weigh_tiles, "constexpr"),
            constants=weigh_tiles,
            config=Config(weigh_tiles, num_warps=4),
            aligned=aligned,
        )
        for config in (chosen, _layout(2, 4096, fill), _layout(4, 2048, fill // 2)):
            tiles = config.tiles
            yield Variant(
                kernel=_draw_kernel,
                label=f"draw-fp32{suffix}-b{tiles['BOUNDS']}s{tiles['SCAN']}w{config.num_warps}",
                signature=draw | dict.fromkeys(tiles, "constexpr"),
                constants=tiles,
                config=config,
                is_chosen=config is chosen,
                aligned=aligned,
            )
