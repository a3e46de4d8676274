"""Opens WebSocket connections: who may have one, and for what."""

from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from shardyard.model import InvalidCall
from shardyard.queues.broker import Broker
from shardyard.server.auth import check_connection, check_token, token_of
from shardyard.server.drain import Drain
from shardyard.server.http import host_of
from shardyard.server.limits import ServerLimits
from shardyard.server.queues.session import Session
from shardyard.server.sharding.host import HostedNode
from shardyard.server.sharding.service import Service
from shardyard.server.sharding.session import ShardingSession
from shardyard.server.tunnel import Tunnel
from shardyard.wire import sharding_frames
from shardyard.wire.frames import PATH

if TYPE_CHECKING:
    from shardyard.server.websocket import WebSocketConnection


def take_connections(app: ASGIApp, broker: Broker, drain: Drain, limits: ServerLimits, hosted: HostedNode) -> ASGIApp:
    """The application, which also takes WebSocket connections on their paths."""

    async def service() -> Service:
        return Service(await hosted.get(), hosted)

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await app(scope, receive, send)
            return
        opening = HTTPConnection(scope)
        token, host = token_of(opening.headers), host_of(opening)
        connection: WebSocketConnection = scope["connection"]
        if scope["path"] == sharding_frames.PATH:
            check_token(broker, token)
            connection.accept(ShardingSession(connection, service, limits, host=host))
            return
        if scope["path"] != PATH:
            paths = f"{PATH} or {sharding_frames.PATH}"
            raise InvalidCall(f"{scope['path']} takes no WebSocket connections: connect to {paths}")
        await check_connection(broker, token)
        connection.accept(Session(connection, broker, drain, Tunnel(app, scope), limits, token=token, host=host))

    return call
