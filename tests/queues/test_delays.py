"""Delayed records, mostly by the real clock. Run as a script, this is a scheduler."""

import asyncio
import contextlib
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from shardyard.groups import Node, status
from shardyard.groups import reader as reader_module
from shardyard.log import Log, Sender
from shardyard.log.memory import MemoryLog
from shardyard.model import (
    Busy,
    InvalidValue,
    Partition,
    PartitionOutOfRange,
    Record,
    RetryLater,
    TooLarge,
    UnknownGroup,
    UnknownTopic,
)
from shardyard.model.limits import ANY_SIZE, Limits, validate
from shardyard.queues.delays import GROUP, LADDER_MS, UNDELIVERABLE, Delays, Scheduler
from shardyard.queues.delays import scheduler as scheduler_module
from shardyard.queues.delays.ladder import RUNG_PARTITIONS
from shardyard.registry import Registry
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.clock import Clock, ManualClock
from shardyard.wire.headers import DUE, REASON, TARGET
from shardyard.wire.media import MAX_DELAY_MS
from tests.log.samples import HOLDER, move
from tests.queues.engines import DELAYS, ENGINES
from tests.queues.stored import contents

TOPIC = "orders"
PARTITIONS = 3
LADDER = (50, 200, 1_000)
RUNGS = ("shardyard.delay.50ms", "shardyard.delay.200ms", "shardyard.delay.1s")
SESSION_SECONDS = 1.0
LONG_SESSION_SECONDS = 20.0
LATE_MS = 1_000
"""Far more than a record is late on an idle machine: this one may be busy."""
TIMEOUT_SECONDS = 60.0

Scenario = Callable[["Environment"], Coroutine[Any, Any, None]]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def records(*ids: str, key: bytes | None = None) -> list[Record]:
    return [Record(id_, key, b"value of " + id_.encode()) for id_ in ids]


async def records_of(log: Log, topic: str) -> list[Record]:
    """The records of a topic, by time."""
    found: list[Record] = []
    with contextlib.suppress(UnknownTopic):
        for partition in await log.topic(topic):
            found += await contents(log, partition)
    return sorted(found, key=lambda record: record.timestamp)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not await condition():  # noqa: ASYNC110 it is the state of a log or registry
            await asyncio.sleep(0.01)


class Environment:
    """A log, a registry and a node."""

    def __init__(self, log: Log, registry: Registry, node: Node) -> None:
        self.log, self.registry, self.node = log, registry, node
        self.delays = Delays(log, ladder=LADDER)

    @contextlib.asynccontextmanager
    async def scheduler(
        self, ladder: Sequence[int] = LADDER, session: float = SESSION_SECONDS, clock: Clock | None = None
    ) -> AsyncIterator[asyncio.Task[None]]:
        """A running scheduler that owns its share of the partitions."""
        before = await self.owners()
        task = asyncio.create_task(Scheduler(self.node, ladder=ladder, session_timeout=session, clock=clock).run())
        try:

            async def settled() -> bool:
                if task.done():
                    await task
                owners = await self.owners()
                return len(owners) == len(before) + 1 and None not in owners

            await until(settled)
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def owners(self) -> set[str | None]:
        with contextlib.suppress(UnknownGroup):
            rows = await status(self.log, self.registry, GROUP)
            return {row.owner if row.target is None else None for row in rows}
        return set()

    async def delivered(self, count: int, topic: str = TOPIC) -> list[Record]:
        """Wait until a topic has so many records, not counting duplicates. Returns them."""

        async def has_them() -> bool:
            return len({record.id for record in await records_of(self.log, topic)}) >= count

        await until(has_them)
        return await records_of(self.log, topic)

    async def waiting(self, rung: str) -> list[str]:
        return [record.id for record in await records_of(self.log, rung)]


@contextlib.asynccontextmanager
async def open_environment(engine: str, folder: Path) -> AsyncIterator[Environment]:
    with ENGINES[engine].open_registry(folder) as registry:
        async with ENGINES[engine].log(folder) as log, Node(log, registry) as node:
            await log.create_topic(TOPIC, PARTITIONS)
            yield Environment(log, registry, node)


def runner(engine: str, folder: Path) -> Callable[[Scenario], None]:
    def run_scenario(scenario: Scenario) -> None:
        async def with_environment() -> None:
            async with open_environment(engine, folder) as env:
                await scenario(env)

        asyncio.run(with_environment())

    return run_scenario


@pytest.fixture(params=DELAYS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario on an engine."""
    return runner(request.param, tmp_path)


@pytest.fixture
def run_in_memory(tmp_path: Path) -> Callable[[Scenario], None]:
    return runner("memory", tmp_path)


# Delivery


def test_a_record_is_delivered_when_it_is_due_and_not_before(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        async with env.scheduler():
            began = now_ms()
            dues = {f"r{delay}": began + delay for delay in (1, 30, 120, 450, 1_300, 1_777)}
            await env.delays.put(TOPIC, records(*dues), list(dues.values()))
            found = await env.delivered(len(dues))
        times = {record.id: record.timestamp for record in found}
        assert times.keys() == dues.keys()
        by_due_time = [times[id_] for id_ in dues]
        assert by_due_time == sorted(by_due_time)  # those that are due when it looks get the same time
        for id_, due in dues.items():
            assert 0 <= times[id_] - due < LATE_MS, id_

    run(scenario)


def test_id_key_value_and_headers_are_preserved_and_the_partition_is_that_of_a_sender(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(env: Environment) -> None:
        headers = (("tag", b"blue"), ("tag", b"\xff\x00"), ("", b""))
        rows = [Record(f"r{i}", b"k%d" % i if i else None, b"v%d" % i, headers[:i], timestamp=5) for i in range(4)]
        async with env.scheduler():
            await env.delays.put(TOPIC, rows, env.delays.due_in(300))
            found = await env.delivered(len(rows))
        bare = [(r.id, r.key, r.value, r.headers) for r in sorted(found, key=lambda r: r.id)]
        assert bare == [(r.id, r.key, r.value, r.headers) for r in rows]
        await env.log.create_topic("sent", PARTITIONS)
        await Sender(env.log, "sent").send(rows[1:])
        for index in range(PARTITIONS):
            sent = await contents(env.log, Partition("sent", index))
            delivered = await contents(env.log, Partition(TOPIC, index))
            assert {r.id for r in sent} == {r.id for r in delivered} - {"r0"}

    run(scenario)


def test_a_pinned_record_goes_to_its_partition_and_by_key_when_that_is_gone(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        for index in range(PARTITIONS):
            await env.delays.put(TOPIC, records(f"r{index}", key=b"k"), env.delays.due_in(100), partition=index)
        await env.log.create_topic("old", 2)
        await env.delays.put("old", records("moved", key=b"k"), env.delays.due_in(100), partition=1)
        await env.log.create_topic("new", 1)
        await move(env.log, "old", "new")
        async with env.scheduler():
            await env.delivered(PARTITIONS)
            (moved,) = await env.delivered(1, "new")
        for index in range(PARTITIONS):
            assert [record.id for record in await contents(env.log, Partition(TOPIC, index))] == [f"r{index}"]
        assert (moved.id, moved.headers) == ("moved", ())

    run(scenario)


def test_records_that_are_due_already_need_no_scheduler(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        began = now_ms()
        await env.delays.put(TOPIC, records("placed"), 0)
        await env.delays.put(TOPIC, records("pinned", "later"), [began, began + 60_000], partition=1)
        found = await records_of(env.log, TOPIC)
        assert {record.id for record in found} == {"placed", "pinned"}
        assert all(record.timestamp >= began and record.headers == () for record in found)
        assert "pinned" in {record.id for record in await contents(env.log, Partition(TOPIC, 1))}
        assert await env.waiting(RUNGS[2]) == ["later"]

    run(scenario)


def test_a_delivery_follows_a_topic_that_moves(run_in_memory: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await env.delays.put(TOPIC, records("a", key=b"k"), env.delays.due_in(300))
        await env.log.create_topic("orders2", 5)
        await move(env.log, TOPIC, "orders2")
        async with env.scheduler():
            (found,) = await env.delivered(1, "orders2")
        assert (found.id, found.key) == ("a", b"k")

    run_in_memory(scenario)


# The ladder


def test_a_record_goes_to_the_longest_rung_that_fits_and_then_to_shorter_ones(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(env: Environment) -> None:
        due = env.delays.due_in(1_330)
        await env.delays.put(TOPIC, records("long"), due)
        await env.delays.put(TOPIC, records("middle", "short"), [now_ms() + 700, now_ms() + 20])
        assert [await env.waiting(rung) for rung in RUNGS] == [["short"], ["middle"], ["long"]]
        hops: list[str] = []
        append = env.log.append

        async def noted(partition: Partition, rows: Any, **options: Any) -> Any:
            hops.extend(partition.topic for record in validate(rows, ANY_SIZE, 0).rows if record.id == "long")
            return await append(partition, rows, **options)

        monkeypatch.setattr(env.log, "append", noted)
        async with env.scheduler():
            await env.delivered(3)
        assert hops[-1] == TOPIC
        assert RUNGS[1] in hops
        waits = [LADDER[RUNGS.index(hop)] for hop in hops[:-1]]
        assert waits == sorted(waits, reverse=True), "never a longer one"

    run(scenario)


def test_a_long_delay_does_not_block_a_short_one_behind_it(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        async with env.scheduler():
            began = now_ms()
            await env.delays.put(TOPIC, records("hour", key=b"k"), began + 3_600_000)
            await env.delays.put(TOPIC, records("second", key=b"k"), began + 1_500)
            await env.delays.put(TOPIC, records("moment", key=b"k"), began + 150)
            found = await env.delivered(2)
        assert [record.id for record in found] == ["moment", "second"]
        assert found[0].timestamp < began + 150 + LATE_MS
        assert found[1].timestamp < began + 1_500 + LATE_MS

    run(scenario)


def test_records_that_have_left_a_rung_are_trimmed(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "TRIM_SECONDS", 0.0)

    async def scenario(env: Environment) -> None:
        async with env.scheduler():
            await env.delays.put(TOPIC, records(*(f"r{i}" for i in range(50))), env.delays.due_in(300))
            found = await env.delivered(50)

            async def empty() -> bool:
                return not any([await env.waiting(rung) for rung in RUNGS])

            await until(empty)
            assert sorted(record.id for record in found) == sorted(f"r{i}" for i in range(50))

    run(scenario)


def test_thousands_of_records_that_are_due_at_the_same_time_are_all_delivered(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        count = 10_000
        async with env.scheduler():
            due = now_ms() + 1_500
            for part in range(0, count, 1_000):
                await env.delays.put(TOPIC, records(*(f"r{i}" for i in range(part, part + 1_000))), due)
            found = await env.delivered(count)
        assert sorted(record.id for record in found) == sorted(f"r{i}" for i in range(count))
        assert found[0].timestamp >= due

    run(scenario)


def test_the_default_ladder_has_a_topic_for_each_waiting_time(run_in_memory: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        now = now_ms()
        usual = Delays(env.log)
        await asyncio.gather(*(usual.put(TOPIC, records(f"r{wait}"), now + wait + 90) for wait in LADDER_MS))
        names = [f"shardyard.delay.{wait}" for wait in ("100ms", "1s", "10s", "1m", "10m", "1h", "6h")]
        assert {topic.name for topic in await env.log.topics()} == {TOPIC, *names}
        for name, wait in zip(names, LADDER_MS, strict=True):
            assert await env.waiting(name) == [f"r{wait}"]

    run_in_memory(scenario)


# Several schedulers


def test_schedulers_share_the_rungs_and_take_over_when_one_ends(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        async with env.scheduler():
            dues = {f"r{i}": now_ms() + 20 * i for i in range(60)}
            await env.delays.put(TOPIC, records(*dues), list(dues.values()))
            async with env.scheduler():
                rows = await status(env.log, env.registry, GROUP)
                owners = [row.owner for row in rows]
                assert sorted(owners.count(owner) for owner in set(owners)) == [3, 3]
                await env.delivered(20)
            found = await env.delivered(len(dues))
        assert {record.id for record in found} == set(dues)
        assert all(record.timestamp >= dues[record.id] for record in found)

    run(scenario)


def test_a_waiting_batch_does_not_count_as_hanging_and_its_partition_is_released_at_once(
    run: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "OLD_WORK_SECONDS", 0.5)

    async def scenario(env: Environment) -> None:
        rows = [Record(f"r{i}", b"k%d" % i, b"") for i in range(20)]
        clock = ManualClock(time.time())
        delays = Delays(env.log, ladder=[3_600_000], clock=clock)
        await delays.put(TOPIC, rows, delays.due_in(4_000_000))
        waits: list[float] = []
        sleep = clock.sleep

        async def noting(seconds: float) -> None:
            waits.append(seconds)
            await sleep(seconds)

        async def waiting() -> bool:
            return waits.count(scheduler_module.MAX_SLEEP_SECONDS) >= RUNG_PARTITIONS

        monkeypatch.setattr(clock, "sleep", noting)
        async with env.scheduler([3_600_000], session=LONG_SESSION_SECONDS, clock=clock):
            await until(waiting)
            await clock.advance(LONG_SESSION_SECONDS / 2)
            began = time.monotonic()
            async with env.scheduler([3_600_000], session=LONG_SESSION_SECONDS, clock=clock):
                took = time.monotonic() - began
                assert took < LONG_SESSION_SECONDS / 2, "a drain would have taken as long as the session"

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert caplog.text == ""


def test_a_revoked_partition_is_released_after_the_delivery_in_progress(
    run_in_memory: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(env: Environment) -> None:
        append, delivering, go_on = env.log.append, asyncio.Event(), asyncio.Event()

        async def slowly(partition: Partition, rows: Any, **options: Any) -> Any:
            if partition.topic == TOPIC:
                delivering.set()
                await go_on.wait()
            return await append(partition, rows, **options)

        async def revoked() -> bool:
            return any(row.target is not None for row in await status(env.log, env.registry, GROUP))

        monkeypatch.setattr(env.log, "append", slowly)
        async with env.scheduler([50], session=10.0):
            now = now_ms()
            rows = [Record(f"{when}-{i}", b"k%d" % i, b"") for when in ("first", "then") for i in range(8)]
            delays = Delays(env.log, ladder=[50])
            await delays.put(TOPIC, rows, [now + (30 if row.id.startswith("first") else 300) for row in rows])
            await delivering.wait()
            second = asyncio.create_task(Scheduler(env.node, ladder=[50]).run())
            await until(revoked)
            go_on.set()
            async with asyncio.timeout(5.0):  # a drain would take as long as the session
                while await revoked():  # noqa: ASYNC110 as in `until`
                    await asyncio.sleep(0.01)
            found = await env.delivered(len(rows))
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
        assert sorted(record.id for record in found) == sorted(row.id for row in rows), "each once"

    run_in_memory(scenario)


@pytest.mark.processes
def test_records_that_a_killed_scheduler_had_in_flight_are_delivered_by_another(tmp_path: Path) -> None:
    async def scenario(first: "subprocess.Popen[bytes]") -> None:
        async with open_environment("sqlite", tmp_path) as env:

            async def working() -> bool:
                assert first.poll() is None
                return bool(owners := await env.owners()) and None not in owners

            async def all_committed() -> bool:
                return not any(row.lag for row in await status(env.log, env.registry, GROUP))

            await until(working)
            early = {f"early{i}": now_ms() + 10 * i for i in range(30)}
            await env.delays.put(TOPIC, records(*early), list(early.values()))
            await env.delivered(len(early))
            await until(all_committed)
            dues = {f"r{i}": now_ms() + 10 * i for i in range(300)}
            await env.delays.put(TOPIC, records(*dues), list(dues.values()))
            await env.delivered(len(early) + 60)
            first.kill()
            first.wait()
            dues |= early
            there = {record.id for record in await records_of(env.log, TOPIC)}
            assert there < set(dues), "it was killed before it had delivered all"
            scheduler = asyncio.create_task(Scheduler(env.node, ladder=LADDER).run())

            async def all_there() -> bool:
                return {record.id for record in await records_of(env.log, TOPIC)} == set(dues)

            await until(all_there)
            scheduler.cancel()
            await asyncio.gather(scheduler, return_exceptions=True)
            found = await records_of(env.log, TOPIC)
            assert all(record.timestamp >= dues[record.id] for record in found)
            times = Counter(record.id for record in found)
            assert {times[id_] for id_ in early} == {1}, "committed records are not delivered again"

    command = [sys.executable, "-m", "tests.queues.test_delays", str(tmp_path)]
    with subprocess.Popen(command, cwd=Path(__file__).parent.parent.parent) as first:
        try:
            asyncio.run(scenario(first))
        finally:
            first.kill()


def test_a_registry_that_is_busy_for_a_while_costs_no_record(
    run_in_memory: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(env: Environment) -> None:
        async with env.scheduler():
            commit, refused = env.node.coordinator.commit, iter(range(3))

            async def refusing(*args: Any) -> None:
                if next(refused, None) is not None:
                    raise Busy("the registry", 1.0)
                await commit(*args)

            monkeypatch.setattr(env.node.coordinator, "commit", refusing)
            await env.delays.put(TOPIC, records("a"), env.delays.due_in(30))
            await env.delivered(1)
            await env.delays.put(TOPIC, records("b"), env.delays.due_in(30))
            found = await env.delivered(2)
        assert [record.id for record in found] == ["a", "b"], "and none twice"
        assert next(refused, None) is None

    run_in_memory(scenario)


# Records that cannot be delivered


def test_records_for_a_deleted_topic_are_undeliverable_and_block_no_other(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await env.log.create_topic("gone", 1)
        due = env.delays.due_in(120)
        await env.delays.put("gone", [Record("a", b"k", b"v", (("tag", b"blue"),))], due)
        await env.delays.put("gone", records("b"), due, partition=0)
        await env.delays.put(TOPIC, records("c"), due)
        await env.log.delete_topic("gone")
        async with env.scheduler():
            (found,) = await env.delivered(1)
            lost = {record.id: record for record in await env.delivered(2, UNDELIVERABLE)}
        assert found.id == "c"
        assert set(lost) == {"a", "b"}
        assert (lost["a"].key, lost["a"].value, lost["a"].header("tag")) == (b"k", b"v", b"blue")
        assert (lost["a"].header(TARGET), lost["a"].header(DUE)) == (b"gone", b"%d" % due)
        for record in lost.values():
            assert record.header(REASON) == b"topic 'gone' does not exist"

    run(scenario)


def test_an_undeliverable_record_of_the_largest_size_is_stored_without_its_reason() -> None:
    async def scenario() -> None:
        log = MemoryLog(limits=Limits(record_bytes=200))
        async with log, Node(log, MemoryRegistry()) as node:
            env = Environment(log, node.registry, node)
            await log.create_topic("gone", 1)
            headers = len(DUE) + len(str(now_ms())) + len(TARGET) + len("gone")
            large = Record("a", None, b"x" * (200 - headers))
            with pytest.raises(TooLarge):
                await env.delays.put("gone", [Record("b", None, large.value + b"x")], env.delays.due_in(100))
            await env.delays.put("gone", [large], env.delays.due_in(100))
            await log.delete_topic("gone")
            async with env.scheduler():
                (lost,) = await env.delivered(1, UNDELIVERABLE)
            assert (lost.value, lost.header(REASON)) == (large.value, None)

    asyncio.run(scenario())


def test_a_sealed_target_gets_its_records_when_it_is_unsealed(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "RETRY_MS", 100)

    async def scenario(env: Environment) -> None:
        await env.log.create_topic("sealed", 1)
        await env.delays.put("sealed", records("a"), env.delays.due_in(60))
        await env.delays.put("sealed", records("b"), env.delays.due_in(60), partition=0)
        await env.log.seal_topic("sealed", HOLDER)
        append, refused = env.log.append, Counter[str]()

        async def counting(partition: Partition, rows: Any, **options: Any) -> Any:
            try:
                return await append(partition, rows, **options)
            except RetryLater:
                refused.update(record.id for record in validate(rows, ANY_SIZE, 0).rows)
                raise

        async def both_were_retried() -> bool:
            return min(refused["a"], refused["b"]) >= 2

        monkeypatch.setattr(env.log, "append", counting)
        async with env.scheduler():
            await until(both_were_retried)
            await env.delays.put(TOPIC, records("c"), due := env.delays.due_in(60))
            (other,) = await env.delivered(1)
            assert other.timestamp - due < LATE_MS, "other records are not delayed"
            await env.log.unseal_topic("sealed", HOLDER)
            found = await env.delivered(2, "sealed")
        assert {(record.id, record.headers) for record in found} == {("a", ()), ("b", ())}
        assert await records_of(env.log, UNDELIVERABLE) == []

    run(scenario)


def test_garbage_on_a_rung_is_undeliverable(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        due = b"%d" % now_ms()
        to: tuple[str, bytes] = (TARGET, TOPIC.encode())
        garbage = {
            "bare": (),
            "no target": ((DUE, due),),
            "no due": (to,),
            "due is no number": ((DUE, b"soon"), to),
            "due is endless": ((DUE, b"9" * 5_000), to),
            "due in 3000": ((DUE, b"32503680000000"), to),
            "target is no text": ((DUE, due), (TARGET, b"\xff")),
            "target is no name": ((DUE, due), (TARGET, b"a/b\x00")),
            "target is empty": ((DUE, due), (TARGET, b"")),
            "partition is no number": ((DUE, due), to, ("shardyard-partition", b"first")),
        }
        async with env.scheduler():
            rows = [Record(id_, None, b"", headers) for id_, headers in garbage.items()]
            await env.log.append(Partition(RUNGS[0], 0), rows)
            await env.delays.put(TOPIC, records("good"), env.delays.due_in(50))
            (found,) = await env.delivered(1)
            lost = await env.delivered(len(garbage), UNDELIVERABLE)
        assert found.id == "good"
        assert {record.id for record in lost} == set(garbage)
        assert all(record.header(REASON) for record in lost)
        assert all(record.headers[:-1] == garbage[record.id] for record in lost)

    run(scenario)


def test_deleted_rungs_are_recreated(run_in_memory: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        async with env.scheduler():
            await env.delays.put(TOPIC, records("a"), env.delays.due_in(100))
            await env.delivered(1)
            for rung in RUNGS:
                await env.log.delete_topic(rung)
            await env.delays.put(TOPIC, records("b"), env.delays.due_in(300))
            found = await env.delivered(2)
        assert [record.id for record in found] == ["a", "b"]

    run_in_memory(scenario)


# Invalid calls


@pytest.mark.parametrize(
    ("due", "name"),
    [
        (-1, "due"),
        (1.5, "due"),
        (True, "due"),
        (None, "due"),
        ("soon", "due"),
        ([0], "due"),
        ([0, 0, 0], "due"),
        ([0, "soon"], "due"),
        (2**63, "due"),
        pytest.param(now_ms() + MAX_DELAY_MS + 3_600_000, "delay", id="too far ahead"),
        pytest.param([0, now_ms() + MAX_DELAY_MS + 3_600_000], "delay", id="one too far ahead"),
    ],
)
def test_an_invalid_due_time_is_refused(run_in_memory: Callable[[Scenario], None], due: object, name: str) -> None:
    async def scenario(env: Environment) -> None:
        with pytest.raises(InvalidValue) as refused:
            await env.delays.put(TOPIC, records("a", "b"), cast(Any, due))
        assert refused.value.name == name
        assert [topic.name for topic in await env.log.topics()] == [TOPIC]
        assert await records_of(env.log, TOPIC) == []

    run_in_memory(scenario)


def test_other_invalid_calls_are_refused_and_store_nothing(run_in_memory: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        put, later = env.delays.put, env.delays.due_in(1_000)
        good = records("a")
        with pytest.raises(UnknownTopic):
            await put("nowhere", good, later)
        with pytest.raises(PartitionOutOfRange):
            await put(TOPIC, good, later, partition=PARTITIONS)
        for target, partition in [(cast(Any, 7), None), ("", None), (TOPIC, -1), (TOPIC, cast(Any, "0"))]:
            with pytest.raises(InvalidValue):
                await put(target, good, later, partition=partition)
        wrong: list[Sequence[Any]] = [[], ["a"], [Record("", None, b"")], [Record("a", None, b"", ((DUE, b"1"),))]]
        for rows in wrong:
            with pytest.raises(InvalidValue):
                await put(TOPIC, [*rows, *good] if rows else [], later)
        for delay in (-1, MAX_DELAY_MS + 1, 0.5, "1s"):
            with pytest.raises(InvalidValue) as refused:
                env.delays.due_in(cast(Any, delay))
            assert refused.value.name == "delay"
        for ladder in ([], [0], ["1s"]):
            with pytest.raises(InvalidValue):
                Delays(env.log, ladder=cast(Any, ladder))
        assert [topic.name for topic in await env.log.topics()] == [TOPIC]
        assert await records_of(env.log, TOPIC) == []

    run_in_memory(scenario)


async def schedule(folder: Path) -> None:
    engine = ENGINES["sqlite"]
    async with engine.log(folder) as log, Node(log, engine.open_registry(folder)) as node:
        await Scheduler(node, ladder=LADDER, session_timeout=3.0).run()  # long enough for a busy machine


if __name__ == "__main__":
    asyncio.run(schedule(Path(sys.argv[1])))
