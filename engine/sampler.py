"""From logits to tokens. Every row is its own function of its sequence: nothing in the batch can change it."""

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from core.sampling import SamplingParams, uniform_draw
from core.sequence import TokenLogprobs
from engine.plan import Sampled
from engine.sequence import Sequence


def sample(logits: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
    """Choose the next token of each sequence.

    Args:
        logits: [n, vocab] float32; not changed.
        sequences: n of them; row i belongs to sequence i.
    Returns:
        One Sampled each, with log-probabilities where the sequence asked for them; with an error for a row that is no
        distribution (NaN, or nothing left to choose), which concerns that row alone.
    """
    # A NaN or +inf anywhere makes the row's maximum NaN or +inf; all -inf makes it -inf.
    is_usable: list[bool] = logits.amax(dim=-1).isfinite().tolist()
    best: list[int] = logits.argmax(dim=-1).tolist()  # the lowest id among equals
    rows = zip(logits, sequences, best, is_usable, strict=True)
    return [
        _sample_row(row, sequence, token) if usable else Sampled(None, error="the model computed no usable logits")
        for row, sequence, token, usable in rows
    ]


def _sample_row(logits: Tensor, sequence: Sequence, best: int) -> Sampled:
    params, position = sequence.spec.sampling, sequence.num_output_tokens
    allowed = logits
    if position < params.min_tokens:
        allowed = _without_stops(logits, sequence)
        best = int(allowed.argmax())
        if allowed[best] == -math.inf:
            return Sampled(None, error="min_tokens leaves no token: every one ends the answer")
    if params.is_greedy:
        token = best
    else:
        assert params.seed is not None, "the router gives every request a seed"
        token = _draw(allowed, params, uniform_draw(params.seed, position))
    return Sampled(token, None if params.logprobs is None else _logprobs(logits, token, params.logprobs))


def _without_stops(logits: Tensor, sequence: Sequence) -> Tensor:
    """A copy in which nothing that would end the answer can be chosen."""
    vocab = logits.shape[-1]
    stops = {*sequence.spec.eos_token_ids, *sequence.spec.sampling.stop_token_ids}
    masked = logits.clone()
    masked[[token for token in stops if 0 <= token < vocab]] = -math.inf
    return masked


def _draw(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """Temperature, min-p, top-k, top-p, in this order, then the inverse of the cumulated probabilities at `uniform`.

    Args:
        logits: [vocab] float32.
        params: with a temperature above zero.
        uniform: in [0, 1).
    """
    scaled = (logits - logits.amax()).double() / params.temperature  # the best is 0, so exp() cannot overflow
    tokens = torch.arange(len(scaled))
    if params.min_p > 0.0:
        tokens = (scaled >= math.log(params.min_p)).nonzero().flatten()
    if 0 < params.top_k < len(tokens):
        tokens = _top_k(scaled, tokens, params.top_k)
    if params.top_p < 1.0:
        tokens = _top_p(scaled, tokens, params.top_p)
    cumulated = scaled[tokens].exp().cumsum(0)
    index = int(torch.searchsorted(cumulated, uniform * cumulated[-1], right=True))
    # Rounding can put the target on the very end; the last token there is one that has weight.
    return int(tokens[min(index, int(torch.searchsorted(cumulated, cumulated[-1])))])


def _top_k(scaled: Tensor, tokens: Tensor, k: int) -> Tensor:
    """The `k` best of `tokens` (ascending ids), best first, equal ones by id."""
    weights = scaled[tokens]
    kept = tokens[weights >= weights.topk(k).values[-1]]  # more than k where the last one has equals
    return kept[scaled[kept].sort(descending=True, stable=True).indices[:k]]


def _top_p(scaled: Tensor, tokens: Tensor, top_p: float) -> Tensor:
    """The fewest best of `tokens` that together have the share `top_p` of their weight, best first, equal ones by id."""
    weights = scaled[tokens].exp()
    target = weights.sum() * top_p
    # Exact, and spares sorting a whole vocabulary: what is below this bound cannot make up 1 - top_p together.
    likely = weights >= (weights.sum() - target) / len(weights)
    tokens, weights = tokens[likely], weights[likely]
    weights, order = weights.sort(descending=True, stable=True)
    count = int(torch.searchsorted(weights.cumsum(0), target)) + 1
    return tokens[order[:count]]


def _logprobs(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    logprobs = logits.log_softmax(dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        ids = _top_k(logprobs, torch.arange(len(logprobs)), min(num_top, len(logprobs)))
        top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), top)
