"""Routes: each requires a token, and the data plane behaves as it would through FastAPI."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from shardyard.server.routing import NO_ROUTE, dispatch

from shardyard.log.memory import MemoryLog
from shardyard.queues.broker import Broker
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.metrics import REQUESTS
from shardyard.server.app import ROUTERS, create_app
from tests.server.asgi import call

TOKEN = "the broker's"
OPEN = {"/healthz", "/readyz"}
DATA_PLANE = {
    ("POST", "/v1/topics/{topic}/records"),
    ("POST", "/v1/groups/{group}/members/{member}/commit"),
    ("GET", "/v1/groups/{group}/partitions/{topic}/{index}/records"),
}


@contextlib.asynccontextmanager
async def an_app(token: str | None = TOKEN) -> AsyncIterator[FastAPI]:
    async with MemoryLog() as log:
        await log.create_topic("orders", 2)
        with MemoryRegistry() as registry:
            async with Broker(log, registry, token=token) as broker:
                yield create_app(broker)


def run(scenario: Callable[[FastAPI], Awaitable[None]], token: str | None = TOKEN) -> None:
    async def whole() -> None:
        async with an_app(token) as app:
            await scenario(app)

    asyncio.run(whole())


ROUTES = [
    (method, route.path)
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in sorted(route.methods or ())
]


def path_of(template: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: "0" if found[1] == "index" else "orders", template)


def test_every_route_but_the_health_checks_requires_the_token() -> None:
    async def scenario(app: FastAPI) -> None:
        assert set(ROUTES) >= DATA_PLANE
        assert len(ROUTES) > 20
        for whole in (app, dispatch(app, ROUTERS)):
            for method, template in ROUTES:
                for authorization in ("", "Bearer wrong", f"Basic {TOKEN}"):
                    headers = {"Authorization": authorization}
                    response = await call(whole, method, path_of(template), b"{}", headers)
                    if template in OPEN:
                        assert response.status == 200
                    else:
                        assert response.status == 401, f"{method} {template}"
                        assert response.json["error"]["code"] == "wrong_token"
                        assert response.headers["www-authenticate"] == "Bearer"
                allowed = await call(whole, method, path_of(template), b"{}", {"Authorization": f"Bearer {TOKEN}"})
                assert allowed.status != 401, f"{method} {template}"

    run(scenario)


def test_the_token_of_a_topic_is_for_publishing_to_it_alone() -> None:
    async def scenario(app: FastAPI) -> None:
        admin, publisher = {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": "Bearer of-publishers"}
        whole = dispatch(app, ROUTERS)
        changed = await call(whole, "PATCH", "/v1/topics/orders", b'{"token": "of-publishers"}', admin)
        assert changed.status == 200
        for method, template in ROUTES:
            response = await call(whole, method, path_of(template), b'{"value": "x"}', publisher)
            is_publish = (method, template) == ("POST", "/v1/topics/{topic}/records")
            assert response.status == (200 if is_publish or template in OPEN else 401), f"{method} {template}"
        assert (await call(whole, "POST", "/v1/topics/orders/records", b'{"value": "x"}', admin)).status == 401

    run(scenario)


REQUESTS_TO_COMPARE = [
    ("POST", "/v1/topics/orders/records?partition=1", b'{"value": "x", "id": "a"}'),
    ("POST", "/v1/topics/nope/records", b'{"value": "x"}'),
    ("POST", "/v1/topics/orders/records?partition=first", b'{"value": "x"}'),
    ("POST", "/v1/topics/orders/records?producer=p", b'{"value": "x"}'),
    ("POST", "/v1/topics/orders/records?partition=9", b'{"value": "x"}'),
    ("POST", "/v1/topics/orders/records", b"{"),
    ("POST", "/v1/topics/or/ders/records", b'{"value": "x"}'),
    ("PUT", "/v1/topics/orders/records", b'{"value": "x"}'),
    ("POST", "/v1/groups/g/members/m/commit", b'{"epoch": 1, "positions": {}}'),
    ("POST", "/v1/groups/g/members/m/commit", b'{"epoch": "one", "positions": {}}'),
    ("GET", "/v1/groups/g/partitions/orders/0/records?offset=0&owner=1", b""),
    ("GET", "/v1/groups/g/partitions/orders/0/records?offset=x&owner=1", b""),
    ("GET", "/v1/groups/g/partitions/orders/first/records?offset=0&owner=1", b""),
    ("GET", "/v1/groups/g/partitions/orders/-1/records?offset=0&owner=1", b""),
    ("GET", "/v1/groups/g/partitions/orders/1234567890/records?offset=0&owner=1", b""),
]


@pytest.mark.parametrize(("method", "target", "body"), REQUESTS_TO_COMPARE)
def test_the_data_plane_responds_as_it_would_through_fastapi(method: str, target: str, body: bytes) -> None:
    async def scenario(app: FastAPI) -> None:
        direct = await call(dispatch(app, ROUTERS), method, target, body)
        through = await call(app, method, target, body)
        assert (direct.status, direct.headers.get("content-type")) == (
            through.status,
            through.headers.get("content-type"),
        )
        if direct.status == 200:  # the second record has another offset
            assert direct.json["stored"][0]["count"] == through.json["stored"][0]["count"] == 1
        else:
            assert direct.body == through.body

    run(scenario, token=None)


def test_the_data_plane_and_nothing_else_goes_around_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        """FastAPI was called."""

    async def reach(*_: object) -> None:
        raise Reached

    async def scenario(app: FastAPI) -> None:
        monkeypatch.setattr(FastAPI, "__call__", reach)
        whole = dispatch(app, ROUTERS)
        for method, template in ROUTES:
            with contextlib.nullcontext() if (method, template) in DATA_PLANE else pytest.raises(Reached):
                await call(whole, method, path_of(template), b"{}")

    run(scenario)


def test_the_data_plane_is_described_with_all_other_routes() -> None:
    async def scenario(app: FastAPI) -> None:
        paths = (await call(dispatch(app, ROUTERS), "GET", "/openapi.json")).json["paths"]
        assert {(method.upper(), path) for path, calls in paths.items() for method in calls} >= DATA_PLANE
        read = paths["/v1/groups/{group}/partitions/{topic}/{index}/records"]["get"]
        kinds = {parameter["name"]: parameter["schema"]["type"] for parameter in read["parameters"]}
        assert kinds == {"group": "string", "topic": "string", "index": "integer"}

    run(scenario)


def test_requests_are_counted_by_the_template_of_their_route_and_by_status() -> None:
    def count(route: str, status: str) -> float:
        return REQUESTS.series(route, status).value

    async def scenario(app: FastAPI) -> None:
        whole = dispatch(app, ROUTERS)
        seen = [
            ("POST", "/v1/topics/orders/records", "/v1/topics/{topic}/records", "200"),
            ("POST", "/v1/topics/nope/records", "/v1/topics/{topic}/records", "404"),
            ("GET", "/v1/topics/orders", "/v1/topics/{name}", "200"),
            ("GET", "/v1/topics/nope", "/v1/topics/{name}", "404"),
            ("GET", "/nothing/here", NO_ROUTE, "404"),
        ]
        for method, path, route, status in seen:
            before = count(route, status)
            await call(whole, method, path, b'{"value": "x"}')
            assert count(route, status) == before + 1, path

    run(scenario, token=None)
