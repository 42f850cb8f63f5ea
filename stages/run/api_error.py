"""How a call of an agent is refused: in the words of OpenAI's API, so that any client knows what to make of it.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

No HTTP and no engine here.
"""

from __future__ import annotations

from typing import Any

from infra.errors import Failure, RollmillError
from schemas.outcome import FailureKind, StopReason


class ApiError(RollmillError):
    """A call is answered with an error.

    Attributes:
        status: of HTTP.
        body: what is sent.
    """

    def __init__(self, status: int, message: str, *, kind: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class LimitReached(ApiError):
    """A limit on the policy leaves no room for this call.

    Attributes:
        limit: which one.
    """

    def __init__(self, limit: StopReason, message: str, *, code: str) -> None:
        super().__init__(400, message, kind="invalid_request_error", code=code, param="messages")
        self.limit = limit


def unsupported(param: str, message: str) -> ApiError:
    """Return the refusal of a field that cannot be honoured."""
    return ApiError(400, message, kind="invalid_request_error", code="unsupported_parameter", param=param)


def malformed(param: str | None, message: str) -> ApiError:
    """Return the refusal of a body that is not what the API says."""
    return ApiError(400, message, kind="invalid_request_error", code="invalid_request", param=param)


def too_large(most: int) -> ApiError:
    """Return the refusal of a body of more than this many bytes."""
    message = f"the body exceeds {most} bytes, which is the limit here"
    return ApiError(413, message, kind="invalid_request_error", code="request_too_large")


def unknown_token() -> ApiError:
    """Return the refusal of a key that opens no episode; nobody is told whether it ever did."""
    message = "no episode is open under this key: it is wrong, or its episode has ended"
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")


def too_many(most: int) -> ApiError:
    """Return the refusal of one call more than an episode may have at once."""
    message = f"{most} calls of this episode are running; ask again when one has ended"
    return ApiError(429, message, kind="rate_limit_error", code="too_many_calls")


def unavailable(failure: Failure) -> ApiError:
    """Return what an agent is told when the system fails its episode."""
    if failure.kind is FailureKind.RATE_LIMIT:
        return ApiError(429, f"the policy is busy: {failure}", kind="rate_limit_error", code="policy_busy")
    return ApiError(503, f"the policy gave no answer: {failure}", kind="server_error", code="policy_unavailable")
