"""Records that retention drops before a group has read them leave a trace: a count, a warning and a metric."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardyard.log.memory import MemoryLog
from shardyard.model import Partition, Position, Record, Retention
from shardyard.queues.dropped_unread import count_dropped_unread, count_without_owner, dropped_unread
from shardyard.registry import GroupRow, OwnershipRow, Registry, Transaction
from shardyard.registry.batcher import TransactionBatcher
from shardyard.registry.memory import MemoryRegistry
from tests.log.samples import awaited
from tests.queues.setup import Cluster, Handled, run

ORDERS = Partition("orders", 0)
OpenBatcher = Callable[[Registry], TransactionBatcher]


def committed(registry: Registry, group: str, position: Position, owner: str | None = None) -> None:
    def work(tx: Transaction) -> None:
        tx.put_group(tx.group(group) or GroupRow(group))
        tx.put_ownerships([replace(OwnershipRow(group, ORDERS), committed=position, owner=owner)])

    registry.run(work)


def test_what_a_running_group_missed_is_counted_once_warned_about_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.publish(*"abcdefgh")
        await cluster.set(paused=True)
        handled = Handled()
        async with handled.at_work(cluster.consumer("m1", start="earliest")):
            await cluster.until_shared(1)
            await cluster.set(paused=False)
            await cluster.until_done()
            await cluster.set(paused=True)
            await cluster.publish(*"ijklm")
        first = (await cluster.log.trim(ORDERS, 11)).first
        assert first == 11
        assert (await cluster.rows())[0]["lag"] == 2
        await cluster.set(paused=False)
        async with handled.at_work(cluster.consumer("m1")):
            await cluster.until_done()
        row = (await cluster.rows())[0]
        assert (row["lag"], row["dropped_unread"]) == (0, 3)
        assert sorted(handled.values) == [*"abcdefgh", *"lm"]
        metrics = (await cluster.request("GET", "/metrics")).body.decode()
        assert 'shardyard_dropped_unread_records_total{group="billing"} 3' in metrics
        await cluster.do("DELETE", "/v1/groups/billing")
        assert cluster.registry.read(lambda tx: dropped_unread(tx, "billing")) == {}

    run(scenario)
    missed = [record.getMessage() for record in caplog.records if "has missed" in record.getMessage()]
    expected = "retention dropped them, and the group had read up to offset 8"
    assert missed == [f"group billing has missed 3 records of orders/0, before offset 11: {expected}"]


@awaited
async def test_partitions_without_an_owner_are_looked_at_and_each_record_is_counted_once(
    batcher: OpenBatcher, caplog: pytest.LogCaptureFixture
) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            transactions = batcher(registry)
            topic = await log.create_topic("orders", 1, retention=Retention(age_ms=1000))
            await log.append(ORDERS, [Record.new(b"%d" % n) for n in range(10)])
            for group, owner in (("offline", None), ("working", "m1")):
                committed(registry, group, Position(topic.epoch, 2), owner)
            committed(registry, "earlier", Position(topic.epoch - 1, 2))
            committed(registry, "ahead", Position(topic.epoch, 9))
            await count_without_owner(log, transactions)
            assert caplog.text == ""
            for first in (5, 5, 7):
                await log.trim(ORDERS, first)
                await count_without_owner(log, transactions)
            counted = {
                group: registry.read(lambda tx, group=group: dropped_unread(tx, group))  # type: ignore[misc]
                for group in ("offline", "working", "earlier", "ahead")
            }
            assert counted == {"offline": {"orders/0": 5}, "working": {}, "earlier": {}, "ahead": {}}
            assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [3, 2]


@awaited
async def test_a_topic_that_was_recreated_is_counted_anew(batcher: OpenBatcher) -> None:
    with MemoryRegistry() as registry:
        transactions = batcher(registry)
        committed(registry, "billing", Position(1, 0))
        for position, first in ((Position(1, 0), 100), (Position(1, 40), 100), (Position(2, 10), 30)):
            await count_dropped_unread(transactions, "billing", {ORDERS: (position, first)})
        assert registry.read(lambda tx: dropped_unread(tx, "billing")) == {"orders/0": 120}
