"""A plain streaming client for OpenAI's HTTP API: gaps between tokens, tokens/s, time to the first token.

The server must know `ignore_eos` and `return_token_ids`, as vLLM and Baton do: tokens are counted by their ids.

Standard library only, from the repository root: `python -m bench.peers.openai_stream http://127.0.0.1:8100 --model M`.
Prompts are random token ids, answers greedy and of fixed length. Definitions:
- step_ms (decode): median over all streams of the time between the arrivals of two consecutive tokens of one stream.
- tpot_ms: median over the streams of (last token - first token) / (tokens - 1). Far above step_ms, tokens came in bursts.
- tokens_per_s (decode): streams / median time of a step while every stream is decoding, i.e. after the last stream's
  first token and before the first stream's last one. `whole_run_tokens_per_s` counts from the first request sent.
- prefill: prompt tokens / time from sending a request to its first token, one request at a time, after one of its length.
"""

import http.client
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

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

TIMEOUT_S = 300.0  # of one read
SPAN = 8  # tokens over which a step is timed


class Server(NamedTuple):
    """Whom to ask, and which token ids it knows."""

    url: str
    model: str
    vocabulary: int


class Stream(NamedTuple):
    """One finished answer: seconds on the clock of `time.perf_counter`."""

    sent: float
    arrivals: list[float]  # of each token


def ask(server: Server, prompt: list[int], max_tokens: int) -> Stream:
    """Stream one answer.

    Raises:
        RuntimeError: the server refused, or sent another number of tokens than was asked for.
    """
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,  # an event may carry several tokens, and text alone does not tell how many
    }
    sent = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{server.url} answered {response.status}: {response.read(500)!r}")
    arrivals: list[float] = []
    for line in response:
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            arrivals += [now] * num_tokens(json.loads(line.removeprefix(b"data: ")))
    connection.close()
    if len(arrivals) != max_tokens:
        raise RuntimeError(f"{server.url} sent {len(arrivals)} tokens of {max_tokens}")
    return Stream(sent, arrivals)


def num_tokens(event: dict[str, Any]) -> int:
    """Tokens in one event. Raises RuntimeError for an error event."""
    if "error" in event:
        raise RuntimeError(f"the server ended a stream with {event['error']}")
    return sum(len(choice.get("token_ids") or ()) for choice in event["choices"])


def measure_decode(server: Server, concurrency: int) -> Row:
    """`concurrency` requests sent at once, each to its last token."""
    prompts = [random_tokens(CONTEXT_TOKENS, server.vocabulary) for _ in range(concurrency)]
    with ThreadPoolExecutor(concurrency) as pool:
        streams = list(pool.map(lambda prompt: ask(server, prompt, OUTPUT_TOKENS), prompts))
    gaps = [b - a for stream in streams for a, b in zip(stream.arrivals, stream.arrivals[1:], strict=False)]
    tpots = [(stream.arrivals[-1] - stream.arrivals[0]) / (OUTPUT_TOKENS - 1) for stream in streams]
    whole_s = max(stream.arrivals[-1] for stream in streams) - min(stream.sent for stream in streams)
    rate = concurrency / steady_step_s(streams)
    row = decode_row(concurrency, CONTEXT_TOKENS, OUTPUT_TOKENS, statistics.median(gaps), rate)
    return row | {
        "tpot_ms": round(statistics.median(tpots) * 1e3, 3),
        "whole_run_tokens_per_s": round(concurrency * OUTPUT_TOKENS / whole_s, 1),
    }


def steady_step_s(streams: list[Stream]) -> float:
    """The median time of a step while all streams decode, taken over SPAN tokens: some may arrive two at a time.

    Raises:
        RuntimeError: they did not all decode at once for so long.
    """
    begin = max(stream.arrivals[0] for stream in streams)
    end = min(stream.arrivals[-1] for stream in streams)
    spans = [
        last - first
        for stream in streams
        for first, last in zip(stream.arrivals, stream.arrivals[SPAN:], strict=False)
        if begin <= first and last <= end
    ]
    if not spans:
        raise RuntimeError(f"{len(streams)} streams were never all decoded at once for {SPAN} tokens")
    return statistics.median(spans) / SPAN


def measure_prefill(server: Server, prompt_tokens: int) -> Row:
    """One prompt, alone, after another of its length: a server may prepare itself for a length it has not seen."""
    for _ in range(2):
        stream = ask(server, random_tokens(prompt_tokens, server.vocabulary), max_tokens=1)
    return prefill_row(prompt_tokens, stream.arrivals[0] - stream.sent)


def counts(text: str) -> list[int]:
    """The numbers of "1,32"; none of ""."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    args_parser = parser("Streams from an OpenAI-compatible server, timed at the client.")
    args_parser.add_argument("url", help="e.g. http://127.0.0.1:8100")
    args_parser.add_argument("--model", required=True, help="the name it is served under")
    args_parser.add_argument("--vocabulary", type=int, default=49152, help="token ids are drawn below this")
    args_parser.add_argument("--batch", type=counts, default=BATCHES, help="streams at once, e.g. 1,32")
    args_parser.add_argument("--prompt", type=counts, default=PROMPTS, help="tokens of a prompt, e.g. 512,2048")
    args = args_parser.parse_args()

    server = Server(args.url, args.model, args.vocabulary)
    ask(server, random_tokens(CONTEXT_TOKENS, server.vocabulary), OUTPUT_TOKENS)  # warm-up
    env = environment(url=server.url, model=server.model)
    results = {
        "decode": [measure_decode(server, concurrency) for concurrency in args.batch],
        "prefill": [measure_prefill(server, tokens) for tokens in args.prompt],
    }
    finish("peers.openai_stream", env, results, args.output)


if __name__ == "__main__":
    main()
