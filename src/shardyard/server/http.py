"""Requests and answers: bodies, tokens, errors and their status codes."""

import re
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from msgspec import Struct
from starlette.exceptions import HTTPException

from shardyard.model import (
    InvalidValue,
    Malformed,
    RetryLater,
    ShardyardError,
    TooLarge,
    WrongToken,
)
from shardyard.queues.broker import Broker
from shardyard.wire import errors
from shardyard.wire import records as wire
from shardyard.wire.validation import refused

T = TypeVar("T")

MOST_BYTES = 32 * 1024 * 1024
"""Of a body."""


def broker_of(request: Request) -> Broker:
    broker: Broker = request.app.state.broker
    return broker


def token_of(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else None


def authorised(request: Request) -> Broker:
    """The broker, for a caller who shows its token, if it asks for one."""
    broker = broker_of(request)
    if not broker.admits(token_of(request)):
        raise WrongToken("this broker")
    return broker


Authorised = Annotated[Broker, Depends(authorised)]
Index = Annotated[int, Path(ge=0, lt=10**9)]


def caller(request: Request) -> str:
    """Who it is, for the audit: as the caller says, and from where."""
    host = request.client.host if request.client else "?"
    name = request.headers.get("x-shardyard-user")
    return f"{name}@{host}" if name else host


async def body_of(request: Request) -> bytes:
    """The body, up to a size."""
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > MOST_BYTES:
        raise TooLarge("body in bytes", int(told), MOST_BYTES)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MOST_BYTES:
            raise TooLarge("body in bytes", size, MOST_BYTES)
        chunks.append(chunk)
    return b"".join(chunks)


async def told(request: Request, kind: type[T]) -> T:
    """The body as what it should be."""
    body = await body_of(request)
    try:
        return wire.decoded(body, kind)
    except Malformed:
        raise refused(kind, wire.decoded(body, Any)) from None


def queried(request: Request, kind: type[T]) -> T:
    """The query as what it should be."""
    query = dict(request.query_params)
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError:
        raise refused(kind, query, strict=False) from None


def media_of(request: Request) -> str:
    """The kind of the body; JSON if the caller says nothing, or what forms and `curl -d` say."""
    media = request.headers.get("content-type", wire.JSON).partition(";")[0].strip().lower()
    if media == "application/x-www-form-urlencoded":
        return wire.JSON
    if media not in wire.MEDIA:
        raise InvalidValue("content-type", media, "one of " + ", ".join(wire.MEDIA))
    return media


def wants_arrow(request: Request) -> bool:
    return wire.ARROW in request.headers.get("accept", "")


def answer(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=wire.JSON)


async def on_error(_: Request, error: Exception) -> Response:
    """An error that was raised on purpose, as its status, code and sentence."""
    if not isinstance(error, ShardyardError):
        raise error
    headers = {"Retry-After": "1"} if isinstance(error, RetryLater) else {}
    if isinstance(error, WrongToken):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": msgspec.to_builtins(errors.error_body(error))}, errors.status_of(error), headers)


async def on_bad_query(request: Request, error: Exception) -> Response:
    """What the path or the query names is not what it should be."""
    if not isinstance(error, RequestValidationError):
        raise error
    wrong = error.errors()[0]
    expected = wrong["msg"].removeprefix("Input should be ")
    return await on_error(request, InvalidValue(str(wrong["loc"][-1]), wrong.get("input"), expected))


async def on_no_such_call(request: Request, error: Exception) -> Response:
    """There is nothing at that path, or nothing of that method."""
    if not isinstance(error, HTTPException):
        raise error
    code = re.sub(r"\W+", "_", str(error.detail)).lower()
    body = errors.ErrorBody(code, f"{request.method} {request.url.path} is no call of this API: see /docs")
    return JSONResponse({"error": msgspec.to_builtins(body)}, error.status_code, error.headers)


def takes(*kinds: type[Struct], media: tuple[str, ...] = (wire.JSON,)) -> dict[str, Any]:
    """What the API's description says of a body."""
    name = kinds[0].__name__
    schema: dict[str, Any] = {"$ref": f"#/components/schemas/{name}"}
    content: dict[str, Any] = {kind: {"schema": schema} if kind == wire.JSON else {} for kind in media}
    return {"requestBody": {"content": content, "required": True}}
