"""The random token of a row whose filters order tokens best first, equal ones by id: top-k, top-p. Used by `draw_tokens`.

What such a filter keeps ends at an edge: a logit, and how many of the tokens that have exactly that one. The token drawn is one
more edge, that of the share `uniform` of what is left. Edges are found without a sort: the weight and the number of the tokens
not below a few bounds say on which side of each the edge lies, until one logit remains. Logits are compared as the floats they
are; their order as integers, the keys, gives every interval a middle.

Sums are monotonous in the bound, in an order of additions that the tile sizes alone fix.
"""

import triton
import triton.language as tl


@triton.jit
def key_of(logit):
    """An integer in the order of the logits; both zeros have 0."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def next_above(logit):
    """The least float above a finite one."""
    return logit_of(key_of(logit) + 1)


@triton.jit
def nth_equal(row_ptr, peaks_ptr, vocab, logit, nth, TILE: tl.constexpr):
    """The id of the `nth` token, from 1, in the order of ids, of those that have exactly this logit; there are as many.

    Args:
        peaks_ptr: highest logit of each tile of the row.
    """
    lanes = tl.arange(0, TILE)
    token = tl.full([], -1, tl.int32)
    rest = token * 0 + nth
    start = 0
    while (token < 0) & (start < vocab):
        # A tile without a logit as high is not read.
        if tl.load(peaks_ptr + start // TILE) >= logit:
            ids = start + lanes
            is_equal = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf")) == logit
            ranks = tl.cumsum(is_equal.to(tl.int32), axis=0)
            token = tl.max(tl.where(is_equal & (ranks == rest), ids, -1), axis=0)
            rest -= tl.max(ranks, axis=0)
        start += TILE
    return token


@triton.jit
def _measure(logits_ptr, num_logits, bounds, best, scale, TILE: tl.constexpr, BOUNDS: tl.constexpr):
    """Of each bound, the weight and the number of the tokens not below it; and the lowest of those not below any."""
    lanes = tl.arange(0, TILE)[None, :]
    least_bound = tl.min(bounds, axis=0)
    weights = tl.zeros([BOUNDS, TILE], tl.float32)
    counts = tl.zeros([BOUNDS, TILE], tl.int32)
    lowest = tl.full([1, TILE], float("inf"), tl.float32)
    for start in range(0, num_logits, TILE):
        # Added up lane by lane, and across lanes once at the end: there, all threads wait for each other.
        places = start + lanes
        logits = tl.load(logits_ptr + places, mask=places < num_logits, other=-float("inf"))
        is_above = logits >= bounds[:, None]
        weights += tl.where(is_above, tl.exp2((logits - best) * scale), 0.0)
        counts += is_above.to(tl.int32)
        lowest = tl.minimum(lowest, tl.where(logits >= least_bound, logits, float("inf")))
    return tl.sum(weights, axis=1).to(tl.float64), tl.sum(counts, axis=1), tl.min(tl.min(lowest, axis=1), axis=0)


@triton.jit
def _highest_below(logits_ptr, num_logits, bound, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)[None, :]
    highest = tl.full([1, TILE], -float("inf"), tl.float32)
    for start in range(0, num_logits, TILE):
        places = start + lanes
        logits = tl.load(logits_ptr + places, mask=places < num_logits, other=-float("inf"))
        highest = tl.maximum(highest, tl.where(logits < bound, logits, -float("inf")))
    return tl.max(tl.max(highest, axis=1), axis=0)


@triton.jit
def _narrow(keys, weights, counts, is_reached, low, high, count_low, weight_high, count_high):
    """[low, high) once some bounds in it were measured."""
    low = tl.maximum(low, tl.max(tl.where(is_reached, keys, low), axis=0))
    count_low = tl.minimum(count_low, tl.min(tl.where(is_reached, counts, count_low), axis=0))
    high = tl.minimum(high, tl.min(tl.where(is_reached, high, keys), axis=0))
    weight_high = tl.maximum(weight_high, tl.max(tl.where(is_reached, weight_high, weights), axis=0))
    count_high = tl.maximum(count_high, tl.max(tl.where(is_reached, count_high, counts), axis=0))
    return low, high, count_low, weight_high, count_high


@triton.jit
def _is_reached(weights, counts, target, kind):
    """Whether tokens are enough: by their number (kind 0), by their weight (1), or with more weight than the target (2)."""
    return tl.where(
        kind == 0, counts.to(tl.float64) >= target, tl.where(kind == 1, weights >= target, weights > target)
    )


@triton.jit
def _search(
    logits_ptr,
    num_logits,
    low,
    high,
    count_low,
    weight_high,
    count_high,
    target,
    kind,
    enough,
    best,
    scale,
    TILE: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """Narrow [low, high) to the highest key such that the tokens not below it reach the target; it is a token's.

    Ends as soon as a single token is left in it, or not more than `enough` are not below `low`. `low` reaches the target,
    `high` does not: neither is doubted, so rounding cannot lead out of the tokens between them.
    """
    steps = tl.arange(0, BOUNDS) + 1
    turn = 0
    while (high > low + 1) & (count_low > count_high + 1) & (count_low > enough):
        # Equal steps between logits come near the edge soon; equal steps between keys get there for certain.
        low_logit = logit_of(low)
        by_logit = key_of(low_logit + (logit_of(high) - low_logit) * (steps.to(tl.float32) / (BOUNDS + 1)))
        by_key = (low + (high.to(tl.int64) - low) * steps // (BOUNDS + 1)).to(tl.int32)
        keys = tl.minimum(tl.maximum(tl.where(turn == 0, by_logit, by_key), low + 1), high - 1)
        weights, counts, _ = _measure(logits_ptr, num_logits, logit_of(keys), best, scale, TILE, BOUNDS)
        is_reached = _is_reached(weights, counts, target, kind)
        low, high, count_low, weight_high, count_high = _narrow(
            keys, weights, counts, is_reached, low, high, count_low, weight_high, count_high
        )
        turn ^= 1
    return low, high, count_low, weight_high, count_high


@triton.jit
def _settle(
    logits_ptr,
    num_logits,
    low,
    high,
    count_low,
    weight_high,
    count_high,
    total,
    top_k,
    top_p,
    uniform,
    best,
    scale,
    TILE: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """The edge of top-k, that of top-p within it, then the token at `uniform` within that.

    Args:
        low, high, count_low, weight_high, count_high: where the search for the first edge begins. `low` is a token's key, and
            no token below it matters.
        total: weight of all tokens.
        top_k: 0 is off; then top_p is below 1.
    Returns:
        The token's key; which of those that have it, from 1; how many have it.
    """
    # Kept are the tokens above the edge and the first `num_kept` of those on it.
    edge = low
    num_kept = count_low
    weight_kept = total
    count_edge = count_low
    num_equal = count_low
    for kind in range(3):
        if ((kind == 0) & (top_k > 0)) | ((kind == 1) & (top_p < 1.0)) | (kind == 2):
            target = tl.where(kind == 0, top_k.to(tl.float64), tl.where(kind == 1, top_p, uniform) * weight_kept)
            found, end, count_edge, weight_above, count_above = _search(
                logits_ptr,
                num_logits,
                edge,
                high,
                count_edge,
                weight_high,
                count_high,
                target,
                kind,
                0,
                best,
                scale,
                TILE,
                BOUNDS,
            )
            if end > found + 1:
                found = key_of(_highest_below(logits_ptr, num_logits, logit_of(end), TILE))
            weight = tl.exp2((logit_of(found) - best) * scale).to(tl.float64)
            num_equal = count_edge - count_above
            num_allowed = tl.where(found == edge, tl.minimum(num_kept, num_equal), num_equal)
            missing = (target - weight_above) / weight
            missing = tl.where(kind == 1, tl.ceil(missing), tl.floor(missing) + 1.0)
            missing = tl.where(kind == 0, target - count_above.to(tl.float64), missing)
            missing = tl.minimum(tl.maximum(missing, 1.0), num_allowed.to(tl.float64))
            edge = found
            num_kept = missing.to(tl.int32)
            weight_kept = weight_above + missing * weight
            # The next edge lies anywhere from this one on.
            high = key_of(best) + 1
            weight_high = weight_high * 0.0
            count_high = count_high * 0
    return edge, num_kept, num_equal


@triton.jit
def _list_tokens(row_ptr, vocab, bound, list_ptr, TILE: tl.constexpr, LIST: tl.constexpr):
    """Write the logits not below `bound`, at most LIST, and their ids, in an order that the tile alone fixes.

    Returns the lowest.
    """
    # Adding nothing hides from the compiler that four neighbours can be loaded as one: the stores, each to a place of its own,
    # would have all threads exchange what they loaded, tile by tile.
    row_ptr += vocab >> 31
    lanes = tl.arange(0, TILE)
    counts = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        ids = start + lanes
        counts += (tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf")) >= bound).to(tl.int32)
    places = tl.cumsum(counts, axis=0) - counts
    for start in range(0, vocab, TILE):
        ids = start + lanes
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf"))
        is_listed = logits >= bound
        tl.store(list_ptr + places, logits, mask=is_listed)
        tl.store(list_ptr + LIST + places, ids.to(tl.float32, bitcast=True), mask=is_listed)
        places += is_listed.to(tl.int32)
    # Other threads read what these wrote.
    tl.debug_barrier()
    places = tl.arange(0, LIST)
    return tl.min(tl.load(list_ptr + places, mask=places < tl.sum(counts, axis=0), other=float("inf")), axis=0)


@triton.jit
def draw_best_first(
    row_ptr,
    peaks_ptr,
    list_ptr,
    vocab,
    best,
    scale,
    lowest,
    top_k,
    top_p,
    uniform,
    TILE: tl.constexpr,
    SCAN: tl.constexpr,
    BOUNDS: tl.constexpr,
    LIST: tl.constexpr,
    LIST_SCAN: tl.constexpr,
):
    """The token at `uniform` of what top-k and top-p leave of the tokens not below `lowest`.

    Args:
        row_ptr: `vocab` logits without NaN, some finite.
        peaks_ptr: highest logit of each TILE of them.
        list_ptr: room for 2 * LIST floats.
        best: the highest.
        scale: 1 / (temperature * log(2)).
        lowest: finite, not above `best`; has a weight that float32 can say.
        top_k: 0 is off; then top_p is below 1.
    """
    # The first bounds lie ever nearer to the best token: few tokens have most of the weight.
    steps = tl.arange(0, BOUNDS).to(tl.float32)
    bounds = lowest + tl.minimum(best - lowest, 3.4e38) * (1.0 - tl.exp2(-2.0 * steps))
    weights, counts, lowest = _measure(row_ptr, vocab, bounds, best, scale, SCAN, BOUNDS)
    total = tl.max(weights, axis=0)
    num_tokens = tl.max(counts, axis=0)
    top_k = tl.minimum(top_k, num_tokens)
    kind = tl.where(top_k > 0, 0, 1)
    target = tl.where(top_k > 0, top_k.to(tl.float64), top_p * total)
    is_reached = _is_reached(weights, counts, target, kind)
    end = key_of(best) + 1
    none = total * 0.0
    low, high, count_low, weight_high, count_high = _narrow(
        key_of(bounds), weights, counts, is_reached, key_of(lowest), end, num_tokens, none, num_tokens * 0
    )
    low, high, count_low, weight_high, count_high = _search(
        row_ptr,
        vocab,
        low,
        high,
        count_low,
        weight_high,
        count_high,
        target,
        kind,
        LIST,
        best,
        scale,
        SCAN,
        BOUNDS,
    )
    token = -1
    if count_low <= LIST:
        low = key_of(_list_tokens(row_ptr, vocab, logit_of(low), list_ptr, 2 * TILE, LIST))
        edge, nth, num_equal = _settle(
            list_ptr,
            count_low,
            low,
            end,
            count_low,
            none,
            count_low * 0,
            total,
            top_k,
            top_p,
            uniform,
            best,
            scale,
            LIST_SCAN,
            BOUNDS,
        )
        if num_equal == 1:
            places = tl.arange(0, LIST)
            is_listed = places < count_low
            is_found = tl.load(list_ptr + places, mask=is_listed, other=-float("inf")) == logit_of(edge)
            ids = tl.load(list_ptr + LIST + places, mask=is_listed, other=0.0).to(tl.int32, bitcast=True)
            token = tl.max(tl.where(is_found, ids, -1), axis=0)
    else:
        edge, nth, num_equal = _settle(
            row_ptr,
            vocab,
            low,
            high,
            count_low,
            weight_high,
            count_high,
            total,
            top_k,
            top_p,
            uniform,
            best,
            scale,
            SCAN,
            BOUNDS,
        )
    if token < 0:
        token = nth_equal(row_ptr, peaks_ptr, vocab, logit_of(edge), nth, TILE)
    return token
