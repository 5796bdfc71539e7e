"""From logits to tokens: what changes logits, what draws, what reports the best."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.kernels.case import Case, Inputs, Make, Outputs
from bench.kernels.ceilings import Cost
from kernels.gpu.draw_tokens import draw_tokens, draw_tokens_ref
from kernels.gpu.edit_logits import edit_logits, edit_logits_ref
from kernels.gpu.top_logprobs import top_logprobs, top_logprobs_ref
from kernels.gpu.variant import Config

_NUM_LIKELY = 50  # tokens that stand out in a row, as they do in a model's


def _logits(make: Make, num_rows: int, vocab: int) -> Tensor:
    logits = make.normal(num_rows, vocab, dtype=torch.float32, scale=2.0)
    likely = make.integers(0, vocab, num_rows, _NUM_LIKELY, dtype=torch.int64)
    return logits.scatter_add_(1, likely, make.uniform(num_rows, _NUM_LIKELY) * 14)


@dataclass(frozen=True, slots=True)
class DrawTokens(Case):
    """One token of each row."""

    op = "draw_tokens"

    num_rows: int
    temperature: float = 0.0  # 0: the best
    top_p: float = 1.0
    top_k: int = 0
    vocab: int = 128256

    @property
    def shape(self) -> str:
        filters = [f"top-p {self.top_p}"] * (self.top_p < 1) + [f"top-k {self.top_k}"] * (self.top_k > 0)
        how = ", ".join([f"temperature {self.temperature}", *filters]) if self.temperature else "greedy"
        return f"{self.num_rows} x {self.vocab}, {how}"

    @property
    def label(self) -> str:
        return "draw-fp32"

    def cost(self) -> Cost:
        return Cost(self.num_rows * self.vocab * 4, 0)

    def inputs(self, make: Make) -> Inputs:
        def each(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((self.num_rows,), value, dtype=dtype, device=make.device)

        return (
            _logits(make, self.num_rows, self.vocab),
            each(self.temperature, torch.float64),
            each(0.0, torch.float64),
            each(self.top_k, torch.int32),
            each(self.top_p, torch.float64),
            make.integers(0, 1 << 40, self.num_rows, dtype=torch.int64),
            make.integers(0, 1000, self.num_rows, dtype=torch.int32),
        )

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:
        logits, temperatures, min_ps, top_ks, top_ps, seeds, positions = inputs
        return (draw_tokens(logits, temperatures, min_ps, top_ks, top_ps, seeds, positions, config=config),)

    def expected(self, inputs: Inputs) -> Outputs:
        return (draw_tokens_ref(*inputs),)

    def difference(self, got: Outputs, wanted: Outputs) -> str:
        # A number so close to a border between two tokens that float32 and float64 see it on both sides is very rare.
        num_wrong = int((got[0] != wanted[0]).sum())
        return f"{num_wrong} of {self.num_rows} tokens are others" if num_wrong > self.num_rows // 32 else ""

    def alternatives(self, inputs: Inputs) -> Mapping[str, Callable[[], object]]:
        logits: Tensor = inputs[0]
        if not self.temperature:
            return {"argmax": lambda: logits.argmax(-1)}

        def draw() -> Tensor:
            return (logits / self.temperature).softmax(-1).multinomial(1)

        def draw_of_sorted() -> Tensor:
            ordered, ids = (logits / self.temperature).sort(-1, descending=True)
            if self.top_k:
                ordered[:, self.top_k :] = -torch.inf
            weights = ordered.softmax(-1)
            weights = weights.masked_fill(weights.cumsum(-1) - weights >= self.top_p, 0.0)
            return ids.gather(1, weights.multinomial(1))

        if self.top_p < 1 or self.top_k:
            return {"sort, softmax, multinomial": draw_of_sorted}
        return {"softmax, multinomial": draw}


@dataclass(frozen=True, slots=True)
class EditLogits(Case):
    """Penalties of what was said and some biases, in every row."""

    op = "edit_logits"

    num_rows: int
    num_said: int
    num_biases: int = 8
    vocab: int = 128256

    @property
    def shape(self) -> str:
        return f"{self.num_rows} x {self.vocab}, {self.num_said} said, {self.num_biases} biases"

    @property
    def label(self) -> str:
        return "edit-fp32"

    def cost(self) -> Cost:
        # An id, what belongs to it, the logit read and written.
        return Cost(self.num_rows * (self.num_said + self.num_biases) * 16, 0)

    def inputs(self, make: Make) -> Inputs:
        def one_list(length: int) -> tuple[Tensor, Tensor]:
            firsts = torch.arange(self.num_rows + 1, dtype=torch.int32, device=make.device) * length
            return firsts, torch.cat([make.permutation(self.vocab)[:length] for _ in range(self.num_rows)])

        return (
            _logits(make, self.num_rows, self.vocab),
            *one_list(self.num_biases),
            make.normal(self.num_rows * self.num_biases, dtype=torch.float32),
            *one_list(self.num_said),
            make.integers(0, 3, self.num_rows * self.num_said).float(),
            1.0 + make.uniform(self.num_rows),
            make.uniform(self.num_rows),
            make.uniform(self.num_rows),
        )

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:  # noqa: ARG002 - it has one only
        edit_logits(*inputs)
        return (inputs[0],)

    def expected(self, inputs: Inputs) -> Outputs:
        logits, *rest = inputs
        changed: Tensor = logits.clone()
        edit_logits_ref(changed, *rest)
        return (changed,)

    def wrong_at_size(self, inputs: Inputs) -> str:  # noqa: ARG002
        """Nothing that small cases would not show: the specification takes a second for every row."""
        return ""


@dataclass(frozen=True, slots=True)
class TopLogprobs(Case):
    """Log-probabilities of chosen tokens and of the best."""

    op = "top_logprobs"

    num_rows: int
    num_top: int
    vocab: int = 128256

    @property
    def shape(self) -> str:
        return f"{self.num_rows} x {self.vocab}, best {self.num_top}"

    @property
    def label(self) -> str:
        return "top-fp32"

    def cost(self) -> Cost:
        return Cost(self.num_rows * (self.vocab * 4 + 8 + 8 * self.num_top), 0)

    def inputs(self, make: Make) -> Inputs:
        return _logits(make, self.num_rows, self.vocab), make.integers(0, self.vocab, self.num_rows)

    def call(self, inputs: Inputs, config: Config | None) -> Outputs:  # noqa: ARG002 - it has one only
        logits, tokens = inputs
        return top_logprobs(logits, tokens, self.num_top)

    def expected(self, inputs: Inputs) -> Outputs:
        logits, tokens = inputs
        return top_logprobs_ref(logits, tokens, self.num_top)

    def alternatives(self, inputs: Inputs) -> Mapping[str, Callable[[], object]]:
        logits, tokens = inputs
        wide = tokens.long()[:, None]

        def separate() -> Outputs:
            values = logits.log_softmax(-1)
            best, ids = values.topk(self.num_top)
            return values.gather(1, wide), ids, best

        return {"log_softmax, topk": separate}
