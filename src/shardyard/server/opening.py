"""Opens WebSocket connections: who may have one, and for what."""

from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from shardyard.model import InvalidCall
from shardyard.queues.broker import Broker
from shardyard.server.auth import check_connection, token_of
from shardyard.server.drain import Drain
from shardyard.server.http import host_of
from shardyard.server.limits import ServerLimits
from shardyard.server.queues.session import Session
from shardyard.server.tunnel import Tunnel
from shardyard.wire.frames import PATH

if TYPE_CHECKING:
    from shardyard.server.websocket import WebSocketConnection


def take_connections(app: ASGIApp, broker: Broker, drain: Drain, limits: ServerLimits) -> ASGIApp:
    """The application, which also takes WebSocket connections on their path."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await app(scope, receive, send)
            return
        if scope["path"] != PATH:
            raise InvalidCall(f"{scope['path']} takes no WebSocket connections: connect to {PATH}")
        opening = HTTPConnection(scope)
        token, host = token_of(opening.headers), host_of(opening)
        await check_connection(broker, token)
        connection: WebSocketConnection = scope["connection"]
        connection.accept(Session(connection, broker, drain, Tunnel(app, scope), limits, token=token, host=host))

    return call
