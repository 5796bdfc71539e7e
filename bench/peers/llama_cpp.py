"""llama.cpp through its own `llama_decode`: milliseconds a step by batch, tokens/s of a prompt by length.

Runs in llama-cpp-python's environment, from the repository root: `python -m bench.peers.llama_cpp FILE.gguf`.
Timed is `llama_decode` alone, with the logits of every sequence: choosing the token is not part of it. Decode steps
are taken around the mean context of the answers that `openai_stream` asks for: all 128 would take minutes.
`cpu_ms` is the processor time of the same work; well below the wall time, something else had the core.
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
    PROMPTS,
    Row,
    decode_row,
    environment,
    finish,
    parser,
    prefill_row,
    random_tokens,
)

MAX_BATCH_TOKENS = 512  # in one llama_decode: llama.cpp's own default for a compute batch
STEPS = 32
FIRST_POSITION = CONTEXT_TOKENS + OUTPUT_TOKENS // 2 - STEPS // 2


class Entry(NamedTuple):
    """One token to compute."""

    token: int
    position: int
    sequence: int
    wants_logits: bool


class Spent(NamedTuple):
    """Time that one piece of work took."""

    wall_s: float
    cpu_s: float  # of all threads


class Stepper:
    """Runs tokens through one context, which it owns."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def run(self, entries: Sequence[Entry]) -> Spent:
        """Compute `entries`, at most MAX_BATCH_TOKENS at once; the time spent in llama.cpp."""
        wall_s = cpu_s = 0.0
        for start in range(0, len(entries), MAX_BATCH_TOKENS):
            self._fill(entries[start : start + MAX_BATCH_TOKENS])
            began, began_cpu = time.perf_counter(), time.process_time()
            status = llama_cpp.llama_decode(self._context, self._batch)
            llama_cpp.llama_synchronize(self._context)
            wall_s += time.perf_counter() - began
            cpu_s += time.process_time() - began_cpu
            if status != 0:
                raise RuntimeError(f"llama_decode answered {status}")
        return Spent(wall_s, cpu_s)

    def copy_first_sequence(self, num_sequences: int) -> None:
        """Give every sequence its own copy of what the first one has in the cache."""
        memory = llama_cpp.llama_get_memory(self._context)
        for sequence in range(1, num_sequences):
            llama_cpp.llama_memory_seq_cp(memory, 0, sequence, -1, -1)

    def _fill(self, entries: Sequence[Entry]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, entry in enumerate(entries):
            batch.token[i] = entry.token
            batch.pos[i] = entry.position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = entry.sequence
            batch.logits[i] = entry.wants_logits


@contextmanager
def a_stepper(model: Any, num_sequences: int, tokens_each: int, threads: int) -> Iterator[Stepper]:
    """A new context with room for `tokens_each` in every sequence."""
    params = llama_cpp.llama_context_default_params()
    # Each sequence gets its own part of the cache, and llama.cpp rounds a part up to 256.
    params.n_ctx = num_sequences * (-(-tokens_each // 256) * 256)
    params.n_seq_max = num_sequences
    params.n_batch = params.n_ubatch = MAX_BATCH_TOKENS
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp made no context for {num_sequences} sequences of {tokens_each} tokens")
    stepper = Stepper(context)
    try:
        yield stepper
    finally:
        stepper.close()


def measure_decode(model: Any, batch: int, threads: int, vocabulary: int) -> Row:
    """The median step of `batch` sequences."""
    with a_stepper(model, batch, FIRST_POSITION + STEPS, threads) as stepper:
        stepper.run(prompt(random_tokens(FIRST_POSITION, vocabulary)))
        stepper.copy_first_sequence(batch)
        spent = []
        for position in range(FIRST_POSITION, FIRST_POSITION + STEPS):
            tokens = random_tokens(batch, vocabulary)
            spent.append(stepper.run([Entry(token, position, i, True) for i, token in enumerate(tokens)]))
    step_s = statistics.median(step.wall_s for step in spent)
    cpu_ms = statistics.median(step.cpu_s for step in spent) * 1e3
    return decode_row(batch, FIRST_POSITION, STEPS, step_s, batch / step_s) | {"cpu_ms": round(cpu_ms, 3)}


def measure_prefill(model: Any, prompt_tokens: int, threads: int, vocabulary: int) -> Row:
    """One prompt in a fresh context."""
    with a_stepper(model, 1, prompt_tokens, threads) as stepper:
        spent = stepper.run(prompt(random_tokens(prompt_tokens, vocabulary)))
    return prefill_row(prompt_tokens, spent.wall_s) | {"cpu_ms": round(spent.cpu_s * 1e3, 2)}


def prompt(tokens: Sequence[int]) -> list[Entry]:
    """The first sequence from position 0; only the last token asks for logits."""
    last = len(tokens) - 1
    return [Entry(token, position, 0, position == last) for position, token in enumerate(tokens)]


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
        stepper.run(prompt(random_tokens(CONTEXT_TOKENS, vocabulary)))
    results = {
        "decode": [measure_decode(model, batch, args.threads, vocabulary) for batch in BATCHES],
        "prefill": [measure_prefill(model, tokens, args.threads, vocabulary) for tokens in PROMPTS],
    }
    llama_cpp.llama_model_free(model)
    finish("peers.llama_cpp", env, results, args.output)


if __name__ == "__main__":
    main()
