"""Requests of the HTTP API that come over a WebSocket connection."""

from urllib.parse import unquote, urlencode

from starlette.types import ASGIApp, Message, Scope

from shardyard.wire.frames import Request, Response

OF_CONNECTION = (b"host", b"authorization")
"""Headers that a request always has from its connection."""
USER = b"x-shardyard-user"
"""The header that it has from its connection unless it has one of its own."""


class Tunnel:
    """Passes requests to the application, with the caller and the token of their connection."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        """`scope`: of the request that opened the connection."""
        self._app = app
        self._scope = scope
        self._headers = [(name, value) for name, value in scope["headers"] if name in OF_CONNECTION]
        self._user = [(name, value) for name, value in scope["headers"] if name == USER]

    async def request(self, request: Request) -> Response:
        own = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
        own = [(name, value) for name, value in own if name not in OF_CONNECTION]
        path, body = request.path, request.body
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": request.method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": urlencode(request.query).encode(),
            "root_path": "",
            "headers": [*self._headers, *own, *(() if USER in dict(own) else self._user)],
            "client": self._scope["client"],
            "server": self._scope["server"],
        }
        status, parts = 500, []

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return Response(status, b"".join(parts))
