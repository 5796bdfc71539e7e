"""The flags of every process, as frozen objects: one field, one flag, one BATON_ environment variable.

The command line builds them; everything below takes them as arguments. `help` metadata is what `--help` prints.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from core.errors import ConfigError

_SIZES = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def flag(default: Any, help: str) -> Any:  # noqa: A002 (the word the command line library uses)
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": help})


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "512 MiB" or "1000". Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2] not in _SIZES:
        raise ConfigError(
            f"size {text!r}: want a number and one of {', '.join(unit for unit in _SIZES if unit)}, e.g. 2GiB"
        )
    return int(float(match[1]) * _SIZES[match[2]])


def parse_cores(text: str) -> frozenset[int]:
    """The cores of "0", "0,2" or "2-5"; none of "". Raises ConfigError."""
    cores: set[int] = set()
    for span in text.split(",") if text else []:
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", span)
        if not match or not (named := range(int(match[1]), int(match[2] or match[1]) + 1)):
            raise ConfigError(f"cores={text!r}: want core numbers, e.g. 0 or 0,2 or 2-5")
        cores.update(named)
    return frozenset(cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and under which name it is served."""

    model: str = flag("smollm2-135m-instruct", "A model folder, a .gguf file or the name of a fetched model.")
    served_model_name: str = flag("", "The name clients ask for; default: the folder's name.")
    max_model_len: int = flag(0, "Most tokens of prompt and answer together; 0: what the model was made for.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Where a process listens and how it finds the others."""

    host: str = flag("127.0.0.1", "Address to listen on.")
    port: int = flag(0, "gRPC port; 0 picks a free one.")
    http_port: int = flag(
        0, "HTTP port (/healthz, /readyz, /metrics; on a router the OpenAI API too); 0 picks a free one."
    )
    advertise_host: str = flag("", "Address the others reach this process at; default: --host.")
    redis_url: str = flag("redis://127.0.0.1:6379/0", "Redis or Valkey that all processes of the cluster share.")
    cluster: str = flag("default", "Name in every Redis key; clusters may share one Redis.")
    drain_timeout_s: float = flag(30.0, "After SIGTERM: how long running requests may go on.")
    worker_ttl_s: float = flag(5.0, "A worker that has not written its record for this long is gone from Redis.")
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "Least severe log level written.")
    log_format: Literal["text", "json"] = flag("text", "Log lines as text or JSON objects.")

    def __post_init__(self) -> None:
        if not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError(f"redis_url={self.redis_url!r}: must start with redis://, rediss:// or unix://")
        for name in ("drain_timeout_s", "worker_ttl_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0")
        for name in ("port", "http_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name}={getattr(self, name)}: must be 0 to 65535")
        if self.host in ("0.0.0.0", "::") and not self.advertise_host:  # noqa: S104
            raise ConfigError(f"host={self.host}: nobody can connect to that; give --advertise-host too")

    @property
    def reachable_host(self) -> str:
        """The address this process tells others."""
        return self.advertise_host or self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a worker computes and how much it holds."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag(
        "auto", "Arithmetic of weights, activations and KV."
    )
    quantization: Literal["none", "int8", "int4"] = flag(
        "none",
        "Weights in 8 or 4 bits, made on load: faster at few sequences, smaller, less exact. Equal on both pools.",
    )
    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "Where to compute: auto is a GPU where there is one, cuda is ROCm's name too."
    )
    block_tokens: int = flag(16, "Tokens in one KV block; equal on both pools.")
    kv_memory: str = flag("auto", "Memory for KV blocks, e.g. 2GiB; auto: 1GiB on a CPU, what is left on a GPU.")
    gpu_memory_share: float = flag(
        0.9,
        "Of a GPU's memory that a worker takes, with --kv-memory auto; with `up`, that all its workers take together.",
    )
    kv_blocks: int = flag(0, "KV blocks; 0: as many as --kv-memory holds.")
    prefix_cache: bool = flag(True, "Share the KV of equal prefixes between requests and keep it while there is room.")
    swap_memory: str = flag(
        "1GiB", "Host memory for the KV of preempted sequences, taken when needed; 0: it is always computed anew."
    )
    max_sequences: int | None = flag(
        None, "Sequences held at once; more are refused. Default: 64 on a CPU, 256 on a GPU."
    )
    max_batched_tokens: int | None = flag(
        None, "Tokens computed in one step at most. Default: 512 on a CPU, 2048 on a GPU."
    )
    threads: int = flag(1, "Compute threads.")
    cores: str = flag(
        "", "Cores the engine keeps to, e.g. 0 or 2-5; empty: any. `up` gives each worker its own if it can."
    )
    deterministic: bool = flag(
        False, "The same answer, bit for bit, alone or in any batch, after preemption or cache hits."
    )
    transport: Literal["zmq"] = flag("zmq", "How KV blocks travel.")
    kv_bind: str = flag(
        "", "Where a decode worker takes KV: tcp://HOST:PORT or ipc://PATH; default: any free port of --host."
    )
    kv_idle_timeout_s: float = flag(10.0, "A KV transfer whose other end is silent for this long fails.")

    def __post_init__(self) -> None:
        if self.kv_memory != "auto":
            parse_size(self.kv_memory)
        if not 0 < self.gpu_memory_share <= 1:
            raise ConfigError(f"gpu_memory_share={self.gpu_memory_share}: must be above 0 and at most 1")
        parse_size(self.swap_memory)
        parse_cores(self.cores)
        if self.kv_bind and not self.kv_bind.startswith(("tcp://", "ipc://")):
            raise ConfigError(
                f"kv_bind={self.kv_bind!r}: must be tcp://HOST:PORT or ipc://PATH; port 0 picks a free one"
            )
        for name in ("block_tokens", "max_sequences", "max_batched_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if self.kv_blocks < 0:
            raise ConfigError(f"kv_blocks={self.kv_blocks}: must be 0 (from kv_memory) or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """What a router admits and how long things may take."""

    mode: Literal["disaggregated", "aggregated"] = flag(
        "disaggregated", "Prefill and decode apart, or whole requests in one worker."
    )
    max_requests: int = flag(4096, "Requests open at once at most, waiting and running; more are refused.")
    max_queued: int = flag(1024, "Requests waiting for room at most; more are refused.")
    max_queue_s: float = flag(60.0, "Longest wait for room; then the request is refused.")
    request_timeout_s: float = flag(600.0, "Deadline of a request that brings none, and the longest one it may bring.")
    stall_timeout_s: float = flag(30.0, "A client that does not read for this long is cut off.")
    worker_silence_s: float = flag(3.0, "A worker that sends nothing for this long is lost, and its requests with it.")
    worker_grace_s: float = flag(2.0, "How long a request waits for a worker to come back when none is live.")
    max_attempts: int = flag(
        3, "Pairs of workers tried for a request; it goes on after the tokens that the client has."
    )

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_queued", "max_attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("max_queue_s", "request_timeout_s", "stall_timeout_s", "worker_silence_s", "worker_grace_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0")


def limit_context(asked_tokens: int, model_tokens: int) -> int:
    """The context limit in force.

    Args:
        asked_tokens: --max-model-len; 0: all the model was made for.
        model_tokens: what the model was made for.
    Raises:
        ConfigError: more was asked for than the model has.
    """
    if not 0 <= asked_tokens <= model_tokens:
        raise ConfigError(f"max_model_len={asked_tokens}: must be 0 to {model_tokens}, the model's own limit")
    return asked_tokens or model_tokens
