"""What callers of a broker may do with Shardyard's own topics, and with topics that have a token."""

from typing import Any

import pytest

from shardyard.client import Consumer, Message
from shardyard.model import InvalidValue, Partition, Record, TopicKind, WrongToken
from shardyard.queues.delays import UNDELIVERABLE
from shardyard.queues.lineage import lineage, with_protectors
from shardyard.queues.settings import WATCH_NAME
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


@pytest.mark.parametrize(
    ("name", "status"), [(DEAD, 200), (UNDELIVERABLE, 200), (RETRY, 200), (RUNG, 400), ("inbox", 400)]
)
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


@pytest.mark.parametrize(
    ("topic", "attempt", "origin"),
    [("orders", 1, "orders/0/5"), (RETRY, 8, "elsewhere/1/2"), (DEAD, 1, "elsewhere/1/2")],
)
def test_only_retries_are_counted_and_dead_letters_have_their_origin(topic: str, attempt: int, origin: str) -> None:
    record = Record.new("x", headers={"shardyard-attempt": "7", "shardyard-origin": "elsewhere/1/2"})
    message = Message(record, Partition(topic, 0), 5, 1)
    assert (message.attempt, message.origin) == (attempt, origin)


async def move(cluster: Cluster, name: str, target: str) -> None:
    """What a reshard does in the end, with its signal to brokers."""
    if not await _exists(cluster, target):
        await cluster.log.create_topic(target, 2)
    sealed = await cluster.log.seal_topic(name, "test")
    await cluster.log.move_topic(name, target, holder="test", generation=sealed.generation)
    cluster.registry.run(lambda tx: tx.touch(WATCH_NAME))


@pytest.mark.parametrize("name", [RUNG, RETRY, "inbox"])
def test_topics_of_shardyard_stay_its_own_when_they_are_resharded(name: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        await create(cluster)
        await cluster.log.create_topic("new", 2)
        await cluster.publish("x", topic="new")  # the broker has seen it before it continues another one
        await move(cluster, name, "new")
        await move(cluster, "new", "newer")

        async def refused() -> bool:
            response = await cluster.request("POST", "/v1/topics/newer/records", FORGED)
            return response.status == 400 and response.code == "invalid_value"

        await cluster.until(refused)
        calls: list[tuple[str, str, Any]] = [
            ("POST", "/records", FORGED),
            ("POST", "/expand", {"partitions": 5}),
            ("POST", "/contract", {"partitions": 1}),
            ("PATCH", "", {"token": "of-publishers"}),
        ]
        for method, path, content in calls:
            for each in ("new", "newer"):
                response = await cluster.request(method, f"/v1/topics/{each}{path}", content)
                assert (response.status, response.code) == (400, "invalid_value"), (method, path, each)
                assert f"this topic and '{name}' continue each other" in response.json["error"]["message"]
        deleted = await cluster.request("DELETE", "/v1/topics/newer", force=True)
        assert deleted.status == (200 if name == RETRY else 400)

    run(scenario)


@pytest.mark.parametrize("carrier", ["http", "websocket"])
def test_a_resharded_topic_keeps_its_token_until_it_gets_another_one(carrier: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        async def admits(topic: str, token: str) -> bool:
            async with cluster.producer(carrier=carrier, token=token) as producer:
                try:
                    await producer.send(topic, "x")
                except WrongToken:
                    return False
                return True

        await cluster.topic()
        await cluster.topic("orders.2")
        assert await admits("orders.2", "another-one"), "the broker has seen it before it continues another one"
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "of-publishers"})
        await move(cluster, "orders", "orders.2")
        await cluster.until(lambda: _has_token(cluster, "orders.2"))
        for topic in ("orders", "orders.2"):
            assert not await admits(topic, "another-one")
            assert await admits(topic, "of-publishers")
        change = {"token": "of-the-new-one"}
        refused = await cluster.request("PATCH", "/v1/topics/orders.2", change, token="another-one")
        assert (refused.status, refused.code) == (401, "wrong_token")
        await cluster.do("PATCH", "/v1/topics/orders.2", change, token="of-publishers")
        for topic in ("orders", "orders.2"):
            assert not await admits(topic, "of-publishers"), "records of both go to the new one"
            assert await admits(topic, "of-the-new-one")

    run(scenario)


async def _has_token(cluster: Cluster, topic: str) -> bool:
    found: bool = (await cluster.get(f"/v1/topics/{topic}"))["token"]
    return found


def test_deleting_the_old_topic_leaves_its_token_to_the_one_that_continues_it() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "of-publishers"})
        for old, new in (("orders", "orders.2"), ("orders.2", "orders.3")):
            await move(cluster, old, new)
        for old in ("orders.2", "orders"):
            await cluster.do("DELETE", f"/v1/topics/{old}", token="of-publishers")
        assert await _has_token(cluster, "orders.3")
        refused = await cluster.request("DELETE", "/v1/topics/orders.3", token="another-one")
        assert (refused.status, refused.code) == (401, "wrong_token")

    run(scenario)


@pytest.mark.parametrize("name", [RETRY, DEAD, f"repair.{DEAD}.dead", "billing.orders.2.dead"])
def test_retries_and_dead_letters_of_a_topic_with_a_token_are_deleted_only_with_it(name: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "of-publishers"})
        await move(cluster, "orders", "orders.2")
        await cluster.log.create_topic(name, 1)
        calls: list[tuple[str, Any]] = [("DELETE", None)]
        if name.endswith(".dead"):
            calls.insert(0, ("PATCH", {"retention_ms": 1}))
        for method, content in calls:
            for token in (None, "another-one"):
                refused = await cluster.request(method, f"/v1/topics/{name}", content, token=token)
                assert (refused.status, refused.code) == (401, "wrong_token")
            await cluster.do(method, f"/v1/topics/{name}", content, token="of-publishers")

    run(scenario)


async def die(cluster: Cluster, *values: str, group: str = "billing", topic: str = "orders") -> None:
    """Let these records become dead letters of a group, whose member then leaves. Its retry topic is empty."""

    async def fail(_: Message) -> None:
        raise ValueError("no")

    await cluster.set(group, backoff=[])
    async with running(Consumer(cluster.urls, group, [topic], session_timeout=2.0), fail):
        await cluster.publish(*values, topic=topic)
        await cluster.until_done(group, topic)


async def state(cluster: Cluster) -> Any:
    """The names of all topics, the settings and positions of the group, its dead letters, and the audit log."""
    names = sorted(topic.name for topic in await cluster.log.topics())
    group = await cluster.get("/v1/groups/billing")
    rows = {(row["topic"], row["partition"]): row["committed"] for row in group["partitions"]}
    letters = [[record.id for record in records] for records in await cluster.records(DEAD)]
    return names, group["settings"], rows, letters, await cluster.get("/v1/audit")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("resharded", [False, True])
def test_a_group_is_not_deleted_with_retries_or_dead_letters_of_a_topic_whose_token_is_not_shown(
    resharded: bool, force: bool
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await die(cluster, "a")
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "of-publishers"})
        if resharded:
            await move(cluster, "orders", "orders.2")
        before = await state(cluster)
        for token in (None, "another-one"):
            refused = await cluster.request("DELETE", "/v1/groups/billing", token=token, force=force)
            assert (refused.status, refused.code) == (401, "wrong_token")
            assert await state(cluster) == before
        deleted = await cluster.do("DELETE", "/v1/groups/billing", token="of-publishers", force=force)
        assert sorted(deleted["also_deleted"]) == ([DEAD, RETRY] if force else [RETRY])
        assert [kept["topic"] for kept in deleted["kept"]] == ([] if force else [DEAD])
        assert (await cluster.request("GET", "/v1/groups/billing")).code == "unknown_group"
        assert (await _exists(cluster, DEAD), await _exists(cluster, RETRY)) == (not force, False)

    run(scenario)


def test_dead_letters_that_a_deleted_group_has_left_are_deleted_by_force_only_with_the_token_of_their_topic() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await die(cluster, "a")
        await cluster.do("DELETE", "/v1/groups/billing")
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "of-publishers"})
        kept = await cluster.do("DELETE", "/v1/groups/billing")
        assert [each["topic"] for each in kept["kept"]] == [DEAD], "nothing is deleted, so it takes no token"
        refused = await cluster.request("DELETE", "/v1/groups/billing", force=True)
        assert (refused.status, refused.code) == (401, "wrong_token")
        assert await _exists(cluster, DEAD)
        deleted = await cluster.do("DELETE", "/v1/groups/billing", token="of-publishers", force=True)
        assert deleted["also_deleted"] == [DEAD]

    run(scenario)


def test_dead_letters_that_a_deleted_topic_has_left_stay_protected_by_its_token() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await die(cluster, "a")
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "of-publishers"})
        deleted = await cluster.do("DELETE", "/v1/topics/orders", token="of-publishers")
        assert [kept["topic"] for kept in deleted["kept"]] == [DEAD]
        await cluster.topic()  # another one of that name, without a token
        for method, path, content in (
            ("DELETE", f"/v1/topics/{DEAD}", None),
            ("PATCH", f"/v1/topics/{DEAD}", {"retention_ms": 1}),
            ("POST", "/v1/groups/billing/dead/redrive", {"topic": "orders"}),
        ):
            for token in (None, "another-one"):
                refused = await cluster.request(method, path, content, token=token)
                assert (refused.status, refused.code) == (401, "wrong_token"), path
        assert sum(map(len, await cluster.records(DEAD))) == 1
        await cluster.do("DELETE", f"/v1/topics/{DEAD}", token="of-publishers")
        assert not await _exists(cluster, DEAD)

    run(scenario)


def test_companions_of_companions_are_deleted_with_a_group_only_with_the_token_of_the_first_topic() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await cluster.set()
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "of-publishers"})
        await cluster.log.create_topic(f"billing.repair.{DEAD}.dead.retry", 1, kind=TopicKind.RETRY)
        refused = await cluster.request("DELETE", "/v1/groups/billing", token="another-one")
        assert (refused.status, refused.code) == (401, "wrong_token")
        assert (await cluster.get("/v1/groups/billing"))["joined"] is False, "it still has its settings"
        deleted = await cluster.do("DELETE", "/v1/groups/billing", token="of-publishers")
        assert deleted["also_deleted"] == [f"billing.repair.{DEAD}.dead.retry"]

    run(scenario)


def test_a_group_with_topics_of_two_tokens_is_deleted_when_one_of_them_has_no_companions_left() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.set()
        for topic in ("orders", "returns", "open"):
            await cluster.topic(topic)
            await cluster.log.create_topic(f"billing.{topic}.retry", 1, kind=TopicKind.RETRY)
            if topic != "open":
                await cluster.do("PATCH", f"/v1/topics/{topic}", {"token": f"token-of-{topic}"})
        topics = sorted(topic.name for topic in await cluster.log.topics())
        for token in (None, "token-of-orders", "token-of-returns"):
            refused = await cluster.request("DELETE", "/v1/groups/billing", token=token)
            assert (refused.status, refused.code) == (401, "wrong_token")
            assert sorted(topic.name for topic in await cluster.log.topics()) == topics
        await cluster.do("DELETE", f"/v1/topics/{RETRY}", token="token-of-orders")
        deleted = await cluster.do("DELETE", "/v1/groups/billing", token="token-of-returns")
        assert sorted(deleted["also_deleted"]) == ["billing.open.retry", "billing.returns.retry"]

    run(scenario)


@pytest.mark.parametrize("named", ["orders", RETRY, "orders.2"])
def test_dead_letters_of_a_topic_with_a_token_are_redriven_only_with_it(named: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await die(cluster, "a")
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "of-publishers"})
        if named == "orders.2":
            await move(cluster, "orders", "orders.2")
        before, retries = await state(cluster), await cluster.records(RETRY)
        for token in (None, "another-one"):
            refused = await cluster.request("POST", "/v1/groups/billing/dead/redrive", {"topic": named}, token=token)
            assert (refused.status, refused.code) == (401, "wrong_token")
            assert (await state(cluster), await cluster.records(RETRY)) == (before, retries)
        redriven = await cluster.do("POST", "/v1/groups/billing/dead/redrive", {"topic": named}, token="of-publishers")
        assert redriven == {"redriven": 1}
        assert [record.value for records in await cluster.records(RETRY) for record in records] == [b"a"]

    run(scenario)


def test_the_names_of_a_topic_begin_with_the_one_that_continues_it() -> None:
    moves = {"a": "b", "b": "c", "x": "c", "w": "x"}
    assert lineage("c", moves) == ("c", "b", "x", "a", "w")
    assert lineage("x", moves) == ("c", "x", "b", "w", "a")
    assert lineage("a", moves) == ("c", "b", "a", "x", "w")
    assert lineage("other", moves) == ("other",)
    assert with_protectors("billing.a.dead", moves) == ("billing.a.dead", "c", "b", "a", "x", "w")
    assert with_protectors("g.x.retry", {}) == ("g.x.retry", "x")
