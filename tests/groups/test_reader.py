"""Readers as a user sees them, on the embedded engines, their in-memory twins, and a log with gaps between offsets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardyard.groups import GroupConfig, Node, OwnedBatch, Reader, configure, protocol, status
from shardyard.groups import reader as reader_module
from shardyard.log import Log, open_log
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
from shardyard.registry import Registry, Transaction, open_registry
from shardyard.runtime.clock import ManualClock, SystemClock
from tests.log.samples import at, end
from tests.log.sparse import SparseLog
from tests.registry.blocks import transaction
from tests.sqlite_files import with_log, with_registry

TOPIC = "orders"
PARTITIONS = 4
TIMEOUT_SECONDS = 60.0
STEP_SECONDS = 0.05
"""Of a manual clock: less than anything that a member or the rebalancer waits for."""

Scenario = Callable[["Environment"], Coroutine[Any, Any, None]]
Run = Callable[[Scenario], None]
"""Runs a scenario on the engine of the test."""


def evict(tx: Transaction, group: str, name: str) -> None:
    """What the rebalancer does to a member that is gone or hangs."""
    member = tx.member(group, name)
    assert member is not None
    protocol.evict(tx, protocol.group_row(tx, group), member)


class Environment:
    """A log, a registry and a node. With a manual clock, time passes only while a condition is awaited."""

    def __init__(self, log: Log, registry: Registry, node: Node) -> None:
        self.log, self.registry, self.node = log, registry, node

    def member(self, name: str, **options: Any) -> Reader:
        options = {"session_timeout": 2.0, **options}
        return Reader("billing", [TOPIC], node=self.node, name=name, **options)

    async def send(self, partition: int, *ids: str) -> None:
        await self.log.append(Partition(TOPIC, partition), [Record(i, None, b"") for i in ids])

    def evict(self, name: str) -> None:
        self.registry.run(lambda tx: evict(tx, "billing", name))

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait until the condition holds. It is polled, because no single event signals it."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not await condition():
                if isinstance(self.node.clock, ManualClock):
                    await self.node.clock.advance(STEP_SECONDS)
                    await self.node.transactions.read(lambda _: None)  # after the heartbeats that were due
                else:
                    await asyncio.sleep(0.005)

    async def until_shared(self, *sizes: int) -> None:
        """Wait until members own that many partitions each, and no partition is about to move."""

        async def shared() -> bool:
            with contextlib.suppress(UnknownGroup):
                rows = await status(self.log, self.registry, "billing")
                owners = [row.owner for row in rows if row.target is None]
                held = sorted(owners.count(owner) for owner in {*owners} - {None})
                return held == sorted(sizes) and len(owners) == PARTITIONS
            return False

        await self.until(shared)

    async def committed(self) -> dict[int, int | None]:
        return {row.partition.index: row.committed for row in await status(self.log, self.registry, "billing")}


@contextlib.asynccontextmanager
async def open_environment(
    kind: str, folder: Path, database: str = "", *, clock: ManualClock | None = None
) -> AsyncIterator[Environment]:
    opened: dict[str, tuple[Callable[[], Log], str]] = {
        "memory": (MemoryLog, "memory://"),
        "sparse": (SparseLog, "memory://"),
        "sqlite": (lambda: SqliteLog(with_log(folder / "log")), f"sqlite:///{folder / 'registry.db'}"),
        "postgresql": (partial(open_log, database), database),
    }
    if kind == "sqlite":
        with_registry(folder / "registry.db")
    log, registry_url = opened[kind][0](), opened[kind][1]
    with open_registry(registry_url, clock=clock or SystemClock()) as registry:
        async with log, Node(log, registry, clock=clock) as node:
            await log.create_topic(TOPIC, PARTITIONS)
            yield Environment(log, registry, node)


ENGINES = [
    "memory",
    pytest.param("sparse", marks=pytest.mark.long),
    "sqlite",
    pytest.param("postgresql", marks=pytest.mark.server),
]


@pytest.fixture(params=ENGINES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs a scenario on an engine."""
    return run_on_engine(request, tmp_path)


@pytest.fixture(params=ENGINES)
def run_by_hand(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """The same with a manual clock, for scenarios in which sessions or heartbeats pass. Not on PostgreSQL, whose
    notifications take a time that such a clock knows nothing of."""
    return run_on_engine(request, tmp_path, None if request.param == "postgresql" else ManualClock())


def run_on_engine(request: pytest.FixtureRequest, folder: Path, clock: ManualClock | None = None) -> Run:
    database = request.getfixturevalue("postgresql_url") if request.param == "postgresql" else ""

    def run_scenario(scenario: Scenario) -> None:
        async def with_environment() -> None:
            async with open_environment(request.param, folder, database, clock=clock) as env:
                await scenario(env)

        asyncio.run(with_environment())

    return run_scenario


async def take(member: Reader, count: int) -> list[OwnedBatch]:
    """The next `count` batches, not committed."""
    batches: list[OwnedBatch] = []
    async with asyncio.timeout(TIMEOUT_SECONDS):
        async for batch in member:
            batches.append(batch)
            if len(batches) == count:
                break
    return batches


def test_a_member_gets_each_record_once_and_continues_where_the_last_one_stopped(
    run: Run,
) -> None:
    async def scenario(env: Environment) -> None:
        await env.send(0, "a", "b")
        async with env.member("m1") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["a", "b"]
            await batch.commit()
        await env.send(0, "c")
        async with env.member("m2") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["c"]
            assert (batch.first, batch.end, len(batch)) == (end(env.log, 2), end(env.log, 3), 1)

    run(scenario)


def test_what_was_not_committed_is_redelivered(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        await env.send(1, "a", "b", "c")
        async with env.member("m1") as member:
            (batch,) = await take(member, 1)
            await batch.commit(upto=batch.offsets()[1])
        async with env.member("m2") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["b", "c"]

    run(scenario)


def test_a_partitions_next_batch_waits_for_the_commit_of_the_last_but_others_do_not(
    run: Run,
) -> None:
    async def scenario(env: Environment) -> None:
        async with env.member("m1", max_records=1) as member:
            await env.until_shared(4)
            await env.send(0, "a0", "a1")
            (slow,) = await take(member, 1)
            await env.send(1, "b0", "b1")
            (other,) = await take(member, 1)
            await other.commit()
            (more,) = await take(member, 1)
            assert [b.records()[0].id for b in (slow, other, more)] == ["a0", "b0", "b1"]
            await slow.commit()
            (last,) = await take(member, 1)
            assert last.records()[0].id == "a1"

    run(scenario)


def test_a_moving_partition_is_finished_and_committed_before_it_is_released(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        async with env.member("m1") as first:
            await env.until_shared(4)
            for partition in range(PARTITIONS):
                await env.send(partition, f"old{partition}")
            in_flight = {batch.partition: batch for batch in await take(first, 4)}
            async with env.member("m2") as second:

                async def revoked() -> bool:
                    return len(first.owned) == 2

                await env.until(revoked)
                assert second.owned == set(), "the first member has not finished yet"
                leaving = set(in_flight) - first.owned
                for batch in in_flight.values():
                    await batch.commit()
                await env.until_shared(2, 2)
                assert second.owned <= leaving
                assert await env.committed() == dict.fromkeys(range(PARTITIONS), end(env.log, 1))
                for partition in range(PARTITIONS):
                    await env.send(partition, f"new{partition}")
                (batch,) = await take(second, 1)
                assert batch.partition in leaving
                assert batch.records()[0].id.startswith("new")

    run(scenario)


def test_a_partition_is_released_after_the_drain_time_and_a_late_commit_is_fenced(
    run: Run,
) -> None:
    async def scenario(env: Environment) -> None:
        async with env.member("m1", drain=0.1) as first:
            await env.until_shared(4)
            for partition in range(PARTITIONS):
                await env.send(partition, "x")
            in_flight = await take(first, 4)
            async with env.member("m2"):
                await env.until_shared(2, 2)
                gone = [batch for batch in in_flight if batch.partition not in first.owned]
                assert len(gone) == 2

                async def noticed() -> bool:
                    return all(batch.lost for batch in gone)

                await env.until(noticed)  # the next owner may learn of it before the last one
                for batch in gone:
                    with pytest.raises(Fenced, match="is no longer ours"):
                        await batch.commit()

    run(scenario)


def test_an_owner_that_was_replaced_can_neither_commit_append_nor_read(run_by_hand: Run) -> None:
    """The member does not know yet: registry and log refuse it."""

    async def scenario(env: Environment) -> None:
        async with env.member("m1") as zombie:
            await env.until_shared(4)
            await env.send(0, "x")
            (batch,) = await take(zombie, 1)
            await batch.append(Partition(TOPIC, 1), [Record("as owner", None, b"")])
            assert zombie._membership._task is not None
            zombie._membership._task.cancel()  # like SIGSTOP: it sends no more heartbeats
            async with env.member("m2", session_timeout=60.0) as successor:
                await env.until_shared(4)

                async def taken_over() -> bool:
                    return len(successor.owned) == 4

                await env.until(taken_over)
                again = await take(successor, 1)
                assert again[0].epoch > batch.epoch
                with pytest.raises(Fenced):
                    await batch.commit()
                with pytest.raises(Fenced):
                    await batch.append(Partition(TOPIC, 1), [Record("too late", None, b"")])
                with pytest.raises(Fenced):
                    await batch._reader._read(Position((await env.log.topic(TOPIC)).epoch, 0), 1, 1000)
                assert (await env.log.span(Partition(TOPIC, 1))).end == end(env.log, 1)

    run_by_hand(scenario)


def test_a_member_that_was_evicted_joins_again_by_itself(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        async with env.member("m1") as member:
            await env.until_shared(4)
            before = member.identity.epoch
            env.evict("m1")
            await env.send(2, "x")

            async def consumed() -> bool:
                return (await env.committed()).get(2) == end(env.log, 1)

            async def work() -> None:
                async for batch in member:
                    with contextlib.suppress(Fenced):
                        await batch.commit()

            task = asyncio.create_task(work())
            await env.until(consumed)
            assert member.identity.epoch > before
            task.cancel()

    run(scenario)


def test_a_static_members_restart_moves_nothing(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        async def held_by_other() -> dict[int, int]:
            rows = await status(env.log, env.registry, "billing")
            return {row.partition.index: row.epoch for row in rows if row.owner == "m2"}

        async with env.member("m2"):
            async with env.member("m1", static=True) as member:
                await env.until_shared(2, 2)

                async def settled() -> bool:
                    return len(member.owned) == 2

                await env.until(settled)
                before, others = member.owned, await held_by_other()
            async with env.member("m1", static=True) as member:

                async def back() -> bool:
                    return member.owned == before

                await env.until(back)
                assert await held_by_other() == others, "the partitions of the other member did not move"

    run(scenario)


def test_a_member_that_hangs_is_visible_and_is_evicted_if_configured(run_by_hand: Run) -> None:
    async def scenario(env: Environment) -> None:
        async with env.member("m1") as hung:
            await env.until_shared(4)
            await env.send(0, "x")
            await take(hung, 1)  # and never commits

            async def visible() -> bool:
                stuck = {row.partition.index: row.stuck_for for row in await status(env.log, env.registry, "billing")}
                return stuck[0] > 1.0 > stuck[1]

            await env.until(visible)
            with transaction(env.registry) as tx:
                configure(tx, "billing", GroupConfig(release_after=1.0), who="ann")
            async with env.member("m2") as other:

                async def taken_over() -> bool:
                    return Partition(TOPIC, 0) in other.owned

                await env.until(taken_over)
                (batch,) = await take(other, 1)
                assert batch.records()[0].id == "x"

    run_by_hand(scenario)


def test_a_member_may_name_its_partitions_and_new_ones_of_a_topic_are_shared(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        async with env.member("m1", partitions=[Partition(TOPIC, 3)]) as named, env.member("m2") as other:
            await env.until_shared(1, 3)
            await env.log.expand_topic(TOPIC, 6)

            async def shared() -> bool:
                return len(named.owned | other.owned) == 6

            await env.until(shared)
            assert named.owned == {Partition(TOPIC, 3)}
            assert other.owned == {Partition(TOPIC, index) for index in (0, 1, 2, 4, 5)}

    run(scenario)


def test_a_group_continues_after_records_were_trimmed_or_the_topic_was_recreated(
    run: Run,
) -> None:
    async def scenario(env: Environment) -> None:
        await env.send(0, "a", "b", "c")
        async with env.member("m1") as member:
            (batch,) = await take(member, 1)
            await batch.commit(upto=batch.offsets()[1])
        await env.log.trim(Partition(TOPIC, 0), at(env.log, 2))
        async with env.member("m2") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["c"]
            await batch.commit()
        await env.log.delete_topic(TOPIC)
        await env.log.create_topic(TOPIC, PARTITIONS)
        await env.send(0, "of the new one")
        async with env.member("m3") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["of the new one"]
            await batch.commit()
            assert (await env.committed())[0] == end(env.log, 1)

    run(scenario)


def test_latest_starts_with_records_appended_after_the_join_also_for_the_next_owner(
    run: Run,
) -> None:
    async def scenario(env: Environment) -> None:
        await env.send(0, "before")
        async with env.member("m1", start="latest"):

            async def begun() -> bool:
                return (await env.committed()).get(0) == end(env.log, 1)

            await env.until(begun)
            await env.send(0, "after")
        await env.send(0, "while nobody was there")
        async with env.member("m2", start="latest") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["after", "while nobody was there"]

    run(scenario)


def test_invalid_calls_say_what_is_wrong(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        with pytest.raises(UnknownTopic):
            async with Reader("billing", ["nothing"], node=env.node):
                pass
        with pytest.raises(PartitionOutOfRange, match="has partitions 0 to 3"):
            async with env.member("m1", partitions=[Partition(TOPIC, 4)]):
                pass
        with pytest.raises(UnknownGroup):
            await status(env.log, env.registry, "billing")
        with pytest.raises(InvalidValue, match="topics is 'orders': expected a list"):
            Reader("billing", TOPIC, node=env.node)
        with pytest.raises(InvalidValue, match="topics is \\[\\]"):
            Reader("billing", [], node=env.node)
        with pytest.raises(InvalidValue, match="member name is 5: expected a string"):
            async with env.member(5):  # type: ignore[arg-type]
                pass
        with pytest.raises(InvalidCall, match="has not joined: enter it"):
            await take(env.member("m1"), 1)
        with pytest.raises(InvalidCall, match="the node is not open"):
            async with Reader("billing", [TOPIC], node=Node(env.log, env.registry)):
                pass
        with pytest.raises(InvalidValue, match="expected a log and a registry"):
            Node(env.registry, env.log)  # type: ignore[arg-type]
        with pytest.raises(InvalidValue, match="session_timeout is '10'"):
            env.member("m1", session_timeout="10")
        with pytest.raises(InvalidValue, match="start is 'newest'"):
            env.member("m1", start="newest")
        await env.send(0, "a", "b")
        async with env.member("m1") as member:
            with pytest.raises(MemberExists):
                async with env.member("m1"):
                    pass
            (batch,) = await take(member, 1)
            beyond = f"offset {batch.end + 1} of orders/0 lies beyond what was delivered, {batch.end}"
            with pytest.raises(CommitBeyond, match=beyond):
                await batch.commit(upto=batch.end + 1)
            with pytest.raises(InvalidCall, match="has no batch of orders/9 in flight"):
                await member.commit({Partition(TOPIC, 0): batch.end, Partition(TOPIC, 9): 0})
            assert (await env.committed())[0] is None
            second = batch.offsets()[1]
            await batch.commit(upto=second)
            with pytest.raises(CommitBehind, match=f"offset 0 of orders/0 lies behind what is committed, {second}"):
                await batch.commit(upto=0)

    run(scenario)


def test_batches_of_several_partitions_are_committed_at_once_and_the_next_ones_follow(
    run: Run,
) -> None:
    async def scenario(env: Environment) -> None:
        for partition in (0, 1):
            await env.send(partition, "a", "b")
        async with env.member("m1", max_records=1) as member:
            batches = await take(member, 2)
            await member.commit({batch.partition: batch.end for batch in batches})
            ends = {batch.partition.index: batch.end for batch in batches}
            assert {p: c for p, c in (await env.committed()).items() if p < 2} == ends
            assert [batch.records()[0].id for batch in await take(member, 2)] == ["b", "b"]

    run(scenario)


def test_a_release_that_meets_a_busy_registry_is_retried(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(env: Environment) -> None:
        real, refusals = protocol.release, iter(range(2))

        def busy(*arguments: Any) -> None:
            if next(refusals, None) is not None:
                raise Busy("registry", 0.0)
            real(*arguments)

        monkeypatch.setattr(protocol, "release", busy)
        async with env.member("m1"):
            await env.until_shared(4)
            async with env.member("m2"):
                await env.until_shared(2, 2)
                assert next(refusals, None) is None, "it was refused twice"

    run(scenario)


def test_a_member_that_was_fenced_while_a_batch_is_awaited_joins_again(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        async with env.member("m1") as member:
            await env.until_shared(4)
            await env.send(0, "x")
            (batch,) = await take(member, 1)
            waiting = asyncio.create_task(take(member, 1))
            await asyncio.sleep(0)
            env.evict("m1")
            with pytest.raises(Fenced):
                await batch.commit()
            assert (await waiting)[0].records()[0].id == "x"

    run(scenario)


def test_a_member_that_cannot_join_again_raises_the_error_and_leaves_no_tasks_behind(
    run: Run,
) -> None:
    async def scenario(env: Environment) -> None:
        mine = Partition(TOPIC, 0)
        with pytest.raises(PartitionTaken):
            async with env.member("m1", partitions=[mine]) as member:
                with transaction(env.registry) as tx:
                    evict(tx, "billing", "m1")
                    protocol.join(tx, "billing", "m2", topics=[TOPIC], manual=[mine])
                await take(member, 1)
        assert member._tasks == set()
        with transaction(env.registry) as tx:
            assert [row.name for row in tx.members("billing")] == ["m2"]

    run(scenario)


def test_of_two_processes_with_one_static_name_the_later_one_stays_a_member(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        await env.send(0, "x")
        with pytest.raises(Fenced, match="another process is member 'm1'"):
            async with env.member("m1", static=True) as first:
                await env.until_shared(4)
                async with env.member("m1", static=True) as second:
                    (batch,) = await take(second, 1)
                    await batch.commit()
                    async with asyncio.timeout(TIMEOUT_SECONDS):
                        async for theirs in first:
                            with contextlib.suppress(Fenced):
                                await theirs.commit()

    run(scenario)


def test_a_healthy_member_is_not_evicted_between_two_heartbeats(run_by_hand: Run) -> None:
    async def scenario(env: Environment) -> None:
        with transaction(env.registry) as tx:
            configure(tx, "billing", GroupConfig(release_after=0.01), who="ann")
        async with env.member("m1") as member:
            await env.until_shared(4)
            before = member._membership._last_contact

            async def heartbeat_sent() -> bool:
                return member._membership._last_contact > before

            await env.until(heartbeat_sent)
            with transaction(env.registry) as tx:
                assert [row.action for row in tx.audit_log()] == ["group configured"]

    run_by_hand(scenario)


def test_a_batch_that_is_not_committed_is_logged(
    run_by_hand: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "OLD_WORK_SECONDS", 0.1)

    async def scenario(env: Environment) -> None:
        await env.send(0, "x")
        async with env.member("m1", session_timeout=1.0) as member:
            (batch,) = await take(member, 1)

            def warnings() -> list[str]:
                return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

            async def warned() -> bool:
                return bool(warnings())

            await env.until(warned)
            assert warnings()[0].startswith(f"{batch!r} has been in flight for")

    run_by_hand(scenario)


def test_a_lost_batch_cannot_append_even_before_its_next_owner_starts(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        await env.send(0, "x")
        async with env.member("m1") as member:
            (batch,) = await take(member, 1)
        with pytest.raises(Fenced, match="is no longer ours"):
            await batch.append(Partition(TOPIC, 1), [Record("too late", None, b"")])

    run(scenario)


def test_twenty_members_at_once_share_evenly_and_lose_nothing(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        seen: dict[str, int] = {}

        async def work(name: str) -> None:
            async with env.member(name) as member:
                async for batch in member:
                    for record in batch.records():
                        seen[record.id] = seen.get(record.id, 0) + 1
                    await batch.commit()

        tasks = [asyncio.create_task(work(f"m{i:02}")) for i in range(20)]
        for n in range(50):
            await env.send(n % PARTITIONS, f"r{n}")
        await env.until_shared(1, 1, 1, 1)

        async def all_seen() -> bool:
            return len(seen) == 50

        await env.until(all_seen)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert set(seen.values()) == {1}, "nobody crashed, so nothing is redelivered"

    run(scenario)
