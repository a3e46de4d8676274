"""What goes with a topic or a group that is deleted, and what does not."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli.queues import groups as group_commands
from shardyard.cli.queues import topics as topic_commands
from shardyard.client import Consumer, Message
from shardyard.log.memory import MemoryLog
from shardyard.model import Partition, Record, Span, TopicKind
from shardyard.queues.cascade_delete import Kept, Leftovers, beside_group
from shardyard.queues.delays import UNDELIVERABLE, Delays
from shardyard.queues.retry_topics import beside
from shardyard.queues.topic_readers import Known
from shardyard.wire.headers import REASON
from tests.log.samples import awaited, move
from tests.queues.setup import Yard, running, tell

RETRY, DEAD = "billing.orders.retry", "billing.orders.dead"
LETTERS = "it has dead letters"
WAITING = "records wait to be tried again"
A_LONG_TIME = 3600.0


async def failing(_: Message) -> None:
    raise ValueError("no")


async def fail(yard: Yard, *values: str, backoff: tuple[float, ...] = (), group: str = "billing") -> None:
    """Have a group fail at these records of `orders`; its member is gone then."""
    await yard.set(group, backoff=backoff)
    async with running(yard.consumer(group=group), failing):
        await yard.publish(*values)
        await yard.until_done(group)


async def visit(yard: Yard, group: str) -> None:
    """Have a member of the group come and go."""
    async with yard.consumer(group=group):
        await yard.until(lambda: there(yard, f"{group}.orders.retry"))


async def there(yard: Yard, *names: str) -> bool:
    return set(names) <= {topic.name for topic in await yard.log.topics()}


async def names(yard: Yard) -> set[str]:
    return {topic.name for topic in await yard.log.topics() if not topic.name.startswith("shardyard.")}


async def deleted(yard: Yard, path: str, *, force: bool = False) -> tuple[list[str], list[tuple[str, int, str]]]:
    """What went with it, and what was kept."""
    told: Any = await yard.do("DELETE", f"/v1/{path}", force=force)
    return sorted(told["also_deleted"]), [(k["topic"], k["records"], k["because"]) for k in told["kept"]]


def test_a_name_says_of_which_group_and_topic_it_is() -> None:
    assert beside("billing.orders.retry") == ("billing", "orders", ".retry")
    assert beside("billing.eu.orders.dead") == ("billing", "eu.orders", ".dead")
    assert beside("repair.billing.orders.dead.retry") == ("repair", "billing.orders.dead", ".retry")
    for name in (
        "orders",
        "orders.dead",
        "billing.retry",
        "billing..retry",
        ".orders.dead",
        "billing.orders.retry.old",
    ):
        assert beside(name) is None


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
def test_retry_topics_go_with_their_topic_and_dead_letters_by_force_alone(engine: str, tmp_path: Path) -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=2)
        await fail(yard, "a", "b")
        await visit(yard, "shipping")
        assert await deleted(yard, "topics/orders") == ([RETRY, "shipping.orders.retry"], [(DEAD, 2, LETTERS)])
        assert await names(yard) == {DEAD}
        await yard.topic()
        assert [letter["reason"] for letter in await yard.get("/v1/groups/billing/dead", topic="orders")] == [
            "ValueError: no"
        ] * 2
        assert await deleted(yard, "topics/orders", force=True) == ([DEAD], [])
        assert await names(yard) == set()
        rows = await yard.get("/v1/audit")
        assert ("topic deleted", DEAD, {"with": "topic orders"}) in [
            (row["action"], row["subject"], row["detail"]) for row in rows
        ]

    tell(story, tmp_path if engine == "sqlite" else None)


def test_dead_letter_topics_from_which_all_was_driven_again_go() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic()
        await fail(yard, "a")
        await yard.do("POST", "/v1/groups/billing/dead/redrive", {"topic": "orders"})
        assert await deleted(yard, "topics/orders") == ([DEAD, RETRY], [])

    tell(story)


def test_those_of_a_broadcast_group_that_are_trimmed_empty_go_too() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=1)
        await yard.set(broadcast=True)
        async with running(yard.consumer("m1"), failing):
            await yard.publish("a")
            await yard.until(lambda: there(yard, DEAD))
            await yard.until(lambda: yard.get("/v1/groups/billing/dead", topic="orders"))
        await yard.log.trim(Partition(DEAD, 0), 1)
        assert await deleted(yard, "groups/billing") == ([DEAD], [])

    tell(story)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("path", ["topics/orders", "groups/billing"])
def test_topics_that_were_made_by_hand_or_are_of_another_name_stay(path: str, force: bool) -> None:
    async def story(yard: Yard) -> None:
        own = {"billing.orders.dead", "the.orders.dead", "shipping.orders.retry", "billing.walking.dead"}
        for name in own:
            await yard.topic(name, partitions=1)
        await yard.publish("mine", topic="the.orders.dead")
        await yard.publish("mine", topic="billing.walking.dead")
        await yard.log.trim(Partition("the.orders.dead", 0), 1)
        other = {"a.b.orders.retry", "billing-2.orders-2.retry", "billingx.ordersx.retry"}
        for name in other:
            await yard.log.create_topic(name, 1, kind=TopicKind.RETRY)
        await yard.topic()
        await visit(yard, "billing")
        await yard.do("PATCH", "/v1/topics/the.orders.dead", {"token": "of-publishers"})
        assert await deleted(yard, path, force=force) == ([RETRY], [])
        assert await names(yard) - {"orders"} == own | other
        assert (await yard.get("/v1/topics/the.orders.dead"))["token"] is True

    tell(story)


@pytest.mark.parametrize("force", [False, True])
def test_somebodys_own_records_among_dead_letters_are_kept_also_by_force(force: bool) -> None:
    async def story(yard: Yard) -> None:
        await yard.topic()
        await fail(yard, "a")
        await yard.publish("mine", topic=DEAD)
        kept = [(DEAD, 2, "it has dead letters and other records")]
        assert await deleted(yard, "topics/orders", force=force) == ([RETRY], kept)

    tell(story)


def test_a_dead_letter_topic_that_somebody_reads_goes_by_force_alone_with_all_that_is_beside_it() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=1)
        await fail(yard, "a")
        await yard.log.trim(Partition(DEAD, 0), 1)
        nested = f"repair.{DEAD}.retry"
        async with Consumer(yard.urls, "repair", [DEAD]):
            await yard.until(lambda: there(yard, nested))
            kept = [(DEAD, 0, "it is subscribed to by repair")]
            assert await deleted(yard, "topics/orders") == ([RETRY], kept)
            await yard.topic()
            assert await deleted(yard, "topics/orders", force=True) == ([DEAD, nested], [])

    tell(story)


def test_what_waits_to_be_tried_again_on_a_topic_that_moved_is_kept() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic()
        await fail(yard, "a", backoff=(A_LONG_TIME,))
        await yard.topic("orders-2")
        await move(yard.log, "orders", "orders-2")
        assert await deleted(yard, "topics/orders") == ([], [(RETRY, 1, WAITING)])

    tell(story)


def test_a_delayed_record_is_kept_with_its_group_and_by_force_it_is_undeliverable_and_holds_up_nobody() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic()
        await yard.topic("other", partitions=1)
        await fail(yard, "a", "b", backoff=(4.0,))
        await visit(yard, "shipping")
        assert await deleted(yard, "groups/billing") == ([], [(RETRY, 2, WAITING)])
        assert (await yard.ask("GET", "/v1/groups/billing")).code == "unknown_group"
        assert await deleted(yard, "groups/billing") == ([], [(RETRY, 2, WAITING)]), "it is still known by its topic"
        assert await deleted(yard, "groups/billing", force=True) == ([RETRY], [])
        assert (await yard.ask("DELETE", "/v1/groups/billing", force=True)).code == "unknown_group"
        await yard.do("POST", "/v1/topics/other/records", {"value": "c", "delay": 1.0})
        await yard.until(lambda: there(yard, UNDELIVERABLE))

        async def lost() -> list[Record]:
            return [record for partition in await yard.records(UNDELIVERABLE) for record in partition]

        async def both() -> bool:
            return len(await lost()) == 2

        await yard.until(both)
        assert {(r.value, r.header(REASON)) for r in await lost()} == {
            (value, b"topic 'billing.orders.retry' does not exist") for value in (b"a", b"b")
        }

        async def delivered() -> bool:
            return [record.value for record in (await yard.records("other"))[0]] == [b"c"]

        await yard.until(delivered)
        assert await there(yard, "shipping.orders.retry"), "that of another group"

    tell(story)


@awaited
async def test_what_waits_on_a_rung_that_nobody_owns_yet_counts() -> None:
    async with MemoryLog() as log:
        await log.create_topic("orders", 1)
        await log.create_topic(RETRY, 1, kind=TopicKind.RETRY)
        delays = Delays(log)
        await delays.put(RETRY, [Record.new(b"x")], delays.due_in(60_000))
        nobody = Known({}, {}, frozenset())
        assert await beside_group(log, nobody, "billing", force=False) == Leftovers((), (Kept(RETRY, 1, WAITING),))


def test_unread_retries_are_kept_and_read_ones_go_with_their_group() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=1)
        await fail(yard, "a")
        await yard.do("POST", "/v1/groups/billing/dead/redrive", {"topic": "orders"})
        done: list[bytes] = []
        assert await deleted(yard, "groups/billing") == ([DEAD], [(RETRY, 1, WAITING)])
        async with running(yard.consumer("m1"), lambda message: done.append(message.value)):
            await yard.until_done()
            await yard.until_done(topic=RETRY)
            assert (await yard.ask("DELETE", "/v1/groups/billing", force=True)).code == "group_in_use"
            assert await there(yard, RETRY)
        assert done == [b"a"] * 2, "the group is a new one, which reads all"
        assert await deleted(yard, "groups/billing") == ([RETRY], [])

    tell(story)


def test_dead_letters_are_kept_with_their_group_until_they_go_by_force() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic()
        await fail(yard, "a")
        assert await deleted(yard, "groups/billing") == ([RETRY], [(DEAD, 1, LETTERS)])
        assert await deleted(yard, "groups/billing", force=True) == ([DEAD], [])
        rows = await yard.get("/v1/audit")
        assert ("topic deleted", DEAD, {"with": "group billing"}) in [
            (row["action"], row["subject"], row["detail"]) for row in rows
        ]

    tell(story)


def test_dead_letters_that_were_kept_can_be_listed_but_not_driven_again_without_topic_or_group() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic()
        await fail(yard, "a")
        redrive = "/v1/groups/billing/dead/redrive"
        await deleted(yard, "topics/orders")
        assert (await yard.ask("POST", redrive, {"topic": "orders"})).code == "unknown_topic"
        await deleted(yard, "groups/billing")
        for topics in ({DEAD}, {DEAD, "orders"}):
            letters = await yard.get("/v1/groups/billing/dead", topic="orders")
            assert [letter["record"]["value"] for letter in letters] == ["a"]
            told = await yard.ask("POST", redrive, {"topic": "orders"})
            assert (told.status, told.code) == (404, "unknown_group")
            assert await names(yard) == topics
            if topics == {DEAD}:
                await yard.topic()
        assert "dead letters re-driven" not in [row["action"] for row in await yard.get("/v1/audit")]
        await visit(yard, "billing")
        assert await yard.do("POST", redrive, {"topic": "orders"}) == {"redriven": 1}, "it has no members right now"
        assert await yard.get("/v1/groups/billing/dead", topic="orders") == []

    tell(story)


def test_partitions_that_go_during_the_look_hold_nothing_up() -> None:
    class Dropping(MemoryLog):
        """The closing partitions are dropped when one of them is looked at."""

        async def span(self, partition: Partition) -> Span:
            if partition.index == 1:
                await self.drop_partitions(partition.topic, 1)
            return await super().span(partition)

    async def story() -> None:
        async with Dropping() as log:
            for name, kind in ((RETRY, TopicKind.RETRY), (DEAD, TopicKind.NORMAL)):
                await log.create_topic(name, 2, kind=kind)
                await log.append(Partition(name, 0), [Record.new(b"")])
                await log.contract_topic(name, 1)
            await log.trim(Partition(DEAD, 0), 1)
            left = await beside_group(log, Known({}, {}, frozenset()), "billing", force=False)
            assert left == Leftovers((DEAD,), (Kept(RETRY, 1, WAITING),))

    asyncio.run(story())


def test_dead_letters_under_names_of_nothing_are_an_error() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic()
        await yard.set("billing", paused=False)
        assert await yard.get("/v1/groups/billing/dead", topic="orders") == []
        for group, topic, code in (
            ("biling", "orders", "unknown_group"),
            ("billing", "order", "unknown_topic"),
            ("biling", "order", "unknown_topic"),
        ):
            told = await yard.ask("GET", f"/v1/groups/{group}/dead", topic=topic)
            assert (told.status, told.code) == (404, code)

    tell(story)


def test_the_commands_say_what_went_and_what_was_kept(capsys: pytest.CaptureFixture[str]) -> None:
    async def story(yard: Yard) -> None:
        await yard.topic()
        await fail(yard, "a", "b")
        await visit(yard, "shipping")
        kept = f"topic {DEAD!r} is kept: {LETTERS} (records: 2); `shardyard topics delete {DEAD}` deletes it\n"
        await asyncio.to_thread(group_commands.delete, "billing", force=False, brokers=yard.urls)
        assert capsys.readouterr().err == f"group 'billing' is deleted\ntopic {RETRY!r} went with it\n{kept}"
        await asyncio.to_thread(topic_commands.delete, "orders", force=False, brokers=yard.urls)
        gone = "topic 'shipping.orders.retry' went with it\n"
        assert capsys.readouterr().err == f"topic 'orders' is deleted\n{gone}{kept}"
        await asyncio.to_thread(group_commands.delete, "billing", force=True, brokers=yard.urls)
        assert capsys.readouterr().err == f"group 'billing' is deleted\ntopic {DEAD!r} went with it\n"

    tell(story)
