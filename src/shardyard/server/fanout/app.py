"""The process of a coordinator or a fan-out worker: its HTTP application, and the server that runs it."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from shardyard import __version__
from shardyard.fanout import topics
from shardyard.fanout.config import DEFAULT_CONFIG, FanoutConfig
from shardyard.fanout.modes import Role
from shardyard.fanout.parts import make_part
from shardyard.fanout.process import FanoutProcess
from shardyard.groups import Node
from shardyard.log import Log
from shardyard.messaging.tokens import Tokens, signing_key
from shardyard.registry import Registry
from shardyard.runtime.clock import Clock
from shardyard.server.app import BACKLOG, DRAIN_SECONDS, EmbeddedServer, Server, add_routes
from shardyard.server.bodies import Bodies, limit_bodies
from shardyard.server.connections import Connection
from shardyard.server.drain import Drain
from shardyard.server.fanout import routes
from shardyard.server.fanout.service import FanoutService
from shardyard.server.fanout.typing import ChannelTypingSender
from shardyard.server.limits import DEFAULT_LIMITS, ServerLimits
from shardyard.server.measuring import measure
from shardyard.server.messaging.admin import AdminToken

SETTLE_SECONDS = 3.0
"""How long a process waits for its group before it answers requests."""


@dataclass(frozen=True, slots=True)
class FanoutOptions:
    """How a coordinator or worker runs, and how others reach it."""

    address: str = ""
    """Where messaging servers reach it, if that is not where it listens."""
    admin_token: str | None = None
    snapshot: Path | None = None
    """The folder of the routing snapshot that a worker begins with; None: it builds its table from the topics alone."""
    config: FanoutConfig = DEFAULT_CONFIG


DEFAULT_OPTIONS = FanoutOptions()


@contextlib.asynccontextmanager
async def running_fanout(
    log: Log,
    registry: Registry,
    role: Role,
    options: FanoutOptions = DEFAULT_OPTIONS,
    *,
    clock: Clock | None = None,
) -> AsyncIterator[str]:
    """A coordinator or worker inside this program, on a free port of this machine; yields its URL. For tests and
    examples."""
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listening:
        async with serving_fanout(log, registry, role, listening.getsockname(), options, clock=clock) as server:
            embedded = EmbeddedServer(server.config, server.drain)
            task = asyncio.create_task(embedded.serve([listening]), name=role)
            try:
                host, port = listening.getsockname()[:2]
                yield f"http://{host}:{port}"
            finally:
                embedded.should_exit = True
                await task


@contextlib.asynccontextmanager
async def serving_fanout(
    log: Log,
    registry: Registry,
    role: Role,
    listening: tuple[Any, ...],
    options: FanoutOptions = DEFAULT_OPTIONS,
    *,
    limits: ServerLimits = DEFAULT_LIMITS,
    clock: Clock | None = None,
) -> AsyncIterator[Server]:
    """A coordinator or worker, ready to `serve()`. `listening`: host and port of its socket."""
    await topics.open_all(log)
    async with Node(log, registry, clock=clock) as node:
        tokens = Tokens(await signing_key(node.transactions), node.clock)
        address = options.address or _address(listening)
        make = functools.partial(make_part, config=options.config, address=address, snapshot=options.snapshot)
        process = FanoutProcess(node, role, make, address=address, config=options.config)
        async with ChannelTypingSender(node, tokens) as typing, process:
            await process.settled(SETTLE_SECONDS)
            drain = Drain()
            yield Server(_config(FanoutService(process, tokens, typing), drain, options, limits), drain)


def _config(service: FanoutService, drain: Drain, options: FanoutOptions, limits: ServerLimits) -> uvicorn.Config:
    app = FastAPI(title=f"Shardyard {service.process.role}", version=__version__, description="Health and status.")
    app.state.service = service
    app.state.drain = drain
    app.state.admin = AdminToken(options.admin_token)
    add_routes(app, (routes.router, routes.worker_router) if service.process.role == "worker" else (routes.router,))
    limits = replace(limits, connections=min(limits.connections, 1000)).within_open_files()
    return uvicorn.Config(
        limit_bodies(measure(app), Bodies(limits)),
        http=functools.partial(Connection, limits=limits),  # type: ignore[arg-type]  # it is only called
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=DRAIN_SECONDS,  # type: ignore[arg-type]  # it is passed to asyncio.wait_for
    )


def _address(listening: tuple[Any, ...]) -> str:
    host, port = listening[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
