"""The web application of a broker, and the server that runs it."""

import asyncio
import contextlib
import functools
import logging
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from types import FrameType
from typing import Any

import msgspec
import uvicorn
from fastapi import APIRouter, FastAPI

from shardyard import __version__
from shardyard.log import Log
from shardyard.queues.broker import Broker
from shardyard.registry import Registry
from shardyard.runtime.clock import Clock
from shardyard.runtime.metrics import CLIENTS
from shardyard.server import health
from shardyard.server.bodies import Bodies, limit_bodies
from shardyard.server.connection_checks import ConnectionChecks
from shardyard.server.connections import Connection
from shardyard.server.drain import Drain
from shardyard.server.http import ERROR_HANDLERS, refuse_without_upgrade
from shardyard.server.limits import DEFAULT_LIMITS, ServerLimits
from shardyard.server.measuring import measure
from shardyard.server.opening import take_connections
from shardyard.server.queues import groups, members, records, topics
from shardyard.server.sharding import exchanges, nodes, policies
from shardyard.server.sharding import queues as sharding_queues
from shardyard.server.sharding.host import HostedNode, NodeOptions
from shardyard.server.websocket import WebSocketConnection
from shardyard.wire import frames, requests, responses, sharding, sharding_frames
from shardyard.wire.batches import JsonBatch
from shardyard.wire.records import JsonRecord
from shardyard.wire.settings import GroupSettings

_log = logging.getLogger(__name__)

ROUTERS = (
    topics.router,
    records.router,
    members.router,
    groups.router,
    exchanges.router,
    policies.router,
    sharding_queues.router,
    nodes.router,
    health.router,
)
BACKLOG = 1024
"""Connections that can wait to be accepted."""
DRAIN_SECONDS = 5.0
"""How long a server that stops waits for requests in flight."""

_BODIES = [
    kind
    for module in (requests, responses, sharding)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
]


def create_app(broker: Broker, drain: Drain | None = None, hosted: HostedNode | None = None) -> FastAPI:
    """The application of a broker that is open. `hosted`: its node of sharded queues."""
    app = FastAPI(
        title="Shardyard", version=__version__, description="Topics, records, groups and sharded queues over HTTP."
    )
    app.state.broker = broker
    app.state.hosted = hosted or HostedNode(broker.node)
    app.state.drain = drain or Drain()
    add_routes(app, ROUTERS)
    for path in (frames.PATH, sharding_frames.PATH):
        app.add_api_route(path, refuse_without_upgrade, include_in_schema=False)
    describe_bodies(app, [*_BODIES, JsonRecord, JsonBatch, GroupSettings])
    return app


def describe_bodies(app: FastAPI, kinds: Sequence[type[msgspec.Struct]]) -> None:
    """Let `/openapi.json` describe these, to which its routes refer by name."""
    describe_routes = app.openapi

    def describe() -> dict[str, Any]:
        schema = describe_routes()
        _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return schema

    app.openapi = describe  # type: ignore[method-assign]


def add_routes(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Add routes, and the responses to errors."""
    for kind, handler in ERROR_HANDLERS.items():
        app.add_exception_handler(kind, handler)
    for router in routers:
        app.router.routes.extend(router.routes)  # `include_router` would build each route anew, with the first request


class Server(uvicorn.Server):
    """Drains before it stops: it accepts no more connections, answers long polls at once, and finishes the requests in
    flight, up to a time."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self.drain = drain
        self._reason = "the program has asked for it"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self._reason = f"{signal.Signals(sig).name} was received"
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        connections = len(self.server_state.connections) + int(CLIENTS.value)  # those of users are not uvicorn's
        _log.info("stopping: %s; %d connections are open", self._reason, connections)
        self.drain.start()
        await super().shutdown(sockets)


class EmbeddedServer(Server):
    """A server inside another program, which handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def running(
    log: Log,
    registry: Registry,
    *,
    token: str | None = None,
    clock: Clock | None = None,
    node_name: str | None = None,
) -> AsyncIterator[str]:
    """A broker inside this program, on a free port of this machine; yields its URL. For tests and examples.
    `node_name`: of its node of sharded queues."""
    async with Broker(log, registry, token=token, clock=clock) as broker, HostedNode(broker.node, token) as hosted:
        drain = Drain()
        server = EmbeddedServer(_config(broker, hosted, drain, "127.0.0.1", 0), drain)
        listening = server.config.bind_socket()
        listening.listen(BACKLOG)  # connections that come before the server is up wait for it
        task = asyncio.create_task(server.serve([listening]), name="broker")
        try:
            host, port = listening.getsockname()[:2]
            hosted.start(NodeOptions.of(f"http://{host}:{port}", port, node_name))
            yield f"http://{host}:{port}"
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def serving(
    log: Log,
    registry: Registry,
    *,
    host: str = "127.0.0.1",
    port: int = 7400,
    token: str | None = None,
    trusted_proxies: Sequence[str] = (),
    drain_seconds: float = DRAIN_SECONDS,
    limits: ServerLimits = DEFAULT_LIMITS,
    clock: Clock | None = None,
    node: NodeOptions | None = None,
) -> AsyncIterator[uvicorn.Server]:
    """A server, ready to `serve()`. Port 0 takes a free one. `node`: its part in sharded queues, if any.

    `trusted_proxies`: addresses of proxies whose `X-Forwarded-For` header is believed. `limits`: on what callers
    can take. `clock`: of the broker, for long polls, leases and everything that it does in the background.
    """
    async with Broker(log, registry, token=token, clock=clock) as broker, HostedNode(broker.node, token) as hosted:
        if node is not None:
            hosted.start(node)
        drain = Drain()
        yield Server(_config(broker, hosted, drain, host, port, trusted_proxies, drain_seconds, limits), drain)


def _config(
    broker: Broker,
    hosted: HostedNode,
    drain: Drain,
    host: str,
    port: int,
    trusted_proxies: Sequence[str] = (),
    drain_seconds: float = DRAIN_SECONDS,
    limits: ServerLimits = DEFAULT_LIMITS,
) -> uvicorn.Config:
    limits = limits.within_open_files()
    bodies = Bodies(limits)
    checks = ConnectionChecks(limits.stalled_seconds / 2)
    app = measure(create_app(broker, drain, hosted))
    return uvicorn.Config(
        take_connections(limit_bodies(app, bodies), broker, drain, limits, hosted),
        host=host,
        port=port,
        http=functools.partial(Connection, limits=limits),  # type: ignore[arg-type]  # it is only called
        ws=functools.partial(WebSocketConnection, limits=limits, bodies=bodies, checks=checks),  # type: ignore[arg-type]  # likewise
        access_log=False,
        log_config=None,  # the program configures where logs go
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=drain_seconds,  # type: ignore[arg-type]  # it is passed to asyncio.wait_for
        proxy_headers=bool(trusted_proxies),  # by default uvicorn believes every caller on this machine
        forwarded_allow_ips=list(trusted_proxies),
    )
