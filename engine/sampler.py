"""From logits to tokens. Every row is its own function of its sequence: nothing in the batch can change it.

A row's steps, in vLLM's order: log-probabilities of the raw logits; min_tokens holds back what ends the answer; logit_bias;
repetition, frequency, presence penalty; greedy takes the best; temperature, min-p, top-k, top-p and a draw (`engine.draw`).
"""

import math
from collections.abc import Sequence as Seq

import numpy as np
from torch import Tensor

from core.sampling import MIN_LOGPROB, uniform_draw
from core.sequence import TokenLogprobs
from engine.draw import Row, Weigh, draw, rough_weights, top_tokens
from engine.plan import Sampled
from engine.sequence import Sequence
from engine.token_counts import TokenCounts

UNUSABLE = "the model computed no usable logits"


def sample(
    logits: Tensor, sequences: Seq[Sequence], weigh: Weigh = rough_weights, known_best: Tensor | None = None
) -> list[Sampled]:
    """Choose the next token of each sequence.

    Args:
        logits: [n, vocab] float32 on the CPU, contiguous; rows are changed in place.
        sequences: n of them; row i belongs to sequence i.
        weigh: how whole rows are weighed; no token depends on it.
        known_best: [n] the highest of each row, the first of equal ones or the first NaN; None: found here.
    Returns:
        One Sampled each, with log-probabilities where the sequence asked for them; with an error for a row that is no
        distribution (NaN, or nothing left to choose), which concerns that row alone.
    """
    rows = logits.numpy()
    edited = {
        index: _edit(row, sequence)
        for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True))
        if not sequence.is_plain and sequence.spec.sampling.edits_logits
    }
    if known_best is None:
        best = rows.argmax(axis=1)  # the lowest id among equals, or the first NaN
    else:
        best = known_best.numpy().copy()
        for index in edited:
            best[index] = rows[index].argmax()
    heights = rows[np.arange(len(rows)), best].tolist()
    sampled = []
    for index, (sequence, token, height) in enumerate(zip(sequences, best.tolist(), heights, strict=True)):
        if not math.isfinite(height):
            sampled.append(Sampled(None, error=_why_unusable(sequence, height)))
            continue
        if sequence.is_plain:
            sampled.append(Sampled(token))
            continue
        params = sequence.spec.sampling
        if not params.is_greedy:
            assert params.seed is not None, "the router gives every request a seed"
            token = draw(rows[index], height, params, uniform_draw(params.seed, sequence.num_output_tokens), weigh)
        logprobs = None
        if params.logprobs is not None:
            logprobs = _logprobs(edited.get(index, rows[index]), token, params.logprobs, weigh)
        sampled.append(Sampled(token, logprobs))
    return sampled


def prompt_logprobs(
    logits: Tensor, token_ids: Seq[int], num_top: int, weigh: Weigh = rough_weights
) -> tuple[TokenLogprobs, ...] | None:
    """Log-probabilities of prompt tokens.

    Args:
        logits: [n, vocab] float32 on the CPU, contiguous; row i is what the model expected where token i came.
        token_ids: n of them.
        num_top: how many of the best ones are named beside each.
        weigh: how whole rows are weighed.
    Returns:
        One each; None when a row is no distribution.
    """
    rows = logits.numpy()
    if not np.isfinite(rows.max(axis=1)).all():
        return None
    return tuple(_logprobs(row, token, num_top, weigh) for row, token in zip(rows, token_ids, strict=True))


def _edit(row: Row, sequence: Sequence) -> Row:
    """Apply min_tokens, logit_bias and penalties in place.

    Returns:
        The row as it was, when log-probabilities of it are asked for; else the row.
    """
    params = sequence.spec.sampling
    raw = row if params.logprobs is None else row.copy()
    if sequence.num_output_tokens < params.min_tokens:
        stops = {*sequence.spec.eos_token_ids, *params.stop_token_ids}
        row[[token for token in stops if 0 <= token < len(row)]] = -math.inf
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        row[list(ids)] += np.array(biases, np.float32)
    if params.has_penalties:
        if sequence.counts is None:
            sequence.counts = TokenCounts()
        sequence.counts.update(sequence.token_ids, len(sequence.spec.prompt))
        sequence.counts.penalise(row, params)
    return raw


def _why_unusable(sequence: Sequence, height: float) -> str:
    if height == -math.inf and sequence.num_output_tokens < sequence.spec.sampling.min_tokens:
        return "min_tokens leaves no token: every one ends the answer"
    return UNUSABLE


def _logprobs(row: Row, token: int, num_top: int, weigh: Weigh) -> TokenLogprobs:
    best = float(row.max())
    log_total = best + math.log(weigh(row, best, 1.0).block_sums.sum())
    ids = top_tokens(row, num_top).tolist() if num_top else []
    # Equal logits have equal logprobs; what is less likely than a float can say has the floor's.
    values = [max(float(row[each]) - log_total, MIN_LOGPROB) for each in (token, *ids)]
    return TokenLogprobs(token, values[0], tuple(zip(ids, values[1:], strict=True)))
