"""The client that measures peers, against a real socket: it counts tokens, not events, and refuses a short answer."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.peers.compare import figures, require_ready, table
from bench.peers.openai_stream import Server, Stream, ask, steady_step_s

DONE = "[DONE]"


def token_event(*ids: int) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "token_ids": list(ids)}]}


class Scripted(BaseHTTPRequestHandler):
    """Streams the events that the prompt's first token names."""

    scripts: tuple[list[Any], ...] = (
        [token_event(5), token_event(6, 7), {"choices": [], "usage": {}}, DONE],
        [token_event(5), {"error": {"message": "worker lost"}}],
    )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        for event in self.scripts[body["prompt"][0]]:
            self.wfile.write(f"data: {event if event == DONE else json.dumps(event)}\n\n".encode())

    def log_message(self, *args: Any) -> None:
        """Tests print no access log."""


@pytest.fixture
def server() -> Iterator[Server]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield Server(f"http://127.0.0.1:{http.server_port}", "m", 100)
        http.shutdown()


def test_every_token_of_an_event_counts(server: Server) -> None:
    stream = ask(server, [0], max_tokens=3)
    assert len(stream.arrivals) == 3
    assert stream.sent < stream.arrivals[0] <= stream.arrivals[1] == stream.arrivals[2]


def test_an_answer_of_another_length_is_an_error(server: Server) -> None:
    with pytest.raises(RuntimeError, match="3 tokens of 4"):
        ask(server, [0], max_tokens=4)


def test_an_error_event_is_an_error(server: Server) -> None:
    with pytest.raises(RuntimeError, match="worker lost"):
        ask(server, [1], max_tokens=3)


def test_a_step_is_timed_only_while_all_streams_decode() -> None:
    early = Stream(0.0, [*range(10), *range(10, 30, 2)])  # slower, once there are two
    late = Stream(0.0, [*range(10, 40, 2)])
    assert steady_step_s([early, late]) == 2.0
    in_pairs = Stream(0.0, [time for time in range(0, 40, 2) for _ in range(2)])
    assert steady_step_s([in_pairs]) == 1.0
    with pytest.raises(RuntimeError, match="never all decoded at once"):
        steady_step_s([early, Stream(0.0, [*range(27, 60)])])


def test_a_row_that_one_program_lacks_is_said_to_be_missing() -> None:
    full = figures(
        {
            "decode": [{"batch": 1, "step_ms": 10.0, "tokens_per_s": 100.0}],
            "prefill": [{"prompt_tokens": 512, "tokens_per_s": 900.0}, {"prompt_tokens": 77, "tokens_per_s": 1.0}],
        }
    )
    short = figures({"decode": [{"batch": 1, "step_ms": 20.0, "tokens_per_s": 50.0}], "prefill": []})
    lines = table({"peer": [short, short], "baton": [full, full]}, subject="baton").splitlines()
    assert lines[0] == "| | peer | baton | baton / peer |"
    assert lines[2] == "| decode 1, ms a token | 20.0 (20.0 to 20.0) | 10.0 (10.0 to 10.0) | 0.50 |"
    assert lines[4] == "| prefill 512, tokens/s | not measured | 900.0 (900.0 to 900.0) |  |"
    assert len(lines) == 5


def test_a_server_that_is_not_up_is_not_measured_beside() -> None:
    with pytest.raises(RuntimeError, match=r"vllm at http://127.0.0.1:9 is not ready"):
        require_ready("vllm", "http://127.0.0.1:9")
