"""What a worker measures. Names are public: dashboards use them."""

from collections import Counter as Tally
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from core.sequence import StepResult

TRANSFER_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class TransferStats(Protocol):
    """Totals that one end of KV transfer keeps; see `kvtransfer.stats`."""

    transfers: Tally[str]
    frames_dropped: Tally[str]
    num_inflight: int
    num_bytes: int
    leases_expired: int


class WorkerMetrics:
    """Metrics of one prefill or decode worker in a registry of its own.

    Args:
        registry: where they are collected.
        pool: prefill or decode.
        model: the served model's name.
    """

    def __init__(
        self, registry: CollectorRegistry, pool: str, model: str, block_tokens: int, total_blocks: int
    ) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["model_name"], registry=registry).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=registry).labels(model)

        self.running = gauge("vllm:num_requests_running", "Sequences that compute in this worker's engine.")
        self.waiting = gauge("vllm:num_requests_waiting", "Sequences held whose prompt or KV is not complete.")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens sampled.")
        self.preemptions = counter(
            "vllm:num_preemptions", "Sequences that had to yield their KV blocks and go on later."
        )
        self.recomputed_tokens = counter("baton_recomputed_tokens", "Tokens computed again for preempted sequences.")
        self.prefix_queries = counter(
            "vllm:prefix_cache_queries", "Tokens of starting sequences looked up in the cache."
        )
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Tokens of starting sequences found in the prefix cache.")
        self.step_seconds = Histogram("baton_engine_step_seconds", "Duration of engine steps.", registry=registry)
        Gauge("vllm:cache_config_info", "The KV cache.", ["block_size", "num_gpu_blocks"], registry=registry).labels(
            str(block_tokens), str(total_blocks)
        ).set(1)

        self._copied: Tally[Counter] = Tally()  # how far each counter of transfers has been raised
        blocks = Gauge("baton_kv_blocks", "KV blocks by state.", ["pool", "state"], registry=registry)
        self.blocks = {state: blocks.labels(pool, state) for state in ("free", "used", "cached", "reserved")}
        self.transfer_seconds = Histogram(
            "baton_kv_transfer_seconds",
            "First frame to the end of a KV transfer.",
            buckets=TRANSFER_BUCKETS_S,
            registry=registry,
        )
        self._transfer_bytes = Counter("baton_kv_transfer_bytes", "KV bytes moved.", registry=registry)
        self._transfers = Counter(
            "baton_kv_transfers", "KV transfers by how they ended.", ["outcome"], registry=registry
        )
        self._transfers_inflight = Gauge("baton_kv_transfers_inflight", "KV transfers open.", registry=registry)
        self._leases_expired = Counter("baton_kv_leases_expired", "KV leases nobody extended.", registry=registry)
        self._frames_dropped = Counter("baton_kv_frames_dropped", "KV frames dropped.", ["reason"], registry=registry)

    def note_step(self, result: StepResult) -> None:
        """Count what an engine step did."""
        if result.step_s:  # an abort is told without a step
            self.step_seconds.observe(result.step_s)
        self.prompt_tokens.inc(result.num_prompt_tokens)
        self.recomputed_tokens.inc(result.num_recomputed_tokens)
        self.preemptions.inc(result.num_preemptions)
        self.prefix_queries.inc(result.num_looked_up_tokens)
        self.prefix_hits.inc(result.num_found_tokens)

    def set_blocks(self, free: int, cached: int, total: int, reserved: int) -> None:
        """The pool's state: reserved blocks wait for KV that is on its way, used ones are computed or computing, cached
        ones nobody uses but their content is kept while there is room.

        Args:
            free: blocks that nobody holds, cached ones included.
        """
        self.blocks["free"].set(free - cached)
        self.blocks["cached"].set(cached)
        self.blocks["used"].set(total - free - reserved)
        self.blocks["reserved"].set(reserved)
        self.kv_usage.set((total - free) / total)

    def copy_transfer_stats(self, stats: TransferStats) -> None:
        """Bring the transfer counters up to the totals that the transfer keeps itself."""
        self._transfers_inflight.set(stats.num_inflight)
        self._raise_to(self._transfer_bytes, stats.num_bytes)
        self._raise_to(self._leases_expired, stats.leases_expired)
        for outcome, total in stats.transfers.items():
            self._raise_to(self._transfers.labels(outcome), total)
        for reason, total in stats.frames_dropped.items():
            self._raise_to(self._frames_dropped.labels(reason), total)

    def _raise_to(self, counter: Counter, total: int) -> None:
        counter.inc(total - self._copied[counter])
        self._copied[counter] = total
