"""One Baton process whose model is scripted: `python -m tests.scripted_worker ROLE [flags]`.

The real composition roots, sockets and signals of a prefill worker, a decode worker or a router; no tensor library.
"""

import argparse
import asyncio

from engine.scheduler import StepLimits
from engine.scripted import VOCAB_SIZE, scripted_engine, scripted_layout
from kvtransfer.config import TransferConfig
from kvtransfer.zeromq import ZmqTransport
from services.common.engine_parts import EngineParts
from services.common.lifecycle import run_until_stopped
from services.common.logs import configure_logging
from services.common.options import ClusterOptions, RouterLimits
from services.common.registry import Capacity
from services.decode.main import serve as serve_decode
from services.prefill.main import serve as serve_prefill
from services.router.main import serve as serve_router
from tests.scripted_parts import BLOCK, EOS, fingerprint, served_model

CONTEXT_TOKENS = 1024
MAX_SEQUENCES = 64


def load(blocks: int, step_ms: float) -> EngineParts:
    """A scripted engine of `blocks` KV blocks whose steps take `step_ms`."""
    limits = StepLimits(max_batched_tokens=64, max_sequences=MAX_SEQUENCES)
    built = scripted_engine(num_blocks=blocks, layout=scripted_layout(BLOCK), limits=limits)
    built.runner.step_s = step_ms / 1000
    capacity = Capacity(
        total_blocks=blocks, max_sequences=MAX_SEQUENCES, max_model_len=CONTEXT_TOKENS, vocab_size=VOCAB_SIZE
    )
    return EngineParts(
        engine=built.loop,
        pool=built.pool,
        memory=built.memory,
        layout=built.layout,
        fingerprint=fingerprint(),
        eos_token_ids=(EOS,),
        capacity=capacity,
        max_cached_prompt_tokens=CONTEXT_TOKENS,
    )


def main() -> None:
    """Be the process until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["prefill", "decode", "router"])
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--advertise-host", default="")
    parser.add_argument("--kv-bind", default="tcp://127.0.0.1:0")
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--silence-s", type=float, default=3.0)
    parser.add_argument("--grace-s", type=float, default=2.0)
    arguments = parser.parse_args()
    cluster = ClusterOptions(
        redis_url=arguments.redis_url,
        port=arguments.port,
        advertise_host=arguments.advertise_host,
        drain_timeout_s=5.0,
    )
    configure_logging(arguments.role, cluster.log_level, cluster.log_format)

    def print_ready(endpoints: str) -> None:
        print(f"READY {endpoints}", flush=True)

    def parts() -> EngineParts:
        return load(arguments.blocks, arguments.step_ms)

    async def serve(stop: asyncio.Event) -> None:
        if arguments.role == "router":
            limits = RouterLimits(worker_silence_s=arguments.silence_s, worker_grace_s=arguments.grace_s)
            await serve_router(cluster, limits, served_model(CONTEXT_TOKENS), stop, print_ready)
            return
        transport = ZmqTransport()
        if arguments.role == "prefill":
            await serve_prefill(cluster, parts, transport, TransferConfig(), stop, print_ready)
        else:
            await serve_decode(cluster, arguments.kv_bind, parts, transport, TransferConfig(), stop, print_ready)
        transport.close()

    run_until_stopped(serve)


if __name__ == "__main__":
    main()
