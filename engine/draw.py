"""One random token of one row of logits: temperature, min-p, top-k, top-p, and the inverse of what remains.

Everything is decided in float64, by the row, its parameters and one number alone. To compute a whole vocabulary in float64
would take longer than a small model's head, so float32 first says where to look: `FLOAT32_ERROR` bounds how wrong it can be,
and where that could change the token, float64 decides over the whole row.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from core.sampling import SamplingParams

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]

BLOCK = 128  # tokens whose weights are summed, or compared, as one
FEW = 256  # top-p seldom keeps more

# Of a sum of weights exp(-x), largest 1, relative: x has three roundings, exp2 and the sum of a block err by less than 1.5e-6;
# the mean of x under its own weights is at most log(vocab), 12. So 3 * 2**-24 * 12 + 1.5e-6 = 3.7e-6.
FLOAT32_ERROR = 4e-6


class RoughWeights(NamedTuple):
    """Weights of a row's tokens in float32, and their sums in blocks; all relative to the best one's, 1."""

    weights: Row  # [vocab]
    block_sums: Weights  # [ceil(vocab / BLOCK)]


Weigh = Callable[[Row, float, float], RoughWeights]
"""Does what `rough_weights` says, in its own way and within the same error."""


def rough_weights(row: Row, best: float, temperature: float) -> RoughWeights:
    """Weigh every token; any sum of the weights is wrong by less than FLOAT32_ERROR of the whole.

    Args:
        row: [vocab] logits; -inf is allowed.
        best: the largest of them, finite.
        temperature: above 0.
    """
    weights = torch.from_numpy(row) - best
    weights.mul_(1.0 / (temperature * math.log(2.0))).exp2_()  # half the time of exp
    whole = len(row) // BLOCK * BLOCK
    sums = weights[:whole].view(-1, BLOCK).sum(-1).numpy().astype(np.float64)
    if whole < len(row):
        sums = np.append(sums, float(weights[whole:].sum()))
    return RoughWeights(weights.numpy(), sums)


def top_tokens(row: Row, k: int) -> Ids:
    """The `k` best tokens, best first, equal ones by id; all of them when there are fewer."""
    k = min(k, len(row))
    whole = len(row) // BLOCK * BLOCK
    if k <= len(row) // BLOCK:
        # k blocks have a token at least as good as the k-th best block's best: what is below cannot be among the k best.
        heads = torch.from_numpy(row[:whole]).view(-1, BLOCK).amax(-1).numpy()
        bound = np.partition(heads, -k)[-k]
    else:
        bound = np.partition(row, -k)[-k]
    return _best_first(row, np.flatnonzero(row >= bound))[:k]


def draw(row: Row, best: float, params: SamplingParams, uniform: float, weigh: Weigh = rough_weights) -> int:
    """Choose the token at `uniform` of what the filters leave.

    The filters apply in the order temperature, min-p, top-k, top-p; each sees the weights the one before it left. What is
    left lies in the order of ids, or, after top-k or top-p, best first, equal ones by id.

    Args:
        row: [vocab] logits; -inf is never drawn.
        best: the largest of them, finite.
        params: with a temperature above 0.
        uniform: in [0, 1).
        weigh: how the whole row is weighed where that is needed; the token does not depend on it.
    """
    top_k = params.top_k if params.top_k < len(row) else 0
    if not (top_k or params.min_p):
        if params.top_p < 1.0:
            tokens, weights = _top_p_of_all(row, best, params, weigh)
            return int(tokens[_inverse(weights, uniform)])
        return _draw_of_all(row, best, params.temperature, uniform, weigh)
    if top_k:
        tokens = top_tokens(row, top_k)
    else:
        # Never too high a bound: rounded to float32, then one step down. The weights below decide.
        bound = np.float32(best + params.temperature * math.log(params.min_p))
        tokens = np.flatnonzero(row >= np.nextafter(bound, np.float32(-np.inf)))
        if params.top_p < 1.0:
            tokens = _best_first(row, tokens)
    weights = _weights(row[tokens], best, params.temperature)
    is_kept = weights >= params.min_p
    tokens, weights = tokens[is_kept], weights[is_kept]
    if params.top_p < 1.0:
        cumulated = weights.cumsum()
        weights = weights[: int(cumulated.searchsorted(params.top_p * cumulated[-1])) + 1]
    return int(tokens[_inverse(weights, uniform)])


def _draw_of_all(row: Row, best: float, temperature: float, uniform: float, weigh: Weigh) -> int:
    """The token at `uniform` of the whole vocabulary."""
    ends = weigh(row, best, temperature).block_sums.cumsum()
    target = uniform * ends[-1]
    block = min(int(ends.searchsorted(target, side="right")), len(ends) - 1)
    start = ends[block - 1] if block else 0.0
    borders = start + _weights(row[block * BLOCK : (block + 1) * BLOCK], best, temperature).cumsum()
    index = int(borders.searchsorted(target, side="right"))
    margin = 2 * FLOAT32_ERROR * ends[-1]  # the borders' and the target's
    if index < len(borders):
        below = borders[index - 1] if index else start
        is_first = block == index == 0  # nothing lies below the first token
        if (is_first or below + margin <= target) and target <= borders[index] - margin:
            return block * BLOCK + index
    return _inverse(_weights(row, best, temperature), uniform)


def _top_p_of_all(row: Row, best: float, params: SamplingParams, weigh: Weigh) -> tuple[Ids, Weights]:
    """The fewest best tokens that have the share `top_p` of the whole vocabulary's weight, best first, and their weights."""
    rough = weigh(row, best, params.temperature)
    total = float(rough.block_sums.sum())
    low, high = ((1.0 + error) * params.top_p * total for error in (-FLOAT32_ERROR, FLOAT32_ERROR))
    tokens = top_tokens(row, FEW)
    cumulated = (weights := _weights(row[tokens], best, params.temperature)).cumsum()
    if cumulated[-1] <= high:
        # What is below this bound has not even half of 1 - top_p together.
        likely = np.flatnonzero(rough.weights >= (1.0 - params.top_p) * total / (2 * len(row)))
        tokens = _best_first(row, likely)
        cumulated = (weights := _weights(row[tokens], best, params.temperature)).cumsum()
    if cumulated[-1] <= high or cumulated.searchsorted(low) != cumulated.searchsorted(high):
        tokens = _best_first(row, np.arange(len(row)))
        cumulated = (weights := _weights(row[tokens], best, params.temperature)).cumsum()
        low = params.top_p * cumulated[-1]
    count = int(cumulated.searchsorted(low)) + 1
    return tokens[:count], weights[:count]


def _best_first(row: Row, tokens: Ids) -> Ids:
    """Sort tokens by their logits, the largest first, equal ones by id."""
    # One integer each, in the order of (-logit, id): sorted many times faster than floats that must keep their order.
    bits = (row[tokens] + np.float32(0.0)).view(np.int32)  # -0.0 becomes 0.0
    ascending = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
    keys = (-ascending << 32) + tokens
    keys.sort()
    return keys & 0xFFFFFFFF


def _weights(logits: Row, best: float, temperature: float) -> Weights:
    scaled = torch.from_numpy((logits.astype(np.float64) - best) / temperature)
    weights: Weights = scaled.exp_().numpy()  # numpy's own takes five times as long
    return weights


def _inverse(weights: Weights, uniform: float) -> int:
    """Where `uniform` falls among the cumulated weights."""
    cumulated = weights.cumsum()
    index = int(cumulated.searchsorted(uniform * cumulated[-1], side="right"))
    # Rounding can put the target on the very end; the last token there is one that has weight.
    return min(index, int(cumulated.searchsorted(cumulated[-1])))
