"""One sequence while the engine runs it. The loop owns it; a runner only reads it."""

from dataclasses import dataclass, field

from core.sequence import SequenceSpec


@dataclass(slots=True, eq=False)
class Sequence:
    """States, derived and not stored: waiting (prompt not fully computed), decoding (one token a step), ended."""

    spec: SequenceSpec
    token_ids: list[int] = field(init=False)  # prompt, then output
    block_table: list[int] = field(init=False)  # holds every computed token, and those of the next step
    num_computed_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = [*self.spec.prompt, *self.spec.output]
        self.block_table = list(self.spec.block_table)
        self.num_computed_tokens = self.spec.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far, the ones sampled elsewhere included."""
        return len(self.token_ids) - len(self.spec.prompt)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is not in the blocks yet; 1 for a decoding sequence."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the next step computes just the newest token."""
        return self.num_output_tokens > 0 and self.num_uncomputed_tokens == 1
