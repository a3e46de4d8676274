"""Calls an ASGI application without a server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


async def call(
    app: ASGIApp, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Response:
    """The response to a request for `target`, a path with or without a query."""
    path, _, query = target.partition("?")
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 7400),
    }
    await app(scope, receive, send)
    start, *rest = sent
    named = {name.decode(): value.decode() for name, value in start["headers"]}
    return Response(start["status"], named, b"".join(message.get("body", b"") for message in rest))
