"""From logits to tokens without leaving the device; what comes back are tokens, and log-probabilities where asked for.

The order of a row's steps, and their meaning, are those of `engine.sampler`.
"""

import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.sequence import TokenLogprobs
from engine.batch import Ints
from engine.gpu.device import Device
from engine.gpu.inputs import Sections, Stager
from engine.plan import Sampled
from engine.sampler import UNUSABLE
from engine.sequence import Sequence
from engine.token_counts import TokenCounts
from kernels.gpu.draw_tokens import draw_tokens
from kernels.gpu.edit_logits import edit_logits
from kernels.gpu.top_logprobs import top_logprobs

_FEW_EDITS = 4096  # room for so many at first; long answers with penalties need more, and get it


@dataclass(frozen=True, slots=True)
class Drawn:
    """What sampling launched: tensors on the device, one row each for the sequences that sampled."""

    tokens: Tensor  # [n] int32; -1: the row is no distribution
    # [n] of the token, [n, top] ids, [n, top] of those; None: nobody asked.
    logprobs: tuple[Tensor, Tensor, Tensor] | None


class GpuSampler:
    """Samples the rows of one step after the other.

    Args:
        device: that computes.
        max_sequences: of one step.
        vocab_size: of the model.
    """

    def __init__(self, device: Device, max_sequences: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._draws = Stager(device, _draw_sections(max_sequences).num_ints)
        self._edits = Stager(device, _edit_sections(max_sequences, _FEW_EDITS, _FEW_EDITS).num_ints)

    def launch(self, logits: Tensor, sequences: Seq[Sequence]) -> Drawn:
        """Choose the next token of each sequence.

        Args:
            logits: [n, vocab] float32; changed in place where sequences edit them.
            sequences: n of them.
        """
        raw = logits
        edits = [sequence.spec.sampling.edits_logits for sequence in sequences]
        num_top = _num_top(sequences)
        if any(edits):
            if num_top is not None:
                raw = logits.clone()
            self._edit(logits, sequences)
        tokens = self._draw(logits, sequences)
        # A row that cannot be sampled has token -1, which has no log-probability, and nobody reads it.
        logprobs = None if num_top is None else top_logprobs(raw, tokens, num_top)
        return Drawn(tokens, logprobs)

    def _draw(self, logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
        params = [sequence.spec.sampling for sequence in sequences]
        seeds = np.array([0 if each.seed is None else each.seed for each in params], np.int64)
        arrays = {
            "temperatures": _words([each.temperature for each in params]),
            "min_ps": _words([each.min_p for each in params]),
            "top_ps": _words([each.top_p for each in params]),
            "seeds": seeds.view(np.int32),
            "top_ks": np.array([each.top_k for each in params], np.int32),
            "positions": np.array([sequence.num_output_tokens for sequence in sequences], np.int32),
        }
        sections = _draw_sections(len(sequences))
        self._draws.put(sections, arrays)
        views = self._draws.views(sections)
        return draw_tokens(
            logits,
            views["temperatures"].view(torch.float64),
            views["min_ps"].view(torch.float64),
            views["top_ks"],
            views["top_ps"].view(torch.float64),
            views["seeds"].view(torch.int64),
            views["positions"],
        )

    def _edit(self, logits: Tensor, sequences: Seq[Sequence]) -> None:
        biases, said = _Ragged(), _Ragged()
        for sequence in sequences:
            sampling = sequence.spec.sampling
            held_back: set[int] = set()
            if sequence.num_output_tokens < sampling.min_tokens:
                held_back = {*sequence.spec.eos_token_ids, *sampling.stop_token_ids}
                held_back = {token for token in held_back if 0 <= token < self._vocab_size}
            biases.add(held_back, [-math.inf] * len(held_back))
            kept = [(token, bias) for token, bias in sampling.logit_bias if token not in held_back]
            biases.add([token for token, _ in kept], [bias for _, bias in kept])
            biases.end_row()
            if sampling.has_penalties:
                if sequence.counts is None:
                    sequence.counts = TokenCounts()
                sequence.counts.update(sequence.token_ids, sequence.num_prompt_tokens)
                said.add(*sequence.counts.said())
            said.end_row()
        params = [sequence.spec.sampling for sequence in sequences]
        arrays = {
            "bias_first": biases.first(),
            "said_first": said.first(),
            "repetitions": _floats([each.repetition_penalty for each in params]),
            "frequencies": _floats([each.frequency_penalty for each in params]),
            "presences": _floats([each.presence_penalty for each in params]),
            "bias_ids": biases.ids(),
            "biases": biases.values(),
            "said_ids": said.ids(),
            "said_counts": said.values(),
        }
        sections = _edit_sections(len(sequences), len(arrays["bias_ids"]), len(arrays["said_ids"]))
        self._edits.reserve(sections.num_ints)
        self._edits.put(sections, arrays)
        views = self._edits.views(sections)
        edit_logits(
            logits,
            views["bias_first"],
            views["bias_ids"],
            views["biases"].view(torch.float32),
            views["said_first"],
            views["said_ids"],
            views["said_counts"].view(torch.float32),
            views["repetitions"].view(torch.float32),
            views["frequencies"].view(torch.float32),
            views["presences"].view(torch.float32),
        )


def read_sampled(
    sequences: Seq[Sequence], tokens: list[int], logprobs: tuple[list[float], list[list[int]], list[list[float]]] | None
) -> list[Sampled]:
    """What came back from the device, one for each sequence that sampled.

    Args:
        sequences: as they were given to `launch`.
        tokens, logprobs: of `Drawn`, on the host.
    """
    results = []
    for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
        num_top = sequence.spec.sampling.logprobs
        if token < 0:
            results.append(Sampled(None, error=_why_unusable(sequence)))
        elif num_top is None or logprobs is None:
            results.append(Sampled(token))
        else:
            results.append(Sampled(token, one_logprobs(token, num_top, *(part[row] for part in logprobs))))
    return results


def one_logprobs(token: int, num_top: int, logprob: Any, ids: Any, values: Any) -> TokenLogprobs:
    """One token's entry of what `top_logprobs` gave; its rows may name more tokens than this sequence asked for."""
    top = [(each, value) for each, value in zip(ids[:num_top], values[:num_top], strict=True) if each >= 0]
    return TokenLogprobs(token, logprob, tuple(top))


def _why_unusable(sequence: Sequence) -> str:
    if sequence.spec.sampling.min_tokens > 0:
        return f"{UNUSABLE}, or min_tokens leaves no token: every one ends the answer"
    return UNUSABLE


def _num_top(sequences: Seq[Sequence]) -> int | None:
    """The most log-probabilities that anyone wants to see beside the token's; None: nobody wants any."""
    asked = [one.spec.sampling.logprobs for one in sequences if not one.is_plain]
    return max((num_top for num_top in asked if num_top is not None), default=None)


class _Ragged:
    """Lists of (token, number), one after the other."""

    def __init__(self) -> None:
        self._ids: list[npt.NDArray[np.int32]] = []
        self._values: list[npt.NDArray[np.float32]] = []
        self._first = array("i", (0,))
        self._size = 0

    def add(self, ids: Any, values: Any) -> None:
        self._ids.append(np.fromiter(ids, np.int32) if isinstance(ids, set) else np.asarray(ids, np.int32))
        self._values.append(np.asarray(values, np.float32))
        self._size += len(self._ids[-1])

    def end_row(self) -> None:
        self._first.append(self._size)

    def first(self) -> Ints:
        return np.frombuffer(self._first, np.int32)

    def ids(self) -> Ints:
        return np.concatenate(self._ids) if self._ids else np.empty(0, np.int32)

    def values(self) -> Ints:
        return np.concatenate(self._values).view(np.int32) if self._values else np.empty(0, np.int32)


def _draw_sections(n: int) -> Sections:
    wide = dict.fromkeys(("temperatures", "min_ps", "top_ps", "seeds"), 2 * n)
    return Sections(wide | {"top_ks": n, "positions": n})


def _edit_sections(n: int, num_biases: int, num_said: int) -> Sections:
    rows = {"bias_first": n + 1, "said_first": n + 1, "repetitions": n, "frequencies": n, "presences": n}
    return Sections(
        rows | {"bias_ids": num_biases, "biases": num_biases, "said_ids": num_said, "said_counts": num_said}
    )


def _words(values: list[float]) -> Ints:
    return np.array(values, np.float64).view(np.int32)


def _floats(values: list[float]) -> Ints:
    return np.array(values, np.float32).view(np.int32)
