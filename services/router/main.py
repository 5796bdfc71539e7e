"""Composition root of the router."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from baton.v1 import inference_pb2, inference_pb2_grpc
from core.errors import ConfigError
from core.ids import new_incarnation
from core.model_config import load_model_config
from services.common import rpc
from services.common.lifecycle import HttpServer, bind
from services.common.ops_http import render_metrics
from services.common.options import ClusterOptions, RouterLimits, limit_context
from services.common.registry import Registry
from services.router.api import ModelCard
from services.router.chat_template import ChatTemplate
from services.router.grpc_edge import InferenceServicer
from services.router.http_edge import HttpLimits, create_app
from services.router.intake import ServedModel
from services.router.metrics import RouterMetrics
from services.router.router import Router
from services.router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

READINESS_S = 0.25


def load_served_model(folder: Path, name: str, max_model_len: int) -> ServedModel:
    """What the router needs of a model folder: its limits, tokenizer and chat template.

    Args:
        folder: a Hugging Face model folder.
        name: what clients call it.
        max_model_len: 0: what the model was made for.
    Raises:
        ConfigError: the folder cannot be served, or max_model_len exceeds the model's.
    """
    config = load_model_config(folder)
    card = ModelCard(
        name=name,
        revision="",
        max_model_len=limit_context(max_model_len, config.max_context_tokens),
        vocab_size=config.vocab_size,
    )
    return ServedModel(
        card=card, config=config, tokenizer=Tokenizer.load(folder), chat_template=ChatTemplate.load(folder)
    )


async def serve(
    options: ClusterOptions,
    limits: RouterLimits,
    model: ServedModel,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    """Live a router's life: bind, follow workers, serve both edges, drain.

    Args:
        options: where it listens and how it finds the workers.
        limits: what it admits.
        model: served.
        stop: set when it should drain and end.
        on_ready: told its endpoints once it listens; requests are answered UNAVAILABLE until workers are there.
    Raises:
        ConfigError: an address that cannot be had.
    """
    registry = Registry.from_url(options.redis_url, options.cluster)
    metrics_registry = CollectorRegistry()
    router = Router(
        model=model,
        limits=limits,
        registry=registry,
        router_id=new_incarnation(),
        metrics=RouterMetrics(metrics_registry, model.card.name),
    )

    def metrics() -> tuple[bytes, str]:
        router.refresh_metrics()
        return render_metrics(metrics_registry)

    http_socket = bind(options.host, options.http_port)
    http = HttpServer(
        create_app(router, metrics=metrics, limits=HttpLimits(stall_timeout_s=limits.stall_timeout_s)),
        http_socket,
        drain_s=int(options.drain_timeout_s) + 5,
    )
    server = aio.server(options=rpc.SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(router, limits.stall_timeout_s), server)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (
        inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
    try:
        port = server.add_insecure_port(f"{options.host}:{options.port}")
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {options.host}:{options.port}; choose another --port or 0") from error
    async with asyncio.TaskGroup() as group:
        group.create_task(http.serve(), name="http")
        beside = [
            group.create_task(router.run(), name="router"),
            group.create_task(_report_health(router, health, names[0]), name="health"),
        ]
        try:
            await server.start()
            http_port = http_socket.getsockname()[1]
            on_ready(f"grpc={options.reachable_host}:{port} http={options.reachable_host}:{http_port}")
            await stop.wait()
            logger.info("draining")
            await health.enter_graceful_shutdown()
            await router.drain(options.drain_timeout_s)
        finally:
            http.stop()
            await server.stop(grace=1.0)
            for task in beside:
                task.cancel()
    await registry.aclose()


async def _report_health(router: Router, health: HealthServicer, service: str) -> None:
    """Keep the health service's answer equal to the router's readiness."""
    while True:
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if not router.why_unready()
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        await health.set(service, status)
        await health.set("", status)
        await asyncio.sleep(READINESS_S)
