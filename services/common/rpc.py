"""gRPC in one place: channel and server options, and errors to status codes and back."""

from typing import Any, NoReturn

import grpc
from grpc import aio

from core.errors import (
    BatonError,
    CapacityError,
    InternalError,
    ServingError,
    UnavailableError,
    error_from_status,
    status_of,
)

MAX_MESSAGE_BYTES = 16 * 2**20  # a prompt of a million token ids fits; nothing bigger is read
RETRY_AFTER = "retry-after-ms"

# A dead or black-holed peer is noticed within keepalive_time + keepalive_timeout. Servers accept frequent pings: by default
# a client that pings every 10 s through a long quiet prefill is sent away with "too_many_pings" (one in 5 min allowed).
_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_metadata_size", 16 * 2**10),
    ("grpc.so_reuseport", 0),  # two servers on one port would share it silently; the second must fail
)
CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # two channels to one address do not share a broken connection's back-off
    ("grpc.enable_http_proxy", 0),  # internal addresses never go through a proxy from the environment
)


async def abort_with(context: "aio.ServicerContext[Any, Any]", error: BatonError) -> NoReturn:
    """End an RPC with the status `core.errors.STATUS` gives the error. Always raises."""
    trailing = ((RETRY_AFTER, str(error.retry_after_ms)),) if isinstance(error, CapacityError) else ()
    await context.abort(grpc.StatusCode[status_of(error).grpc], str(error), trailing)


def error_of(call_error: aio.AioRpcError) -> ServingError:
    """The error another Baton process ended an RPC with; transport failures become UnavailableError."""
    code, details = call_error.code(), call_error.details() or ""
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED):
        return UnavailableError(details or code.name)
    error = error_from_status(code.name, details)
    if isinstance(error, CapacityError):
        trailing: Any = call_error.trailing_metadata() or ()
        for key, value in trailing:
            if key == RETRY_AFTER:
                error.retry_after_ms = int(value)
    return error


def hidden_bug(error: BaseException) -> ServingError:
    """What a client is told of an exception that is our bug: its kind, never its text, which may hold a prompt."""
    return InternalError(f"internal error ({type(error).__name__}); the server's log has the details")
