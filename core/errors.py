"""Every error Baton raises on purpose, and what each becomes on the wire.

BatonError
├── ConfigError                wrong flag, file or model; a process exits with status 2
│   └── ModelError             the model folder needs something Baton does not have
├── ServingError               ends one request; `STATUS` maps it to gRPC and HTTP
│   ├── InvalidRequestError    a field, its value, the limit
│   ├── NotFoundError          no such model
│   ├── DuplicateRequestError  that request id is in flight
│   ├── CapacityError          refused now, worth retrying later (`retry_after_ms`)
│   ├── DeadlineError          the request's own deadline passed
│   ├── UnavailableError       no worker can serve, or the one that did is gone
│   ├── CancelledError         the client went away or aborted
│   └── InternalError          our bug
├── DeviceLostError            a GPU failed for good; the process ends and another takes over
└── TransferError              a KV transfer failed; the router turns it into one of the above
    ├── FrameError             bytes that are not a frame of this protocol
    └── FingerprintError       the two ends do not hold the same kind of KV
"""

from typing import NamedTuple


class BatonError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(BatonError):
    """A flag, file or environment value that cannot work; names the value and the way out."""


class ModelError(ConfigError):
    """A model folder that needs a piece Baton does not have; names the piece."""


class ServingError(BatonError):
    """Ends one request with a status; the process goes on."""


class InvalidRequestError(ServingError):
    """A request field is wrong.

    Args:
        field: the field's public name, as the client spelled it.
        message: the value and the limit it broke.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NotFoundError(ServingError):
    """The named model does not exist here."""


class DuplicateRequestError(ServingError):
    """A request with this id is in flight."""


class CapacityError(ServingError):
    """Refused for lack of room now.

    Args:
        message: what is full, how full, which limit.
        retry_after_ms: when trying again is worth it.
    """

    def __init__(self, message: str, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class DeadlineError(ServingError):
    """The deadline the client gave (or the server's own limit) passed."""


class UnavailableError(ServingError):
    """No worker can serve this now, or the worker that served it is gone."""


class CancelledError(ServingError):
    """The client cancelled. Not asyncio.CancelledError, which is never swallowed."""


class InternalError(ServingError):
    """A bug of ours; the message is safe to show."""


class DeviceLostError(BatonError):
    """A device failed and computes nothing any more in this process; only another process can."""


class TransferError(BatonError):
    """A KV transfer failed; says in which state and why."""


class FrameError(TransferError):
    """Bytes on the KV socket that are not a frame of this protocol."""


class FingerprintError(TransferError):
    """Two workers whose KV blocks are not interchangeable; names each differing field and both values."""


class Status(NamedTuple):
    """How one error looks outside: gRPC code name, HTTP status, OpenAI error type."""

    grpc: str
    http: int
    openai_type: str


STATUS: dict[type[BatonError], Status] = {
    InvalidRequestError: Status("INVALID_ARGUMENT", 400, "invalid_request_error"),
    NotFoundError: Status("NOT_FOUND", 404, "not_found_error"),
    DuplicateRequestError: Status("ALREADY_EXISTS", 409, "conflict_error"),
    CapacityError: Status("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    DeadlineError: Status("DEADLINE_EXCEEDED", 504, "timeout_error"),
    UnavailableError: Status("UNAVAILABLE", 503, "service_unavailable_error"),
    CancelledError: Status("CANCELLED", 499, "cancelled_error"),
    InternalError: Status("INTERNAL", 500, "internal_error"),
}


def status_of(error: BatonError) -> Status:
    """The wire status of an error: the row of its nearest base that has one, else INTERNAL."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), STATUS[InternalError])


def error_from_status(grpc_code: str, message: str) -> ServingError:
    """Rebuild the error another Baton process reported as (gRPC code name, message).

    Args:
        grpc_code: a name of `STATUS`, e.g. "UNAVAILABLE"; an unknown one becomes InternalError.
        message: shown to the client as it is.
    """
    if grpc_code == "INVALID_ARGUMENT":
        field, _, rest = message.partition(": ")
        return InvalidRequestError(field, rest)
    for kind, status in STATUS.items():
        if status.grpc == grpc_code and issubclass(kind, ServingError):
            return kind(message)
    return InternalError(message)
