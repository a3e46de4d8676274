"""Searching a topic."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.model import (
    TAG,
    TRACE,
    InvalidValue,
    Partition,
    PartitionOutOfRange,
    Record,
    Span,
    TooLarge,
    UnknownTopic,
    WrongEpoch,
)
from shardyard.model.batch import Batch, to_records
from shardyard.queues import search as module
from shardyard.queues.search import Found, search
from tests.queues.engines import ENGINES, SEARCH
from tests.queues.stored import offsets

TOPIC = "orders"
P0, P1, P2 = (Partition(TOPIC, i) for i in range(3))

Scenario = Callable[[Log], Coroutine[Any, Any, None]]


@pytest.fixture(params=SEARCH)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario on a log with a topic of three partitions."""

    def run_scenario(scenario: Scenario) -> None:
        async def with_log() -> None:
            async with ENGINES[request.param].log(tmp_path) as log:
                await log.create_topic(TOPIC, 3)
                await scenario(log)

        asyncio.run(with_log())

    return run_scenario


def ids(found: list[Found]) -> list[str]:
    return [each.record.id for each in found]


def test_records_are_found_by_id_key_and_trace_on_any_partition(run: Callable[[Scenario], None]) -> None:
    async def scenario(log: Log) -> None:
        first = Record("a", b"ann", b"1", ((TRACE, b"t1"), ("x", b"t2")), 10)
        again = Record("a", b"bob", b"2", ((TRACE, b"t1"), (TRACE, "tü".encode())), 5)
        bare = Record("b", None, b"3", (), 7)
        empty = Record("c", b"", b"4", (), 8)
        await log.append(P0, [bare, first])
        await log.append(P0, [empty])
        await log.append(P2, [again])
        _, at_first, at_empty = await offsets(log, P0)
        (at_again,) = await offsets(log, P2)
        found_first, found_again = Found(P0, at_first, first), Found(P2, at_again, again)
        assert await search(log, TOPIC, id="a") == [found_again, found_first]
        assert await search(log, TOPIC, key=b"ann") == [found_first]
        assert await search(log, TOPIC, key=b"") == [Found(P0, at_empty, empty)]
        assert await search(log, TOPIC, trace="t1") == [found_first], "the last header of a name counts"
        assert await search(log, TOPIC, trace="tü") == [found_again]
        assert await search(log, TOPIC, trace="t2") == []
        assert await search(log, TOPIC, id="a", key=b"bob") == [found_again]
        assert await search(log, TOPIC, id="b", key=b"bob") == []
        assert await search(log, TOPIC, id="a", partition=0) == [found_first]
        assert await search(log, TOPIC, id="a", partition=1) == []

    run(scenario)


def test_records_are_found_by_each_of_their_tags(run: Callable[[Scenario], None]) -> None:
    async def scenario(log: Log) -> None:
        red = Record("a", b"ann", b"1", ((TAG, b"red"), ("x", b"blue")), 1)
        both = Record("b", b"bob", b"2", ((TAG, b"red"), (TRACE, b"green"), (TAG, "blüe".encode())), 2)
        await log.append(P0, [Record("c", b"ann", b"3", (), 3), red])
        await log.append(P0, [Record("d", b"ann", b"4", (), 4)])
        await log.append(P0, [Record("e", b"ann", b"5", (("x", b"red"),), 5), both])
        at = await offsets(log, P0)
        found_red, found_both = Found(P0, at[1], red), Found(P0, at[4], both)
        assert await search(log, TOPIC, tag="red") == [found_red, found_both]
        assert await search(log, TOPIC, tag="red", limit=1) == [found_both]
        assert await search(log, TOPIC, tag="blüe") == [found_both]
        assert await search(log, TOPIC, tag="red", key=b"ann") == [found_red]
        assert await search(log, TOPIC, tag="red", since=2) == [found_both]
        for other in ("blue", "green", "re", "redd"):
            assert await search(log, TOPIC, tag=other) == []

    run(scenario)


def test_records_are_found_by_time_even_if_timestamps_do_not_ascend(run: Callable[[Scenario], None]) -> None:
    async def scenario(log: Log) -> None:
        for at in (10, 40, 20, 30):
            await log.append(P0, [Record(f"a{at}", None, b"", timestamp=at)])
        await log.append(P1, [Record(f"b{at}", None, b"", timestamp=at) for at in (20, 5)])
        assert ids(await search(log, TOPIC, since=20)) == ["a20", "b20", "a30", "a40"]
        assert ids(await search(log, TOPIC, until=20)) == ["b5", "a10"]
        assert ids(await search(log, TOPIC, since=20, until=40)) == ["a20", "b20", "a30"]
        assert ids(await search(log, TOPIC, since=41)) == []
        assert len(await search(log, TOPIC, since=0)) == 6

    run(scenario)


def test_if_too_many_match_the_newest_are_returned(run: Callable[[Scenario], None]) -> None:
    async def scenario(log: Log) -> None:
        for partition, stamps in ((P0, (9, 1, 8, 2)), (P1, (3, 7)), (P2, (6, 6, 6))):
            records = [Record(f"{partition.index}-{i}", b"k", b"", timestamp=at) for i, at in enumerate(stamps)]
            await log.append(partition, records)
        assert ids(await search(log, TOPIC, key=b"k", limit=5)) == ["2-1", "2-2", "1-1", "0-2", "0-0"]
        assert ids(await search(log, TOPIC, key=b"k", limit=1)) == ["0-0"]
        assert ids(await search(log, TOPIC, key=b"k", limit=2, partition=2)) == ["2-1", "2-2"]

    run(scenario)


def test_it_reads_in_chunks_and_creates_objects_only_of_matches(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_RECORDS", 7)
    made: list[int] = []

    def counted(data: Any) -> list[Record]:
        made.append(len(data))
        return to_records(data)

    monkeypatch.setattr(module, "to_records", counted)

    async def scenario(log: Log) -> None:
        sizes, read = [], log.read

        async def watched(*arguments: Any, **options: Any) -> Batch:
            batch = await read(*arguments, **options)
            sizes.append(len(batch))
            return batch

        monkeypatch.setattr(log, "read", watched)
        for start in range(0, 50, 5):
            records = [Record(str(i), b"%d" % (i % 25), b"", timestamp=1 + i) for i in range(start, start + 5)]
            await log.append(P1, records)
        found = await search(log, TOPIC, key=b"3")
        assert sum(sizes) == 50
        assert max(sizes) <= 7
        assert sum(made) == 2
        at = await offsets(log, P1)
        assert [(each.offset, each.record.id) for each in found] == [(at[3], "3"), (at[28], "28")]
        made.clear()
        sizes.clear()
        assert len(await search(log, TOPIC, since=1, limit=2)) == 2
        assert sum(made) <= 2 * len(sizes), "of each chunk no more than the limit"
        sizes.clear()
        await search(log, TOPIC, since=1 + 40)
        assert sum(sizes) == 10, "older records are not read"

    run(scenario)


def test_records_that_are_trimmed_meanwhile_are_skipped(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_RECORDS", 2)

    async def scenario(log: Log) -> None:
        await log.append(P0, [Record(str(i), b"k", b"", timestamp=1) for i in range(10)])
        await log.append(P1, [Record("other", b"k", b"", timestamp=2)])
        at = [*await offsets(log, P0), (await log.span(P0)).end]
        read, trims = log.read, iter([0, at[7], at[10]])

        async def trimming(partition: Partition, offset: int, **options: Any) -> Batch:
            if partition == P0:
                await log.trim(P0, next(trims))
            return await read(partition, offset, **options)

        monkeypatch.setattr(log, "read", trimming)
        assert ids(await search(log, TOPIC, key=b"k")) == ["0", "1", "other"]

    run(scenario)


def test_it_ends_even_while_records_are_appended(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(log: Log) -> None:
        await log.append(P0, [Record("before", b"k", b"")])
        read = log.read

        async def growing(partition: Partition, offset: int, **options: Any) -> Batch:
            await log.append(P0, [Record("during", b"k", b"")])
            return await read(partition, offset, **options)

        monkeypatch.setattr(log, "read", growing)
        assert ids(await search(log, TOPIC, key=b"k", partition=0)) == ["before"]

    run(scenario)


def test_a_topic_that_is_recreated_meanwhile_is_not_mixed_with_the_old_one(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(log: Log) -> None:
        await log.append(P0, [Record("old", b"k", b"")])
        span = log.span

        async def recreating(partition: Partition) -> Any:
            before = await span(partition)
            await log.delete_topic(TOPIC)
            await log.create_topic(TOPIC, 3)
            await log.append(P0, [Record("new", b"k", b"")])
            return before

        monkeypatch.setattr(log, "span", recreating)
        with pytest.raises(WrongEpoch):
            await search(log, TOPIC, key=b"k")

    run(scenario)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, InvalidValue, "at least one of id, key, trace, tag, since and until"),
        ({"partition": 1}, InvalidValue, "at least one of"),
        ({"id": ""}, InvalidValue, "id is ''"),
        ({"id": b"a"}, InvalidValue, "id is b'a': expected a string"),
        ({"key": "a"}, InvalidValue, "key is 'a': expected bytes"),
        ({"trace": "\ud800"}, InvalidValue, "without lone surrogates"),
        ({"tag": ""}, InvalidValue, "tag is ''"),
        ({"tag": b"red"}, InvalidValue, "tag is b'red': expected a string"),
        ({"since": -1}, InvalidValue, "since is -1"),
        ({"until": 1.5}, InvalidValue, "until is 1.5"),
        ({"until": 2**63}, InvalidValue, "until is"),
        ({"since": 5, "until": 5}, InvalidValue, "until is 5: expected a time after 5"),
        ({"id": "a", "limit": 0}, InvalidValue, "limit is 0"),
        ({"id": "a", "limit": 1001}, TooLarge, "limit of a search is 1001, beyond the limit of 1000"),
        ({"id": "a", "partition": 3}, PartitionOutOfRange, "orders/3"),
        ({"id": "a", "partition": -1}, InvalidValue, "partition is -1"),
    ],
)
def test_invalid_calls_say_what_is_wrong(
    run: Callable[[Scenario], None], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    async def scenario(log: Log) -> None:
        with pytest.raises(error, match=said):
            await search(log, TOPIC, **options)
        with pytest.raises(UnknownTopic):
            await search(log, "nothing", id="a")

    run(scenario)


RECORDS = st.builds(
    Record,
    st.sampled_from("abc"),
    st.sampled_from([None, b"", b"k"]),
    st.just(b""),
    st.lists(st.tuples(st.sampled_from([TRACE, TAG, "x"]), st.sampled_from([b"t", b"u"])), max_size=3).map(tuple),
    st.integers(1, 6),
)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(RECORDS, min_size=1, max_size=4)), max_size=8),
    st.fixed_dictionaries(
        {"id": st.sampled_from([None, "a"]), "key": st.sampled_from([None, b"", b"k"]), "limit": st.integers(1, 9)},
        optional={"trace": st.just("t"), "tag": st.just("u"), "since": st.integers(0, 3), "until": st.integers(4, 7)},
    ).filter(lambda options: any(options.get(n) is not None for n in ("id", "key", "trace", "tag", "since", "until"))),
)
def test_it_finds_the_same_as_a_check_of_every_record(
    batches: list[tuple[int, list[Record]]], options: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with MemoryLog() as log:
            await log.create_topic(TOPIC, 3)
            rows = []
            for index, records in batches:
                at = await log.append(Partition(TOPIC, index), records)
                rows += [Found(at.partition, at.first.offset + i, record) for i, record in enumerate(records)]
            wanted = [row for row in rows if matches(row.record, options)]
            wanted.sort(key=lambda row: (row.record.timestamp, row.partition, row.offset))
            assert await search(log, TOPIC, **options) == wanted[-options["limit"] :]

    asyncio.run(scenario())


def test_a_partition_that_is_dropped_meanwhile_is_left_out_unless_it_was_named() -> None:
    class Dropping(MemoryLog):
        """Drops the draining partitions when the span of one of them is read."""

        async def span(self, partition: Partition) -> Span:
            if partition.index == 1:
                await self.drop_partitions(TOPIC, 1)
            return await super().span(partition)

    async def scenario(**options: Any) -> list[str]:
        async with Dropping() as log:
            await log.create_topic(TOPIC, 2)
            for index, name in enumerate("ab"):
                await log.append(Partition(TOPIC, index), [Record(name, b"k", b"")])
            await log.contract_topic(TOPIC, 1)
            return [hit.record.id for hit in await search(log, TOPIC, key=b"k", **options)]

    assert asyncio.run(scenario()) == ["a"]
    with pytest.raises(PartitionOutOfRange):
        asyncio.run(scenario(partition=1))


def matches(record: Record, options: dict[str, Any]) -> bool:
    return (
        options["id"] in (None, record.id)
        and options["key"] in (None, record.key)
        and ("trace" not in options or record.header(TRACE) == options["trace"].encode())
        and ("tag" not in options or (TAG, options["tag"].encode()) in record.headers)
        and options.get("since", 0) <= record.timestamp < options.get("until", 100)
    )
