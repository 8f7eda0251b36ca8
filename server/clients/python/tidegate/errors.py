"""The errors: one class for each kind, all derived from `TidegateError`."""

from typing import Any


class TidegateError(Exception):
    """The base class of all errors of this package."""


class ConnectionFailed(TidegateError):
    """The server could not be reached, or the connection broke and the retries were used up."""


class StreamDiverged(TidegateError):
    """A turn that ran again after a server crash gave a text that differs from the part already read."""


class APIError(TidegateError):
    """The server refused a request, or failed. `status` is None for an error in the middle of a stream."""

    def __init__(self, status: int | None, error: dict[str, Any], request_id: str | None = None) -> None:
        self.status = status
        self.message = str(error.get("message") or "the server gave no reason")
        self.type: str | None = error.get("type")
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")
        self.request_id = request_id
        super().__init__(f"{self.message} ({status})" if status else self.message)


class BadRequest(APIError):
    """400: `param` names the field."""


class Unauthorized(APIError):
    """401: the key is missing or unknown."""


class Forbidden(APIError):
    """403: the key lacks a scope, or the owner's storage is used up."""


class NotFound(APIError):
    """404: no session, version, tag or model has this id, or it belongs to another owner."""


class Conflict(APIError):
    """409: the session is in use."""


class Gone(APIError):
    """410: the version or the events of a stream are no longer kept."""


class VersionMismatch(APIError):
    """412: the session's current version is not `if_version`."""


class KeyReused(APIError):
    """422: the idempotency key was used for another request."""


class RateLimited(APIError):
    """429: the queue is full (a stream may report this in its first event), or a quota is used up."""


class ServerError(APIError):
    """5xx: the server failed, is not ready, or has no disk space."""


BY_STATUS: dict[int, type[APIError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    412: VersionMismatch,
    422: KeyReused,
    429: RateLimited,
}


def api_error(status: int | None, body: Any, request_id: str | None = None) -> APIError:
    """Returns the error for a status and the body of a response."""
    error = body.get("error") if isinstance(body, dict) else None
    kind = BY_STATUS.get(status or 0, ServerError if (status or 0) >= 500 else APIError)
    if status is None and isinstance(error, dict) and error.get("code") == "queue_full":
        kind = RateLimited
    return kind(status, error if isinstance(error, dict) else {}, request_id)
