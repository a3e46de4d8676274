"""Which companion topics are deleted with a topic or a group, and which are kept."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli.queues import groups as group_commands
from shardyard.cli.queues import topics as topic_commands
from shardyard.client import Consumer, Message
from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.model import Partition, Record, Span, TopicKind
from shardyard.queues.cascade_delete import Companions, KeptTopic, companions_of_group
from shardyard.queues.delays import UNDELIVERABLE, Delays
from shardyard.queues.settings import change_topic
from shardyard.queues.topic_readers import TopicReaders
from shardyard.registry import Snapshot
from shardyard.wire.companions import parse_companion
from shardyard.wire.headers import REASON
from tests.log.samples import awaited, move
from tests.queues.engines import BROKERS
from tests.queues.setup import Cluster, run, running

RETRY, DEAD = "billing.orders.retry", "billing.orders.dead"
LETTERS = "it has dead letters"
WAITING = "records wait for a retry"
A_LONG_TIME = 3600.0


async def failing(_: Message) -> None:
    raise ValueError("no")


async def fail(cluster: Cluster, *values: str, backoff: tuple[float, ...] = (), group: str = "billing") -> None:
    """Let a group fail on these records of `orders`; then its member leaves. A rebalance after that would forget which
    topics the group had read, if one of them was deleted in the meantime."""
    await cluster.set(group, backoff=backoff)
    async with running(cluster.consumer(group=group), failing):
        await cluster.publish(*values)
        await cluster.until_done(group)
    await cluster.until(lambda: cluster.registry.read(lambda tx: is_rebalanced(tx, group)))


def is_rebalanced(tx: Snapshot, group: str) -> bool:
    row = tx.group(group)
    return row is not None and row.assigned == row.inputs


async def visit(cluster: Cluster, group: str) -> None:
    """Let a member of the group join and leave."""
    async with cluster.consumer(group=group):
        await cluster.until(lambda: exist(cluster, f"{group}.orders.retry"))


async def exist(cluster: Cluster, *names: str) -> bool:
    return set(names) <= {topic.name for topic in await cluster.log.topics()}


async def trim_all(log: Log, partition: Partition) -> None:
    await log.trim(partition, (await log.span(partition)).end)


async def names(cluster: Cluster) -> set[str]:
    return {topic.name for topic in await cluster.log.topics() if not topic.name.startswith("shardyard.")}


async def delete(cluster: Cluster, path: str, *, force: bool = False) -> tuple[list[str], list[tuple[str, int, str]]]:
    """Delete a topic or a group: which topics were deleted with it, and which were kept."""
    body: Any = await cluster.do("DELETE", f"/v1/{path}", force=force)
    return sorted(body["also_deleted"]), [(k["topic"], k["records"], k["because"]) for k in body["kept"]]


def test_the_name_of_a_companion_topic_has_one_reading() -> None:
    assert parse_companion("billing.orders.retry") == ("billing", "orders", ".retry")
    assert parse_companion("billing.eu.orders.dead") == ("billing", "eu.orders", ".dead")
    assert parse_companion("repair.billing.orders.dead.retry") == ("repair", "billing.orders.dead", ".retry")
    for name in (
        "orders",
        "orders.dead",
        "billing.retry",
        "billing..retry",
        ".orders.dead",
        "billing.orders.retry.old",
    ):
        assert parse_companion(name) is None


@pytest.mark.parametrize("engine", BROKERS)
def test_retry_topics_are_deleted_with_their_topic_and_dead_letters_only_by_force(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        await fail(cluster, "a", "b")
        await visit(cluster, "shipping")
        assert await delete(cluster, "topics/orders") == ([RETRY, "shipping.orders.retry"], [(DEAD, 2, LETTERS)])
        assert await names(cluster) == {DEAD}
        await cluster.topic()
        assert [letter["reason"] for letter in await cluster.get("/v1/groups/billing/dead", topic="orders")] == [
            "ValueError: no"
        ] * 2
        assert await delete(cluster, "topics/orders", force=True) == ([DEAD], [])
        assert await names(cluster) == set()
        rows = await cluster.get("/v1/audit")
        assert ("topic deleted", DEAD, {"with": "topic orders"}) in [
            (row["action"], row["subject"], row["detail"]) for row in rows
        ]

    run(scenario, tmp_path, engine=engine)


def test_dead_letter_topics_without_letters_after_a_redrive_are_deleted() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await fail(cluster, "a")
        await cluster.do("POST", "/v1/groups/billing/dead/redrive", {"topic": "orders"})
        assert await delete(cluster, "topics/orders") == ([DEAD, RETRY], [])

    run(scenario)


def test_trimmed_dead_letter_topics_of_a_broadcast_group_are_deleted() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(broadcast=True)
        async with running(cluster.consumer("m1"), failing):
            await cluster.publish("a")
            await cluster.until(lambda: exist(cluster, DEAD))
            await cluster.until(lambda: cluster.get("/v1/groups/billing/dead", topic="orders"))
        await trim_all(cluster.log, Partition(DEAD, 0))
        assert await delete(cluster, "groups/billing") == ([DEAD], [])

    run(scenario)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("path", ["topics/orders", "groups/billing"])
def test_topics_that_a_user_created_or_that_have_another_name_are_kept(path: str, force: bool) -> None:
    async def scenario(cluster: Cluster) -> None:
        own = {"billing.orders.dead", "the.orders.dead", "shipping.orders.retry", "billing.walking.dead"}
        for name in own:  # by an earlier version, or through the library: brokers refuse to create them
            await cluster.log.create_topic(name, 1)
        for name in ("the.orders.dead", "billing.walking.dead"):
            await cluster.log.append(Partition(name, 0), [Record.new("mine")])
        await trim_all(cluster.log, Partition("the.orders.dead", 0))
        other = {"a.b.orders.retry", "billing-2.orders-2.retry", "billingx.ordersx.retry"}
        for name in other:
            await cluster.log.create_topic(name, 1, kind=TopicKind.RETRY)
        await cluster.topic()
        await visit(cluster, "billing")
        token = {"token": "of-publishers"}
        cluster.registry.run(lambda tx: change_topic(tx, "the.orders.dead", "ann", token))
        assert await delete(cluster, path, force=force) == ([RETRY], [])
        assert await names(cluster) - {"orders"} == own | other
        assert (await cluster.get("/v1/topics/the.orders.dead"))["token"] is True
        await cluster.do("DELETE", "/v1/topics/billing.walking.dead")

    run(scenario)


@pytest.mark.parametrize("force", [False, True])
def test_a_users_records_among_dead_letters_are_kept_even_by_force(force: bool) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await fail(cluster, "a")
        await cluster.log.append(Partition(DEAD, 0), [Record.new("mine")])
        kept = [(DEAD, 2, "it has dead letters and other records")]
        assert await delete(cluster, "topics/orders", force=force) == ([RETRY], kept)

    run(scenario)


def test_a_dead_letter_topic_with_subscribers_is_deleted_only_by_force_together_with_its_own_companions() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await fail(cluster, "a")
        await trim_all(cluster.log, Partition(DEAD, 0))
        nested = f"repair.{DEAD}.retry"
        async with Consumer(cluster.urls, "repair", [DEAD]):
            await cluster.until(lambda: exist(cluster, nested))
            kept = [(DEAD, 0, "it is subscribed to by repair")]
            assert await delete(cluster, "topics/orders") == ([RETRY], kept)
            await cluster.topic()
            assert await delete(cluster, "topics/orders", force=True) == ([DEAD, nested], [])

    run(scenario)


def test_records_that_wait_for_a_retry_on_a_topic_that_moved_are_kept() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await fail(cluster, "a", backoff=(A_LONG_TIME,))
        await cluster.topic("orders-2")
        await move(cluster.log, "orders", "orders-2")
        assert await delete(cluster, "topics/orders") == ([], [(RETRY, 1, WAITING)])

    run(scenario)


def test_a_retry_topic_with_delayed_records_is_deleted_only_by_force_and_these_become_undeliverable() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await cluster.topic("other", partitions=1)
        await fail(cluster, "a", "b", backoff=(4.0,))
        await visit(cluster, "shipping")
        assert await delete(cluster, "groups/billing") == ([], [(RETRY, 2, WAITING)])
        assert (await cluster.request("GET", "/v1/groups/billing")).code == "unknown_group"
        assert await delete(cluster, "groups/billing") == ([], [(RETRY, 2, WAITING)]), "it is still known by its topic"
        assert await delete(cluster, "groups/billing", force=True) == ([RETRY], [])
        assert (await cluster.request("DELETE", "/v1/groups/billing", force=True)).code == "unknown_group"
        await cluster.do("POST", "/v1/topics/other/records", {"value": "c", "delay": 1.0})
        await cluster.until(lambda: exist(cluster, UNDELIVERABLE))

        async def lost() -> list[Record]:
            return [record for partition in await cluster.records(UNDELIVERABLE) for record in partition]

        async def both() -> bool:
            return len(await lost()) == 2

        await cluster.until(both)
        assert {(r.value, r.header(REASON)) for r in await lost()} == {
            (value, b"topic 'billing.orders.retry' does not exist") for value in (b"a", b"b")
        }

        async def delivered() -> bool:
            return [record.value for record in (await cluster.records("other"))[0]] == [b"c"]

        await cluster.until(delivered)
        assert await exist(cluster, "shipping.orders.retry"), "it belongs to another group"

    run(scenario)


@awaited
async def test_records_on_a_rung_without_an_owner_count_as_waiting() -> None:
    async with MemoryLog() as log:
        await log.create_topic("orders", 1)
        await log.create_topic(RETRY, 1, kind=TopicKind.RETRY)
        delays = Delays(log)
        await delays.put(RETRY, [Record.new(b"x")], delays.due_in(60_000))
        companions = await companions_of_group(log, TopicReaders({}, {}, frozenset()), "billing", force=False)
        assert companions == Companions((), (KeptTopic(RETRY, 1, WAITING),))


def test_a_retry_topic_is_kept_while_it_has_unread_records() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await fail(cluster, "a")
        await cluster.do("POST", "/v1/groups/billing/dead/redrive", {"topic": "orders"})
        done: list[bytes] = []
        assert await delete(cluster, "groups/billing") == ([DEAD], [(RETRY, 1, WAITING)])
        async with running(cluster.consumer("m1"), lambda message: done.append(message.value)):
            await cluster.until_done()
            await cluster.until_done(topic=RETRY)
            assert (await cluster.request("DELETE", "/v1/groups/billing", force=True)).code == "group_in_use"
            assert await exist(cluster, RETRY)
        assert done == [b"a"] * 2, "it is a new group, which reads all records"
        assert await delete(cluster, "groups/billing") == ([RETRY], [])

    run(scenario)


def test_dead_letters_of_a_deleted_group_are_kept_until_they_are_deleted_by_force() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await fail(cluster, "a")
        assert await delete(cluster, "groups/billing") == ([RETRY], [(DEAD, 1, LETTERS)])
        assert await delete(cluster, "groups/billing", force=True) == ([DEAD], [])
        rows = await cluster.get("/v1/audit")
        assert ("topic deleted", DEAD, {"with": "group billing"}) in [
            (row["action"], row["subject"], row["detail"]) for row in rows
        ]

    run(scenario)


def test_dead_letters_that_were_kept_can_be_listed_but_not_redriven_without_topic_and_group() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await fail(cluster, "a")
        redrive = "/v1/groups/billing/dead/redrive"
        await delete(cluster, "topics/orders")
        assert (await cluster.request("POST", redrive, {"topic": "orders"})).code == "unknown_topic"
        await delete(cluster, "groups/billing")
        for topics in ({DEAD}, {DEAD, "orders"}):
            letters = await cluster.get("/v1/groups/billing/dead", topic="orders")
            assert [letter["record"]["value"] for letter in letters] == ["a"]
            refused = await cluster.request("POST", redrive, {"topic": "orders"})
            assert (refused.status, refused.code) == (404, "unknown_group")
            assert await names(cluster) == topics
            if topics == {DEAD}:
                await cluster.topic()
        assert "dead letters re-driven" not in [row["action"] for row in await cluster.get("/v1/audit")]
        await visit(cluster, "billing")
        assert await cluster.do("POST", redrive, {"topic": "orders"}) == {"redriven": 1}, "it has no members right now"
        assert await cluster.get("/v1/groups/billing/dead", topic="orders") == []

    run(scenario)


def test_partitions_that_are_dropped_meanwhile_do_no_harm() -> None:
    class Dropping(MemoryLog):
        """Drops the draining partitions when the span of one of them is read."""

        async def span(self, partition: Partition) -> Span:
            if partition.index == 1:
                await self.drop_partitions(partition.topic, 1)
            return await super().span(partition)

    async def scenario() -> None:
        async with Dropping() as log:
            for name, kind in ((RETRY, TopicKind.RETRY), (DEAD, TopicKind.NORMAL)):
                await log.create_topic(name, 2, kind=kind)
                await log.append(Partition(name, 0), [Record.new(b"")])
                await log.contract_topic(name, 1)
            await trim_all(log, Partition(DEAD, 0))
            companions = await companions_of_group(log, TopicReaders({}, {}, frozenset()), "billing", force=False)
            assert companions == Companions((DEAD,), (KeptTopic(RETRY, 1, WAITING),))

    asyncio.run(scenario())


def test_dead_letters_of_an_unknown_group_or_topic_are_an_error() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await cluster.set("billing", paused=False)
        assert await cluster.get("/v1/groups/billing/dead", topic="orders") == []
        for group, topic, code in (
            ("biling", "orders", "unknown_group"),
            ("billing", "order", "unknown_topic"),
            ("biling", "order", "unknown_topic"),
        ):
            refused = await cluster.request("GET", f"/v1/groups/{group}/dead", topic=topic)
            assert (refused.status, refused.code) == (404, code)

    run(scenario)


def test_the_commands_say_what_was_deleted_and_what_was_kept(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await fail(cluster, "a", "b")
        await visit(cluster, "shipping")
        kept = f"topic {DEAD!r} is kept: {LETTERS} (records: 2); `shardyard topics delete {DEAD}` deletes it\n"
        await asyncio.to_thread(group_commands.delete, "billing", force=False, brokers=cluster.urls)
        assert capsys.readouterr().err == f"group 'billing' is deleted\ntopic {RETRY!r} went with it\n{kept}"
        await asyncio.to_thread(topic_commands.delete, "orders", force=False, brokers=cluster.urls)
        gone = "topic 'shipping.orders.retry' went with it\n"
        assert capsys.readouterr().err == f"topic 'orders' is deleted\n{gone}{kept}"
        await asyncio.to_thread(group_commands.delete, "billing", force=True, brokers=cluster.urls)
        assert capsys.readouterr().err == f"group 'billing' is deleted\ntopic {DEAD!r} went with it\n"

    run(scenario)
