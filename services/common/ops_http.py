"""/healthz, /readyz and /metrics: the same in every process."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


def render_metrics(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The metrics of a process as (Prometheus text, content type)."""
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def create_ops_app(
    why_unready: Callable[[], str], registry: CollectorRegistry, refresh: Callable[[], None]
) -> Starlette:
    """An app with the three routes (and /health, an alias of /healthz).

    Args:
        why_unready: empty when a request sent now would be served, else the reason.
        registry: the process's metrics.
        refresh: brings gauges up to date; called before they are read.
    """

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        reason = why_unready()
        return PlainTextResponse(f"{reason or 'ready'}\n", status_code=503 if reason else 200)

    async def metrics(_: Request) -> Response:
        refresh()
        body, content_type = render_metrics(registry)
        return Response(body, media_type=content_type)

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/health", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
        ]
    )
