"""`baton router`, `baton prefill`, `baton decode`: one process each, as Helm runs it."""

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import disable_created_metrics

from core.errors import ConfigError
from services.cli import flags
from services.cli.home import baton_home
from services.cli.progress import progress_bars
from services.common.lifecycle import run_until_stopped
from services.common.logs import configure_logging
from services.common.options import (
    ClusterOptions,
    EngineOptions,
    ModelOptions,
    RouterLimits,
    limit_context,
    parse_cores,
    parse_size,
)

if TYPE_CHECKING:  # a quarter of a second of imports that clients need not wait for
    from services.common.engine_parts import EngineParts


def resolve_model(options: ModelOptions) -> tuple[Path, str]:
    """The model's folder and the name it is served under; imports a .gguf file first. Raises ConfigError."""
    from services.common.models.store import ModelStore

    with progress_bars() as report:
        folder = ModelStore(baton_home()).resolve(options.model, report)
    return folder, options.served_model_name or folder.name


def print_ready(endpoints: str) -> None:
    """The line on stdout that tools wait for; the process has everything it needs by now.

    What was imported and loaded stays, so the garbage collector need not look at it again: with a tensor library a full
    collection takes 0.2 s, in which no token would be answered, and the one at exit takes longer.
    """
    gc.collect()
    gc.freeze()
    print(f"READY {endpoints}", flush=True)


def run_router(values: dict[str, Any]) -> None:
    """Be a router until stopped."""
    from services.router.main import load_served_model, serve

    cluster, model = flags.build(ClusterOptions, values), flags.build(ModelOptions, values)
    limits = flags.build(RouterLimits, values)
    _begin("router", cluster)
    folder, name = resolve_model(model)
    served = load_served_model(folder, name, model.max_model_len)
    run_until_stopped(lambda stop: serve(cluster, limits, served, stop, print_ready))


def run_prefill(values: dict[str, Any]) -> None:
    """Be a prefill worker until stopped."""
    from services.prefill.main import serve

    parts = _WorkerInputs("prefill", values)
    parts.live(lambda stop: serve(parts.cluster, parts.load, parts.transport, parts.transfer, stop, print_ready))


def run_decode(values: dict[str, Any]) -> None:
    """Be a decode worker until stopped."""
    from services.decode.main import serve

    parts = _WorkerInputs("decode", values)
    bind = parts.engine.kv_bind or f"tcp://{parts.cluster.host}:0"
    parts.live(lambda stop: serve(parts.cluster, bind, parts.load, parts.transport, parts.transfer, stop, print_ready))


def _begin(name: str, options: ClusterOptions) -> None:
    configure_logging(name, options.log_level, options.log_format)
    # They are a second series beside each counter and histogram, which no dashboard reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]


class _WorkerInputs:
    """What either worker's composition root is given."""

    def __init__(self, role: str, values: dict[str, Any]) -> None:
        from kvtransfer.config import TransferConfig
        from kvtransfer.zeromq import ZmqTransport

        self.cluster: ClusterOptions = flags.build(ClusterOptions, values)
        self.engine: EngineOptions = flags.build(EngineOptions, values)
        self._model: ModelOptions = flags.build(ModelOptions, values)
        _begin(role, self.cluster)
        self.transfer = TransferConfig(idle_timeout_s=self.engine.kv_idle_timeout_s)
        self.transport = ZmqTransport()

    def load(self) -> "EngineParts":
        """Load the model; takes seconds."""
        return _load_engine(self._model, self.engine)

    def live(self, serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
        """Run until stopped. Raises ConfigError from any part."""

        async def main(stop: asyncio.Event) -> None:
            try:
                await serve(stop)
            except* ConfigError as group:
                raise group.exceptions[0] from None

        run_until_stopped(main)
        self.transport.close()


def _usable_cores(text: str) -> frozenset[int]:
    """The cores of a --cores flag. Raises ConfigError unless this process may run on each."""
    cores = parse_cores(text)
    usable = os.sched_getaffinity(0)
    if cores - usable:
        raise ConfigError(f"cores={text}: this process may only use {','.join(map(str, sorted(usable)))}")
    return cores


def _load_engine(model: ModelOptions, options: EngineOptions) -> "EngineParts":
    from engine.backend import step_limits
    from engine.build import build_engine
    from services.common.engine_parts import EngineParts
    from services.common.registry import Capacity

    limits = step_limits(options.device, options.max_batched_tokens, options.max_sequences)
    folder, name = resolve_model(model)
    with progress_bars() as report:
        built = build_engine(
            folder,
            model=name,
            dtype=options.dtype,
            quantization=None if options.quantization == "none" else options.quantization,
            device=options.device,
            block_tokens=options.block_tokens,
            num_blocks=options.kv_blocks,
            kv_memory_bytes=None if options.kv_memory == "auto" else parse_size(options.kv_memory),
            max_context_tokens=model.max_model_len,
            gpu_memory_share=options.gpu_memory_share,
            threads=options.threads,
            limits=limits,
            swap_bytes=parse_size(options.swap_memory),
            deterministic=options.deterministic,
            cores=_usable_cores(options.cores),
            load_progress=lambda done, total: report("load", done, total),
        )
    capacity = Capacity(
        total_blocks=built.pool.num_total,
        max_sequences=limits.max_sequences,
        max_model_len=limit_context(model.max_model_len, built.config.max_context_tokens),
        vocab_size=built.config.vocab_size,
    )
    return EngineParts(
        engine=built.engine,
        pool=built.pool,
        memory=built.memory,
        layout=built.layout,
        fingerprint=built.fingerprint,
        eos_token_ids=built.config.eos_token_ids,
        capacity=capacity,
        max_cached_prompt_tokens=built.config.max_shared_prompt_tokens if options.prefix_cache else 0,
    )
