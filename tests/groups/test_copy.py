"""Copying topics, positions and settings to another log and registry."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shardyard.groups import GroupConfig, configure, copy
from shardyard.log import Log, open_log
from shardyard.log.copy import Checkpoint, LogCopy
from shardyard.log.memory import MemoryLog
from shardyard.log.sqlite import SqliteLog
from shardyard.model import (
    Conflict,
    Damaged,
    GroupInUse,
    Partition,
    Position,
    Record,
    Retention,
    TopicExists,
    TopicKind,
    Unsupported,
)
from shardyard.registry import OwnershipRow, Registry, open_registry
from tests.groups.test_reader import take
from tests.log.sparse import SparseLog
from tests.registry.blocks import snapshot, transaction

P0, P1 = Partition("orders", 0), Partition("orders", 1)


class Killed(Exception):
    pass


class Stores:
    """A source with some topics and groups, and an empty target."""

    def __init__(self, source: Log, target: Log, old: Registry, new: Registry) -> None:
        self.source, self.target, self.old, self.new = source, target, old, new

    async def work(self) -> LogCopy:
        with snapshot(self.new) as tx:
            checkpoints = copy.load_checkpoints(tx)
        return LogCopy(self.source, self.target, checkpoints, self.store)

    async def store(self, partition: Partition, at: Checkpoint) -> None:
        with transaction(self.new) as tx:
            copy.store_checkpoint(tx, partition, at)

    async def copy_all(self) -> dict[str, int]:
        """Returns how many records of each topic were copied."""
        work = await self.work()
        topics = await self.source.topics()
        await work.create(topics)
        copied = {topic.name: await work.copy(topic) for topic in topics}
        for topic in topics:
            await work.compare(topic)
        await work.finish(topics)
        with snapshot(self.old) as tx:
            kept = copy.contents(tx)
        with transaction(self.new) as tx:
            copy.put_contents(tx, kept, work.checkpoints, "ann")
        return copied

    async def ids(self, log: Log, partition: Partition) -> list[str]:
        span = await log.span(partition)
        return [record.id for record in (await log.read(partition, span.first)).records()]


Story = Callable[[Stores], Coroutine[Any, Any, None]]


@asynccontextmanager
async def a_yard(log: str, registry: str, folder: Path) -> AsyncIterator[Stores]:
    with open_registry(f"sqlite:///{folder}/old.db") as old, open_registry(registry) as new:
        async with SqliteLog(folder / "old") as source, open_log(log) as target:
            await source.create_topic("orders", 2, retention=Retention(age_ms=10**15), partitioner="jump")
            yield Stores(source, target, old, new)


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def on(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Run a coroutine on a target engine."""
    match request.param:
        case "memory":
            urls = ("memory://", "memory://")
        case "sqlite":
            urls = (f"sqlite:///{tmp_path}/new", f"sqlite:///{tmp_path}/new.db")
        case _:
            database = request.getfixturevalue("postgresql_url")
            urls = (database, database)

    def run(story: Story) -> None:
        async def whole() -> None:
            async with a_yard(*urls, tmp_path) as stores:
                await story(stores)

        asyncio.run(whole())

    return run


def records(*ids: str) -> list[Record]:
    return [Record(i, i.encode(), b"value of " + i.encode(), (("tag", b"x"),), 1_000) for i in ids]


def test_a_copy_has_the_same_records_topics_settings_and_positions(on: Callable[[Story], None]) -> None:
    async def story(stores: Stores) -> None:
        await stores.source.append(P0, records("a", "b", "c", "d"))
        await stores.source.append(P1, records("x"))
        await stores.source.trim(P0, 1)
        await stores.source.create_topic("failed", 1, kind=TopicKind.RETRY)
        epoch = (await stores.source.topic("orders")).epoch
        with transaction(stores.old) as tx:
            configure(tx, "billing", GroupConfig("even", max_active=3), who="ann")
            tx.put_ownerships(
                [
                    OwnershipRow("billing", P0, committed=Position(epoch, 3)),
                    OwnershipRow("billing", P1, committed=Position(epoch - 1, 1)),
                ]
            )
            tx.put_setting("topic/orders", "quota", {"per_second": 5})
            tx.put_setting("group/billing", "tags", ["x"])
            tx.put_setting("group/gone", "tags", 1)
            tx.delete_setting("group/gone", "tags")

        assert await stores.copy_all() == {"orders": 4, "failed": 0}

        made = await stores.target.topic("orders")
        assert (made.partitions, made.partitioner, made.hash) == (2, "jump", "xxh64")
        assert made.retention == Retention(age_ms=10**15)
        assert (await stores.target.topic("failed")).kind is TopicKind.RETRY
        assert await stores.ids(stores.target, P0) == ["b", "c", "d"]
        assert (await stores.target.read(P0, 0)).data.equals((await stores.source.read(P0, 1)).data)
        assert await stores.ids(stores.target, P1) == ["x"]
        with snapshot(stores.new) as tx:
            group = tx.group("billing")
            assert group is not None
            assert (group.assignor, group.max_active) == ("even", 3)
            # c was next. The position on P1 is one of an earlier topic of that name.
            assert {row.partition: row.committed for row in tx.ownerships("billing")} == {P0: Position(made.epoch, 2)}
            assert tx.setting("topic/orders", "quota").value == {"per_second": 5}  # type: ignore[union-attr]
            assert tx.setting("group/billing", "tags").value == ["x"]  # type: ignore[union-attr]
            assert tx.scopes() == ["copy", "group/billing", "topic/orders"]
            assert tx.audit_log(1)[0].action == "registry copied"

    on(story)


def test_a_second_run_copies_what_came_since_and_moves_positions_on(on: Callable[[Story], None]) -> None:
    async def story(stores: Stores) -> None:
        await stores.source.append(P0, records("a", "b"))
        assert await stores.copy_all() == {"orders": 2}
        await stores.source.append(P0, records("c"))
        await stores.source.create_topic("later", 1)
        epoch = (await stores.source.topic("orders")).epoch
        with transaction(stores.old) as tx:
            configure(tx, "billing", GroupConfig(), who="ann")
            tx.put_ownerships([OwnershipRow("billing", P0, committed=Position(epoch, 3))])
        assert await stores.copy_all() == {"orders": 1, "later": 0}
        assert await stores.copy_all() == {"orders": 0, "later": 0}
        assert await stores.ids(stores.target, P0) == ["a", "b", "c"]
        with snapshot(stores.new) as tx:
            assert [row.committed.offset for row in tx.ownerships("billing") if row.committed] == [3]

    on(story)


def test_a_copy_that_was_killed_between_append_and_checkpoint_repeats_nothing(on: Callable[[Story], None]) -> None:
    async def story(stores: Stores) -> None:
        await stores.source.append(P0, records("a", "b", "c"))
        work = await stores.work()
        topics = await stores.source.topics()
        await work.create(topics)
        await stores.target.append(P0, records("a", "b"))  # what the killed one had appended
        assert await stores.copy_all() == {"orders": 1}
        assert await stores.ids(stores.target, P0) == ["a", "b", "c"]

    on(story)


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_a_copy_that_was_killed_while_it_created_a_topic_continues(on: Callable[[Story], None], stored: int) -> None:
    """`stored`: how many checkpoints it had stored."""

    async def story(stores: Stores) -> None:
        await stores.source.append(P0, records("a", "b"))
        left = stored

        async def store_or_die(partition: Partition, at: Checkpoint) -> None:
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            await stores.store(partition, at)

        with pytest.raises(Killed):
            await LogCopy(stores.source, stores.target, {}, store_or_die).create(await stores.source.topics())
        assert await stores.copy_all() == {"orders": 2}
        assert await stores.ids(stores.target, P0) == ["a", "b"]

    on(story)


def test_a_topic_that_was_deleted_in_the_target_or_recreated_in_the_source_is_copied_again(
    on: Callable[[Story], None],
) -> None:
    async def story(stores: Stores) -> None:
        await stores.source.append(P0, records("a", "b"))
        await stores.source.append(P1, records("c"))
        assert await stores.copy_all() == {"orders": 3}
        await stores.target.delete_topic("orders")
        assert await stores.copy_all() == {"orders": 3}
        await stores.source.delete_topic("orders")
        await stores.source.create_topic("orders", 2)
        await stores.source.append(P1, records("d"))
        with pytest.raises(TopicExists):
            await stores.copy_all()
        await stores.target.delete_topic("orders")
        assert await stores.copy_all() == {"orders": 1}
        assert [await stores.ids(stores.target, partition) for partition in (P0, P1)] == [[], ["d"]]

    on(story)


def test_a_copy_that_was_killed_after_the_source_was_trimmed_repeats_nothing(on: Callable[[Story], None]) -> None:
    async def story(stores: Stores) -> None:
        await stores.source.append(P0, records("a", "b"))
        await stores.copy_all()
        await stores.source.append(P0, records("c", "d", "e"))
        await stores.source.trim(P0, 3)

        append = stores.target.append

        async def append_and_die(partition: Partition, data: pa.RecordBatch, **options: Any) -> Any:
            await append(partition, data.slice(0, 1), **options)
            raise Killed

        work = await stores.work()
        topics = await stores.source.topics()
        await work.create(topics)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(stores.target, "append", append_and_die)
            await work.copy(topics[0])
        assert await stores.copy_all() == {"orders": 1}
        assert await stores.ids(stores.target, P0) == ["a", "b", "d", "e"]

    on(story)


def test_a_copy_continues_after_the_source_was_trimmed_and_keeps_draining_partitions_and_successors(
    on: Callable[[Story], None],
) -> None:
    async def story(stores: Stores) -> None:
        await stores.source.append(P0, records("a", "b"))
        await stores.copy_all()
        await stores.source.append(P0, records("c", "d", "e"))
        await stores.source.trim(P0, 3)
        await stores.source.contract_topic("orders", 1)
        await stores.source.create_topic("old", 1)
        sealed = await stores.source.seal_topic("old", "ann")
        await stores.source.move_topic("old", "orders", holder="ann", generation=sealed.generation)
        assert (await stores.copy_all())["orders"] == 2
        assert await stores.ids(stores.target, P0) == ["a", "b", "d", "e"]
        assert (await stores.target.topic("orders")).open_partitions == 1
        assert (await stores.target.topic("old")).successor == "orders"
        assert await stores.copy_all() == {"old": 0, "orders": 0}
        assert (await stores.target.topic("orders")).open_partitions == 1

    on(story)


def test_a_target_that_others_use_is_left_as_it_is(on: Callable[[Story], None]) -> None:
    async def story(stores: Stores) -> None:
        await stores.source.create_topic("bills", 1)
        await stores.target.create_topic("orders", 2)
        with pytest.raises(TopicExists, match="'orders' exists already in the target, with 2 partitions: it is no cop"):
            await stores.copy_all()
        assert [topic.name for topic in await stores.target.topics()] == ["orders"], "nothing was created"
        await stores.target.delete_topic("orders")
        await stores.source.append(P0, records("a"))
        await stores.copy_all()
        await stores.target.append(P0, records("of a producer"))
        with pytest.raises(Conflict, match="orders/0 of the target has records that this copy did not append"):
            await stores.copy_all()
        await stores.target.delete_topic("orders")
        await stores.target.create_topic("orders", 2, partitioner="jump")
        with pytest.raises(TopicExists):
            await stores.copy_all()

    on(story)


def test_a_group_that_has_members_in_the_target_keeps_its_positions(on: Callable[[Story], None]) -> None:
    async def story(stores: Stores) -> None:
        from shardyard.groups import Node, Reader  # noqa: PLC0415 the only test that needs them

        await stores.source.append(P0, records("a"))
        epoch = (await stores.source.topic("orders")).epoch
        with transaction(stores.old) as tx:
            configure(tx, "billing", GroupConfig(), who="ann")
            tx.put_ownerships([OwnershipRow("billing", P0, committed=Position(epoch, 0))])
        await stores.copy_all()
        async with (
            Node(stores.target, stores.new) as node,
            Reader("billing", ["orders"], node=node, name="m") as member,
        ):
            (batch,) = await take(member, 1)
            await batch.commit()
            with pytest.raises(GroupInUse):
                await stores.copy_all()
        await stores.copy_all()
        with snapshot(stores.new) as tx:
            committed = {row.partition: row.committed for row in tx.ownerships("billing") if row.committed}
        assert committed[P0].offset == 1, "a position does not move back to where the group was on the source"

    on(story)


def test_a_record_that_differs_is_found(on: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stores: Stores) -> None:
        await stores.source.append(P0, records("a", "b"))
        append = stores.target.append

        async def damaged(partition: Partition, data: pa.RecordBatch, **options: Any) -> Any:
            values = pa.array([b"something else"] * len(data), pa.binary())
            return await append(partition, data.set_column(2, data.schema.field(2), values), **options)

        monkeypatch.setattr(stores.target, "append", damaged)
        with pytest.raises(Damaged, match="orders/0 is damaged: the copy differs from the source"):
            await stores.copy_all()

    on(story)


def test_logs_with_gaps_between_offsets_cannot_be_copied() -> None:
    async def story() -> None:
        async def store(_partition: Partition, _at: Checkpoint) -> None:
            pytest.fail("nothing is copied")

        async with SparseLog() as source, MemoryLog() as target:
            with pytest.raises(Unsupported):
                LogCopy(source, target, {}, store)

    asyncio.run(story())
