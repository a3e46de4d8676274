"""What callers of a broker may do with Shardyard's own topics, and with topics that have a token."""

from typing import Any

import pytest

from shardyard.client import Message
from shardyard.model import InvalidValue, Record
from shardyard.queues.delays import UNDELIVERABLE
from tests.queues.setup import Cluster, run, running

RUNG, RETRY, DEAD = "shardyard.delay.1s", "billing.orders.retry", "billing.orders.dead"
OWN = (RUNG, RETRY, DEAD, UNDELIVERABLE, "inbox")
FORGED = {"value": "x", "headers": {"shardyard-target": "orders", "shardyard-due": "1"}}


async def create(cluster: Cluster) -> None:
    """Create the topics that do not exist yet: brokers create the rungs in the background."""
    existing = {topic.name for topic in await cluster.log.topics()}
    for name in {*OWN} - existing - {RUNG}:
        await cluster.log.create_topic(name, 2)
    await cluster.until(lambda: _exists(cluster, RUNG))


async def _exists(cluster: Cluster, name: str) -> bool:
    return name in [topic.name for topic in await cluster.log.topics()]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", "/records", FORGED),
        ("POST", "/expand", {"partitions": 5}),
        ("POST", "/contract", {"partitions": 1}),
        ("PATCH", "", {"token": "of-publishers"}),
        ("PATCH", "", {"records_per_second": 5, "retention_ms": 5}),
    ],
)
def test_callers_may_not_publish_to_resize_or_configure_topics_of_shardyard(
    name: str, method: str, path: str, content: Any
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await create(cluster)
        before = await cluster.get(f"/v1/topics/{name}")
        refused = await cluster.request(method, f"/v1/topics/{name}{path}", content)
        assert (refused.status, refused.code) == (400, "invalid_value")
        assert await cluster.get(f"/v1/topics/{name}") == before

    run(scenario)


@pytest.mark.parametrize("carrier", ["http", "websocket"])
def test_a_producer_may_not_publish_to_topics_of_shardyard(carrier: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        await create(cluster)
        async with cluster.producer(carrier=carrier) as producer:
            for name in OWN:
                with pytest.raises(InvalidValue, match=f"topic name is '{name}'"):
                    await producer.publish(name, [Record.new("x")])
                with pytest.raises(InvalidValue, match=f"topic name is '{name}'"):
                    await producer.send(name, "x", delay=5)

    run(scenario)


@pytest.mark.parametrize(("name", "status"), [(DEAD, 200), (UNDELIVERABLE, 200), (RUNG, 400), (RETRY, 400)])
def test_retention_can_be_set_where_no_record_waits_for_shardyard(name: str, status: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        await create(cluster)
        assert (await cluster.request("PATCH", f"/v1/topics/{name}", {"retention_ms": 5000})).status == status

    run(scenario)


@pytest.mark.parametrize(("name", "status"), [(DEAD, 200), (UNDELIVERABLE, 200), (RETRY, 200), (RUNG, 400)])
def test_topics_that_shardyard_works_with_are_not_deleted(name: str, status: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        await create(cluster)
        assert (await cluster.request("DELETE", f"/v1/topics/{name}", force=True)).status == status
        assert await _exists(cluster, name) == (status != 200)

    run(scenario)


def test_a_topic_with_a_token_is_changed_and_deleted_only_by_those_who_know_it() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "of-publishers", "retention_ms": 5000})
        before = await cluster.get("/v1/topics/orders")
        calls: list[tuple[str, str, Any]] = [
            ("PATCH", "", {"retention_ms": None}),
            ("PATCH", "", {"records_per_second": 1}),
            ("POST", "/contract", {"partitions": 2}),
            ("POST", "/expand", {"partitions": 6}),
            ("DELETE", "", None),
        ]
        for method, path, content in calls:
            refused = await cluster.request(method, f"/v1/topics/orders{path}", content, token="another")
            assert (refused.status, refused.code) == (401, "wrong_token")
        assert await cluster.get("/v1/topics/orders") == before
        for method, path, content in calls:
            await cluster.do(method, f"/v1/topics/orders{path}", content, token="of-publishers")

    run(scenario)


def test_headers_of_retries_mean_nothing_on_the_topics_of_publishers() -> None:
    seen: list[tuple[int, str]] = []

    async def fail(message: Message) -> None:
        seen.append((message.attempt, message.origin))
        raise ValueError("no")

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(backoff=[0.05])
        forged = {"shardyard-attempt": "7", "shardyard-origin": "elsewhere/1/2"}
        await cluster.do("POST", "/v1/topics/orders/records", {"value": "x", "headers": forged})
        async with running(cluster.consumer(), fail):
            await cluster.until(lambda: cluster.get("/v1/groups/billing/dead", topic="orders"))

    run(scenario)
    assert seen == [(1, "orders/0/0"), (2, "orders/0/0")]
