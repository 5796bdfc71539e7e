"""Every error of the tree has its status, and comes back from the wire as what it was."""

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from core import errors
from core.errors import (
    STATUS,
    BatonError,
    CapacityError,
    InternalError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
    error_from_status,
    status_of,
)
from services.common import rpc

SERVING_ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ServingError)]


def test_every_serving_error_has_a_row_of_its_own() -> None:
    assert set(STATUS) == set(SERVING_ERRORS) - {ServingError}
    assert len({status.grpc for status in STATUS.values()}) == len(STATUS)
    for status in STATUS.values():
        assert status.grpc in grpc.StatusCode.__members__
        assert 400 <= status.http < 600


@pytest.mark.parametrize("kind", STATUS)
def test_an_error_comes_back_as_it_was(kind: type[BatonError]) -> None:
    error = kind("field", "9 is above 8: too: many") if kind is InvalidRequestError else kind("why: it was")
    again = error_from_status(status_of(error).grpc, str(error))
    assert type(again) is kind
    assert str(again) == str(error)
    if isinstance(again, InvalidRequestError):
        assert again.field == "field"


def test_an_unknown_code_or_error_is_internal() -> None:
    assert type(error_from_status("DATA_LOSS", "x")) is InternalError
    assert status_of(errors.TransferError("x")).grpc == "INTERNAL"


def call_error(code: grpc.StatusCode, details: str, *trailing: tuple[str, str]) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(*trailing), details=details)


@pytest.mark.parametrize("code", ["UNAVAILABLE", "UNKNOWN", "UNIMPLEMENTED"])
def test_failures_of_the_transport_mean_that_the_worker_is_unavailable(code: str) -> None:
    error = rpc.error_of(call_error(grpc.StatusCode[code], "Socket closed"))
    assert type(error) is UnavailableError
    assert "Socket closed" in str(error)


def test_a_refusal_keeps_its_advice_when_to_come_again() -> None:
    error = rpc.error_of(call_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (rpc.RETRY_AFTER, "1234")))
    assert isinstance(error, CapacityError)
    assert error.retry_after_ms == 1234


def test_a_bug_s_text_is_never_shown() -> None:
    error = rpc.hidden_bug(KeyError("the user's secret prompt"))
    assert "KeyError" in str(error)
    assert "secret" not in str(error)
