"""What a router measures. Names are public: dashboards use them."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.router.api import Done, Timings

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
ITL_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
LABELS = ("model", "tenant", "priority", "length_class")
PARTS = ("queue", "route", "reserve", "prefill")
WORKER_STATES = ("ready", "unready", "draining", "lost")


class RouterMetrics:
    """Metrics of one router in a registry of its own.

    Tenants and priorities come with a later feature: their labels have one value each until then.

    Args:
        registry: where they are collected.
        model: the served model's name.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def latency(name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
            return Histogram(name, text, LABELS, buckets=buckets, registry=registry)

        self._model = model
        self.ttft = latency("vllm:time_to_first_token_seconds", "Arrival to the first token handed to the client.")
        self.itl = latency("vllm:inter_token_latency_seconds", "Time between two tokens of an answer.", ITL_BUCKETS_S)
        self.e2e = latency("vllm:e2e_request_latency_seconds", "Arrival to the last token.")
        self.queue = latency("vllm:request_queue_time_seconds", "Arrival to placement.")
        self.prefill = latency("vllm:request_prefill_time_seconds", "Handing to prefill to the first token.")
        self.decode = latency("vllm:request_decode_time_seconds", "First to last token.")
        self.success = Counter(
            "vllm:request_success",
            "Requests by how they ended: stop, length, abort, or error (then with its status).",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Prompt tokens of answers.", ["model_name"], registry=registry
        )
        self.generation_tokens = Counter(
            "vllm:generation_tokens", "Tokens handed to clients.", ["model_name"], registry=registry
        )
        self.decision = Histogram(
            "baton_router_decision_seconds",
            "Time to choose workers.",
            buckets=(0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.1),
            registry=registry,
        )
        self.path = Counter("baton_router_path", "Requests by path.", ["path", "reason"], registry=registry)
        self.rejected = Counter("baton_router_rejected", "Requests refused, by status.", ["reason"], registry=registry)
        self.retries = Counter(
            "baton_router_retries", "Requests placed again after a worker failed.", registry=registry
        )
        self.queue_depth = Gauge("baton_router_queue_depth", "Requests waiting for room.", registry=registry)
        self.queue_tokens = Gauge("baton_router_queue_tokens", "Prompt tokens waiting for room.", registry=registry)
        self.queue_oldest = Gauge("baton_router_queue_oldest_seconds", "Age of the oldest waiter.", registry=registry)
        self.running = Gauge(
            "vllm:num_requests_running", "Requests placed and not ended.", ["model_name"], registry=registry
        )
        self.waiting = Gauge(
            "vllm:num_requests_waiting", "Requests waiting for room.", ["model_name"], registry=registry
        )
        self.worker_state = Gauge(
            "baton_router_worker_state", "1 for the state a worker is in.", ["worker", "state"], registry=registry
        )
        self.worker_inflight = Gauge(
            "baton_router_worker_inflight",
            "Sequences this router has placed on a worker and not seen ended.",
            ["worker"],
            registry=registry,
        )
        self.ttft_part = Histogram(
            "baton_ttft_part_seconds",
            "Parts of the time to first token.",
            ["part"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )

    def finished(self, done: Done, token_gaps_s: Sequence[float]) -> None:
        """Count an answer that reached its end, and the times between its tokens. A request with n answers counts n times."""
        self.success.labels(self._model, done.finish_reason).inc()
        self.path.labels(done.path, "mode").inc()
        if done.index == 0:  # the other answers to a request share its prompt
            self.prompt_tokens.labels(self._model).inc(done.prompt_tokens)
        self.generation_tokens.labels(self._model).inc(done.completion_tokens)
        timings = done.timings
        labels = (self._model, "default", "0", _length_class(done.prompt_tokens, done.completion_tokens))
        after_first_ms = timings.transfer_ms + timings.adopt_ms + timings.first_decode_ms + timings.decode_ms
        if done.completion_tokens:
            self.ttft.labels(*labels).observe(timings.ttft_ms / 1000)
        self.e2e.labels(*labels).observe(timings.e2e_ms / 1000)
        self.queue.labels(*labels).observe(timings.queue_ms / 1000)
        self.prefill.labels(*labels).observe(timings.prefill_ms / 1000)
        self.decode.labels(*labels).observe(after_first_ms / 1000)
        itl = self.itl.labels(*labels)
        for gap_s in token_gaps_s:
            itl.observe(gap_s)
        self._observe_parts(timings)

    def failed(self, status: str, *, was_admitted: bool) -> None:
        """Count a request that ended with a status (a gRPC code name) instead of an answer."""
        if was_admitted:
            self.success.labels(self._model, "abort" if status == "CANCELLED" else "error").inc()
        else:
            self.rejected.labels(status.lower()).inc()

    def _observe_parts(self, timings: Timings) -> None:
        for part in PARTS:
            self.ttft_part.labels(part).observe(getattr(timings, f"{part}_ms") / 1000)


def _length_class(num_prompt_tokens: int, num_output_tokens: int) -> str:
    return f"{_size(num_prompt_tokens, 256, 2048)}-{_size(num_output_tokens, 64, 512)}"


def _size(num_tokens: int, short: int, medium: int) -> str:
    return "short" if num_tokens <= short else "medium" if num_tokens <= medium else "long"
