"""Members on the embedded engines and on their twins: what a user sees."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardyard.groups import GroupConfig, Node, OwnedBatch, Reader, configure, protocol, status
from shardyard.groups import reader as reader_module
from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.log.sqlite import SqliteLog
from shardyard.model import (
    Busy,
    CommitBehind,
    CommitBeyond,
    Fenced,
    InvalidCall,
    InvalidValue,
    MemberExists,
    Partition,
    PartitionOutOfRange,
    PartitionTaken,
    Position,
    Record,
    UnknownGroup,
    UnknownTopic,
)
from shardyard.registry import Registry, open_registry
from tests.log.sparse import SparseLog, offset_of
from tests.registry.blocks import transaction

TOPIC = "orders"
PARTITIONS = 4
PATIENCE_SECONDS = 20.0

Story = Callable[["Yard"], Coroutine[Any, Any, None]]


class Yard:
    """A log, a registry and a node, for the length of a story."""

    def __init__(self, log: Log, registry: Registry, node: Node) -> None:
        self.log, self.registry, self.node = log, registry, node

    def member(self, name: str, **options: Any) -> Reader:
        options = {"session_timeout": 2.0, **options}
        return Reader("billing", [TOPIC], node=self.node, name=name, **options)

    async def send(self, partition: int, *ids: str) -> None:
        await self.log.append(Partition(TOPIC, partition), [Record(i, None, b"") for i in ids])

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """What is waited for shows in the state of several processes' worth of parts: there is no one event for it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def until_shared(self, *sizes: int) -> None:
        """Until the owners of the partitions own that many each, and nothing is about to move."""

        async def shared() -> bool:
            with contextlib.suppress(UnknownGroup):
                rows = await status(self.log, self.registry, "billing")
                owners = [row.owner for row in rows if row.target is None]
                held = sorted(owners.count(owner) for owner in {*owners} - {None})
                return held == sorted(sizes) and len(owners) == PARTITIONS
            return False

        await self.until(shared)

    def offset_of(self, number: int) -> int:
        """The offset of record number `number` of a partition, from 0 on."""
        return offset_of(number) if isinstance(self.log, SparseLog) else number

    def end_after(self, count: int) -> int:
        """Where a partition ends that has `count` records."""
        return offset_of(count) - 1 if isinstance(self.log, SparseLog) else count

    async def committed(self) -> dict[int, int | None]:
        return {row.partition.index: row.committed for row in await status(self.log, self.registry, "billing")}


@contextlib.asynccontextmanager
async def a_yard(kind: str, folder: Path) -> AsyncIterator[Yard]:
    log: Log = {"memory": MemoryLog, "sparse": SparseLog}.get(kind, partial(SqliteLog, folder / "log"))()
    registry = open_registry("memory://" if kind != "sqlite" else f"sqlite:///{folder / 'registry.db'}")
    with registry:
        async with log, Node(log, registry) as node:
            await log.create_topic(TOPIC, PARTITIONS)
            yield Yard(log, registry, node)


@pytest.fixture(params=["memory", "sparse", "sqlite"])
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Tell a story on an engine."""

    def told(story: Story) -> None:
        async def whole() -> None:
            async with a_yard(request.param, tmp_path) as yard:
                await story(yard)

        asyncio.run(whole())

    return told


async def take(member: Reader, count: int) -> list[OwnedBatch]:
    """The next `count` batches, not committed."""
    batches: list[OwnedBatch] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for batch in member:
            batches.append(batch)
            if len(batches) == count:
                break
    return batches


def test_a_member_gets_each_record_once_and_goes_on_where_the_last_one_stopped(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        await yard.send(0, "a", "b")
        async with yard.member("m1") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["a", "b"]
            await batch.commit()
        await yard.send(0, "c")
        async with yard.member("m2") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["c"]
            assert (batch.first, batch.end, len(batch)) == (yard.end_after(2), yard.end_after(3), 1)

    tell(story)


def test_what_was_not_committed_comes_again(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        await yard.send(1, "a", "b", "c")
        async with yard.member("m1") as member:
            (batch,) = await take(member, 1)
            await batch.commit(upto=yard.end_after(1))
        async with yard.member("m2") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["b", "c"]

    tell(story)


def test_a_partitions_next_batch_waits_for_the_commit_of_the_last_but_others_do_not(
    tell: Callable[[Story], None],
) -> None:
    async def story(yard: Yard) -> None:
        async with yard.member("m1", max_records=1) as member:
            await yard.until_shared(4)
            await yard.send(0, "a0", "a1")
            (slow,) = await take(member, 1)
            await yard.send(1, "b0", "b1")
            (other,) = await take(member, 1)
            await other.commit()
            (more,) = await take(member, 1)
            assert [b.records()[0].id for b in (slow, other, more)] == ["a0", "b0", "b1"]
            await slow.commit()
            (last,) = await take(member, 1)
            assert last.records()[0].id == "a1"

    tell(story)


def test_a_moving_partition_is_finished_and_committed_before_it_goes(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        async with yard.member("m1") as first:
            await yard.until_shared(4)
            for partition in range(PARTITIONS):
                await yard.send(partition, f"old{partition}")
            in_hand = {batch.partition: batch for batch in await take(first, 4)}
            async with yard.member("m2") as second:

                async def revoked() -> bool:
                    return len(first.owned) == 2

                await yard.until(revoked)
                assert second.owned == set(), "the first one has not finished yet"
                leaving = set(in_hand) - first.owned
                for batch in in_hand.values():
                    await batch.commit()
                await yard.until_shared(2, 2)
                assert second.owned <= leaving
                assert await yard.committed() == dict.fromkeys(range(PARTITIONS), yard.end_after(1))
                for partition in range(PARTITIONS):
                    await yard.send(partition, f"new{partition}")
                (batch,) = await take(second, 1)
                assert batch.partition in leaving
                assert batch.records()[0].id.startswith("new")

    tell(story)


def test_a_partition_is_not_held_up_beyond_the_drain_time_and_a_late_commit_is_fenced(
    tell: Callable[[Story], None],
) -> None:
    async def story(yard: Yard) -> None:
        async with yard.member("m1", drain=0.1) as first:
            await yard.until_shared(4)
            for partition in range(PARTITIONS):
                await yard.send(partition, "x")
            in_hand = await take(first, 4)
            async with yard.member("m2"):
                await yard.until_shared(2, 2)
                gone = [batch for batch in in_hand if batch.partition not in first.owned]
                assert len(gone) == 2

                async def noticed() -> bool:
                    return all(batch.lost for batch in gone)

                await yard.until(noticed)  # the next owner may hear of it before the one who let go
                for batch in gone:
                    with pytest.raises(Fenced, match="is no longer ours"):
                        await batch.commit()

    tell(story)


def test_an_owner_that_was_followed_can_neither_commit_append_nor_read(tell: Callable[[Story], None]) -> None:
    """The member does not know yet: registry and log refuse it."""

    async def story(yard: Yard) -> None:
        async with yard.member("m1") as zombie:
            await yard.until_shared(4)
            await yard.send(0, "x")
            (batch,) = await take(zombie, 1)
            await batch.append(Partition(TOPIC, 1), [Record("as owner", None, b"")])
            assert zombie._membership._task is not None
            zombie._membership._task.cancel()  # as good as SIGSTOP: no more heartbeats
            async with yard.member("m2", session_timeout=60.0) as successor:
                await yard.until_shared(4)

                async def taken_over() -> bool:
                    return len(successor.owned) == 4

                await yard.until(taken_over)
                again = await take(successor, 1)
                assert again[0].epoch > batch.epoch
                with pytest.raises(Fenced):
                    await batch.commit()
                with pytest.raises(Fenced):
                    await batch.append(Partition(TOPIC, 1), [Record("too late", None, b"")])
                with pytest.raises(Fenced):
                    await batch._reader._read(Position((await yard.log.topic(TOPIC)).epoch, 0), 1, 1000)
                assert (await yard.log.span(Partition(TOPIC, 1))).end == yard.end_after(1)

    tell(story)


def test_a_member_that_was_put_out_joins_again_by_itself(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        async with yard.member("m1") as member:
            await yard.until_shared(4)
            with transaction(yard.registry) as tx:
                tx.delete_member("billing", "m1")
                tx.touch("group/billing")
            await yard.send(2, "x")

            async def consumed() -> bool:
                return (await yard.committed()).get(2) == yard.end_after(1)

            async def work() -> None:
                async for batch in member:
                    with contextlib.suppress(Fenced):
                        await batch.commit()

            task = asyncio.create_task(work())
            await yard.until(consumed)
            task.cancel()

    tell(story)


def test_a_static_members_restart_moves_nothing(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        async def held_by_other() -> dict[int, int]:
            rows = await status(yard.log, yard.registry, "billing")
            return {row.partition.index: row.epoch for row in rows if row.owner == "m2"}

        async with yard.member("m2"):
            async with yard.member("m1", static=True) as member:
                await yard.until_shared(2, 2)

                async def settled() -> bool:
                    return len(member.owned) == 2

                await yard.until(settled)
                before, others = member.owned, await held_by_other()
            async with yard.member("m1", static=True) as member:

                async def back() -> bool:
                    return member.owned == before

                await yard.until(back)
                assert await held_by_other() == others, "what the other one has never went away and came back"

    tell(story)


def test_a_member_that_hangs_can_be_seen_and_is_put_out_when_configured(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        async with yard.member("m1") as hung:
            await yard.until_shared(4)
            await yard.send(0, "x")
            await take(hung, 1)  # and never commits

            async def visible() -> bool:
                stuck = {row.partition.index: row.stuck_for for row in await status(yard.log, yard.registry, "billing")}
                return stuck[0] > 1.0 > stuck[1]

            await yard.until(visible)
            with transaction(yard.registry) as tx:
                configure(tx, "billing", GroupConfig(release_after=1.0), who="ann")
            async with yard.member("m2") as other:

                async def taken_over() -> bool:
                    return Partition(TOPIC, 0) in other.owned

                await yard.until(taken_over)
                (batch,) = await take(other, 1)
                assert batch.records()[0].id == "x"

    tell(story)


def test_a_member_may_name_its_partitions_and_new_ones_of_a_topic_are_shared(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        async with yard.member("m1", partitions=[Partition(TOPIC, 3)]) as named, yard.member("m2") as other:
            await yard.until_shared(1, 3)
            await yard.log.expand_topic(TOPIC, 6)

            async def grown() -> bool:
                return len(other.owned) == 5 and named.owned == {Partition(TOPIC, 3)}

            await yard.until(grown)

    tell(story)


def test_a_group_goes_on_after_records_were_trimmed_or_the_topic_was_made_anew(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        await yard.send(0, "a", "b", "c")
        async with yard.member("m1") as member:
            (batch,) = await take(member, 1)
            await batch.commit(upto=yard.end_after(1))
        await yard.log.trim(Partition(TOPIC, 0), yard.end_after(2))
        async with yard.member("m2") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["c"]
            await batch.commit()
        await yard.log.delete_topic(TOPIC)
        await yard.log.create_topic(TOPIC, PARTITIONS)
        await yard.send(0, "of the new one")
        async with yard.member("m3") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["of the new one"]
            await batch.commit()
            assert (await yard.committed())[0] == yard.end_after(1)

    tell(story)


def test_latest_begins_with_what_comes_after_joining_also_for_the_next_owner(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        await yard.send(0, "before")
        async with yard.member("m1", start="latest"):

            async def begun() -> bool:
                return (await yard.committed()).get(0) == yard.end_after(1)

            await yard.until(begun)
            await yard.send(0, "after")
        await yard.send(0, "while nobody was there")
        async with yard.member("m2", start="latest") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["after", "while nobody was there"]

    tell(story)


def test_bad_calls_say_what_is_wrong(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        with pytest.raises(UnknownTopic):
            async with Reader("billing", ["nothing"], node=yard.node):
                pass
        with pytest.raises(PartitionOutOfRange, match="has partitions 0 to 3"):
            async with yard.member("m1", partitions=[Partition(TOPIC, 4)]):
                pass
        with pytest.raises(UnknownGroup):
            await status(yard.log, yard.registry, "billing")
        with pytest.raises(InvalidValue, match="topics is 'orders': expected a list"):
            Reader("billing", TOPIC, node=yard.node)
        with pytest.raises(InvalidValue, match="topics is \\[\\]"):
            Reader("billing", [], node=yard.node)
        with pytest.raises(InvalidValue, match="member name is 5: expected a string"):
            async with yard.member(5):  # type: ignore[arg-type]
                pass
        with pytest.raises(InvalidCall, match="has not joined: enter it"):
            await take(yard.member("m1"), 1)
        with pytest.raises(InvalidCall, match="the node is not open"):
            async with Reader("billing", [TOPIC], node=Node(yard.log, yard.registry)):
                pass
        with pytest.raises(InvalidValue, match="expected a log and a registry"):
            Node(yard.registry, yard.log)  # type: ignore[arg-type]
        with pytest.raises(InvalidValue, match="session_timeout is '10'"):
            yard.member("m1", session_timeout="10")
        with pytest.raises(InvalidValue, match="start is 'newest'"):
            yard.member("m1", start="newest")
        await yard.send(0, "a", "b")
        async with yard.member("m1") as member:
            with pytest.raises(MemberExists):
                async with yard.member("m1"):
                    pass
            (batch,) = await take(member, 1)
            end, one = yard.end_after(2), yard.end_after(1)
            with pytest.raises(
                CommitBeyond, match=f"offset {end + 1} of orders/0 lies beyond what was delivered, {end}"
            ):
                await batch.commit(upto=end + 1)
            with pytest.raises(InvalidCall, match="has no batch of orders/9 in flight"):
                await member.commit({Partition(TOPIC, 0): end, Partition(TOPIC, 9): 0})
            assert (await yard.committed())[0] is None
            await batch.commit(upto=yard.end_after(1))
            with pytest.raises(CommitBehind, match=f"offset 0 of orders/0 lies behind what is committed, {one}"):
                await batch.commit(upto=0)

    tell(story)


def test_batches_of_several_partitions_are_committed_at_once_and_the_next_ones_come(
    tell: Callable[[Story], None],
) -> None:
    async def story(yard: Yard) -> None:
        for partition in (0, 1):
            await yard.send(partition, "a", "b")
        async with yard.member("m1", max_records=1) as member:
            batches = await take(member, 2)
            await member.commit({batch.partition: batch.end for batch in batches})
            assert {p: c for p, c in (await yard.committed()).items() if p < 2} == {
                b.partition.index: b.end for b in batches
            }
            assert {b.records()[0].id for b in await take(member, 2)} == {"b"}

    tell(story)


def test_a_release_that_meets_a_busy_registry_is_tried_again(
    tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(yard: Yard) -> None:
        real, refusals = protocol.release, iter(range(2))

        def busy(*arguments: Any) -> None:
            if next(refusals, None) is not None:
                raise Busy("registry", 0.0)
            real(*arguments)

        monkeypatch.setattr(protocol, "release", busy)
        async with yard.member("m1"):
            await yard.until_shared(4)
            async with yard.member("m2"):
                await yard.until_shared(2, 2)
                assert next(refusals, None) is None, "it was refused as often as it could be"

    tell(story)


def test_a_member_that_was_fenced_while_its_consumer_waits_comes_back(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        async with yard.member("m1") as member:
            await yard.until_shared(4)
            await yard.send(0, "x")
            (batch,) = await take(member, 1)
            asking = asyncio.create_task(take(member, 1))
            await asyncio.sleep(0)
            with transaction(yard.registry) as tx:
                tx.delete_member("billing", "m1")
            with pytest.raises(Fenced):
                await batch.commit()
            assert (await asking)[0].records()[0].id == "x"

    tell(story)


def test_one_that_cannot_come_back_says_so_and_leaves_nothing_behind(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        mine = Partition(TOPIC, 0)
        with pytest.raises(PartitionTaken):
            async with yard.member("m1", partitions=[mine]) as member:
                with transaction(yard.registry) as tx:
                    tx.delete_member("billing", "m1")
                    protocol.join(tx, "billing", "m2", topics=[TOPIC], manual=[mine])
                    tx.touch(protocol.watch_name("billing"))
                await take(member, 1)
        assert member._tasks == set()
        with transaction(yard.registry) as tx:
            assert [row.name for row in tx.members("billing")] == ["m2"]

    tell(story)


def test_of_two_processes_with_one_static_name_the_later_one_stays(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        await yard.send(0, "x")
        with pytest.raises(Fenced, match="another process is member 'm1'"):
            async with yard.member("m1", static=True) as first:
                await yard.until_shared(4)
                async with yard.member("m1", static=True) as second:
                    (batch,) = await take(second, 1)
                    await batch.commit()
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        async for theirs in first:
                            with contextlib.suppress(Fenced):
                                await theirs.commit()

    tell(story)


def test_a_healthy_member_is_not_put_out_between_two_heartbeats(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        with transaction(yard.registry) as tx:
            configure(tx, "billing", GroupConfig(release_after=0.01), who="ann")
        async with yard.member("m1") as member:
            await yard.until_shared(4)
            heard = member._membership._last_contact

            async def heard_again() -> bool:
                return member._membership._last_contact > heard

            await yard.until(heard_again)
            with transaction(yard.registry) as tx:
                assert [row.action for row in tx.audit_log()] == ["group configured"]

    tell(story)


def test_a_batch_that_is_not_committed_is_warned_of(
    tell: Callable[[Story], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "OLD_WORK_SECONDS", 0.1)

    async def story(yard: Yard) -> None:
        await yard.send(0, "x")
        async with yard.member("m1", session_timeout=1.0) as member:
            await take(member, 1)

            async def warned() -> bool:
                return (
                    f"<OwnedBatch orders/0, offsets 0 to {yard.end_after(1) - 1}> has been in flight for" in caplog.text
                )

            await yard.until(warned)

    tell(story)


def test_a_lost_batch_cannot_append_even_before_its_next_owner_began(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        await yard.send(0, "x")
        async with yard.member("m1") as member:
            (batch,) = await take(member, 1)
        with pytest.raises(Fenced, match="is no longer ours"):
            await batch.append(Partition(TOPIC, 1), [Record("too late", None, b"")])

    tell(story)


def test_twenty_members_at_once_share_evenly_and_lose_nothing(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        seen: dict[str, int] = {}

        async def work(name: str) -> None:
            async with yard.member(name) as member:
                async for batch in member:
                    for record in batch.records():
                        seen[record.id] = seen.get(record.id, 0) + 1
                    await batch.commit()

        tasks = [asyncio.create_task(work(f"m{i:02}")) for i in range(20)]
        for n in range(50):
            await yard.send(n % PARTITIONS, f"r{n}")
        await yard.until_shared(1, 1, 1, 1)

        async def all_seen() -> bool:
            return len(seen) == 50

        await yard.until(all_seen)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert set(seen.values()) == {1}, "nobody crashed, so nothing comes twice"

    tell(story)
