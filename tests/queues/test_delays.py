"""Delayed records on the embedded engines and on their twins, by the real clock. Run as a script, it is a scheduler."""

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
from shardyard.log.sqlite import SqliteLog
from shardyard.model import (
    Busy,
    InvalidValue,
    Partition,
    PartitionOutOfRange,
    Record,
    TooLarge,
    UnknownGroup,
    UnknownTopic,
)
from shardyard.model.limits import ANY_SIZE, Limits, validate
from shardyard.queues import delays as delays_module
from shardyard.queues.delays import GROUP, LADDER_MS, MAX_DELAY_MS, UNDELIVERABLE, Delays, Scheduler
from shardyard.registry import Registry, open_registry
from shardyard.registry.memory import MemoryRegistry
from shardyard.wire.headers import DUE, REASON, TARGET
from tests.log.samples import HOLDER, move

TOPIC = "orders"
PARTITIONS = 3
LADDER = (50, 200, 1_000)
RUNGS = ("shardyard.delay.50ms", "shardyard.delay.200ms", "shardyard.delay.1s")
SESSION_SECONDS = 1.0
LATE_MS = 1_000
"""More than a record is ever late on an idle machine, by far: this one may be busy."""
PATIENCE_SECONDS = 30.0

Story = Callable[["Yard"], Coroutine[Any, Any, None]]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def records(*ids: str, key: bytes | None = None) -> list[Record]:
    return [Record(id_, key, b"value of " + id_.encode()) for id_ in ids]


async def contents(log: Log, topic: str) -> list[Record]:
    """All records of a topic, by time."""
    found: list[Record] = []
    with contextlib.suppress(UnknownTopic):
        for partition in await log.topic(topic):
            span = await log.span(partition)
            while span.first < span.end and (batch := await log.read(partition, span.first)):
                found += batch.records()
                span = type(span)(span.epoch, batch.end, span.end)
    return sorted(found, key=lambda record: record.timestamp)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():  # noqa: ASYNC110 it shows in the state of a log or registry
            await asyncio.sleep(0.01)


class Yard:
    """A log, a registry and a node, for the length of a story."""

    def __init__(self, log: Log, registry: Registry, node: Node) -> None:
        self.log, self.registry, self.node = log, registry, node
        self.delays = Delays(log, ladder=LADDER)

    @contextlib.asynccontextmanager
    async def scheduler(
        self, ladder: Sequence[int] = LADDER, session: float = SESSION_SECONDS
    ) -> AsyncIterator[asyncio.Task[None]]:
        """One that runs, and owns its share."""
        before = await self.owners()
        task = asyncio.create_task(Scheduler(self.node, ladder=ladder, session_timeout=session).run())
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
        """The records of a topic, once there are so many, not counting what came twice."""

        async def there() -> bool:
            return len({record.id for record in await contents(self.log, topic)}) >= count

        await until(there)
        return await contents(self.log, topic)

    async def waiting(self, rung: str) -> list[str]:
        return [record.id for record in await contents(self.log, rung)]


@contextlib.asynccontextmanager
async def a_yard(kind: str, folder: Path) -> AsyncIterator[Yard]:
    log: Log = MemoryLog() if kind == "memory" else SqliteLog(folder / "log")
    registry: Registry = MemoryRegistry() if kind == "memory" else open_registry(registry_url(folder))
    with registry:
        async with log, Node(log, registry) as node:
            await log.create_topic(TOPIC, PARTITIONS)
            yield Yard(log, registry, node)


def registry_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'registry.db'}"


def tell_on(kind: str, folder: Path) -> Callable[[Story], None]:
    def told(story: Story) -> None:
        async def whole() -> None:
            async with a_yard(kind, folder) as yard:
                await story(yard)

        asyncio.run(whole())

    return told


@pytest.fixture(params=["memory", "sqlite"])
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Tell a story on an engine."""
    return tell_on(request.param, tmp_path)


@pytest.fixture
def tell_in_memory(tmp_path: Path) -> Callable[[Story], None]:
    return tell_on("memory", tmp_path)


# Delivery


def test_a_record_is_delivered_when_it_is_due_and_not_before(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        async with yard.scheduler():
            began = now_ms()
            dues = {f"r{delay}": began + delay for delay in (1, 30, 120, 450, 1_300, 1_777)}
            await yard.delays.put(TOPIC, records(*dues), list(dues.values()))
            found = await yard.delivered(len(dues))
        assert [record.id for record in found] == list(dues), "by due time"
        for record in found:
            assert 0 <= record.timestamp - dues[record.id] < LATE_MS, record.id

    tell(story)


def test_id_key_value_and_headers_survive_and_the_place_is_that_of_a_sender(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        headers = (("tag", b"blue"), ("tag", b"\xff\x00"), ("", b""))
        rows = [Record(f"r{i}", b"k%d" % i if i else None, b"v%d" % i, headers[:i], timestamp=5) for i in range(4)]
        async with yard.scheduler():
            await yard.delays.put(TOPIC, rows, yard.delays.due_in(300))
            found = await yard.delivered(len(rows))
        bare = [(r.id, r.key, r.value, r.headers) for r in sorted(found, key=lambda r: r.id)]
        assert bare == [(r.id, r.key, r.value, r.headers) for r in rows]
        await yard.log.create_topic("sent", PARTITIONS)
        await Sender(yard.log, "sent").send(rows[1:])
        for index in range(PARTITIONS):
            sent = await yard.log.read(Partition("sent", index), 0)
            came = await yard.log.read(Partition(TOPIC, index), 0)
            assert {r.id for r in sent.records()} == {r.id for r in came.records()} - {"r0"}

    tell(story)


def test_a_pinned_record_goes_to_its_partition_and_by_key_when_that_is_gone(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        for index in range(PARTITIONS):
            await yard.delays.put(TOPIC, records(f"r{index}", key=b"k"), yard.delays.due_in(100), partition=index)
        await yard.log.create_topic("old", 2)
        await yard.delays.put("old", records("moved", key=b"k"), yard.delays.due_in(100), partition=1)
        await yard.log.create_topic("new", 1)
        await move(yard.log, "old", "new")
        async with yard.scheduler():
            await yard.delivered(PARTITIONS)
            (moved,) = await yard.delivered(1, "new")
        for index in range(PARTITIONS):
            batch = await yard.log.read(Partition(TOPIC, index), 0)
            assert [record.id for record in batch.records()] == [f"r{index}"]
        assert (moved.id, moved.headers) == ("moved", ())

    tell(story)


def test_what_is_due_already_needs_no_scheduler(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        began = now_ms()
        await yard.delays.put(TOPIC, records("placed"), 0)
        await yard.delays.put(TOPIC, records("pinned", "later"), [began, began + 60_000], partition=1)
        found = await contents(yard.log, TOPIC)
        assert {record.id for record in found} == {"placed", "pinned"}
        assert all(record.timestamp >= began and record.headers == () for record in found)
        assert "pinned" in {record.id for record in (await yard.log.read(Partition(TOPIC, 1), 0)).records()}
        assert await yard.waiting(RUNGS[2]) == ["later"]

    tell(story)


def test_a_delivery_follows_a_topic_that_moves(tell_in_memory: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        await yard.delays.put(TOPIC, records("a", key=b"k"), yard.delays.due_in(300))
        await yard.log.create_topic("orders2", 5)
        await move(yard.log, TOPIC, "orders2")
        async with yard.scheduler():
            (found,) = await yard.delivered(1, "orders2")
        assert (found.id, found.key) == ("a", b"k")

    tell_in_memory(story)


# The ladder


def test_a_record_takes_the_longest_rung_that_fits_and_then_the_next(
    tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(yard: Yard) -> None:
        due = yard.delays.due_in(1_330)
        await yard.delays.put(TOPIC, records("long"), due)
        await yard.delays.put(TOPIC, records("middle", "short"), [now_ms() + 700, now_ms() + 20])
        assert [await yard.waiting(rung) for rung in RUNGS] == [["short"], ["middle"], ["long"]]
        hops: list[str] = []
        append = yard.log.append

        async def noted(partition: Partition, rows: Any, **options: Any) -> Any:
            hops.extend(partition.topic for record in validate(rows, ANY_SIZE, 0).rows if record.id == "long")
            return await append(partition, rows, **options)

        monkeypatch.setattr(yard.log, "append", noted)
        async with yard.scheduler():
            await yard.delivered(3)
        assert hops[-1] == TOPIC
        assert RUNGS[1] in hops
        waits = [LADDER[RUNGS.index(hop)] for hop in hops[:-1]]
        assert waits == sorted(waits, reverse=True), "never back up"

    tell(story)


def test_a_long_delay_does_not_hold_up_a_short_one_behind_it(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        async with yard.scheduler():
            began = now_ms()
            await yard.delays.put(TOPIC, records("hour", key=b"k"), began + 3_600_000)
            await yard.delays.put(TOPIC, records("second", key=b"k"), began + 1_500)
            await yard.delays.put(TOPIC, records("moment", key=b"k"), began + 150)
            found = await yard.delivered(2)
        assert [record.id for record in found] == ["moment", "second"]
        assert found[0].timestamp < began + 150 + LATE_MS
        assert found[1].timestamp < began + 1_500 + LATE_MS

    tell(story)


def test_what_has_left_a_rung_is_trimmed_away(tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays_module, "TRIM_SECONDS", 0.0)

    async def story(yard: Yard) -> None:
        async with yard.scheduler():
            await yard.delays.put(TOPIC, records(*(f"r{i}" for i in range(50))), yard.delays.due_in(300))
            await yard.delivered(50)

            async def empty() -> bool:
                return not any([await yard.waiting(rung) for rung in RUNGS])

            await until(empty)

    tell(story)


def test_thousands_a_second_go_through(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        count = 10_000
        async with yard.scheduler():
            began = now_ms()
            due = began + 1_500
            for part in range(0, count, 1_000):
                await yard.delays.put(TOPIC, records(*(f"r{i}" for i in range(part, part + 1_000))), due)
            found = await yard.delivered(count)
        assert sorted(record.id for record in found) == sorted(f"r{i}" for i in range(count))
        assert found[0].timestamp >= due
        assert found[-1].timestamp - due < 5_000

    tell(story)


def test_the_usual_ladder_has_a_topic_for_each_waiting_time(tell_in_memory: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        now = now_ms()
        usual = Delays(yard.log)
        await asyncio.gather(*(usual.put(TOPIC, records(f"r{wait}"), now + wait + 90) for wait in LADDER_MS))
        names = [f"shardyard.delay.{wait}" for wait in ("100ms", "1s", "10s", "1m", "10m", "1h", "6h")]
        assert {topic.name for topic in await yard.log.topics()} == {TOPIC, *names}
        for name, wait in zip(names, LADDER_MS, strict=True):
            assert await yard.waiting(name) == [f"r{wait}"]

    tell_in_memory(story)


# Sharing, and taking over


def test_schedulers_share_the_rungs_and_one_that_ends_leaves_nothing_behind(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        async with yard.scheduler():
            dues = {f"r{i}": now_ms() + 40 * i for i in range(60)}
            await yard.delays.put(TOPIC, records(*dues), list(dues.values()))
            async with yard.scheduler():
                rows = await status(yard.log, yard.registry, GROUP)
                held = [row.owner for row in rows]
                assert sorted(held.count(owner) for owner in set(held)) == [3, 3]
                await asyncio.sleep(0.3)
            found = await yard.delivered(len(dues))
        assert {record.id for record in found} == set(dues)
        assert all(record.timestamp >= dues[record.id] for record in found)

    tell(story)


def test_a_long_wait_is_no_old_work_and_gives_its_partition_up_at_once(
    tell: Callable[[Story], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "OLD_WORK_SECONDS", 0.5)

    async def story(yard: Yard) -> None:
        rows = [Record(f"r{i}", b"k%d" % i, b"") for i in range(20)]
        delays = Delays(yard.log, ladder=[3_600_000])
        await delays.put(TOPIC, rows, delays.due_in(4_000_000))
        async with yard.scheduler([3_600_000], session=3.0):
            await asyncio.sleep(4.0)
            began = time.monotonic()
            async with yard.scheduler([3_600_000], session=3.0):
                assert time.monotonic() - began < 2.0, "a drain would have taken as long as the session"

    with caplog.at_level(logging.WARNING):
        tell(story)
    assert caplog.text == ""


def test_a_partition_that_is_to_go_goes_after_the_move_that_is_under_way(
    tell_in_memory: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(yard: Yard) -> None:
        append, go_on = yard.log.append, asyncio.Event()

        async def slowly(partition: Partition, rows: Any, **options: Any) -> Any:
            if partition.topic == TOPIC:
                await go_on.wait()
            return await append(partition, rows, **options)

        async def revoked() -> bool:
            return any(row.target is not None for row in await status(yard.log, yard.registry, GROUP))

        monkeypatch.setattr(yard.log, "append", slowly)
        async with yard.scheduler([50], session=10.0):
            now = now_ms()
            rows = [Record(f"{when}-{i}", b"k%d" % i, b"") for when in ("first", "then") for i in range(8)]
            delays = Delays(yard.log, ladder=[50])
            await delays.put(TOPIC, rows, [now + (30 if row.id.startswith("first") else 300) for row in rows])
            await asyncio.sleep(0.2)
            second = asyncio.create_task(Scheduler(yard.node, ladder=[50]).run())
            await until(revoked)
            go_on.set()
            async with asyncio.timeout(5.0):  # a drain would take as long as the session
                while await revoked():  # noqa: ASYNC110 as in `until`
                    await asyncio.sleep(0.01)
            found = await yard.delivered(len(rows))
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
        assert sorted(record.id for record in found) == sorted(row.id for row in rows), "each once"

    tell_in_memory(story)


def test_what_a_killed_scheduler_had_in_hand_another_one_delivers(tmp_path: Path) -> None:
    async def story(first: "subprocess.Popen[bytes]") -> None:
        async with a_yard("sqlite", tmp_path) as yard:

            async def working() -> bool:
                assert first.poll() is None
                return bool(owners := await yard.owners()) and None not in owners

            async def all_committed() -> bool:
                return not any(row.lag for row in await status(yard.log, yard.registry, GROUP))

            await until(working)
            early = {f"early{i}": now_ms() + 10 * i for i in range(30)}
            await yard.delays.put(TOPIC, records(*early), list(early.values()))
            await yard.delivered(len(early))
            await until(all_committed)
            dues = {f"r{i}": now_ms() + 10 * i for i in range(300)}
            await yard.delays.put(TOPIC, records(*dues), list(dues.values()))
            await yard.delivered(len(early) + 60)
            first.kill()
            first.wait()
            dues |= early
            there = {record.id for record in await contents(yard.log, TOPIC)}
            assert there < set(dues), "it was killed in the middle of its work"
            scheduler = asyncio.create_task(Scheduler(yard.node, ladder=LADDER).run())

            async def all_there() -> bool:
                return {record.id for record in await contents(yard.log, TOPIC)} == set(dues)

            await until(all_there)
            scheduler.cancel()
            await asyncio.gather(scheduler, return_exceptions=True)
            found = await contents(yard.log, TOPIC)
            assert all(record.timestamp >= dues[record.id] for record in found)
            times = Counter(record.id for record in found)
            assert {times[id_] for id_ in early} == {1}, "what was committed does not come again"

    command = [sys.executable, "-m", "tests.queues.test_delays", str(tmp_path)]
    with subprocess.Popen(command, cwd=Path(__file__).parent.parent.parent) as first:
        try:
            asyncio.run(story(first))
        finally:
            first.kill()


def test_a_registry_that_is_busy_for_a_while_costs_no_record(
    tell_in_memory: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delays_module, "AGAIN_SECONDS", 0.01)

    async def story(yard: Yard) -> None:
        async with yard.scheduler():
            commit, refused = yard.node.coordinator.commit, iter(range(3))

            async def refusing(*args: Any) -> None:
                if next(refused, None) is not None:
                    raise Busy("the registry", 1.0)
                await commit(*args)

            monkeypatch.setattr(yard.node.coordinator, "commit", refusing)
            await yard.delays.put(TOPIC, records("a"), yard.delays.due_in(30))
            await yard.delivered(1)
            await yard.delays.put(TOPIC, records("b"), yard.delays.due_in(30))
            found = await yard.delivered(2)
        assert [record.id for record in found] == ["a", "b"], "and none twice"
        assert next(refused, None) is None

    tell_in_memory(story)


# What can't be delivered


def test_records_for_a_topic_that_is_gone_are_undeliverable_and_hold_up_nobody(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        await yard.log.create_topic("gone", 1)
        due = yard.delays.due_in(120)
        await yard.delays.put("gone", [Record("a", b"k", b"v", (("tag", b"blue"),))], due)
        await yard.delays.put("gone", records("b"), due, partition=0)
        await yard.delays.put(TOPIC, records("c"), due)
        await yard.log.delete_topic("gone")
        async with yard.scheduler():
            (found,) = await yard.delivered(1)
            lost = {record.id: record for record in await yard.delivered(2, UNDELIVERABLE)}
        assert found.id == "c"
        assert set(lost) == {"a", "b"}
        assert (lost["a"].key, lost["a"].value, lost["a"].header("tag")) == (b"k", b"v", b"blue")
        assert (lost["a"].header(TARGET), lost["a"].header(DUE)) == (b"gone", b"%d" % due)
        for record in lost.values():
            assert record.header(REASON) == b"topic 'gone' does not exist"

    tell(story)


def test_an_undeliverable_record_as_large_as_can_be_is_kept_without_its_reason() -> None:
    async def story() -> None:
        log = MemoryLog(limits=Limits(record_bytes=200))
        async with log, Node(log, MemoryRegistry()) as node:
            yard = Yard(log, node.registry, node)
            await log.create_topic("gone", 1)
            marks = len(DUE) + len(str(now_ms())) + len(TARGET) + len("gone")
            large = Record("a", None, b"x" * (200 - marks))
            with pytest.raises(TooLarge):
                await yard.delays.put("gone", [Record("b", None, large.value + b"x")], yard.delays.due_in(100))
            await yard.delays.put("gone", [large], yard.delays.due_in(100))
            await log.delete_topic("gone")
            async with yard.scheduler():
                (lost,) = await yard.delivered(1, UNDELIVERABLE)
            assert (lost.value, lost.header(REASON)) == (large.value, None)

    asyncio.run(story())


def test_a_target_that_is_sealed_gets_its_records_when_it_takes_them_again(
    tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delays_module, "RETRY_MS", 100)

    async def story(yard: Yard) -> None:
        await yard.log.create_topic("sealed", 1)
        await yard.delays.put("sealed", records("a"), yard.delays.due_in(60))
        await yard.delays.put("sealed", records("b"), yard.delays.due_in(60), partition=0)
        await yard.log.seal_topic("sealed", HOLDER)
        async with yard.scheduler():
            await asyncio.sleep(0.3)
            await yard.delays.put(TOPIC, records("c"), due := yard.delays.due_in(60))
            (other,) = await yard.delivered(1)
            assert other.timestamp - due < LATE_MS, "the others go on"
            await yard.log.unseal_topic("sealed", HOLDER)
            found = await yard.delivered(2, "sealed")
        assert {(record.id, record.headers) for record in found} == {("a", ()), ("b", ())}
        assert await contents(yard.log, UNDELIVERABLE) == []

    tell(story)


def test_garbage_on_a_rung_is_undeliverable(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
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
        async with yard.scheduler():
            rows = [Record(id_, None, b"", headers) for id_, headers in garbage.items()]
            await yard.log.append(Partition(RUNGS[0], 0), rows)
            await yard.delays.put(TOPIC, records("good"), yard.delays.due_in(50))
            (found,) = await yard.delivered(1)
            lost = await yard.delivered(len(garbage), UNDELIVERABLE)
        assert found.id == "good"
        assert {record.id for record in lost} == set(garbage)
        assert all(record.header(REASON) for record in lost)
        assert all(record.headers[:-1] == garbage[record.id] for record in lost)

    tell(story)


def test_rungs_that_were_deleted_are_made_anew(tell_in_memory: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        async with yard.scheduler():
            await yard.delays.put(TOPIC, records("a"), yard.delays.due_in(100))
            await yard.delivered(1)
            for rung in RUNGS:
                await yard.log.delete_topic(rung)
            await yard.delays.put(TOPIC, records("b"), yard.delays.due_in(300))
            found = await yard.delivered(2)
        assert [record.id for record in found] == ["a", "b"]

    tell_in_memory(story)


# Wrong calls


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
def test_a_wrong_due_time_is_refused(tell_in_memory: Callable[[Story], None], due: object, name: str) -> None:
    async def story(yard: Yard) -> None:
        with pytest.raises(InvalidValue) as refused:
            await yard.delays.put(TOPIC, records("a", "b"), cast(Any, due))
        assert refused.value.name == name
        assert [topic.name for topic in await yard.log.topics()] == [TOPIC]
        assert await contents(yard.log, TOPIC) == []

    tell_in_memory(story)


def test_other_wrong_calls_are_refused_and_store_nothing(tell_in_memory: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        put, later = yard.delays.put, yard.delays.due_in(1_000)
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
                yard.delays.due_in(cast(Any, delay))
            assert refused.value.name == "delay"
        for ladder in ([], [0], ["1s"]):
            with pytest.raises(InvalidValue):
                Delays(yard.log, ladder=cast(Any, ladder))
        assert [topic.name for topic in await yard.log.topics()] == [TOPIC]
        assert await contents(yard.log, TOPIC) == []

    tell_in_memory(story)


async def schedule(folder: Path) -> None:
    registry = open_registry(registry_url(folder))
    async with SqliteLog(folder / "log") as log, Node(log, registry) as node:
        await Scheduler(node, ladder=LADDER, session_timeout=3.0).run()  # not so short that a busy machine ends it


if __name__ == "__main__":
    asyncio.run(schedule(Path(sys.argv[1])))
