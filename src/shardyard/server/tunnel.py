"""Requests of the HTTP API that come over a WebSocket connection."""

from urllib.parse import unquote, urlencode

from starlette.types import ASGIApp, Message, Scope

from shardyard.wire.frames import Request, Response


class Tunnel:
    """Passes requests to the application, with the caller and the token of their connection."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        """`scope`: of the request that opened the connection."""
        self._app = app
        self._scope = scope
        kept = (b"host", b"authorization", b"x-shardyard-user")
        self._headers = [(name, value) for name, value in scope["headers"] if name in kept]

    async def request(self, request: Request) -> Response:
        own = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
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
            "headers": [*self._headers, *((name, value) for name, value in own if name not in dict(self._headers))],
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
