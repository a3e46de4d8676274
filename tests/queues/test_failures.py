"""Failed records: retried with back-off, dead letters after the last retry, and redriven. With real delays."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardyard.groups import Node, OwnedBatch, Reader
from shardyard.log import Log
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
from shardyard.queues.dead_letters import DeadLetter, count_dead_letters, list_dead_letters
from shardyard.queues.delays import Delays, Scheduler
from shardyard.queues.failures import Disposition, Failure, Failures
from shardyard.queues.redrive import redrive
from shardyard.queues.retry_topics import dead_topic, ensure_retry_topics, original_topic, published_of, retry_topic
from shardyard.runtime.clock import Clock, ManualClock
from shardyard.wire.headers import ATTEMPT, DIED, ERROR, ORIGIN, PUBLISHED, REDRIVEN
from shardyard.wire.settings import GroupSettings
from tests.log.samples import HOLDER, move
from tests.queues.engines import ENGINES, FAILURES
from tests.queues.stored import contents, offsets

GROUP, TOPIC = "billing", "orders"
PARTITIONS = 4
TIMEOUT_SECONDS = 60.0
RETRY, DEAD = "billing.orders.retry", "billing.orders.dead"
LADDER_MS = (20, 100, 500)
P0 = Partition(TOPIC, 0)
NO_RETRIES = GroupSettings(backoff=())
SHORT = GroupSettings(backoff=(0.05, 0.15))

Scenario = Callable[["Environment"], Coroutine[Any, Any, None]]


class Environment:
    """A log with a topic, a node, and the handling of failures."""

    def __init__(self, log: Log, node: Node) -> None:
        self.log, self.node = log, node
        self.failures = Failures(log, Delays(log, ladder=LADDER_MS))

    @contextlib.asynccontextmanager
    async def scheduling(self) -> AsyncIterator[None]:
        running = asyncio.create_task(Scheduler(self.node, ladder=LADDER_MS, session_timeout=2.0).run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def send(self, *ids: str, partition: Partition = P0, headers: Headers = ()) -> list[int]:
        """Append records with these ids. Returns their offsets."""
        await self.log.append(partition, [Record(i, i.encode(), b"value of " + i.encode(), headers) for i in ids])
        return (await offsets(self.log, partition))[-len(ids) :]

    async def kill(self, *ids: str, partition: Partition = P0, clock: Clock | None = None) -> None:
        """Let records with these ids become dead letters, together."""
        at = await self.send(*ids, partition=partition)
        failures = [Failure(partition, 1, offset, f"no {id_}") for offset, id_ in zip(at, ids, strict=True)]
        handler = self.failures if clock is None else Failures(self.log, Delays(self.log), clock=clock)
        await handler.handle(GROUP, NO_RETRIES, failures)

    async def dead_ids(self) -> list[str]:
        return [letter.record.id for letter in await list_dead_letters(self.log, GROUP, TOPIC)]

    async def all_of(self, topic: str) -> list[Record]:
        return [r for partition in await self.log.topic(topic) for r in await contents(self.log, partition)]

    async def until_all_of(self, topic: str, count: int) -> list[Record]:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while len(found := await self.all_of(topic)) < count:  # noqa: ASYNC110 it is the state of the log
                await asyncio.sleep(0.005)
        return found


@pytest.fixture(params=FAILURES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario on an engine."""
    engine = ENGINES[request.param]

    def run_scenario(scenario: Scenario) -> None:
        async def with_environment() -> None:
            with engine.open_registry(tmp_path) as registry:
                async with engine.log(tmp_path) as log, Node(log, registry) as node:
                    await log.create_topic(TOPIC, PARTITIONS)
                    await scenario(Environment(log, node))

        asyncio.run(with_environment())

    return run_scenario


def failure_headers(record: Record) -> tuple[bytes | None, bytes | None, bytes | None]:
    return record.header(ATTEMPT), record.header(ORIGIN), record.header(ERROR)


def test_a_retry_topic_is_never_nested() -> None:
    assert (retry_topic(GROUP, TOPIC), dead_topic(GROUP, TOPIC)) == (RETRY, DEAD)
    assert (retry_topic(GROUP, RETRY), dead_topic(GROUP, RETRY)) == (RETRY, DEAD)
    assert original_topic(GROUP, RETRY) == TOPIC
    for other in (TOPIC, DEAD, "shipping.orders.retry", "billing.retry", "orders.retry"):
        assert original_topic(GROUP, other) == other


def test_each_topic_gets_one_small_retry_topic(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await env.log.create_topic("wide", 9)
        wanted = [TOPIC, RETRY, "wide", "billing.wide.retry"]
        for result in await asyncio.gather(*(ensure_retry_topics(env.log, GROUP, [TOPIC, "wide"]) for _ in range(3))):
            assert result == wanted
        assert await ensure_retry_topics(env.log, GROUP, wanted) == wanted
        assert await ensure_retry_topics(env.log, GROUP, [DEAD]) == [DEAD]
        made = {topic.name: (topic.partitions, topic.kind) for topic in await env.log.topics()}
        assert made[RETRY] == made["billing.wide.retry"] == (4, TopicKind.RETRY)
        assert len(made) == 4
        with pytest.raises(UnknownTopic):
            await ensure_retry_topics(env.log, GROUP, ["nowhere"])
        with pytest.raises(TooLarge, match="topic name"):
            await ensure_retry_topics(env.log, "g" * 200, [TOPIC])
        with pytest.raises(InvalidValue, match="topic name"):
            await ensure_retry_topics(env.log, "a group", [TOPIC])

    run(scenario)


def test_a_record_is_retried_and_dies_while_others_are_handled(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        seen: list[tuple[str, str, bytes | None]] = []
        dues: list[int] = []
        late: list[bool] = []

        async def consume(batch: OwnedBatch) -> bool:
            failed = []
            for offset, record in zip(batch.offsets(), batch.records(), strict=True):
                seen.append((record.id, batch.partition.topic, record.header(ATTEMPT)))
                if record.id == "bad":
                    late.append(not dues or time.time() * 1000 >= dues[-1])
                    failed.append(Failure(batch.partition, batch.epoch, offset, f"failure {len(late)}"))
            outcomes = await env.failures.handle(GROUP, SHORT, failed)
            await batch.commit()
            dues.extend(outcome.due for outcome in outcomes if outcome.due is not None)
            return any(outcome.disposition is Disposition.DEAD for outcome in outcomes)

        _, at_bad, _ = await env.send("before", "bad", "after", headers=(("tag", b"x"),))
        topics = await ensure_retry_topics(env.log, GROUP, [TOPIC])
        member = Reader(GROUP, topics, node=env.node, session_timeout=2.0)
        began = time.time() * 1000
        async with env.scheduling(), member, asyncio.timeout(TIMEOUT_SECONDS):
            async for batch in member:
                if await consume(batch):
                    break
        assert seen[:3] == [("before", TOPIC, None), ("bad", TOPIC, None), ("after", TOPIC, None)]
        assert seen[3:] == [("bad", RETRY, b"1"), ("bad", RETRY, b"2")]
        assert late == [True] * 3, "none was delivered before it was due"
        assert began + 50 <= dues[0]
        assert dues[0] + 150 <= dues[1]
        (letter,) = await list_dead_letters(env.log, GROUP, TOPIC)
        assert (letter.reason, letter.attempts, letter.origin) == ("failure 3", 3, f"orders/0/{at_bad}")
        assert letter.record.headers == (("tag", b"x"),)
        assert (letter.record.id, letter.record.key, letter.record.value) == ("bad", b"bad", b"value of bad")
        assert dues[1] <= letter.died_at <= time.time() * 1000

    run(scenario)


def test_the_headers_of_a_record_while_it_is_retried(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        at_once = GroupSettings(backoff=(0.001,) * 3)
        async with env.scheduling():
            (at,) = await env.send("a", partition=Partition(TOPIC, 3))
            origin = b"orders/3/%d" % at
            failed = Failure(Partition(TOPIC, 3), 1, at, "x" * 2000)
            for attempt in (1, 2, 3):
                (outcome,) = await env.failures.handle(GROUP, at_once, [failed])
                assert (outcome.disposition, outcome.attempts) == (Disposition.RETRY, attempt)
                record = (await env.until_all_of(RETRY, attempt))[-1]
                reason = b"x" * 1000 if attempt == 1 else b"half a pair: ?"
                assert failure_headers(record) == (b"%d" % attempt, origin, reason)
                (partition,) = [p for p in await env.log.topic(RETRY) if await offsets(env.log, p)]
                failed = Failure(partition, 1, (await offsets(env.log, partition))[-1], "half a pair: \ud800")
            (outcome,) = await env.failures.handle(GROUP, at_once, [failed])
            assert (outcome.disposition, outcome.attempts, outcome.due) == (Disposition.DEAD, 4, None)

    run(scenario)


def test_a_shorter_backoff_applies_to_records_that_are_being_retried(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await ensure_retry_topics(env.log, GROUP, [TOPIC])
        on_retry = Partition(RETRY, 0)
        (at,) = await env.send("a", partition=on_retry, headers=((ATTEMPT, b"4"), (ORIGIN, b"orders/1/2")))
        (outcome,) = await env.failures.handle(GROUP, SHORT, [Failure(on_retry, 1, at, "no")])
        assert (outcome.disposition, outcome.attempts) == (Disposition.DEAD, 5)

    run(scenario)


def test_a_stale_owner_is_refused_and_nothing_is_stored(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await ensure_retry_topics(env.log, GROUP, [TOPIC])
        (at_a,) = await env.send("a")
        (at_b,) = await env.send("b", partition=Partition(TOPIC, 1))
        await env.log.set_fence(Fence("billing/orders/1", 8))
        before = await env.log.topics()
        failures = [Failure(P0, 7, at_a, "no"), Failure(Partition(TOPIC, 1), 7, at_b, "no")]
        for settings in (SHORT, NO_RETRIES):
            with pytest.raises(Fenced):
                await env.failures.handle(GROUP, settings, failures)
        assert await env.log.topics() == before, "neither a rung nor a dead-letter topic was needed"
        assert await env.all_of(RETRY) == []

    run(scenario)


def test_an_owner_that_stalls_before_it_stores_is_fenced_as_well(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await ensure_retry_topics(env.log, GROUP, [TOPIC])
        (at,) = await env.send("a")

        class Stalled(Delays):
            async def put(self, *arguments: Any, **options: Any) -> None:
                await env.log.set_fence(Fence("billing/orders/0", 8))  # meanwhile another member took over
                await super().put(*arguments, **options)

        delays = Stalled(env.log, ladder=LADDER_MS)
        with pytest.raises(Fenced):
            await Failures(env.log, delays).handle(GROUP, SHORT, [Failure(P0, 7, at, "no")])
        rungs = [topic.name for topic in await env.log.topics() if topic.name.startswith("shardyard.delay.")]
        assert [record for rung in rungs for record in await env.all_of(rung)] == []
        assert await env.all_of(RETRY) == []

    run(scenario)


def test_records_far_apart_are_found_and_handled_together(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        at = await env.send(*(f"r{i}" for i in range(600)))
        numbers = [599, 0, 1, 77, 150, 420, 421]
        failures = [Failure(P0, 1, at[number], f"no {number}") for number in [*numbers, 77]]
        outcomes = await env.failures.handle(GROUP, NO_RETRIES, failures)
        assert [outcome.failure for outcome in outcomes] == failures
        assert {outcome.disposition for outcome in outcomes} == {Disposition.DEAD}
        letters = await list_dead_letters(env.log, GROUP, TOPIC)
        assert len(letters) == len(numbers), "the one named twice died once"
        assert {(d.record.id, d.reason, d.origin) for d in letters} == {
            (f"r{n}", f"no {n}", f"orders/0/{at[n]}") for n in numbers
        }

    run(scenario)


def test_a_trimmed_record_is_gone_and_one_that_never_existed_is_an_error(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        at = await env.send("a", "b", "c")
        await env.log.trim(P0, at[2])
        failures = [Failure(P0, 1, offset, "no") for offset in at]
        end = (await env.log.span(P0)).end
        for beyond in (end, end + 1):
            with pytest.raises(OffsetBeyondEnd):
                await env.failures.handle(GROUP, NO_RETRIES, [*failures, Failure(P0, 1, beyond, "no")])
        assert await env.dead_ids() == []
        outcomes = await env.failures.handle(GROUP, NO_RETRIES, failures)
        assert [outcome.disposition for outcome in outcomes] == [Disposition.GONE, Disposition.GONE, Disposition.DEAD]
        assert await env.dead_ids() == ["c"]
        assert await env.failures.handle(GROUP, SHORT, []) == []

    run(scenario)


def test_reserved_headers_that_a_publisher_set_mean_nothing(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        ours = tuple((name, b"7") for name in (ATTEMPT, ORIGIN, PUBLISHED, ERROR, DIED, REDRIVEN, "shardyard-due"))
        (at,) = await env.send("a", headers=(("mine", b"1"), *ours, ("mine", b"2")))
        (outcome,) = await env.failures.handle(GROUP, SHORT, [Failure(P0, 1, at, "no")])
        assert (outcome.disposition, outcome.attempts) == (Disposition.RETRY, 1)
        async with env.scheduling():
            (record,) = await env.until_all_of(RETRY, 1)
        assert failure_headers(record) == (b"1", b"orders/0/%d" % at, b"no")
        assert [h for h in record.headers if not h[0].startswith("shardyard-")] == [("mine", b"1"), ("mine", b"2")]
        assert published_of(record) == (await env.all_of(TOPIC))[0].timestamp
        assert len(record.headers) == 6

    run(scenario)


@pytest.mark.parametrize("attempt", [b"", b"-3", b"1.5", b"many", b"\xff", b"9" * 40, "٣".encode()])
def test_garbage_on_the_retry_topic_counts_as_a_first_failure(attempt: bytes) -> None:
    async def scenario() -> None:
        async with MemoryLog() as log:
            await log.create_topic(TOPIC, 1)
            await ensure_retry_topics(log, GROUP, [TOPIC])
            at = Partition(RETRY, 0)
            for origin in (b"\xff", b"orders", b"orders/x/1", b"a b/1/2"):
                await log.append(at, [Record("r", None, b"", ((ATTEMPT, attempt), (ORIGIN, origin)))])
            failures = [Failure(at, 1, offset, "no") for offset in range(4)]
            outcomes = await Failures(log, Delays(log)).handle(GROUP, NO_RETRIES, failures)
            assert [outcome.attempts for outcome in outcomes] == [1] * 4
            letters = await list_dead_letters(log, GROUP, TOPIC)
            assert [letter.origin for letter in letters] == [f"{RETRY}/0/{i}" for i in (3, 2, 1, 0)]

    asyncio.run(scenario())


def test_garbage_on_the_dead_letter_topic_is_listed_and_redriven(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await env.kill("a")
        at = Partition(DEAD, 0)
        ours = tuple((name, b"\xff") for name in (ATTEMPT, ORIGIN, ERROR, DIED, REDRIVEN))
        ahead = ((REDRIVEN, b"1000"),)
        await env.log.append(at, [Record("odd", None, b"", ours, 5), Record("ahead", None, b"", ahead)])
        letters = {letter.record.id: letter for letter in await list_dead_letters(env.log, GROUP, TOPIC)}
        assert letters.keys() == {"a", "odd", "ahead"}
        odd = letters["odd"]
        assert (odd.reason, odd.attempts, odd.origin, odd.died_at) == ("\ufffd", 0, None, 5)
        assert odd.record.headers == ()
        assert await redrive(env.log, GROUP, TOPIC) == 3
        assert {record.id for record in await env.all_of(RETRY)} == {"a", "odd", "ahead"}

    run(scenario)


def test_a_record_that_fails_on_the_dead_letter_topic_stays_there(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await env.kill("a")
        topics = await env.log.topics()
        (at,) = await offsets(env.log, Partition(DEAD, 0))
        (outcome,) = await env.failures.handle(GROUP, SHORT, [Failure(Partition(DEAD, 0), 1, at, "no")])
        assert (outcome.disposition, outcome.attempts) == (Disposition.DEAD, 1)
        assert await env.log.topics() == topics
        assert [(d.record.id, d.reason) for d in await list_dead_letters(env.log, GROUP, TOPIC)] == [("a", "no a")]

    run(scenario)


def test_another_group_has_failures_of_its_own(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await env.kill("a")
        (at,) = await offsets(env.log, Partition(DEAD, 0))
        await env.failures.handle("shipping", NO_RETRIES, [Failure(Partition(DEAD, 0), 1, at, "no")])
        (letter,) = await list_dead_letters(env.log, "shipping", DEAD)
        assert (letter.attempts, letter.origin, letter.reason) == (1, f"{DEAD}/0/{at}", "no")
        assert await list_dead_letters(env.log, "shipping", TOPIC) == []

    run(scenario)


def test_failures_of_a_topic_that_moved_go_where_the_members_read(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await ensure_retry_topics(env.log, GROUP, [TOPIC])
        await env.log.create_topic("orders.2", 1)
        await env.log.seal_topic(TOPIC, HOLDER)
        await move(env.log, TOPIC, "orders.2")
        moved = Partition("orders.2", 0)
        at_a, at_b = await env.send("a", "b", partition=moved)
        async with env.scheduling():
            await env.failures.handle(GROUP, SHORT, [Failure(moved, 1, at_a, "no")])
            (record,) = await env.until_all_of(RETRY, 1)
        assert failure_headers(record) == (b"1", b"orders.2/0/%d" % at_a, b"no")
        await env.failures.handle(GROUP, NO_RETRIES, [Failure(moved, 1, at_b, "no")])
        assert [d.record.id for d in await list_dead_letters(env.log, GROUP, "orders.2")] == ["b"]
        assert await env.dead_ids() == ["b"]
        await ensure_retry_topics(env.log, GROUP, ["orders.2"])
        await env.failures.handle(GROUP, NO_RETRIES, [Failure(moved, 1, at_b, "no")])
        assert [d.partition.topic for d in await list_dead_letters(env.log, GROUP, "orders.2")] == [
            "billing.orders.2.dead"
        ]

    run(scenario)


def test_records_at_the_size_limit_are_kept_without_headers_and_block_no_other(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        limit = Limits().record_bytes
        for i, size in enumerate((limit, 1_000, 600_000, limit - 130, 1_000)):
            await env.log.append(P0, [Record(f"r{i}", None, b"v" * size)])
        failures = [Failure(P0, 1, offset, "no") for offset in await offsets(env.log, P0)]
        clock = ManualClock(time.time())  # it stands still: a retry that is due already needs no headers for waiting
        handler = Failures(env.log, Delays(env.log, ladder=LADDER_MS, clock=clock), clock=clock)
        fates = [outcome.disposition for outcome in await handler.handle(GROUP, SHORT, failures)]
        assert fates == [Disposition.DEAD, Disposition.RETRY, Disposition.RETRY, Disposition.DEAD, Disposition.RETRY]
        letters = {letter.record.id: letter for letter in await list_dead_letters(env.log, GROUP, TOPIC)}
        assert {i: (d.attempts, d.reason, len(d.record.value)) for i, d in letters.items()} == {
            "r0": (0, "", limit),
            "r3": (1, "no", limit - 130),
        }
        async with env.scheduling():
            await env.until_all_of(RETRY, 3)
        assert sorted(record.id for record in await env.all_of(RETRY)) == ["r1", "r2", "r4"]

    run(scenario)


def test_a_log_that_takes_only_small_batches_gets_several() -> None:
    async def scenario() -> None:
        async with MemoryLog(limits=Limits(record_bytes=4_000, batch_bytes=10_000)) as log:
            await log.create_topic(TOPIC, 1)
            for i in range(9):
                await log.append(P0, [Record(f"r{i}", None, b"v" * 3_000)])
            failures = [Failure(P0, 1, offset, "no") for offset in range(9)]
            handler = Failures(log, Delays(log, ladder=LADDER_MS))
            later = GroupSettings(backoff=(60.0,))
            for settings, disposition in ((later, Disposition.RETRY), (NO_RETRIES, Disposition.DEAD)):
                outcomes = await handler.handle(GROUP, settings, failures)
                assert [outcome.disposition for outcome in outcomes] == [disposition] * 9
            rungs = [topic for topic in await log.topics() if topic.name.startswith("shardyard.delay.")]
            waiting = {record.id for rung in rungs for p in rung for record in await contents(log, p)}
            assert waiting == {f"r{i}" for i in range(9)}
            assert [letter.record.id for letter in await list_dead_letters(log, GROUP, TOPIC)] == [
                f"r{i}" for i in range(8, -1, -1)
            ]

    asyncio.run(scenario())


# Dead letters


def test_having_no_dead_letters_is_no_error_but_an_unknown_topic_is(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        assert await list_dead_letters(env.log, GROUP, TOPIC) == []
        assert await redrive(env.log, GROUP, TOPIC) == 0
        assert [topic.name for topic in await env.log.topics()] == [TOPIC]
        for call in (list_dead_letters, redrive):
            with pytest.raises(UnknownTopic, match="'nowhere'"):
                await call(env.log, GROUP, "nowhere")
        for limit in (0, -1, "x"):
            with pytest.raises(InvalidValue, match="limit"):
                await list_dead_letters(env.log, GROUP, TOPIC, limit=limit)  # type: ignore[arg-type]
        with pytest.raises(InvalidValue, match="ids"):
            await redrive(env.log, GROUP, TOPIC, ids="abc")
        with pytest.raises(InvalidValue, match=r"ids is \['abc'\]"):
            await redrive(env.log, GROUP, TOPIC, ids=["abc"])

    run(scenario)


def test_dead_letters_are_listed_newest_first_page_by_page(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        died: list[str] = []
        clock = ManualClock()
        for turn in range(4):
            ids = [f"{turn}-{i:03}" for i in range(70)]
            await env.kill(*ids, partition=Partition(TOPIC, turn % 2), clock=clock)
            died += ids
            await clock.advance(1.0)
        whole = await list_dead_letters(env.log, GROUP, TOPIC, limit=1000)
        assert [letter.record.id for letter in whole] == died[::-1]
        assert [letter.record.id for letter in await list_dead_letters(env.log, GROUP, TOPIC)] == died[:-101:-1]
        for size in (1, 7, 110):
            pages: list[DeadLetter] = []
            while page := await list_dead_letters(env.log, GROUP, TOPIC, size, pages[-1].order if pages else None):
                assert len(page) <= size
                pages += page
                if size == 1 and len(pages) == 75:
                    break
            assert pages == whole[: len(pages)]
            assert size == 1 or len(pages) == len(whole)

    run(scenario)


def test_every_dead_letter_is_on_one_page_even_if_clocks_differ(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(env: Environment) -> None:
        await env.kill("made the topic")
        await redrive(env.log, GROUP, TOPIC)
        for i, died in enumerate((50, 90, 60, 10, 70)):
            await env.log.append(Partition(DEAD, i % 2), [Record(f"d{died}", None, b"", ((DIED, b"%d" % died),))])
        pages: list[DeadLetter] = []
        while page := await list_dead_letters(env.log, GROUP, TOPIC, 1, pages[-1].order if pages else None):
            pages += page
        assert sorted(letter.died_at for letter in pages) == [10, 50, 60, 70, 90]
        assert pages == await list_dead_letters(env.log, GROUP, TOPIC)

    run(scenario)


def test_all_are_redriven_and_delivered_on_the_retry_topic(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        ids = [f"r{i}" for i in range(250)]
        await env.kill(*ids)
        origin = f"orders/0/{(await offsets(env.log, P0))[17]}"
        assert await redrive(env.log, GROUP, TOPIC) == 250
        assert await env.dead_ids() == []
        assert await redrive(env.log, GROUP, TOPIC) == 0
        assert await env.all_of(DEAD) == [], "they were trimmed"
        topics = await ensure_retry_topics(env.log, GROUP, [TOPIC])
        got: dict[str, Record] = {}
        member = Reader(GROUP, [t for t in topics if t != TOPIC], node=env.node, session_timeout=2.0)
        async with member, asyncio.timeout(TIMEOUT_SECONDS):
            async for batch in member:
                got |= {record.id: record for record in batch.records()}
                outcomes = await env.failures.handle(
                    GROUP,
                    NO_RETRIES,
                    [Failure(batch.partition, batch.epoch, offset, "again") for offset in batch.offsets()],
                )
                assert {outcome.attempts for outcome in outcomes} == {1}, "the attempts start again"
                await batch.commit()
                if len(got) == len(ids):
                    break
        assert got.keys() == set(ids)
        assert failure_headers(got["r17"]) == (None, origin.encode(), None)
        assert (got["r17"].key, got["r17"].value) == (b"r17", b"value of r17")
        letters = {letter.record.id: letter for letter in await list_dead_letters(env.log, GROUP, TOPIC, limit=1000)}
        assert letters.keys() == set(ids)
        assert letters["r17"].origin == origin
        published = (await contents(env.log, P0))[17].timestamp
        assert letters["r17"].published == letters["r17"].record.timestamp == published

    run(scenario)


def test_letters_are_not_redriven_if_both_the_topic_and_the_retry_topic_are_gone(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(env: Environment) -> None:
        await env.kill("a")
        await env.log.delete_topic(TOPIC)
        with pytest.raises(UnknownTopic, match="'orders'"):
            await redrive(env.log, GROUP, TOPIC)
        assert [topic.name for topic in await env.log.topics()] == [DEAD]
        assert await env.dead_ids() == ["a"]
        await env.log.create_topic(RETRY, 1, kind=TopicKind.RETRY)
        assert await redrive(env.log, GROUP, TOPIC) == 1, "members that still read the retry topic get them"

    run(scenario)


def test_a_letter_says_when_it_was_published_however_often_it_failed(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await env.log.append(P0, [Record(name, None, b"", timestamp=at) for name, at in (("a", 1000), ("b", 2**62))])
        async with env.scheduling():
            await env.failures.handle(GROUP, SHORT, [Failure(P0, 1, at, "no") for at in await offsets(env.log, P0)])
            await env.until_all_of(RETRY, 2)
        again = [
            Failure(partition, 1, offset, "no")
            for partition in await env.log.topic(RETRY)
            for offset in await offsets(env.log, partition)
        ]
        await env.failures.handle(GROUP, NO_RETRIES, again)
        letters = {letter.record.id: letter for letter in await list_dead_letters(env.log, GROUP, TOPIC)}
        assert {name: letter.published for name, letter in letters.items()} == {"a": 1000, "b": 2**62}
        assert (letters["a"].record.timestamp, letters["a"].record.headers) == (1000, ())
        assert abs(letters["a"].died_at - time.time() * 1000) < 60_000
        later = letters["a"].died_at + 1_000  # letters of the same millisecond are listed in any order
        mine = Record("mine", None, b"", ((PUBLISHED, b"soon"),), timestamp=later)
        await env.log.append(Partition(DEAD, 0), [mine])
        assert [letter.published for letter in await list_dead_letters(env.log, GROUP, TOPIC, limit=1)] == [None]

    run(scenario)


def test_letters_of_partitions_or_topics_that_are_deleted_meanwhile_are_left_out() -> None:
    class Dropping(MemoryLog):
        """Calls `going` before a span is read."""

        going: Callable[[], Coroutine[Any, Any, object]] | None = None

        async def span(self, partition: Partition) -> Span:
            if (going := self.going) is not None:
                self.going = None
                await going()
            return await super().span(partition)

    async def scenario() -> None:
        async with Dropping() as log:
            await log.create_topic(TOPIC, 2)
            topic = await log.create_topic(DEAD, 2)
            await log.append(Partition(DEAD, 0), [Record("a", None, b"", ((DIED, b"1"),))])
            await log.append(Partition(DEAD, 1), [Record("b", None, b"", ((DIED, b"2"),))])
            await log.contract_topic(DEAD, 1)
            log.going = lambda: log.drop_partitions(DEAD, 1)
            assert [letter.record.id for letter in await list_dead_letters(log, GROUP, TOPIC)] == ["a"]
            assert (await count_dead_letters(log, topic)).letters == 1
            log.going = lambda: log.delete_topic(DEAD)
            assert await list_dead_letters(log, GROUP, TOPIC) == []

    asyncio.run(scenario())


def test_single_letters_are_redriven_once(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await env.kill("a", "b", "c", "d", "e")
        with pytest.raises(
            InvalidValue, match=r"ids is \['nobody', 'x'\]: .* see `shardyard dead list billing orders`"
        ):
            await redrive(env.log, GROUP, TOPIC, ids=["x", "c", "nobody"])
        assert await env.dead_ids() == ["e", "d", "c", "b", "a"], "nothing was redriven"
        assert not [topic for topic in await env.log.topics() if topic.name == RETRY]
        assert await redrive(env.log, GROUP, TOPIC, ids=[]) == 0
        assert await redrive(env.log, GROUP, TOPIC, ids=["c"]) == 1
        with pytest.raises(InvalidValue, match=r"ids is \['c'\]"):
            await redrive(env.log, GROUP, TOPIC, ids=["c"])
        assert await env.dead_ids() == ["e", "d", "b", "a"]
        at_d = (await offsets(env.log, Partition(DEAD, 0)))[3]
        assert await redrive(env.log, GROUP, TOPIC, ids={"a", "b", "e"}) == 3
        assert (await offsets(env.log, Partition(DEAD, 0)))[0] == at_d, "a, b, and c, which was marked, are trimmed"
        assert [letter.record.id for letter in await list_dead_letters(env.log, GROUP, TOPIC, limit=1)] == ["d"]
        await env.kill("f", "c")
        assert await env.dead_ids() == ["c", "f", "d"], "it may die again"
        assert await redrive(env.log, GROUP, TOPIC) == 3
        assert await env.all_of(DEAD) == []
        assert sorted(record.id for record in await env.all_of(RETRY)) == ["a", "b", "c", "c", "d", "e", "f"]

    run(scenario)


def test_concurrent_redrives_lose_nothing(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        ids = [f"r{i}" for i in range(300)]
        await env.kill(*ids)
        await env.kill("x", "y", partition=Partition(TOPIC, 1))
        some = ids[1::2]

        async def again(wanted: Sequence[str] | None) -> None:
            with contextlib.suppress(InvalidValue):  # the other call redrove all of them
                await redrive(env.log, GROUP, TOPIC, ids=wanted)

        await asyncio.gather(again(some), again(some))
        assert set(await env.dead_ids()) <= {*ids[::2], "x", "y"}
        assert {letter.record.id for letter in await list_dead_letters(env.log, GROUP, TOPIC, 1000)} == {
            *ids[::2],
            "x",
            "y",
        }
        assert {record.id for record in await env.all_of(RETRY)} == set(some)
        await asyncio.gather(again(None), again(None), again(["r2", "x"]), env.kill("late"))
        left = await env.dead_ids()
        assert set(left) <= {"late"}
        assert {record.id for record in await env.all_of(RETRY)} | set(left) == {*ids, "x", "y", "late"}

    run(scenario)


def test_letters_survive_an_interrupted_redrive(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await env.kill("a", "b")
        await redrive(env.log, GROUP, TOPIC)
        await env.kill("c", "d")
        await env.log.seal_topic(RETRY, HOLDER)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(redrive(env.log, GROUP, TOPIC), 0.1)
        assert await env.dead_ids() == ["d", "c"]
        await env.log.unseal_topic(RETRY, HOLDER)
        assert await redrive(env.log, GROUP, TOPIC) == 2
        assert sorted(record.id for record in await env.all_of(RETRY)) == ["a", "b", "c", "d"]

    run(scenario)
