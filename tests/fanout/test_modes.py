"""The mode of the fan-out, and migrations between modes while events are published."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.fanout.bounded_log import BoundedLog
from shardyard.fanout.config import EVENTS_GROUP, WORKERS_GROUP
from shardyard.fanout.member import ForwardingMember
from shardyard.fanout.migration import MigrationTimeout, Progress
from shardyard.fanout.modes import (
    AUDIT_ACTION,
    NAME,
    SCOPE,
    ModeState,
    Plan,
    advance,
    begin_migration,
    check_mode,
    plan_of,
    read_state,
)
from shardyard.fanout.process import FanoutProcess
from shardyard.fanout.worker import Worker
from shardyard.groups import Directory
from shardyard.log.memory import MemoryLog
from shardyard.log.requests import ReadRequest
from shardyard.model import Conflict, Damaged, InvalidValue, Partition, Record
from shardyard.model.batch import Batch
from shardyard.placement import partitioner_named
from shardyard.registry import open_registry
from shardyard.runtime.clock import ManualClock
from shardyard.wire.channels import EVENTS, FANOUT
from tests.fanout.yard import CONFIG, INBOX_PARTITIONS, FanoutYard, fanout_yard, until
from tests.messaging.servers import no_errors_logged
from tests.queues.engines import POSTGRESQL

ENGINES = [pytest.param("memory", marks=pytest.mark.long), "sqlite", POSTGRESQL]


def run(
    folder: Path, scenario: Callable[[FanoutYard], Awaitable[None]], engine: str = "memory", *, errors: bool = False
) -> None:
    """`errors`: some may be logged."""

    async def whole() -> None:
        async with fanout_yard(folder, engine) as yard:
            await scenario(yard)

    with nullcontext() if errors else no_errors_logged():
        asyncio.run(whole())


# The setting


UNTIL = {0: (1, 7)}


@pytest.mark.parametrize(
    ("state", "coordinator", "worker"),
    [
        (ModeState(), Plan("coordinator"), Plan("worker")),
        (ModeState("partitioned", "replicated", "pausing"), None, Plan("worker")),
        (ModeState("partitioned", "replicated", "finishing", UNTIL), Plan("coordinator", UNTIL), Plan("worker")),
        (ModeState("partitioned", "replicated", "draining"), None, Plan("worker")),
        (ModeState("replicated"), None, Plan("replicated")),
        (ModeState("replicated", "partitioned", "pausing"), None, None),
        (ModeState("replicated", "partitioned", "finishing", UNTIL), None, Plan("replicated", UNTIL)),
    ],
)
def test_what_a_process_does_follows_from_the_state(
    state: ModeState, coordinator: Plan | None, worker: Plan | None
) -> None:
    assert plan_of("coordinator", state) == coordinator
    assert plan_of("worker", state) == worker


def test_a_migration_is_begun_joined_cancelled_and_audited() -> None:
    with open_registry("memory://") as registry:
        assert registry.read(read_state) == ModeState()
        assert registry.run(lambda tx: begin_migration(tx, "partitioned", "alice")) == ModeState()
        begun = registry.run(lambda tx: begin_migration(tx, "replicated", "alice"))
        assert (begun.mode, begun.to, begun.phase, begun.version) == ("partitioned", "replicated", "pausing", 1)
        assert registry.run(lambda tx: begin_migration(tx, "replicated", "bob")) == begun
        following = ModeState("partitioned", "replicated", "finishing", {3: (1, 44)})
        finishing = registry.run(lambda tx: advance(tx, begun, following, "bob"))
        assert (finishing.until, finishing.version) == ({3: (1, 44)}, 2)
        assert registry.run(lambda tx: advance(tx, begun, ModeState("replicated"), "late")) == finishing
        assert registry.read(read_state) == finishing
        cancelled = registry.run(lambda tx: begin_migration(tx, "partitioned", "carol"))
        assert (cancelled.mode, cancelled.to, cancelled.version) == ("partitioned", None, 3)
        entries = [(row.who, row.action, row.detail) for row in registry.read(lambda tx: tx.audit_log())]
        assert [who for who, action, _ in entries if action == AUDIT_ACTION] == ["carol", "bob", "alice"]
        assert entries[-1][2] == {"mode": "partitioned", "to": "replicated", "phase": "pausing"}


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidValue, match="expected partitioned or replicated"):
        check_mode("sharded")
    with open_registry("memory://") as registry:
        registry.run(lambda tx: tx.put_setting(SCOPE, NAME, {"mode": "sharded"}))
        with pytest.raises(Damaged, match="the setting fanout/mode is damaged"):
            registry.read(read_state)


def test_a_bounded_log_ends_at_its_bounds() -> None:
    async def work() -> None:
        clock = ManualClock()
        async with MemoryLog() as log:
            await log.create_topic(EVENTS, 3)
            await log.create_topic("others", 1)
            for partition in (*(await log.topic(EVENTS)), Partition("others", 0)):
                await log.append(partition, [Record.new(f"{n}") for n in range(10)])
            epoch = (await log.span(Partition(EVENTS, 0))).epoch
            bounded = BoundedLog(log, {0: (epoch, 4), 2: (epoch + 1, 4)}, clock)
            events = [Partition(EVENTS, index) for index in range(3)]
            reads = [ReadRequest(events[0], 1), *(ReadRequest(p, 0) for p in (*events[1:], Partition("others", 0)))]
            found = await bounded.read_many(reads, wait=5.0)  # 1 has no bound, 2 one of another epoch
            values = {
                p: [record.value for record in one.records()] for p, one in found.items() if isinstance(one, Batch)
            }
            assert values == {events[0]: [b"1", b"2", b"3"], Partition("others", 0): [b"%d" % n for n in range(10)]}
            (end,) = [one.end for p, one in found.items() if p == events[0] and isinstance(one, Batch)]
            assert end == 4
            waiting = asyncio.ensure_future(bounded.read_many([ReadRequest(events[0], 4)], wait=5.0))
            for _ in range(5):  # until it waits
                await asyncio.sleep(0)
            await clock.advance(4.9)
            assert not waiting.done()
            await clock.advance(0.2)
            assert await waiting == {}
            assert (await bounded.span(Partition(EVENTS, 0))).end == 10

    asyncio.run(work())


# Migrations


async def populate(yard: FanoutYard, channels: int = 10) -> dict[str, set[int]]:
    """Channels with members that are online in one, several or all inbox partitions. Returns in which."""
    place = partitioner_named("modulus", INBOX_PARTITIONS, "fnv1a32").place
    users = {place(f"user-{number}".encode()): f"user-{number}" for number in reversed(range(40))}
    for user in users.values():
        await yard.channels.set_presence(user, "phone", online=True)
    first = place(b"user-0")
    inboxes = {f"channel-{n}": {(first + i) % INBOX_PARTITIONS for i in range(n % 4 + 1)} for n in range(channels)}
    for channel, indexes in inboxes.items():
        await yard.channels.join_many([channel] * (len(indexes) + 1), [*(users[i] for i in indexes), "offline"])
    return inboxes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(240)
def test_migrations_there_and_back_under_load_lose_nothing_and_deliver_nothing_twice(
    tmp_path: Path, engine: str
) -> None:
    async def scenario(yard: FanoutYard) -> None:
        inboxes = await populate(yard)
        config = replace(CONFIG, session_timeout=20.0)  # nobody is killed, and the machine may be busy
        processes = [
            await yard.start(role, f"{role}-{n}", config) for role in ("coordinator", "worker") for n in range(2)
        ]
        stop, seen = asyncio.Event(), list[Progress]()
        publishing = asyncio.create_task(yard.publish_until(stop))
        for to in ("replicated", "partitioned") * (1 if engine == "postgresql" else 2):
            await yard.publish_more(100)
            state = await yard.migration.migrate(check_mode(to), seconds=60.0, progress=seen.append)
            assert (state.mode, state.to, state.phase) == (to, None, "running")
            await followed(processes, state)
        stop.set()
        await publishing
        await yard.all_delivered(inboxes)
        phases = [each.state.phase for each in seen if each.state.is_migrating]
        assert {"pausing"} <= set(phases)
        assert all(each.waits_for for each in seen if each.state.is_migrating)

    run(tmp_path, scenario, engine)


def test_both_modes_deliver_the_same(tmp_path: Path) -> None:
    delivered = {}
    for mode in ("replicated", "partitioned"):

        async def scenario(yard: FanoutYard, mode: str = mode) -> None:
            inboxes = await populate(yard)
            await yard.start("worker", "worker")
            await yard.start("coordinator", "coordinator")
            await yard.migration.migrate(check_mode(mode), seconds=60.0)
            for number in range(20):
                for channel in (*inboxes, "unknown"):
                    await yard.channels.publish(channel, "text", sender="alice", id=number)
                if number == 10:
                    await settle(yard)
                    await yard.channels.leave("channel-0", "user-0")
                    await yard.channels.leave("channel-3", "user-0")
            await settle(yard)
            delivered[mode] = await yard.received()

        run(tmp_path, scenario)
    assert delivered["replicated"] == delivered["partitioned"]
    left = next(index for index, channels in delivered["replicated"].items() if "channel-0" in channels)
    assert delivered["replicated"][left]["channel-0"] == list(range(11))
    assert delivered["replicated"][left]["channel-1"] == list(range(20))
    assert all("unknown" not in channels for channels in delivered["replicated"].values())


async def followed(processes: list[FanoutProcess], state: ModeState) -> None:
    """Wait until all processes do what the state calls for."""
    await until(
        lambda: all(each.progress.state.version == state.version and each.is_ready for each in processes),
        f"processes in the mode {state.mode}",
    )


async def settle(yard: FanoutYard) -> None:
    """Wait until everything is forwarded and committed."""

    async def is_done() -> bool:
        for topic, group in ((EVENTS, EVENTS_GROUP), (FANOUT, WORKERS_GROUP)):
            rows = await yard.node.transactions.read(lambda tx, g=group: tx.ownerships(g))  # type: ignore[misc]
            committed = {row.partition: row.committed.offset for row in rows if row.committed is not None}
            for index, span in (await yard.log.ends(topic)).items():
                if committed.get(Partition(topic, index), 0) < span.end:
                    return False
        return True

    await until(is_done, "everything to be committed")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("to", ["replicated", "partitioned"])
def test_processes_finish_a_migration_whose_command_was_killed_and_survive_kills_of_their_own(
    tmp_path: Path, to: str
) -> None:
    async def scenario(yard: FanoutYard) -> None:
        inboxes = await populate(yard)
        processes = [await yard.start(role, f"{role}-{n}") for role in ("coordinator", "worker") for n in range(2)]
        if to == "partitioned":
            await yard.migration.migrate("replicated", seconds=30.0)
        stop = asyncio.Event()
        publishing = asyncio.create_task(yard.publish_until(stop))
        await yard.publish_more(200)

        def working() -> list[FanoutProcess]:
            return [p for p in processes if p.part is not None and any(x.topic == EVENTS for x in p.part.owned)]

        await until(lambda: bool(working()), "a process that reads events")
        await kill(working()[0])
        await yard.node.transactions.run(lambda tx: begin_migration(tx, check_mode(to), "a command that is killed"))

        async def is_migrated() -> bool:
            state = await yard.state()
            return (state.mode, state.to) == (to, None)

        await until(is_migrated, "the migration")
        stop.set()
        await publishing
        await yard.all_delivered(inboxes)

    run(tmp_path, scenario)


async def kill(process: FanoutProcess) -> None:
    """End what a process does as if it was killed: nothing is finished, and no group is left."""
    assert process._task is not None
    process._task.cancel()
    await asyncio.gather(process._task, return_exceptions=True)
    part, process._part = process._part, None
    assert isinstance(part, ForwardingMember)
    await part._membership.stop()
    await part._stop()


def test_a_migration_that_takes_too_long_says_what_it_waits_for_and_can_be_cancelled(tmp_path: Path) -> None:
    async def scenario(yard: FanoutYard) -> None:
        inboxes = await populate(yard)
        with pytest.raises(Conflict, match="no fan-out worker is running"):
            await yard.migration.migrate("replicated", seconds=1.0)
        await yard.start("worker", "worker")
        await yard.publish("channel-0")
        await yard.publish("channel-1")
        with pytest.raises(MigrationTimeout, match="waits for a coordinator to forward 2 records of events"):
            await yard.migration.migrate("replicated", seconds=0.3)
        state = await yard.state()
        assert (state.mode, state.to, state.phase) == ("partitioned", "replicated", "finishing")
        look = await yard.migration.look()
        assert look.waits_for == "a coordinator to forward 2 records of events"
        back = await yard.migration.migrate("partitioned", seconds=5.0)
        assert (back.mode, back.to) == ("partitioned", None)
        await yard.start("coordinator", "coordinator")
        await yard.all_delivered(inboxes)
        assert (await yard.migration.migrate("replicated", seconds=20.0)).mode == "replicated"
        assert (await yard.migration.migrate("replicated", seconds=20.0)).mode == "replicated"

    run(tmp_path, scenario)


def test_nothing_is_migrated_to_partitioned_without_a_coordinator(tmp_path: Path) -> None:
    async def scenario(yard: FanoutYard) -> None:
        await yard.start("worker", "worker")
        assert (await yard.migration.migrate("replicated", seconds=20.0)).mode == "replicated"
        with pytest.raises(Conflict, match="no coordinator is running"):
            await yard.migration.migrate("partitioned", seconds=20.0)
        assert (await yard.migration.migrate("partitioned", seconds=20.0, force=True)).mode == "partitioned"

    run(tmp_path, scenario)


def test_messaging_servers_find_workers_in_every_mode(tmp_path: Path) -> None:
    async def scenario(yard: FanoutYard) -> None:
        worker = await yard.start("worker", "worker")
        async with Directory(yard.node, WORKERS_GROUP) as directory:

            def addresses() -> set[str | None]:
                return {member.address for member in directory.members().values()}

            await until(lambda: addresses() == {"http://worker"}, "the worker")
            await until(lambda: directory.owner_of(Partition(FANOUT, 25)) is not None, "an owner")
            await yard.migration.migrate("replicated", seconds=20.0)
            await until(lambda: worker.plan == Plan("replicated") and worker.is_ready, "the mode")
            await until(lambda: addresses() == {"http://worker"}, "the worker")
            assert directory.owner_of(Partition(FANOUT, 25)) is None

    run(tmp_path, scenario)


def test_a_process_follows_the_mode_whatever_went_wrong_when_it_started_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(yard: FanoutYard) -> None:
        worker = await yard.start("worker", "worker")
        left = ["a fault"]

        async def opens(part: Worker) -> None:
            if left:
                raise OSError(left.pop())
            await opened(part)

        opened = Worker._open
        monkeypatch.setattr(Worker, "_open", opens)
        first = worker.part
        assert isinstance(first, ForwardingMember)
        first.failed(InvalidValue("test", 1, "2"))
        await until(lambda: worker.part not in (None, first) and worker.is_ready, "another part")
        assert not left

    run(tmp_path, scenario, errors=True)
    assert "this worker tries again to do what the mode calls for" in caplog.text


def test_a_process_that_was_evicted_looks_at_the_mode_before_it_works_again(tmp_path: Path) -> None:
    async def scenario(yard: FanoutYard) -> None:
        worker = await yard.start("worker", "worker")
        first = worker.part
        assert isinstance(first, ForwardingMember)
        joined = first._membership.identity
        await yard.node.coordinator.leave(joined)  # as if its session had expired
        await until(lambda: worker.part not in (None, first) and worker.is_ready, "another part")
        assert first._membership.identity == joined, "the first part did not join again"

    run(tmp_path, scenario, errors=True)


def test_a_part_that_fails_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(yard: FanoutYard) -> None:
        inboxes = await populate(yard)
        worker = await yard.start("worker", "worker")
        await yard.start("coordinator", "coordinator")
        first = worker.part
        assert isinstance(first, ForwardingMember)
        first.failed(InvalidValue("test", 1, "2"))
        await until(lambda: worker.part not in (None, first) and worker.is_ready, "another part")
        await yard.publish("channel-3")
        await yard.all_delivered(inboxes)

    run(tmp_path, scenario, errors=True)
    assert "this worker has ended, and is started again: test is 1: expected 2" in caplog.text
