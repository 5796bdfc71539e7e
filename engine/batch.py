"""One step's tokens as arrays: what every model takes, whatever computes it."""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import Chunk

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one step, flat: the single tokens of `num_decodes` sequences first, then chunks one after the other."""

    token_ids: Ints  # [n]
    num_decodes: int
    num_positions: int  # tokens of the longest sequence, these included
    starts: Ints  # [s] tokens of each sequence before these
    first_rows: Ints  # [s + 1] where each sequence's tokens begin in the n
    prompt_lens: Ints  # [s] of each sequence
    tables: Ints  # blocks of each sequence up to its newest token, one sequence after the other
    first_blocks: Ints  # [s + 1] where each sequence's blocks begin in `tables`
    outputs: Ints  # [m] rows of the n that get logits, ascending; of the others only the KV is needed

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """With at least one token each."""
        return len(self.starts)

    def positions(self) -> Ints:
        """[n] each token's position in its sequence."""
        if self.num_decodes == self.num_sequences:
            return self.starts
        return np.arange(self.num_tokens, dtype=np.int32) + self.per_token(self.starts - self.first_rows[:-1])

    def per_token(self, values: Ints) -> Ints:
        """[n]: each token's entry of `values`, [s]."""
        return values if self.num_decodes == self.num_sequences else np.repeat(values, np.diff(self.first_rows))


def build_batch(chunks: Seq[Chunk], block_tokens: int) -> Batch:
    """Flatten chunks.

    Args:
        chunks: those of a single token first; at least one.
        block_tokens: tokens in one block.
    """
    token_ids, tables, outputs = array("i"), array("i"), array("i")
    starts, prompt_lens = array("i"), array("i")
    first_rows, first_blocks = array("i", (0,)), array("i", (0,))
    num_decodes = num_positions = num_rows = num_blocks = 0
    for chunk in chunks:
        sequence, num_tokens = chunk
        start = sequence.num_computed_tokens
        end = start + num_tokens
        table = sequence.block_table[: -(-end // block_tokens)]
        assert len(table) * block_tokens >= end, "the scheduler gives blocks before it plans tokens"
        if end > num_positions:
            num_positions = end
        starts.append(start)
        prompt_lens.append(sequence.num_prompt_tokens)
        tables.extend(table)
        num_blocks += len(table)
        first_blocks.append(num_blocks)
        if num_tokens == 1:
            num_decodes += 1
            assert num_decodes == len(starts), "single tokens come first"
            token_ids.append(sequence.token_ids[start])
        else:
            token_ids.extend(sequence.token_ids[start:end])
        num_rows += num_tokens
        first_rows.append(num_rows)
        outputs.extend(range(num_rows - chunk.num_outputs, num_rows))
    return Batch(
        token_ids=_ints(token_ids),
        num_decodes=num_decodes,
        num_positions=num_positions,
        starts=_ints(starts),
        first_rows=_ints(first_rows),
        prompt_lens=_ints(prompt_lens),
        tables=_ints(tables),
        first_blocks=_ints(first_blocks),
        outputs=_ints(outputs),
    )


def _ints(values: "array[int]") -> Ints:
    # Gathered in arrays: numpy takes three times as long over a list of Python integers.
    return np.frombuffer(values, dtype=np.int32)


class Logits(NamedTuple):
    """Next-token scores, and what their model could say of them on the way."""

    rows: Tensor  # [n, vocab] float32, the caller's until the next call
    best: Tensor | None = None  # [n] integers: of each row the highest, the first of equal ones or the first NaN


class Decoder(Protocol):
    """A model that computes batches. Holds no request state: that is in the batch and the cache."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the KV."""

    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """Compute one step, writing every token's KV into its slot.

        Args:
            batch: the tokens; the KV of all tokens before them is in the cache.
            cache: [num_blocks, layers, 2, kv_heads, block_tokens, dim], in the model's dtype.
        Returns:
            [m, hidden]: the hidden rows of `batch.outputs` after the last layer, not normalised.
        """

    def logits(self, hidden: Tensor) -> Logits:
        """Next-token scores.

        Args:
            hidden: [n, hidden], rows of what `forward` returned.
        """
