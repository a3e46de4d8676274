"""Routes: each requires a token, is described, and is measured."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI
from fastapi.routing import APIRoute

from shardyard.log.memory import MemoryLog
from shardyard.model import Partition, Record, TopicKind
from shardyard.queues.broker import Broker
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.metrics import REQUESTS
from shardyard.server.app import ROUTERS, create_app
from shardyard.server.measuring import NO_ROUTE, measure
from shardyard.wire import requests
from shardyard.wire.headers import DIED
from tests.server.asgi import call

TOKEN = "the broker's"
OPEN = {"/healthz", "/readyz"}
FREQUENT = {
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
        assert set(ROUTES) >= FREQUENT
        assert len(ROUTES) > 20
        for method, template in ROUTES:
            for authorization in ("", "Bearer wrong", f"Basic {TOKEN}"):
                headers = {"Authorization": authorization}
                response = await call(app, method, path_of(template), b"{}", headers)
                if template in OPEN:
                    assert response.status == 200
                else:
                    assert response.status == 401, f"{method} {template}"
                    assert response.json["error"]["code"] == "wrong_token"
                    assert response.headers["www-authenticate"] == "Bearer"
            allowed = await call(app, method, path_of(template), b"{}", {"Authorization": f"Bearer {TOKEN}"})
            assert allowed.status != 401, f"{method} {template}"

    run(scenario)


def test_the_token_of_a_topic_is_for_publishing_to_it_alone() -> None:
    async def scenario(app: FastAPI) -> None:
        admin, publisher = {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": "Bearer of-publishers"}
        whole = measure(app)
        changed = await call(whole, "PATCH", "/v1/topics/orders", b'{"token": "of-publishers"}', admin)
        assert changed.status == 200
        for method, template in ROUTES:
            response = await call(whole, method, path_of(template), b'{"value": "x"}', publisher)
            is_publish = (method, template) == ("POST", "/v1/topics/{topic}/records")
            assert response.status == (200 if is_publish or template in OPEN else 401), f"{method} {template}"
        assert (await call(whole, "POST", "/v1/topics/orders/records", b'{"value": "x"}', admin)).status == 401

    run(scenario)


def test_the_token_of_the_broker_redrives_and_deletes_dead_letters_of_a_topic_with_a_token() -> None:
    async def scenario(app: FastAPI) -> None:
        admin, publisher = {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": "Bearer of-publishers"}
        log = app.state.broker.log
        await log.create_topic("billing.orders.retry", 1, kind=TopicKind.RETRY)
        await log.create_topic("billing.orders.dead", 1)
        await log.append(Partition("billing.orders.dead", 0), [Record.new("x", headers={DIED: b"1"})])
        redrive = ("POST", "/v1/groups/billing/dead/redrive", b'{"topic": "orders"}')
        delete = ("DELETE", "/v1/groups/billing?force=true", b"")
        for path, body in (("topics/orders", b'{"token": "of-publishers"}'), ("groups/billing", b'{"paused": true}')):
            assert (await call(app, "PATCH", f"/v1/{path}", body, admin)).status == 200
        for headers in ({}, publisher):
            for request in (redrive, delete):
                refused = await call(app, *request, headers)
                assert (refused.status, refused.json["error"]["code"]) == (401, "wrong_token")
        assert {"billing.orders.retry", "billing.orders.dead"} <= {topic.name for topic in await log.topics()}
        assert (await call(app, *redrive, admin)).json == {"redriven": 1}
        deleted = (await call(app, *delete, admin)).json["also_deleted"]
        assert sorted(deleted) == ["billing.orders.dead", "billing.orders.retry"]

    run(scenario)


def test_frequent_calls_are_described_with_all_other_routes() -> None:
    async def scenario(app: FastAPI) -> None:
        paths = (await call(app, "GET", "/openapi.json")).json["paths"]
        assert {(method.upper(), path) for path, calls in paths.items() for method in calls} >= FREQUENT
        read = paths["/v1/groups/{group}/partitions/{topic}/{index}/records"]["get"]
        kinds = {each["name"]: each["schema"]["type"] for each in read["parameters"] if each["in"] == "path"}
        assert kinds == {"group": "string", "topic": "string", "index": "integer"}
        query = {each["name"]: each["required"] for each in read["parameters"] if each["in"] == "query"}
        assert list(query) == list(requests.Read.__struct_fields__)
        assert [name for name, required in query.items() if required] == ["offset", "owner"]

    run(scenario)


def test_every_route_refuses_unknown_query_parameters_and_proposes_the_closest_one() -> None:
    async def scenario(app: FastAPI) -> None:
        for method, template in ROUTES:
            response = await call(app, method, f"{path_of(template)}?colour=red", b"{}")
            if not template.startswith("/v1/"):  # load balancers and Prometheus may send parameters of their own
                assert response.status == 200, template
                continue
            assert response.status == 400, f"{method} {template}"
            assert response.json["error"]["message"].startswith("query parameter is 'colour': expected ")
        misspelt = [
            ("POST", "/v1/topics/orders/records?partiton=1", "partition"),
            ("GET", "/v1/topics/orders/records?Limit=1", "limit"),
            ("GET", "/v1/groups/billing/changes?wait_second=1", "wait_seconds"),
            ("DELETE", "/v1/topics/orders?forced=true", "force"),
        ]
        for method, target, meant in misspelt:
            response = await call(app, method, target, b'{"value": "x"}')
            assert response.status == 400, target
            assert f"(did you mean {meant}?)" in response.json["error"]["message"]
        assert (await call(app, "GET", "/v1/topics?limit=1")).json["error"]["fields"]["expected"].startswith("none")
        published = await call(app, "POST", "/v1/topics/orders/records?partition=1", b'{"value": "x"}')
        assert [part["partition"] for part in published.json["stored"]] == [1]

    run(scenario, token=None)


def test_requests_are_counted_by_the_template_of_their_route_and_by_status() -> None:
    def count(route: str, status: str) -> float:
        return REQUESTS.series(route, status).value

    async def scenario(app: FastAPI) -> None:
        whole = measure(app)
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
