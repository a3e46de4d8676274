"""HTTP requests and responses: bodies, queries and errors, with their limits and status codes."""

import math
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Path, Request, Response
from fastapi.exceptions import RequestValidationError
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection

from shardyard.model import (
    BodyStalled,
    InvalidValue,
    Malformed,
    OverQuota,
    RetryLater,
    ShardyardError,
    TooLarge,
    WrongToken,
)
from shardyard.runtime.metrics import ERRORS
from shardyard.wire import frames
from shardyard.wire.codec import decode, encode
from shardyard.wire.errors import ErrorBody, ErrorResponse, error_body, status_of
from shardyard.wire.media import ARROW, JSON, MAX_BODY_BYTES, MEDIA_TYPES, MSGPACK
from shardyard.wire.validation import validation_error

T = TypeVar("T")

Index = Annotated[int, Path(ge=0, lt=10**9)]
"""The index of a partition in a path."""


def caller_of(request: Request) -> str:
    """Who makes the request, for the audit log: the name that the caller gives, and its address."""
    name = request.headers.get("x-shardyard-user")
    return f"{name}@{host_of(request)}" if name else host_of(request)


def host_of(connection: HTTPConnection) -> str:
    """The address of the caller."""
    return connection.client.host if connection.client else "?"


async def read_bytes(request: Request) -> bytes:
    """The body. One that is too large is refused, without reading it if its length is declared."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise TooLarge("body in bytes", int(declared), MAX_BODY_BYTES)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise TooLarge("body in bytes", size, MAX_BODY_BYTES)
        chunks.append(chunk)
    return b"".join(chunks)


async def read_body(request: Request, kind: type[T]) -> T:
    """The JSON body as a `kind`. `InvalidValue` names the field that is wrong."""
    body = await read_bytes(request)
    try:
        return decode(body, kind)
    except Malformed:
        raise validation_error(kind, decode(body, Any)) from None


def read_query(request: Request, kind: type[T]) -> T:
    """The query as a `kind`. `InvalidValue` names the parameter that is wrong."""
    query = dict(request.query_params) if request.scope["query_string"] else {}  # parsing takes a while
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError:
        raise validation_error(kind, query, strict=False) from None


def media_type_of(request: Request) -> str:
    """The media type of the body. JSON if the caller gives none, or the one that forms and `curl -d` give."""
    media = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media == "application/x-www-form-urlencoded":
        return JSON
    if media not in MEDIA_TYPES:
        raise InvalidValue("content-type", media, "one of " + ", ".join(MEDIA_TYPES))
    return media


def accepted_media(request: Request) -> str:
    """The media type that the caller wants records in. JSON if it names neither of the others."""
    accept = request.headers.get("accept", JSON)
    return next((media for media in (MSGPACK, ARROW) if media in accept), JSON)


def respond(content: object, status: int = 200) -> Response:
    """A response in JSON."""
    return Response(encode(content), status, media_type=JSON)


def error_response(error: ShardyardError) -> Response:
    """The response to an error of Shardyard's own: its status, code and message."""
    headers = {}
    if isinstance(error, RetryLater):
        seconds = error.wait if isinstance(error, OverQuota) else 1.0
        headers["Retry-After"] = str(max(math.ceil(seconds), 1))
    if isinstance(error, WrongToken):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyStalled):
        headers["Connection"] = "close"  # nobody waits for the rest of the body
    body = error_body(error)
    ERRORS.series(body.code).add()
    return _error_response(body, status_of(error), headers)


async def on_error(_: Request, error: Exception) -> Response:
    """The response to an error of Shardyard's own."""
    if not isinstance(error, ShardyardError):
        raise error
    return error_response(error)


async def on_invalid_parameter(_: Request, error: Exception) -> Response:
    """The response to a path or query parameter that FastAPI could not convert."""
    if not isinstance(error, RequestValidationError):
        raise error
    wrong = error.errors()[0]
    expected = wrong["msg"].removeprefix("Input should be ").replace("String should have", "a string of")
    return error_response(InvalidValue(str(wrong["loc"][-1]), wrong.get("input"), expected))


async def on_no_route(request: Request, error: Exception) -> Response:
    """The response if the path does not exist, or not with this method."""
    if not isinstance(error, HTTPException):
        raise error
    code = re.sub(r"\W+", "_", str(error.detail)).lower()
    call = f"{request.method} {request.url.path}"
    body = ErrorBody(code, f"{call} is not a call of this API: this is {_kind(request)}; see /docs")
    return _error_response(body, error.status_code, dict(error.headers or {}))


def _kind(request: Request) -> str:
    """Which kind of server this is."""
    state = request.app.state
    if hasattr(state, "broker"):
        return "a broker"
    return "a messaging server" if hasattr(state, "authenticator") else f"a server of {request.app.title}"


async def refuse_without_upgrade(request: Request) -> Response:
    """The response to a plain request where only WebSocket connections are taken."""
    message = (
        f"{request.url.path} takes WebSocket connections (subprotocol {frames.SUBPROTOCOL}), and no plain requests"
    )
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    return _error_response(ErrorBody("upgrade_required", message), 426, headers)


async def on_disconnect(_: Request, __: Exception) -> Response:
    """The caller has gone, so nobody gets this; 499 is the status that proxies log for it."""
    return Response(status_code=499)


Handler = Callable[[Request, Exception], Awaitable[Response]]
ERROR_HANDLERS: dict[type[Exception], Handler] = {
    ShardyardError: on_error,
    RequestValidationError: on_invalid_parameter,
    HTTPException: on_no_route,
    ClientDisconnect: on_disconnect,
}
"""The response to each kind of error, whichever route raised it. Others are bugs: they are logged, with status 500."""


def _error_response(body: ErrorBody, status: int, headers: dict[str, str]) -> Response:
    return Response(encode(ErrorResponse(body)), status, headers, media_type=JSON)


def request_body(kind: type[Struct], *, media: tuple[str, ...] = (JSON,)) -> dict[str, Any]:
    """The body of a request, as OpenAPI describes it."""
    schema: dict[str, Any] = {"$ref": f"#/components/schemas/{kind.__name__}"}
    content: dict[str, Any] = {each: {"schema": schema} if each == JSON else {} for each in media}
    return {"requestBody": {"content": content, "required": True}}
