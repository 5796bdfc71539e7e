"""llama.cpp through its own `llama_decode`: milliseconds a step by batch, tokens/s of a prompt by length.

Runs in llama-cpp-python's environment, from the repository root: `python -m bench.peers.llama_cpp FILE.gguf`.
Timed is `llama_decode` alone, with the logits of every sequence: choosing the token is not part of it.
"""

import ctypes
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple

import llama_cpp  # type: ignore[import-not-found]  # the peer: never a dependency

from bench.peers.report import (
    BATCHES,
    CONTEXT_TOKENS,
    OUTPUT_TOKENS,
    PREFILL_REPEATS,
    PROMPTS,
    decode_row,
    environment,
    finish,
    parser,
    prefill_row,
    random_tokens,
)

MAX_BATCH_TOKENS = 512  # in one llama_decode: llama.cpp's own default for a compute batch


class Row(NamedTuple):
    """One token to compute."""

    token: int
    position: int
    sequence: int
    wants_logits: bool


@contextmanager
def a_context(model: Any, num_sequences: int, tokens_each: int, threads: int) -> Iterator[Any]:
    """A llama.cpp context with room for `tokens_each` in every sequence."""
    params = llama_cpp.llama_context_default_params()
    # Each sequence gets its own part of the cache, and llama.cpp rounds a part up to 256.
    params.n_ctx = num_sequences * (-(-tokens_each // 256) * 256)
    params.n_seq_max = num_sequences
    params.n_batch = params.n_ubatch = MAX_BATCH_TOKENS
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp made no context for {num_sequences} sequences of {tokens_each} tokens")
    try:
        yield context
    finally:
        llama_cpp.llama_free(context)


class Stepper:
    """Runs rows of tokens through one context."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)

    def run(self, rows: Sequence[Row]) -> float:
        """Compute `rows`, at most MAX_BATCH_TOKENS at once; the seconds spent in llama.cpp."""
        spent = 0.0
        for start in range(0, len(rows), MAX_BATCH_TOKENS):
            self._fill(rows[start : start + MAX_BATCH_TOKENS])
            began = time.perf_counter()
            status = llama_cpp.llama_decode(self._context, self._batch)
            llama_cpp.llama_synchronize(self._context)
            spent += time.perf_counter() - began
            if status != 0:
                raise RuntimeError(f"llama_decode answered {status}")
        return spent

    def _fill(self, rows: Sequence[Row]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, row in enumerate(rows):
            batch.token[i] = row.token
            batch.pos[i] = row.position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row.sequence
            batch.logits[i] = row.wants_logits


@contextmanager
def a_stepper(model: Any, num_sequences: int, tokens_each: int, threads: int) -> Iterator[Stepper]:
    with a_context(model, num_sequences, tokens_each, threads) as context:
        stepper = Stepper(context)
        try:
            yield stepper
        finally:
            stepper.close()


def measure_decode(model: Any, batch: int, threads: int, vocabulary: int) -> dict[str, Any]:
    """The median step of `batch` sequences that grow from CONTEXT_TOKENS by OUTPUT_TOKENS."""
    with a_stepper(model, batch, CONTEXT_TOKENS + OUTPUT_TOKENS, threads) as stepper:
        for sequence in range(batch):
            stepper.run(prompt_rows(random_tokens(CONTEXT_TOKENS, vocabulary), sequence))
        steps = []
        for position in range(CONTEXT_TOKENS, CONTEXT_TOKENS + OUTPUT_TOKENS):
            tokens = random_tokens(batch, vocabulary)
            steps.append(stepper.run([Row(token, position, i, True) for i, token in enumerate(tokens)]))
    return decode_row(batch, statistics.median(steps), batch * len(steps) / sum(steps))


def measure_prefill(model: Any, prompt_tokens: int, threads: int, vocabulary: int) -> dict[str, Any]:
    """The median of PREFILL_REPEATS prompts, each in a fresh context."""
    seconds = []
    for _ in range(PREFILL_REPEATS):
        with a_stepper(model, 1, prompt_tokens, threads) as stepper:
            seconds.append(stepper.run(prompt_rows(random_tokens(prompt_tokens, vocabulary), 0)))
    return prefill_row(prompt_tokens, seconds)


def prompt_rows(tokens: Sequence[int], sequence: int) -> list[Row]:
    """A prompt from position 0; only its last token asks for logits."""
    last = len(tokens) - 1
    return [Row(token, position, sequence, position == last) for position, token in enumerate(tokens)]


def main() -> None:
    args_parser = parser("llama.cpp on the CPU, one low-level call a step.")
    args_parser.add_argument("gguf", help="the model file")
    args_parser.add_argument("--threads", type=int, default=1)
    args = args_parser.parse_args()

    silence = llama_cpp.llama_log_callback(lambda *_: None)  # a name of its own: it has to outlive the call
    llama_cpp.llama_log_set(silence, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(args.gguf.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"{args.gguf}: llama.cpp cannot load it")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    env = environment(
        llama_cpp_python=version("llama-cpp-python"),
        threads=args.threads,
        model=args.gguf,
        built_for=llama_cpp.llama_print_system_info().decode(),
    )
    with a_stepper(model, 1, CONTEXT_TOKENS, args.threads) as stepper:  # warm-up: pages in the weights
        stepper.run(prompt_rows(random_tokens(CONTEXT_TOKENS, vocabulary), 0))
    results = {
        "decode": [measure_decode(model, batch, args.threads, vocabulary) for batch in BATCHES],
        "prefill": [measure_prefill(model, tokens, args.threads, vocabulary) for tokens in PROMPTS],
    }
    llama_cpp.llama_model_free(model)
    finish("peers.llama_cpp", env, results, args.output)


if __name__ == "__main__":
    main()
