"""What a sequence has said so far, by token, for penalties."""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from core.sampling import SamplingParams


class TokenCounts:
    """The distinct tokens of one sequence and how often its answer has each. Bringing it up to date costs what is new."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # by token: its place in the arrays, of which the first len(slots) are in use
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)  # in the answer
        self._num_taken = 0

    def update(self, token_ids: Seq[int], num_prompt_tokens: int) -> None:
        """Count the tokens that were appended since the last call.

        Args:
            token_ids: prompt, then answer; only ever appended to.
            num_prompt_tokens: how many of them are the prompt.
        """
        for position in range(self._num_taken, len(token_ids)):
            slot = self._slots.setdefault(token_ids[position], len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token_ids[position]
            self._counts[slot] += position >= num_prompt_tokens
        self._num_taken = len(token_ids)

    def said(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The distinct tokens, and how often the answer has each."""
        return self._ids[: len(self._slots)], self._counts[: len(self._slots)]

    def penalise(self, logits: npt.NDArray[np.float32], params: SamplingParams) -> None:
        """Change the logits of what was said before: repetition, then frequency, then presence penalty.

        Args:
            logits: [vocab], changed in place.
            params: whose penalties apply.
        """
        ids, counts = self.said()
        values = logits[ids]
        values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        values -= params.frequency_penalty * counts
        values -= params.presence_penalty * (counts > 0)
        logits[ids] = values
