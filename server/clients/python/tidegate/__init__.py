"""Client for Tidegate: conversations that the server keeps, forks, rewinds and moves.

`tidegate.langchain` and `tidegate.langgraph` connect it to those packages, which are not installed with it.
"""

from .aio import AsyncSession, AsyncStream, AsyncTidegate
from .client import Session, Stream, Tidegate
from .errors import (
    APIError,
    BadRequest,
    Conflict,
    ConnectionFailed,
    Forbidden,
    Gone,
    KeyReused,
    NotFound,
    RateLimited,
    ServerError,
    StreamDiverged,
    TidegateError,
    Unauthorized,
    VersionMismatch,
)
from .wire import Reply, Turn

__version__ = "0.1.0"
__all__ = [
    "APIError",
    "AsyncSession",
    "AsyncStream",
    "AsyncTidegate",
    "BadRequest",
    "Conflict",
    "ConnectionFailed",
    "Forbidden",
    "Gone",
    "KeyReused",
    "NotFound",
    "RateLimited",
    "Reply",
    "ServerError",
    "Session",
    "Stream",
    "StreamDiverged",
    "Tidegate",
    "TidegateError",
    "Turn",
    "Unauthorized",
    "VersionMismatch",
]
