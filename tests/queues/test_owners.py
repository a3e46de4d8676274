"""Who is not the owner can neither read, fence, publish as the owner nor hand over failures; owners lose nothing."""

import asyncio
from typing import Any

import pytest

from shardyard.client import Message
from shardyard.log.memory import MemoryLog
from shardyard.model import Partition, Record, Stamp
from shardyard.model.batch import from_records
from shardyard.placement import partitioner_named
from shardyard.queues.delays import Delays
from shardyard.queues.publishing import Publisher
from shardyard.runtime.clock import now_ms
from shardyard.wire.arrow import encode_arrow
from shardyard.wire.media import ARROW
from shardyard.wire.records import Posted
from tests.log.samples import contents
from tests.queues.setup import Cluster, Handled, run, running

P0 = Partition("orders", 0)


def test_a_member_that_owns_nothing_is_refused_and_the_owner_continues() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.publish("a")
        handled = Handled()
        async with handled.at_work(cluster.consumer("m1")):
            await cluster.until(lambda: handled.values == ["a"])
            epoch = (await cluster.rows())[0]["epoch"]
            high = epoch + 10**6
            owned = "/v1/groups/billing/partitions/orders/0"
            failure = {"partition": "orders/0", "epoch": high, "offset": 0, "reason": "no"}
            before = await cluster.count()
            for group, response in (
                ("billing", await cluster.request("POST", f"{owned}/fence", {"epoch": high})),
                ("nobody", await cluster.request("POST", "/v1/groups/nobody/partitions/nosuch/7/fence", {"epoch": 1})),
                ("billing", await cluster.request("GET", f"{owned}/records", offset=0, owner=high)),
                ("billing", await cluster.request("POST", "/v1/groups/billing/failures", {"failures": [failure]})),
                ("nobody", await cluster.request("POST", "/v1/groups/nobody/failures", {"failures": [failure]})),
                (
                    "billing",
                    await cluster.request(
                        "POST", "/v1/topics/orders/records", {"value": "x"}, fence="billing/orders/0", owner=high
                    ),
                ),
            ):
                assert (response.status, response.code) == (409, "fenced"), (group, response.body)
            assert await cluster.count() == before
            await cluster.publish("b")
            await cluster.until(lambda: handled.values == ["a", "b"])

    run(scenario)


def test_an_owner_cannot_delay_what_it_publishes_as_the_owner() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        handled = Handled()
        async with handled.at_work(cluster.consumer("m1")):
            await cluster.until_shared(1)
            epoch = (await cluster.rows())[0]["epoch"]
            records = {"records": [{"value": "now"}, {"value": "later", "delay": 60}]}
            before = await cluster.count()
            response = await cluster.request(
                "POST", "/v1/topics/orders/records", records, fence="billing/orders/0", owner=epoch
            )
            assert (response.status, response.code) == (400, "invalid_value")
            assert await cluster.count() == before

    run(scenario)


def test_a_commit_with_an_unknown_epoch_is_refused_and_the_owner_continues() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        handled = Handled()
        async with handled.at_work(cluster.consumer("m1")) as consumer:
            await cluster.until_shared(1)
            member, epoch = consumer.member.identity, (await cluster.rows())[0]["epoch"]
            request = {"epoch": member.epoch, "positions": {"orders/0": [epoch, 2**61, 10**12]}}
            response = await cluster.request("POST", "/v1/groups/billing/members/m1/commit", request)
            assert (response.status, response.code) == (409, "wrong_epoch")
            await cluster.publish("a")
            await cluster.until_done()
            assert handled.values == ["a"]

    run(scenario)


def test_a_failure_of_a_member_with_manual_partitions_is_a_dead_letter_at_once_since_no_member_reads_retries() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        await cluster.publish("a", partition=0)

        async def handle(_: Message) -> None:
            raise ValueError("no")

        async with running(cluster.consumer("m1", partitions=[P0]), handle):

            async def dead() -> list[dict[str, Any]]:
                letters: list[dict[str, Any]] = await cluster.get("/v1/groups/billing/dead?topic=orders")
                return letters

            await cluster.until(dead)
            assert [letter["attempts"] for letter in await dead()] == [1]

    run(scenario)


def test_dead_letters_of_a_broadcast_group_stay_where_they_are() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(broadcast=True)
        response = await cluster.request("POST", "/v1/groups/billing/dead/redrive", {"topic": "orders"})
        assert (response.status, response.code) == (400, "invalid_call")

    run(scenario)


def test_an_arrow_body_with_odd_columns_and_a_stamp_is_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        rows = from_records([Record("a", None, b"x")], 1)
        twice = rows.append_column("key", rows["key"])
        body = encode_arrow(twice)
        response = await cluster.request(
            "POST", "/v1/topics/orders/records", body=body, media=ARROW, producer="p", sequence=1
        )
        assert (response.status, response.code) == (400, "invalid_value")

    run(scenario)


# Publishing while the topic is contracted


def place(key: bytes, partitions: int) -> int:
    return partitioner_named("modulus", partitions, "fnv1a32").place(key)


@pytest.mark.parametrize("again", [False, True])
def test_a_stamped_batch_that_is_redistributed_in_the_middle_loses_nothing(again: bool) -> None:
    """The part that was stored goes, under the new number of partitions, where another one is stored by then."""

    async def scenario() -> None:
        keys = [b"k%d" % i for i in range(200)]
        a = next(key for key in keys if place(key, 4) == 0 and place(key, 3) == 1)
        b = next(key for key in keys if place(key, 4) == 3 and place(key, 3) == 0)
        async with MemoryLog() as log:
            await log.create_topic("orders", 4)
            append, contracted = log.append, False

            async def contracts(partition: Partition, *rest: Any, **options: Any) -> Any:
                nonlocal contracted
                if partition.index == 3 and not contracted:
                    contracted = True
                    await log.contract_topic("orders", 3)
                return await append(partition, *rest, **options)

            log.append = contracts  # type: ignore[method-assign]
            publisher = Publisher(log, Delays(log))
            rows = from_records([Record("A", a, b"a"), Record("B", b, b"b")], now_ms())
            for _ in range(1 + again):  # as after an answer that was lost
                stored = await publisher.publish("orders", rows, stamp=Stamp("p", 0))
                assert sum(part.count for part in stored) == 2
            found = [record.id for i in range(4) for record in await contents(log, Partition("orders", i))]
            assert set(found) == {"A", "B"}
            assert again or len(found) == 2

    asyncio.run(scenario())


def test_single_records_are_stored_although_the_first_append_is_refused() -> None:
    async def scenario() -> None:
        async with MemoryLog() as log:
            await log.create_topic("orders", 4)
            publisher = Publisher(log, Delays(log))
            from_posted = [Posted(Record.new(b"x")) for _ in range(40)]
            await publisher.publish("orders", from_posted[:1])
            await log.contract_topic("orders", 1)
            await asyncio.gather(*(publisher.publish("orders", [posted]) for posted in from_posted[1:]))
            assert sum([(await log.span(Partition("orders", i))).end for i in range(4)]) == 40

    asyncio.run(scenario())
