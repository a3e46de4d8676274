"""Searching a topic, on the embedded log and on its twin."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.log.sqlite import SqliteLog
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

TOPIC = "orders"
P0, P1, P2 = (Partition(TOPIC, i) for i in range(3))

Story = Callable[[Log], Coroutine[Any, Any, None]]


@pytest.fixture(params=["memory", "sqlite"])
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Tell a story on an engine, with a topic of three partitions."""

    def told(story: Story) -> None:
        async def whole() -> None:
            log: Log = MemoryLog() if request.param == "memory" else SqliteLog(tmp_path / "log")
            async with log:
                await log.create_topic(TOPIC, 3)
                await story(log)

        asyncio.run(whole())

    return told


def ids(found: list[Found]) -> list[str]:
    return [each.record.id for each in found]


def test_records_are_found_by_id_key_and_trace_wherever_they_lie(tell: Callable[[Story], None]) -> None:
    async def story(log: Log) -> None:
        first = Record("a", b"ann", b"1", ((TRACE, b"t1"), ("x", b"t2")), 10)
        again = Record("a", b"bob", b"2", ((TRACE, b"t1"), (TRACE, "tü".encode())), 5)
        bare = Record("b", None, b"3", (), 7)
        empty = Record("c", b"", b"4", (), 8)
        await log.append(P0, [bare, first])
        await log.append(P0, [empty])
        await log.append(P2, [again])
        assert await search(log, TOPIC, id="a") == [Found(P2, 0, again), Found(P0, 1, first)]
        assert await search(log, TOPIC, key=b"ann") == [Found(P0, 1, first)]
        assert await search(log, TOPIC, key=b"") == [Found(P0, 2, empty)]
        assert await search(log, TOPIC, trace="t1") == [Found(P0, 1, first)], "the last header of a name counts"
        assert await search(log, TOPIC, trace="tü") == [Found(P2, 0, again)]
        assert await search(log, TOPIC, trace="t2") == []
        assert await search(log, TOPIC, id="a", key=b"bob") == [Found(P2, 0, again)]
        assert await search(log, TOPIC, id="b", key=b"bob") == []
        assert await search(log, TOPIC, id="a", partition=0) == [Found(P0, 1, first)]
        assert await search(log, TOPIC, id="a", partition=1) == []

    tell(story)


def test_records_are_found_by_each_of_their_tags(tell: Callable[[Story], None]) -> None:
    async def story(log: Log) -> None:
        red = Record("a", b"ann", b"1", ((TAG, b"red"), ("x", b"blue")), 1)
        both = Record("b", b"bob", b"2", ((TAG, b"red"), (TRACE, b"green"), (TAG, "blüe".encode())), 2)
        await log.append(P0, [Record("c", b"ann", b"3", (), 3), red])
        await log.append(P0, [Record("d", b"ann", b"4", (), 4)])
        await log.append(P0, [Record("e", b"ann", b"5", (("x", b"red"),), 5), both])
        assert await search(log, TOPIC, tag="red") == [Found(P0, 1, red), Found(P0, 4, both)]
        assert await search(log, TOPIC, tag="red", limit=1) == [Found(P0, 4, both)]
        assert await search(log, TOPIC, tag="blüe") == [Found(P0, 4, both)]
        assert await search(log, TOPIC, tag="red", key=b"ann") == [Found(P0, 1, red)]
        assert await search(log, TOPIC, tag="red", since=2) == [Found(P0, 4, both)]
        for other in ("blue", "green", "re", "redd"):
            assert await search(log, TOPIC, tag=other) == []

    tell(story)


def test_time_counts_also_where_it_does_not_run_upwards(tell: Callable[[Story], None]) -> None:
    async def story(log: Log) -> None:
        for at in (10, 40, 20, 30):
            await log.append(P0, [Record(f"a{at}", None, b"", timestamp=at)])
        await log.append(P1, [Record(f"b{at}", None, b"", timestamp=at) for at in (20, 5)])
        assert ids(await search(log, TOPIC, since=20)) == ["a20", "b20", "a30", "a40"]
        assert ids(await search(log, TOPIC, until=20)) == ["b5", "a10"]
        assert ids(await search(log, TOPIC, since=20, until=40)) == ["a20", "b20", "a30"]
        assert ids(await search(log, TOPIC, since=41)) == []
        assert len(await search(log, TOPIC, since=0)) == 6

    tell(story)


def test_of_too_many_the_newest_are_returned(tell: Callable[[Story], None]) -> None:
    async def story(log: Log) -> None:
        for partition, stamps in ((P0, (9, 1, 8, 2)), (P1, (3, 7)), (P2, (6, 6, 6))):
            records = [Record(f"{partition.index}-{i}", b"k", b"", timestamp=at) for i, at in enumerate(stamps)]
            await log.append(partition, records)
        assert ids(await search(log, TOPIC, key=b"k", limit=5)) == ["2-1", "2-2", "1-1", "0-2", "0-0"]
        assert ids(await search(log, TOPIC, key=b"k", limit=1)) == ["0-0"]
        assert ids(await search(log, TOPIC, key=b"k", limit=2, partition=2)) == ["2-1", "2-2"]

    tell(story)


def test_it_reads_chunk_after_chunk_and_makes_objects_of_matches_only(
    tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_RECORDS", 7)
    made: list[int] = []

    def counted(data: Any) -> list[Record]:
        made.append(len(data))
        return to_records(data)

    monkeypatch.setattr(module, "to_records", counted)

    async def story(log: Log) -> None:
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
        assert [(each.offset, each.record.id) for each in found] == [(3, "3"), (28, "28")]
        assert sum(sizes) == 50
        assert max(sizes) <= 7
        assert sum(made) == 2
        made.clear()
        assert len(await search(log, TOPIC, since=1, limit=2)) == 2
        assert sum(made) <= 2 * len(sizes), "of each chunk no more than asked for"
        sizes.clear()
        await search(log, TOPIC, since=1 + 40)
        assert sum(sizes) == 10, "what is older is not read"

    tell(story)


def test_what_is_trimmed_meanwhile_is_passed_over(
    tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_RECORDS", 2)

    async def story(log: Log) -> None:
        await log.append(P0, [Record(str(i), b"k", b"", timestamp=1) for i in range(10)])
        await log.append(P1, [Record("other", b"k", b"", timestamp=2)])
        read, trims = log.read, iter([0, 7, 10])

        async def trimming(partition: Partition, offset: int, **options: Any) -> Batch:
            if partition == P0:
                await log.trim(P0, next(trims))
            return await read(partition, offset, **options)

        monkeypatch.setattr(log, "read", trimming)
        assert ids(await search(log, TOPIC, key=b"k")) == ["0", "1", "other"]

    tell(story)


def test_it_ends_also_while_records_keep_coming(tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(log: Log) -> None:
        await log.append(P0, [Record("before", b"k", b"")])
        read = log.read

        async def growing(partition: Partition, offset: int, **options: Any) -> Batch:
            await log.append(P0, [Record("during", b"k", b"")])
            return await read(partition, offset, **options)

        monkeypatch.setattr(log, "read", growing)
        assert ids(await search(log, TOPIC, key=b"k", partition=0)) == ["before"]

    tell(story)


def test_a_topic_that_is_made_anew_meanwhile_is_not_mixed_with_the_old_one(
    tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(log: Log) -> None:
        await log.append(P0, [Record("old", b"k", b"")])
        span = log.span

        async def anew(partition: Partition) -> Any:
            before = await span(partition)
            await log.delete_topic(TOPIC)
            await log.create_topic(TOPIC, 3)
            await log.append(P0, [Record("new", b"k", b"")])
            return before

        monkeypatch.setattr(log, "span", anew)
        with pytest.raises(WrongEpoch):
            await search(log, TOPIC, key=b"k")

    tell(story)


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
def test_bad_calls_say_what_is_wrong(
    tell: Callable[[Story], None], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    async def story(log: Log) -> None:
        with pytest.raises(error, match=said):
            await search(log, TOPIC, **options)
        with pytest.raises(UnknownTopic):
            await search(log, "nothing", id="a")

    tell(story)


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
def test_it_finds_what_going_through_all_records_one_by_one_finds(
    batches: list[tuple[int, list[Record]]], options: dict[str, Any]
) -> None:
    async def story() -> None:
        async with MemoryLog() as log:
            await log.create_topic(TOPIC, 3)
            rows = []
            for index, records in batches:
                at = await log.append(Partition(TOPIC, index), records)
                rows += [Found(at.partition, at.first.offset + i, record) for i, record in enumerate(records)]
            wanted = [row for row in rows if matches(row.record, options)]
            wanted.sort(key=lambda row: (row.record.timestamp, row.partition, row.offset))
            assert await search(log, TOPIC, **options) == wanted[-options["limit"] :]

    asyncio.run(story())


def test_a_partition_that_goes_during_the_search_is_left_out_unless_it_was_named() -> None:
    class Dropping(MemoryLog):
        """The closing partitions are dropped when one of them is looked at."""

        async def span(self, partition: Partition) -> Span:
            if partition.index == 1:
                await self.drop_partitions(TOPIC, 1)
            return await super().span(partition)

    async def story(**options: Any) -> list[str]:
        async with Dropping() as log:
            await log.create_topic(TOPIC, 2)
            for index, name in enumerate("ab"):
                await log.append(Partition(TOPIC, index), [Record(name, b"k", b"")])
            await log.contract_topic(TOPIC, 1)
            return [hit.record.id for hit in await search(log, TOPIC, key=b"k", **options)]

    assert asyncio.run(story()) == ["a"]
    with pytest.raises(PartitionOutOfRange):
        asyncio.run(story(partition=1))


def matches(record: Record, options: dict[str, Any]) -> bool:
    return (
        options["id"] in (None, record.id)
        and options["key"] in (None, record.key)
        and ("trace" not in options or record.header(TRACE) == options["trace"].encode())
        and ("tag" not in options or (TAG, options["tag"].encode()) in record.headers)
        and options.get("since", 0) <= record.timestamp < options.get("until", 100)
    )
