"""Failed records: tried again by the ladder, dead at its end, and driven again. On both engines, with real delays."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardyard.groups import OwnedBatch, Reader
from shardyard.log.memory import MemoryLog
from shardyard.model import (
    Fence,
    Fenced,
    Headers,
    InvalidValue,
    OffsetBeyondEnd,
    Partition,
    Record,
    Span,
    TooLarge,
    TopicKind,
    UnknownTopic,
)
from shardyard.model.limits import Limits
from shardyard.queues.dead_letters import Dead, dead, held, redrive
from shardyard.queues.delays import Delays, Scheduler
from shardyard.queues.failures import Failure, Failures, Fate
from shardyard.queues.retry_topics import dead_topic, ensure_retry_topics, original, published_of, retry_topic
from shardyard.wire.headers import ATTEMPT, DIED, ERROR, ORIGIN, PUBLISHED, REDRIVEN
from shardyard.wire.settings import GroupSettings
from tests.groups.test_reader import PATIENCE_SECONDS, TOPIC, Yard, a_yard
from tests.log.samples import HOLDER, contents, move

GROUP = "billing"
RETRY, DEAD = "billing.orders.retry", "billing.orders.dead"
LADDER_MS = (20, 100, 500)
P0 = Partition(TOPIC, 0)
AT_ONCE_DEAD = GroupSettings(backoff=())
SHORT = GroupSettings(backoff=(0.05, 0.15))

Story = Callable[["Ward"], Coroutine[Any, Any, None]]


class Ward:
    """A yard, with what cares for failures."""

    def __init__(self, yard: Yard) -> None:
        self.yard, self.log = yard, yard.log
        self.failures = Failures(yard.log, Delays(yard.log, ladder=LADDER_MS))

    @contextlib.asynccontextmanager
    async def scheduling(self) -> AsyncIterator[None]:
        running = asyncio.create_task(Scheduler(self.yard.node, ladder=LADDER_MS, session_timeout=2.0).run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def send(self, *ids: str, partition: Partition = P0, headers: Headers = ()) -> None:
        await self.log.append(partition, [Record(i, i.encode(), b"value of " + i.encode(), headers) for i in ids])

    async def kill(self, *ids: str, partition: Partition = P0) -> None:
        """Have records of these ids die, together."""
        first = (await self.log.span(partition)).end
        await self.send(*ids, partition=partition)
        failures = [Failure(partition, 1, first + i, f"no {id_}") for i, id_ in enumerate(ids)]
        await self.failures.handle(GROUP, AT_ONCE_DEAD, failures)

    async def dead_ids(self) -> list[str]:
        return [letter.record.id for letter in await dead(self.log, GROUP, TOPIC)]

    async def all_of(self, topic: str) -> list[Record]:
        return [r for partition in await self.log.topic(topic) for r in await contents(self.log, partition)]

    async def until_all_of(self, topic: str, count: int) -> list[Record]:
        async def there() -> bool:
            return len(await self.all_of(topic)) >= count

        await self.yard.until(there)
        return await self.all_of(topic)


@pytest.fixture(params=["memory", "sqlite"])
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Tell a story on an engine."""

    def told(story: Story) -> None:
        async def whole() -> None:
            async with a_yard(request.param, tmp_path) as yard:
                await story(Ward(yard))

        asyncio.run(whole())

    return told


def told(record: Record) -> tuple[bytes | None, bytes | None, bytes | None]:
    return record.header(ATTEMPT), record.header(ORIGIN), record.header(ERROR)


def test_a_retry_topic_is_never_nested() -> None:
    assert (retry_topic(GROUP, TOPIC), dead_topic(GROUP, TOPIC)) == (RETRY, DEAD)
    assert (retry_topic(GROUP, RETRY), dead_topic(GROUP, RETRY)) == (RETRY, DEAD)
    assert original(GROUP, RETRY) == TOPIC
    for other in (TOPIC, DEAD, "shipping.orders.retry", "billing.retry", "orders.retry"):
        assert original(GROUP, other) == other


def test_each_topic_gets_one_small_retry_topic(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ward.log.create_topic("wide", 9)
        wanted = [TOPIC, RETRY, "wide", "billing.wide.retry"]
        for result in await asyncio.gather(*(ensure_retry_topics(ward.log, GROUP, [TOPIC, "wide"]) for _ in range(3))):
            assert result == wanted
        assert await ensure_retry_topics(ward.log, GROUP, wanted) == wanted
        assert await ensure_retry_topics(ward.log, GROUP, [DEAD]) == [DEAD]
        made = {topic.name: (topic.partitions, topic.kind) for topic in await ward.log.topics()}
        assert made[RETRY] == made["billing.wide.retry"] == (4, TopicKind.RETRY)
        assert len(made) == 4
        with pytest.raises(UnknownTopic):
            await ensure_retry_topics(ward.log, GROUP, ["nowhere"])
        with pytest.raises(TooLarge, match="topic name"):
            await ensure_retry_topics(ward.log, "g" * 200, [TOPIC])
        with pytest.raises(InvalidValue, match="topic name"):
            await ensure_retry_topics(ward.log, "a group", [TOPIC])

    tell(story)


def test_a_record_climbs_the_ladder_and_dies_while_others_pass(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        seen: list[tuple[str, str, bytes | None]] = []
        dues: list[int] = []
        late: list[bool] = []

        async def consume(batch: OwnedBatch) -> bool:
            failed = []
            for offset, record in enumerate(batch.records(), batch.first):
                seen.append((record.id, batch.partition.topic, record.header(ATTEMPT)))
                if record.id == "bad":
                    late.append(not dues or time.time() * 1000 >= dues[-1])
                    failed.append(Failure(batch.partition, batch.epoch, offset, f"failure {len(late)}"))
            outcomes = await ward.failures.handle(GROUP, SHORT, failed)
            await batch.commit()
            dues.extend(outcome.due for outcome in outcomes if outcome.due is not None)
            return any(outcome.fate is Fate.DEAD for outcome in outcomes)

        await ward.send("before", "bad", "after", headers=(("tag", b"x"),))
        topics = await ensure_retry_topics(ward.log, GROUP, [TOPIC])
        member = Reader(GROUP, topics, node=ward.yard.node, session_timeout=2.0)
        began = time.time() * 1000
        async with ward.scheduling(), member, asyncio.timeout(PATIENCE_SECONDS):
            async for batch in member:
                if await consume(batch):
                    break
        assert seen[:3] == [("before", TOPIC, None), ("bad", TOPIC, None), ("after", TOPIC, None)]
        assert seen[3:] == [("bad", RETRY, b"1"), ("bad", RETRY, b"2")]
        assert late == [True] * 3, "none came before it was due"
        assert began + 50 <= dues[0]
        assert dues[0] + 150 <= dues[1]
        (letter,) = await dead(ward.log, GROUP, TOPIC)
        assert (letter.reason, letter.attempts, letter.origin) == ("failure 3", 3, "orders/0/1")
        assert letter.record.headers == (("tag", b"x"),)
        assert (letter.record.id, letter.record.key, letter.record.value) == ("bad", b"bad", b"value of bad")
        assert dues[1] <= letter.died_at <= time.time() * 1000

    tell(story)


def test_what_it_carries_while_it_is_tried_again(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        at_once = GroupSettings(backoff=(0.001,) * 3)
        async with ward.scheduling():
            await ward.send("a", partition=Partition(TOPIC, 3))
            failed = Failure(Partition(TOPIC, 3), 1, 0, "x" * 2000)
            for attempt in (1, 2, 3):
                (outcome,) = await ward.failures.handle(GROUP, at_once, [failed])
                assert (outcome.fate, outcome.attempts) == (Fate.RETRY, attempt)
                record = (await ward.until_all_of(RETRY, attempt))[-1]
                reason = b"x" * 1000 if attempt == 1 else b"half a pair: ?"
                assert told(record) == (b"%d" % attempt, b"orders/3/0", reason)
                (at,) = [p for p in await ward.log.topic(RETRY) if (await ward.log.span(p)).end]
                failed = Failure(at, 1, attempt - 1, "half a pair: \ud800")
            (outcome,) = await ward.failures.handle(GROUP, at_once, [failed])
            assert (outcome.fate, outcome.attempts, outcome.due) == (Fate.DEAD, 4, None)

    tell(story)


def test_a_shorter_ladder_holds_for_those_already_on_it(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ensure_retry_topics(ward.log, GROUP, [TOPIC])
        await ward.send("a", partition=Partition(RETRY, 0), headers=((ATTEMPT, b"4"), (ORIGIN, b"orders/1/2")))
        (outcome,) = await ward.failures.handle(GROUP, SHORT, [Failure(Partition(RETRY, 0), 1, 0, "no")])
        assert (outcome.fate, outcome.attempts) == (Fate.DEAD, 5)

    tell(story)


def test_a_stale_owner_is_refused_and_nothing_is_stored(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ensure_retry_topics(ward.log, GROUP, [TOPIC])
        await ward.send("a")
        await ward.send("b", partition=Partition(TOPIC, 1))
        await ward.log.set_fence(Fence("billing/orders/1", 8))
        before = await ward.log.topics()
        failures = [Failure(P0, 7, 0, "no"), Failure(Partition(TOPIC, 1), 7, 0, "no")]
        for settings in (SHORT, AT_ONCE_DEAD):
            with pytest.raises(Fenced):
                await ward.failures.handle(GROUP, settings, failures)
        assert await ward.log.topics() == before, "neither a rung nor a dead-letter topic was needed"
        assert await ward.all_of(RETRY) == []

    tell(story)


def test_an_owner_that_stalls_before_it_stores_is_fenced_then_too(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ensure_retry_topics(ward.log, GROUP, [TOPIC])
        await ward.send("a")

        class Stalled(Delays):
            async def put(self, *told: Any, **more: Any) -> None:
                await ward.log.set_fence(Fence("billing/orders/0", 8))  # meanwhile another one took over
                await super().put(*told, **more)

        delays = Stalled(ward.log, ladder=LADDER_MS)
        with pytest.raises(Fenced):
            await Failures(ward.log, delays).handle(GROUP, SHORT, [Failure(P0, 7, 0, "no")])
        rungs = [topic.name for topic in await ward.log.topics() if topic.name.startswith("shardyard.delay.")]
        assert [record for rung in rungs for record in await ward.all_of(rung)] == []
        assert await ward.all_of(RETRY) == []

    tell(story)


def test_records_far_apart_are_found_and_handled_together(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ward.send(*(f"r{i}" for i in range(600)))
        offsets = [599, 0, 1, 77, 150, 420, 421]
        failures = [Failure(P0, 1, offset, f"no {offset}") for offset in [*offsets, 77]]
        outcomes = await ward.failures.handle(GROUP, AT_ONCE_DEAD, failures)
        assert [outcome.failure for outcome in outcomes] == failures
        assert {outcome.fate for outcome in outcomes} == {Fate.DEAD}
        letters = await dead(ward.log, GROUP, TOPIC)
        assert len(letters) == len(offsets), "the one named twice died once"
        assert {(d.record.id, d.reason, d.origin) for d in letters} == {
            (f"r{o}", f"no {o}", f"orders/0/{o}") for o in offsets
        }

    tell(story)


def test_what_was_trimmed_away_is_gone_and_what_never_was_is_an_error(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ward.send("a", "b", "c")
        await ward.log.trim(P0, 2)
        failures = [Failure(P0, 1, offset, "no") for offset in range(3)]
        for beyond in (3, 4):
            with pytest.raises(OffsetBeyondEnd):
                await ward.failures.handle(GROUP, AT_ONCE_DEAD, [*failures, Failure(P0, 1, beyond, "no")])
        assert await ward.dead_ids() == []
        outcomes = await ward.failures.handle(GROUP, AT_ONCE_DEAD, failures)
        assert [outcome.fate for outcome in outcomes] == [Fate.GONE, Fate.GONE, Fate.DEAD]
        assert await ward.dead_ids() == ["c"]
        assert await ward.failures.handle(GROUP, SHORT, []) == []

    tell(story)


def test_headers_of_ours_that_a_publisher_set_mean_nothing(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        ours = tuple((name, b"7") for name in (ATTEMPT, ORIGIN, PUBLISHED, ERROR, DIED, REDRIVEN, "shardyard-due"))
        await ward.send("a", headers=(("mine", b"1"), *ours, ("mine", b"2")))
        (outcome,) = await ward.failures.handle(GROUP, SHORT, [Failure(P0, 1, 0, "no")])
        assert (outcome.fate, outcome.attempts) == (Fate.RETRY, 1)
        async with ward.scheduling():
            (record,) = await ward.until_all_of(RETRY, 1)
        assert told(record) == (b"1", b"orders/0/0", b"no")
        assert [h for h in record.headers if not h[0].startswith("shardyard-")] == [("mine", b"1"), ("mine", b"2")]
        assert published_of(record) == (await ward.all_of(TOPIC))[0].timestamp
        assert len(record.headers) == 6

    tell(story)


@pytest.mark.parametrize("attempt", [b"", b"-3", b"1.5", b"many", b"\xff", b"9" * 40, "٣".encode()])
def test_garbage_on_the_retry_topic_counts_as_a_first_failure(attempt: bytes) -> None:
    async def story() -> None:
        async with MemoryLog() as log:
            await log.create_topic(TOPIC, 1)
            await ensure_retry_topics(log, GROUP, [TOPIC])
            at = Partition(RETRY, 0)
            for origin in (b"\xff", b"orders", b"orders/x/1", b"a b/1/2"):
                await log.append(at, [Record("r", None, b"", ((ATTEMPT, attempt), (ORIGIN, origin)))])
            failures = [Failure(at, 1, offset, "no") for offset in range(4)]
            outcomes = await Failures(log, Delays(log)).handle(GROUP, AT_ONCE_DEAD, failures)
            assert [outcome.attempts for outcome in outcomes] == [1] * 4
            letters = await dead(log, GROUP, TOPIC)
            assert [letter.origin for letter in letters] == [f"{RETRY}/0/{i}" for i in (3, 2, 1, 0)]

    asyncio.run(story())


def test_garbage_on_the_dead_letter_topic_is_listed_and_driven_again(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ward.kill("a")
        at = Partition(DEAD, 0)
        ours = tuple((name, b"\xff") for name in (ATTEMPT, ORIGIN, ERROR, DIED, REDRIVEN))
        await ward.log.append(at, [Record("odd", None, b"", ours, 5), Record("ahead", None, b"", ((REDRIVEN, b"2"),))])
        letters = {letter.record.id: letter for letter in await dead(ward.log, GROUP, TOPIC)}
        assert letters.keys() == {"a", "odd", "ahead"}
        odd = letters["odd"]
        assert (odd.reason, odd.attempts, odd.origin, odd.died_at) == ("\ufffd", 0, None, 5)
        assert odd.record.headers == ()
        assert await redrive(ward.log, GROUP, TOPIC) == 3
        assert {record.id for record in await ward.all_of(RETRY)} == {"a", "odd", "ahead"}

    tell(story)


def test_one_that_fails_on_the_dead_letter_topic_stays_there(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ward.kill("a")
        topics = await ward.log.topics()
        (outcome,) = await ward.failures.handle(GROUP, SHORT, [Failure(Partition(DEAD, 0), 1, 0, "no")])
        assert (outcome.fate, outcome.attempts) == (Fate.DEAD, 1)
        assert await ward.log.topics() == topics
        assert [(d.record.id, d.reason) for d in await dead(ward.log, GROUP, TOPIC)] == [("a", "no a")]

    tell(story)


def test_another_group_has_failures_of_its_own(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ward.kill("a")
        await ward.failures.handle("shipping", AT_ONCE_DEAD, [Failure(Partition(DEAD, 0), 1, 0, "no")])
        (letter,) = await dead(ward.log, "shipping", DEAD)
        assert (letter.attempts, letter.origin, letter.reason) == (1, f"{DEAD}/0/0", "no")
        assert await dead(ward.log, "shipping", TOPIC) == []

    tell(story)


def test_failures_of_a_topic_that_moved_go_where_the_members_read(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ensure_retry_topics(ward.log, GROUP, [TOPIC])
        await ward.log.create_topic("orders.2", 1)
        await ward.log.seal_topic(TOPIC, HOLDER)
        await move(ward.log, TOPIC, "orders.2")
        at = Partition("orders.2", 0)
        await ward.send("a", "b", partition=at)
        async with ward.scheduling():
            await ward.failures.handle(GROUP, SHORT, [Failure(at, 1, 0, "no")])
            (record,) = await ward.until_all_of(RETRY, 1)
        assert told(record) == (b"1", b"orders.2/0/0", b"no")
        await ward.failures.handle(GROUP, AT_ONCE_DEAD, [Failure(at, 1, 1, "no")])
        assert [d.record.id for d in await dead(ward.log, GROUP, "orders.2")] == ["b"]
        assert await ward.dead_ids() == ["b"]
        await ensure_retry_topics(ward.log, GROUP, ["orders.2"])
        await ward.failures.handle(GROUP, AT_ONCE_DEAD, [Failure(at, 1, 1, "no")])
        assert [d.partition.topic for d in await dead(ward.log, GROUP, "orders.2")] == ["billing.orders.2.dead"]

    tell(story)


def test_records_at_the_limit_are_kept_without_headers_and_hold_up_nobody(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        limit = Limits().record_bytes
        for i, size in enumerate((limit, 1_000, 600_000, limit - 130, 1_000)):
            await ward.log.append(P0, [Record(f"r{i}", None, b"v" * size)])
        failures = [Failure(P0, 1, offset, "no") for offset in range(5)]
        fates = [outcome.fate for outcome in await ward.failures.handle(GROUP, SHORT, failures)]
        assert fates == [Fate.DEAD, Fate.RETRY, Fate.RETRY, Fate.DEAD, Fate.RETRY]
        letters = {letter.record.id: letter for letter in await dead(ward.log, GROUP, TOPIC)}
        assert {i: (d.attempts, d.reason, len(d.record.value)) for i, d in letters.items()} == {
            "r0": (0, "", limit),
            "r3": (1, "no", limit - 130),
        }
        async with ward.scheduling():
            await ward.until_all_of(RETRY, 3)
        assert sorted(record.id for record in await ward.all_of(RETRY)) == ["r1", "r2", "r4"]

    tell(story)


def test_a_log_that_takes_only_small_batches_gets_several() -> None:
    async def story() -> None:
        async with MemoryLog(limits=Limits(record_bytes=4_000, batch_bytes=10_000)) as log:
            await log.create_topic(TOPIC, 1)
            for i in range(9):
                await log.append(P0, [Record(f"r{i}", None, b"v" * 3_000)])
            failures = [Failure(P0, 1, offset, "no") for offset in range(9)]
            handler = Failures(log, Delays(log, ladder=LADDER_MS))
            for settings, fate in ((SHORT, Fate.RETRY), (AT_ONCE_DEAD, Fate.DEAD)):
                outcomes = await handler.handle(GROUP, settings, failures)
                assert [outcome.fate for outcome in outcomes] == [fate] * 9
            rungs = [topic for topic in await log.topics() if topic.name.startswith("shardyard.delay.")]
            waiting = {record.id for rung in rungs for p in rung for record in await contents(log, p)}
            assert waiting == {f"r{i}" for i in range(9)}
            assert [letter.record.id for letter in await dead(log, GROUP, TOPIC)] == [f"r{i}" for i in range(8, -1, -1)]

    asyncio.run(story())


# Dead letters


def test_no_dead_letters_are_no_error_but_no_topic_is(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        assert await dead(ward.log, GROUP, TOPIC) == []
        assert await redrive(ward.log, GROUP, TOPIC) == 0
        assert [topic.name for topic in await ward.log.topics()] == [TOPIC]
        for call in (dead, redrive):
            with pytest.raises(UnknownTopic, match="'nowhere'"):
                await call(ward.log, GROUP, "nowhere")
        for limit in (0, -1, "x"):
            with pytest.raises(InvalidValue, match="limit"):
                await dead(ward.log, GROUP, TOPIC, limit=limit)  # type: ignore[arg-type]
        with pytest.raises(InvalidValue, match="ids"):
            await redrive(ward.log, GROUP, TOPIC, ids="abc")
        with pytest.raises(InvalidValue, match=r"ids is \['abc'\]"):
            await redrive(ward.log, GROUP, TOPIC, ids=["abc"])

    tell(story)


def test_dead_letters_are_listed_newest_first_page_by_page(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        died: list[str] = []
        for turn in range(4):
            ids = [f"{turn}-{i:03}" for i in range(70)]
            await ward.kill(*ids, partition=Partition(TOPIC, turn % 2))
            died += ids
            await asyncio.sleep(0.003)  # another time of death
        whole = await dead(ward.log, GROUP, TOPIC, limit=1000)
        assert [letter.record.id for letter in whole] == died[::-1]
        assert [letter.record.id for letter in await dead(ward.log, GROUP, TOPIC)] == died[:-101:-1]
        for size in (1, 7, 110):
            pages: list[Dead] = []
            while page := await dead(ward.log, GROUP, TOPIC, size, pages[-1].order if pages else None):
                assert len(page) <= size
                pages += page
                if size == 1 and len(pages) == 75:
                    break
            assert pages == whole[: len(pages)]
            assert size == 1 or len(pages) == len(whole)

    tell(story)


def test_a_dead_letter_that_seems_younger_than_later_ones_is_on_no_page_twice_and_on_one(
    tell: Callable[[Story], None],
) -> None:
    async def story(ward: Ward) -> None:
        await ward.kill("made the topic")
        await redrive(ward.log, GROUP, TOPIC)
        for i, died in enumerate((50, 90, 60, 10, 70)):
            await ward.log.append(Partition(DEAD, i % 2), [Record(f"d{died}", None, b"", ((DIED, b"%d" % died),))])
        pages: list[Dead] = []
        while page := await dead(ward.log, GROUP, TOPIC, 1, pages[-1].order if pages else None):
            pages += page
        assert sorted(letter.died_at for letter in pages) == [10, 50, 60, 70, 90]
        assert pages == await dead(ward.log, GROUP, TOPIC)

    tell(story)


def test_all_are_driven_again_and_delivered_on_the_retry_topic(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        ids = [f"r{i}" for i in range(250)]
        await ward.kill(*ids)
        assert await redrive(ward.log, GROUP, TOPIC) == 250
        assert await ward.dead_ids() == []
        assert await redrive(ward.log, GROUP, TOPIC) == 0
        assert await ward.all_of(DEAD) == [], "their room is given back"
        topics = await ensure_retry_topics(ward.log, GROUP, [TOPIC])
        got: dict[str, Record] = {}
        member = Reader(GROUP, [t for t in topics if t != TOPIC], node=ward.yard.node, session_timeout=2.0)
        async with member, asyncio.timeout(PATIENCE_SECONDS):
            async for batch in member:
                got |= {record.id: record for record in batch.records()}
                outcomes = await ward.failures.handle(
                    GROUP,
                    AT_ONCE_DEAD,
                    [
                        Failure(batch.partition, batch.epoch, offset, "again")
                        for offset in range(batch.first, batch.end)
                    ],
                )
                assert {outcome.attempts for outcome in outcomes} == {1}, "it begins anew"
                await batch.commit()
                if len(got) == len(ids):
                    break
        assert got.keys() == set(ids)
        assert told(got["r17"]) == (None, b"orders/0/17", None)
        assert (got["r17"].key, got["r17"].value) == (b"r17", b"value of r17")
        letters = {letter.record.id: letter for letter in await dead(ward.log, GROUP, TOPIC, limit=1000)}
        assert letters.keys() == set(ids)
        assert letters["r17"].origin == "orders/0/17"
        published = (await contents(ward.log, P0))[17].timestamp
        assert letters["r17"].published == letters["r17"].record.timestamp == published

    tell(story)


def test_letters_whose_topic_and_retry_topic_are_gone_stay_as_nobody_could_read_them(
    tell: Callable[[Story], None],
) -> None:
    async def story(ward: Ward) -> None:
        await ward.kill("a")
        await ward.log.delete_topic(TOPIC)
        with pytest.raises(UnknownTopic, match="'orders'"):
            await redrive(ward.log, GROUP, TOPIC)
        assert [topic.name for topic in await ward.log.topics()] == [DEAD]
        assert await ward.dead_ids() == ["a"]
        await ward.log.create_topic(RETRY, 1, kind=TopicKind.RETRY)
        assert await redrive(ward.log, GROUP, TOPIC) == 1, "who still reads the retry topic gets them"

    tell(story)


def test_a_letter_says_when_it_was_published_however_often_it_failed(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ward.log.append(P0, [Record(name, None, b"", timestamp=at) for name, at in (("a", 1000), ("b", 2**62))])
        async with ward.scheduling():
            await ward.failures.handle(GROUP, SHORT, [Failure(P0, 1, offset, "no") for offset in (0, 1)])
            await ward.until_all_of(RETRY, 2)
        again = [
            Failure(partition, 1, offset, "no")
            for partition in await ward.log.topic(RETRY)
            for offset in range((await ward.log.span(partition)).end)
        ]
        await ward.failures.handle(GROUP, AT_ONCE_DEAD, again)
        letters = {letter.record.id: letter for letter in await dead(ward.log, GROUP, TOPIC)}
        assert {name: letter.published for name, letter in letters.items()} == {"a": 1000, "b": 2**62}
        assert (letters["a"].record.timestamp, letters["a"].record.headers) == (1000, ())
        assert abs(letters["a"].died_at - time.time() * 1000) < 60_000
        await ward.log.append(Partition(DEAD, 0), [Record.new(b"mine", headers=((PUBLISHED, b"soon"),))])
        assert [letter.published for letter in await dead(ward.log, GROUP, TOPIC, limit=1)] == [None]

    tell(story)


def test_letters_of_partitions_or_topics_that_go_during_a_look_are_left_out() -> None:
    class Dropping(MemoryLog):
        """Somebody makes the dead-letter topic go once it was looked up."""

        going: Callable[[], Coroutine[Any, Any, object]] | None = None

        async def span(self, partition: Partition) -> Span:
            if (going := self.going) is not None:
                self.going = None
                await going()
            return await super().span(partition)

    async def story() -> None:
        async with Dropping() as log:
            await log.create_topic(TOPIC, 2)
            topic = await log.create_topic(DEAD, 2)
            await log.append(Partition(DEAD, 0), [Record("a", None, b"", ((DIED, b"1"),))])
            await log.append(Partition(DEAD, 1), [Record("b", None, b"", ((DIED, b"2"),))])
            await log.contract_topic(DEAD, 1)
            log.going = lambda: log.drop_partitions(DEAD, 1)
            assert [letter.record.id for letter in await dead(log, GROUP, TOPIC)] == ["a"]
            assert (await held(log, topic)).letters == 1
            log.going = lambda: log.delete_topic(DEAD)
            assert await dead(log, GROUP, TOPIC) == []

    asyncio.run(story())


def test_single_ones_are_driven_again_once(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ward.kill("a", "b", "c", "d", "e")
        with pytest.raises(
            InvalidValue, match=r"ids is \['nobody', 'x'\]: .* see `shardyard dead list billing orders`"
        ):
            await redrive(ward.log, GROUP, TOPIC, ids=["x", "c", "nobody"])
        assert await ward.dead_ids() == ["e", "d", "c", "b", "a"], "nothing was driven again"
        assert not [topic for topic in await ward.log.topics() if topic.name == RETRY]
        assert await redrive(ward.log, GROUP, TOPIC, ids=[]) == 0
        assert await redrive(ward.log, GROUP, TOPIC, ids=["c"]) == 1
        with pytest.raises(InvalidValue, match=r"ids is \['c'\]"):
            await redrive(ward.log, GROUP, TOPIC, ids=["c"])
        assert await ward.dead_ids() == ["e", "d", "b", "a"]
        assert (await ward.log.span(Partition(DEAD, 0))).first == 0
        assert await redrive(ward.log, GROUP, TOPIC, ids={"a", "b", "e"}) == 3
        assert (await ward.log.span(Partition(DEAD, 0))).first == 3, "a, b, and c that was marked"
        assert [letter.record.id for letter in await dead(ward.log, GROUP, TOPIC, limit=1)] == ["d"]
        await ward.kill("f", "c")
        assert await ward.dead_ids() == ["c", "f", "d"], "it may die again"
        assert await redrive(ward.log, GROUP, TOPIC) == 3
        assert await ward.all_of(DEAD) == []
        assert sorted(record.id for record in await ward.all_of(RETRY)) == ["a", "b", "c", "c", "d", "e", "f"]

    tell(story)


def test_two_who_drive_again_at_once_lose_nothing(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        ids = [f"r{i}" for i in range(300)]
        await ward.kill(*ids)
        await ward.kill("x", "y", partition=Partition(TOPIC, 1))
        some = ids[1::2]

        async def again(wanted: Sequence[str] | None) -> None:
            with contextlib.suppress(InvalidValue):  # the other one had them all
                await redrive(ward.log, GROUP, TOPIC, ids=wanted)

        await asyncio.gather(again(some), again(some))
        assert set(await ward.dead_ids()) <= {*ids[::2], "x", "y"}
        assert {letter.record.id for letter in await dead(ward.log, GROUP, TOPIC, 1000)} == {*ids[::2], "x", "y"}
        assert {record.id for record in await ward.all_of(RETRY)} == set(some)
        await asyncio.gather(again(None), again(None), again(["r2", "x"]), ward.kill("late"))
        left = await ward.dead_ids()
        assert set(left) <= {"late"}
        assert {record.id for record in await ward.all_of(RETRY)} | set(left) == {*ids, "x", "y", "late"}

    tell(story)


def test_letters_survive_a_redrive_that_breaks_off(tell: Callable[[Story], None]) -> None:
    async def story(ward: Ward) -> None:
        await ward.kill("a", "b")
        await redrive(ward.log, GROUP, TOPIC)
        await ward.kill("c", "d")
        await ward.log.seal_topic(RETRY, HOLDER)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(redrive(ward.log, GROUP, TOPIC), 0.1)
        assert await ward.dead_ids() == ["d", "c"]
        await ward.log.unseal_topic(RETRY, HOLDER)
        assert await redrive(ward.log, GROUP, TOPIC) == 2
        assert sorted(record.id for record in await ward.all_of(RETRY)) == ["a", "b", "c", "d"]

    tell(story)
