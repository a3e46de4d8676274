"""Errors over the wire, and what they mean to a program: the code and the HTTP status of a response, and the exit code
of a command. Status and exit code follow from the branch of the error (`shardyard.model.errors`)."""

import re
from typing import Any

from msgspec import Struct

from shardyard import model
from shardyard.model import (
    BodyStalled,
    Conflict,
    Damaged,
    DatabaseDenied,
    Denied,
    Fenced,
    InvalidCall,
    NotAllowed,
    OffsetBeyondEnd,
    OffsetTrimmed,
    OverQuota,
    Partition,
    RetryLater,
    ShardyardError,
    TooLarge,
    UnknownExchange,
    UnknownGroup,
    UnknownNode,
    UnknownPolicy,
    UnknownQueue,
    UnknownTopic,
)
from shardyard.wire.codec import parse_partition

STATUS: dict[type[ShardyardError], int] = {
    InvalidCall: 400,
    Denied: 401,
    Conflict: 409,
    Fenced: 409,
    RetryLater: 503,
    Damaged: 500,
    # Where HTTP has a status that says more than the branch:
    DatabaseDenied: 503,  # the broker may not use its database: its client has the right token
    NotAllowed: 403,
    UnknownTopic: 404,
    UnknownGroup: 404,
    UnknownExchange: 404,
    UnknownQueue: 404,
    UnknownPolicy: 404,
    UnknownNode: 404,
    BodyStalled: 408,
    OffsetTrimmed: 410,
    TooLarge: 413,
    OffsetBeyondEnd: 416,
    OverQuota: 429,
}
"""The HTTP status of each branch, and of the errors for which HTTP has a more precise one."""

EXIT_CODES: dict[type[ShardyardError], int] = {InvalidCall: 2, ShardyardError: 1}
"""The exit code of a command that failed: 2 if the command was wrong, 1 if it could not be carried out."""


def status_of(error: ShardyardError) -> int:
    """The HTTP status of a response with this error."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def exit_code_of(error: ShardyardError) -> int:
    """The exit code of a command that ends with this error."""
    return next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)


class ErrorBody(Struct):
    """An error in a response: a code for programs, a sentence for people, and its fields."""

    code: str
    message: str
    fields: dict[str, Any] = {}


class ErrorResponse(Struct):
    """The body of every response that reports an error."""

    error: ErrorBody


def error_body(error: ShardyardError) -> ErrorBody:
    """The error as it is sent."""
    return ErrorBody(code_of(type(error)), str(error), {name: _plain(value) for name, value in vars(error).items()})


def code_of(kind: type[ShardyardError]) -> str:
    """The code of a kind of error, such as `unknown_topic`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


_KINDS = {
    code_of(kind): kind for kind in vars(model).values() if isinstance(kind, type) and issubclass(kind, ShardyardError)
}


def error_of(body: ErrorBody) -> ShardyardError:
    """The error of a response, as it was raised in the server. One of an unknown kind is an `InvalidCall`."""
    kind = _KINDS.get(body.code, InvalidCall)
    error = kind.__new__(kind)
    error.args = (body.message,)
    for name, value in body.fields.items():
        setattr(error, name, parse_partition(value) if name == "partition" and isinstance(value, str) else value)
    return error


def _plain(value: object) -> object:
    if isinstance(value, Partition):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
