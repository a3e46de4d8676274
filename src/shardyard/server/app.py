"""The broker's web application, and its server."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from shardyard import __version__
from shardyard.log import Log
from shardyard.model import ShardyardError
from shardyard.queues.broker import Broker
from shardyard.registry import Registry
from shardyard.server.http import answer, broker_of, on_bad_query, on_error, on_no_such_call
from shardyard.server.queues import groups, members, records, topics
from shardyard.wire import records as wire
from shardyard.wire import requests
from shardyard.wire.settings import GroupSettings

BACKLOG = 1024

_BODIES = [kind for kind in vars(requests).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]


def create_app(broker: Broker) -> FastAPI:
    """The application of a broker that is open."""
    app = FastAPI(title="Shardyard", version=__version__, description="Topics, records and groups over HTTP.")
    app.state.broker = broker
    app.add_exception_handler(ShardyardError, on_error)
    app.add_exception_handler(RequestValidationError, on_bad_query)
    app.add_exception_handler(HTTPException, on_no_such_call)
    app.add_exception_handler(ClientDisconnect, _gone)
    for part in (topics, records, members, groups):
        app.include_router(part.router)
    app.add_api_route("/healthz", _alive, tags=["health"])
    app.add_api_route("/readyz", _ready, tags=["health"])
    plain = app.openapi

    def described() -> dict[str, Any]:
        schema = plain()
        _, components = msgspec.json.schema_components(
            [*(kind for kind in _BODIES if kind is not msgspec.Struct), wire.JsonRecord, GroupSettings],
            ref_template="#/components/schemas/{name}",
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return schema

    app.openapi = described  # type: ignore[method-assign]
    return app


def direct(app: FastAPI) -> ASGIApp:
    """The application, with short cuts to what is asked most often: finding the way there would be a quarter of what a
    single record costs."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        hit = _OFTEN.fullmatch(f"{scope['method']} {scope['path']}") if scope["type"] == "http" else None
        if hit is None:
            await app(scope, receive, send)
            return
        scope["app"] = app
        request = Request(scope, receive)
        topic, group, member, owner, of, index = hit.groups()
        try:
            if topic is not None:
                response = await records.publish(topic, request)
            elif group is not None:
                response = await members.commit(group, member, request)
            else:
                response = await members.read(owner, of, int(index), request)
        except ShardyardError as error:
            response = await on_error(request, error)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    return answered


_OFTEN = re.compile(
    r"POST /v1/topics/([^/]+)/records"
    r"|POST /v1/groups/([^/]+)/members/([^/]+)/commit"
    r"|GET /v1/groups/([^/]+)/partitions/([^/]+)/(\d{1,9})/records"
)


async def _gone(_: Request, __: Exception) -> Response:
    """Nobody is there any more to be answered."""
    return Response(status_code=499)


async def _alive() -> Response:
    """The process answers."""
    return answer({"alive": True})


async def _ready(request: Request) -> Response:
    """Log and registry answer too."""
    broker = broker_of(request)
    await broker.log.topics()
    await broker.node.transactions.read(lambda tx: tx.now)
    return answer({"ready": True, "leads": broker.node.rebalancer.leads})


class _Server(uvicorn.Server):
    """Tells requests that wait when it is to stop, so that it stops at once."""

    def __init__(self, config: uvicorn.Config, broker: Broker) -> None:
        super().__init__(config)
        self._broker = broker

    async def shutdown(self, sockets: Any = None) -> None:
        self._broker.closing.set()
        await super().shutdown(sockets)


class _Guest(_Server):
    """One inside another program, which has its own ways with signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def running(log: Log, registry: Registry, *, token: str | None = None) -> AsyncIterator[str]:
    """A broker inside this program, on a free port of this machine; gives its address. For tests and examples."""
    async with Broker(log, registry, token=token) as broker:
        server = _Guest(_config(broker, "127.0.0.1", 0), broker)
        listening = server.config.bind_socket()
        listening.listen(BACKLOG)  # who connects before the server is up waits for it
        task = asyncio.create_task(server.serve([listening]), name="broker")
        try:
            host, port = listening.getsockname()[:2]
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
) -> AsyncIterator[uvicorn.Server]:
    """A server, ready to `serve()`. Port 0 takes a free one.

    `trusted_proxies`: the addresses whose word is taken for where a caller is (`X-Forwarded-For`).
    """
    async with Broker(log, registry, token=token) as broker:
        yield _Server(_config(broker, host, port, trusted_proxies), broker)


def _config(broker: Broker, host: str, port: int, trusted_proxies: Sequence[str] = ()) -> uvicorn.Config:
    return uvicorn.Config(
        direct(create_app(broker)),
        host=host,
        port=port,
        access_log=False,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=5,
        proxy_headers=bool(trusted_proxies),  # uvicorn would believe whoever is on this machine
        forwarded_allow_ips=list(trusted_proxies),
    )
