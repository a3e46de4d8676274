"""Health and metrics of a process that serves nothing else, such as a continuous job of the pipeline."""

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Response

from shardyard import __version__
from shardyard.runtime import metrics
from shardyard.server.app import EmbeddedServer, add_routes
from shardyard.server.bodies import Bodies, limit_bodies
from shardyard.server.connections import Connection
from shardyard.server.drain import Drain
from shardyard.server.http import respond
from shardyard.server.limits import DEFAULT_LIMITS
from shardyard.server.messaging.admin import AdminToken, check_admin
from shardyard.wire import responses

CONNECTIONS = 100

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def check_alive() -> Response:
    """Whether the process responds."""
    return respond(responses.Liveness())


@router.get("/metrics", dependencies=[Depends(check_admin)])
async def export_metrics() -> Response:
    """Metrics of this process, in the text format of Prometheus."""
    return Response(metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})


@contextlib.contextmanager
def serving_metrics(listening: socket.socket, token: str | None) -> Iterator[None]:
    """Answer requests in a thread. `token`: what metrics require; None: everybody on this machine may read them."""
    app = FastAPI(title="Shardyard", version=__version__, description="Health and metrics.")
    app.state.admin = AdminToken(token)
    add_routes(app, [router])
    limits = replace(DEFAULT_LIMITS, connections=CONNECTIONS).within_open_files()
    config = uvicorn.Config(
        limit_bodies(app, Bodies(limits)),
        http=functools.partial(Connection, limits=limits),  # type: ignore[arg-type]  # it is only called
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        lifespan="off",
    )
    server = EmbeddedServer(config, Drain())
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
