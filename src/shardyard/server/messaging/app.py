"""The process of a messaging server: its HTTP application, its connections, and the server that runs both."""

import asyncio
import contextlib
import functools
import hmac
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from fastapi import FastAPI

from shardyard import __version__
from shardyard.groups import Node
from shardyard.log import Log
from shardyard.messaging.config import DEFAULT_CONFIG, MessagingConfig
from shardyard.messaging.history import History
from shardyard.messaging.inbox import DEFAULT_PARTITIONS
from shardyard.messaging.server import MessagingServer
from shardyard.messaging.tokens import Authenticator, Credentials, Open, SharedSecret, Tokens, signing_key
from shardyard.registry import Registry
from shardyard.runtime.clock import Clock
from shardyard.server.app import BACKLOG, DRAIN_SECONDS, EmbeddedServer, Server, add_routes, describe_bodies
from shardyard.server.bodies import Bodies, limit_bodies
from shardyard.server.drain import Drain
from shardyard.server.limits import DEFAULT_LIMITS, ServerLimits
from shardyard.server.measuring import measure
from shardyard.server.messaging import channels, routes
from shardyard.server.messaging.admin import AdminToken
from shardyard.server.messaging.clients import ClientConnections
from shardyard.server.messaging.first_bytes import FirstBytes, HttpConnection
from shardyard.server.messaging.origins import Origins, share_answers
from shardyard.wire.channel_calls import NewEvent
from shardyard.wire.messaging import PATH


@dataclass(frozen=True, slots=True)
class MessengerOptions:
    """How a messaging server is reached, and by whom."""

    address: str = ""
    """Where clients reach it, if that is not where it listens: behind a proxy, for example."""
    secret: str | None = None
    """The shared secret; None: anyone may sign in as anyone."""
    admin_token: str | None = None
    origins: Collection[str] = ()
    """Of pages on other hosts that may connect."""
    partitions: Sequence[int] | None = None
    """The partitions that it owns; None: the rebalancer decides."""
    topic_partitions: int = DEFAULT_PARTITIONS
    clients: int = 50_000
    """That may be connected at a time."""
    stores_history: bool = True
    """Whether the server stores the history itself. If not, another process has to."""
    tls_certificate: str | None = None
    tls_key: str | None = None
    config: MessagingConfig = DEFAULT_CONFIG


DEFAULT_OPTIONS = MessengerOptions()


@contextlib.asynccontextmanager
async def running_messenger(
    log: Log,
    registry: Registry,
    history: History | None = None,
    options: MessengerOptions = DEFAULT_OPTIONS,
    *,
    authenticator: Authenticator | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[str]:
    """A messaging server inside this program, on a free port of this machine; yields its URL. For tests and examples.

    `authenticator`: decides which user a client is, instead of the shared secret.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listening:
        async with serving_messenger(
            log, registry, history, listening.getsockname(), options, authenticator=authenticator, clock=clock
        ) as server:
            embedded = EmbeddedServer(server.config, server.drain)
            task = asyncio.create_task(embedded.serve([listening]), name="messenger")
            try:
                host, port = listening.getsockname()[:2]
                yield f"http://{host}:{port}"
            finally:
                embedded.should_exit = True
                await task


@contextlib.asynccontextmanager
async def serving_messenger(
    log: Log,
    registry: Registry,
    history: History | None,
    listening: tuple[Any, ...],
    options: MessengerOptions = DEFAULT_OPTIONS,
    *,
    authenticator: Authenticator | None = None,
    limits: ServerLimits = DEFAULT_LIMITS,
    clock: Clock | None = None,
) -> AsyncIterator[Server]:
    """A messaging server, ready to `serve()`. `listening`: host and port of its socket."""
    async with Node(log, registry, clock=clock) as node:
        key = await signing_key(node.transactions)
        tokens = Tokens(key, node.clock)
        if authenticator is not None:
            sign_in = type(authenticator).__name__
        elif options.secret is None:
            authenticator, sign_in = Open(), "open"
        else:  # others can compare it, and learn nothing of the secret
            authenticator = SharedSecret(options.secret)
            sign_in = hmac.digest(key.encode(), options.secret.encode(), "sha256").hex()
        server = MessagingServer(
            node,
            address=options.address or _address(listening, is_secure=options.tls_certificate is not None),
            tokens=tokens,
            history=history,
            config=options.config,
            partitions=options.partitions,
            topic_partitions=options.topic_partitions,
            stores_history=options.stores_history,
            sign_in=sign_in,
        )
        app = FastAPI(title="Shardyard messaging", version=__version__, description="Sessions, and where users are.")
        app.state.server = server
        app.state.authenticator = authenticator
        app.state.admin = AdminToken(options.admin_token)
        add_routes(app, (routes.router, channels.router))
        describe_bodies(app, [Credentials, NewEvent])
        limits = replace(limits, connections=options.clients).within_open_files()
        origins = Origins(server, options.origins, is_open=isinstance(authenticator, Open))
        connections = ClientConnections(server, origins=origins, most=limits.connections)

        def protocol(**given: Any) -> FirstBytes:
            """For a new connection, of which nothing is known yet."""
            http = functools.partial(HttpConnection, client=connections.protocol, limits=limits, **given)
            return FirstBytes(connections.protocol, http, limits.head_seconds, given["server_state"].connections)

        drain = Drain()
        config = uvicorn.Config(
            limit_bodies(measure(share_answers(app, origins)), Bodies(limits)),
            http=protocol,  # type: ignore[arg-type]  # it is only called
            ws=HttpConnection,  # uvicorn only asks whether there is one: see `handle_websocket_upgrade`
            access_log=False,
            log_config=None,
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=DRAIN_SECONDS,  # type: ignore[arg-type]  # it is passed to asyncio.wait_for
            ssl_certfile=options.tls_certificate,
            ssl_keyfile=options.tls_key,
        )
        async with server:
            await server.settled()
            yield Server(config, drain)


def _address(listening: tuple[Any, ...], *, is_secure: bool) -> str:
    host, port = listening[:2]
    return f"{'wss' if is_secure else 'ws'}://{f'[{host}]' if ':' in host else host}:{port}{PATH}"
