"""What every log keeps, whichever engine it is: the sentences of the port, one by one."""

import asyncio
import contextlib
import functools
import inspect
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.log.postgresql import PostgresqlLog
from shardyard.log.requests import AppendRequest, Outcomes, ReadRequest
from shardyard.log.scan import scan
from shardyard.log.sqlite import SqliteLog
from shardyard.model import (
    SEQUENCE_WINDOW,
    TAG,
    TRACE,
    Appended,
    Closed,
    Fence,
    Fenced,
    InvalidValue,
    Moved,
    OffsetBeyondEnd,
    OffsetTrimmed,
    Outdated,
    Partition,
    PartitionDraining,
    PartitionOutOfRange,
    Position,
    Record,
    Retention,
    Sealed,
    SequenceTooOld,
    ShardyardError,
    Stamp,
    TooLarge,
    Topic,
    TopicExists,
    TopicKind,
    UnknownTopic,
    WrongEpoch,
)
from shardyard.model.batch import SCHEMA, Batch
from shardyard.model.limits import Limits
from tests.log.refused import LIMITS, REFUSED
from tests.log.samples import (
    HOLDER,
    T0,
    T1,
    TIMEOUT_SECONDS,
    arrow,
    at,
    awaited,
    contents,
    end,
    from_,
    move,
    numbered,
    record,
    records,
    spanned,
    state,
)
from tests.log.sparse import SparseLog
from tests.sqlite_files import with_log

ENGINES = [
    "memory",
    "sqlite",
    pytest.param("sparse", marks=pytest.mark.long),
    pytest.param("postgresql", marks=pytest.mark.server),
]
MINUTE = 60_000


class Open(Protocol):
    def __call__(self, limits: Limits | None = None) -> Log: ...


def open_engine(engine: str, folder: Path, url: str, limits: Limits | None = None) -> Log:
    match engine:
        case "sqlite":
            return SqliteLog(with_log(folder), durability="process", limits=limits, maintain_every=None)
        case "postgresql":
            return PostgresqlLog(url, limits=limits, maintain_every=None)
        case _:
            return (SparseLog if engine == "sparse" else MemoryLog)(limits=limits)


def url_for(engine: str, request: pytest.FixtureRequest) -> str:
    """The URL of an empty log, for the engine that needs one."""
    return request.getfixturevalue("postgresql_log_url") if engine == "postgresql" else ""


@pytest.fixture(params=ENGINES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    url = url_for(request.param, request)
    logs: list[Log] = []

    def open_(limits: Limits | None = None) -> Log:
        logs.append(open_engine(request.param, tmp_path, url, limits))
        return logs[-1]

    yield open_
    for log in logs:
        asyncio.run(log.close())


@pytest.fixture
def log(opened: Open) -> Log:
    return opened()


def ids(batch: Batch) -> list[str]:
    return [r.id for r in batch.records()]


# Topics ------------------------------------------------------------------------------------------------------------


@awaited
async def test_a_topic_is_described_as_it_was_created(log: Log) -> None:
    retention = Retention(age_ms=5, bytes_per_partition=6)
    created = await log.create_topic("Orders.v1_x-y", 3, kind=TopicKind.RETRY, retention=retention)
    assert created == Topic("Orders.v1_x-y", 3, TopicKind.RETRY, retention, created.epoch, generation=created.epoch)
    assert created.epoch > 0
    assert await log.topic("Orders.v1_x-y") == created


@awaited
async def test_topics_are_listed_by_name(log: Log) -> None:
    assert await log.topics() == []
    made = [await log.create_topic(name, 1) for name in ("b", "a", "C", "a.1")]
    assert await log.topics() == sorted(made, key=lambda topic: topic.name)


@awaited
async def test_a_new_partition_is_empty_and_starts_at_offset_0(log: Log) -> None:
    topic = await log.create_topic("t", 2)
    for partition in topic:
        assert await log.span(partition) == spanned(log, topic.epoch, 0, 0)
        assert len(await log.read(partition, 0)) == 0


@awaited
async def test_a_topic_exists_only_once(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    with pytest.raises(TopicExists) as refused:
        await log.create_topic("t", 2, kind=TopicKind.RETRY)
    assert refused.value.topic == "t"
    assert await log.topics() == [topic]


@awaited
async def test_whole_numbers_may_come_from_numpy_and_are_stored_as_such(opened: Open) -> None:
    log = opened()
    await log.create_topic("t", np.int64(1), retention=Retention(np.int64(10**12)))  # type: ignore[arg-type]
    await log.expand_topic("t", np.int32(3))  # type: ignore[arg-type]
    await log.contract_topic("t", np.int64(2))  # type: ignore[arg-type]
    stamp, fence = Stamp("p", np.int64(1)), Fence("f", np.int64(5))  # type: ignore[arg-type]
    await log.append(T0, records(0, 1), stamp=stamp, fence=fence)
    assert (await log.append(T0, records(0, 1), stamp=Stamp("p", 1), fence=Fence("f", 5))).duplicate
    assert await log.offset_at(T0, np.int64(0)) == at(log, 0)  # type: ignore[arg-type]
    second = np.int64(at(log, 1))
    await log.trim(T0, second)  # type: ignore[arg-type]
    batch = await log.read(T0, second, max_records=np.int64(5), fence=fence)  # type: ignore[arg-type]
    assert batch.records() == records(1)
    assert await log.topic("t") == await log.contract_topic("t", 2)
    assert type((await log.topic("t")).open_partitions) is int


@awaited
async def test_a_stamp_that_was_used_for_another_batch_is_refused(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.append(T0, records(0), stamp=Stamp("p", 1))
    with pytest.raises(InvalidValue, match="one that was not used for another batch: it has 1 records stored"):
        await log.append(T0, records(1, 2), stamp=Stamp("p", 1))
    for marks in ({"stamp": ("p", 1)}, {"fence": "f"}):
        with pytest.raises(InvalidValue, match=r"expected a (Stamp|Fence) or None"):
            await log.append(T0, records(3), **marks)
    assert await contents(log, T0) == records(0)


@awaited
async def test_an_expanded_topic_keeps_its_records_and_its_new_partitions_are_empty(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    await log.append(T0, records(0, 1))
    with pytest.raises(PartitionOutOfRange):
        await log.append(T1, records(2))
    expanded = await log.expand_topic("t", 3)
    assert state(expanded) == Topic("t", 3, epoch=topic.epoch)
    assert await log.topic("t") == expanded
    assert await contents(log, T0) == records(0, 1)
    assert await log.span(T1) == spanned(log, topic.epoch, 0, 0)
    appended = await log.append(Partition("t", 2), records(2))
    assert appended.first == Position(topic.epoch, at(log, 0))


@awaited
async def test_a_topic_can_be_expanded_to_what_it_has_but_not_shrunk(log: Log) -> None:
    topic = await log.create_topic("t", 2)
    assert await log.expand_topic("t", 2) == topic
    with pytest.raises(InvalidValue, match="at least the 2 that 't' has"):
        await log.expand_topic("t", 1)
    assert await log.topic("t") == topic


@awaited
async def test_retention_can_be_changed(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    changed = await log.set_retention("t", Retention(age_ms=7))
    assert changed == replace(topic, retention=Retention(age_ms=7))
    assert await log.topic("t") == changed


@awaited
async def test_a_deleted_topic_is_unknown(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.append(T0, records(0))
    await log.delete_topic("t")
    assert await log.topics() == []
    with pytest.raises(UnknownTopic):
        await log.read(T0, 0)


@awaited
async def test_a_recreated_topic_has_a_higher_epoch_no_records_and_no_stamps(log: Log) -> None:
    old = await log.create_topic("t", 1)
    await log.append(T0, records(0, 1), stamp=Stamp("p", 1))
    await log.delete_topic("t")
    new = await log.create_topic("t", 1)
    await log.maintain()
    assert new.epoch > old.epoch
    assert await log.span(T0) == spanned(log, new.epoch, 0, 0)
    assert await log.append(T0, records(2), stamp=Stamp("p", 1)) == Appended(T0, Position(new.epoch, at(log, 0)), 1)
    assert await contents(log, T0) == records(2)


@awaited
async def test_a_position_of_a_topic_before_it_was_recreated_is_refused(log: Log) -> None:
    old = await log.create_topic("t", 1)
    await log.delete_topic("t")
    new = await log.create_topic("t", 1)
    await log.append(T0, records(0))
    assert ids(await log.read(T0, 0, epoch=new.epoch)) == ["r0"]
    with pytest.raises(WrongEpoch) as refused:
        await log.read(T0, 0, epoch=old.epoch)
    assert (refused.value.partition, refused.value.epoch, refused.value.current) == (T0, old.epoch, new.epoch)


# Moving ------------------------------------------------------------------------------------------------------------

U0 = Partition("u", 0)


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ({}, ("modulus", "fnv1a32")),
        ({"partitioner": "modulus", "hash_": "murmur2"}, ("modulus", "murmur2")),
        ({"partitioner": "jump"}, ("jump", "xxh64")),
        ({"partitioner": "jump", "hash_": "fnv1a64"}, ("jump", "fnv1a64")),
        ({"partitioner": "round_robin"}, ("round_robin", None)),
        ({"partitioner": "round_robin", "hash_": "xxh64"}, ("round_robin", None)),
    ],
)
@awaited
async def test_a_topic_says_how_its_keys_are_placed(
    log: Log, named: dict[str, Any], kept: tuple[str, str | None]
) -> None:
    topic = await log.create_topic("t", 3, **named)
    assert (topic.partitioner, topic.hash) == kept
    assert (topic.sealed, topic.successor) == (False, None)
    assert await log.topic("t") == topic
    assert state(await log.expand_topic("t", 4)) == state(replace(topic, partitions=4))


@awaited
async def test_a_sealed_topic_takes_no_records_until_it_is_unsealed(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    await log.create_topic("u", 1)
    await log.append(T0, records(0))
    for _ in range(2):  # once more changes nothing
        assert state(await log.seal_topic("t", HOLDER)) == state(replace(topic, sealed=True))
        assert state(await log.topic("t")) == state(replace(topic, sealed=True))
        for path in (list, arrow):
            with pytest.raises(Sealed, match="topic 't' takes no records while it is being moved") as refused:
                await log.append(T0, path(records(1)), stamp=Stamp("p", 1))
            assert refused.value.topic == "t"
    await log.append(U0, records(9))
    assert await contents(log, T0) == records(0)
    for _ in range(2):
        assert state(await log.unseal_topic("t", HOLDER)) == state(topic)
        assert state(await log.topic("t")) == state(topic)
    assert not (await log.append(T0, records(1), stamp=Stamp("p", 1))).duplicate
    assert await contents(log, T0) == records(0, 1)


@awaited
async def test_once_a_topic_is_sealed_nothing_comes_after(log: Log) -> None:
    topic = await log.create_topic("t", 2)
    in_flight = asyncio.Event()

    async def produce(name: int) -> int:
        for n in itertools.count():
            try:
                await log.append(Partition("t", name % 2), [Record(f"{name}.{n}", None, b"")])
            except Sealed:
                return n
            if n == 5:
                in_flight.set()
            await asyncio.sleep(0)  # the others' turn
        raise AssertionError

    producing = [asyncio.ensure_future(produce(name)) for name in range(20)]
    await in_flight.wait()
    await log.seal_topic("t", HOLDER)
    ends = [(await log.span(p)).end for p in topic]
    assert sum(await asyncio.gather(*producing)) == sum([len(await contents(log, p)) for p in topic])
    assert [(await log.span(p)).end for p in topic] == ends


@awaited
async def test_a_moved_topic_names_its_successor_and_keeps_its_records(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    await log.create_topic("u", 1)
    await log.append(T0, records(0, 1, 2))
    sealed = await log.seal_topic("t", HOLDER)
    for _ in range(2):  # once more changes nothing
        moved = await log.move_topic("t", "u", holder=HOLDER, generation=sealed.generation)
        assert state(moved) == state(replace(topic, sealed=True, successor="u"))
        assert await log.topic("t") == moved
        with pytest.raises(Moved, match="topic 't' continues as 'u': append there") as refused:
            await log.append(T0, records(3))
        assert (refused.value.topic, refused.value.successor) == ("t", "u")
    assert await contents(log, T0) == records(0, 1, 2)
    await log.append(U0, records(3))


@awaited
async def test_a_sealed_or_moved_topic_can_be_read_trimmed_and_deleted_and_retention_applies(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    await log.create_topic("u", 1)
    await log.append(T0, records(*range(6)))
    for first, change in enumerate((log.seal_topic("t", HOLDER), move(log, "t", "u")), 1):
        changed = await change
        assert await log.trim(T0, at(log, first)) == spanned(log, topic.epoch, first, 6)
        assert await contents(log, T0) == records(*range(first, 6))
        assert await log.offset_at(T0, 0) == at(log, first)
        kept = Retention(age_ms=10**15 + first)
        assert await log.set_retention("t", kept) == replace(changed, retention=kept)
    await log.set_retention("t", Retention(age_ms=1))
    await log.maintain()
    assert await log.span(T0) == spanned(log, topic.epoch, 6, 6)
    await log.delete_topic("t")
    assert [left.name for left in await log.topics()] == ["u"]


@awaited
async def test_a_topic_recreated_under_the_name_of_a_moved_one_takes_records(log: Log) -> None:
    await log.create_topic("u", 1)
    await log.create_topic("t", 1, partitioner="jump")
    await move(log, "t", "u")
    await log.delete_topic("t")
    topic = await log.create_topic("t", 1)
    assert topic == Topic("t", 1, epoch=topic.epoch, generation=topic.epoch)
    await log.append(T0, records(0))


@awaited
async def test_a_retried_append_is_recognised_although_its_topic_is_sealed_or_moved(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    await log.create_topic("u", 1)
    stored = await log.append(T0, records(0, 1), stamp=Stamp("p", 100))
    for change, refusal in ((log.seal_topic("t", HOLDER), Sealed), (move(log, "t", "u"), Moved)):
        await change
        again = await log.append(T0, records(0, 1), stamp=Stamp("p", 100))
        assert again == Appended(T0, Position(topic.epoch, at(log, 0)), 2, duplicate=True)
        assert again.first == stored.first
        with pytest.raises(InvalidValue, match="not used for another batch"):
            await log.append(T0, records(0), stamp=Stamp("p", 100))
        with pytest.raises(SequenceTooOld):
            await log.append(T0, records(0), stamp=Stamp("p", 1))
        with pytest.raises(refusal):
            await log.append(T0, records(2), stamp=Stamp("p", 101))
    assert await contents(log, T0) == records(0, 1)


@awaited
async def test_a_fence_comes_before_the_seal_and_is_not_raised_by_what_the_seal_refuses(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.append(T0, records(0), stamp=Stamp("p", 1), fence=Fence("g", 5))
    await log.seal_topic("t", HOLDER)
    with pytest.raises(Fenced):
        await log.append(T0, records(1), fence=Fence("g", 4))
    with pytest.raises(Sealed):
        await log.append(T0, records(1), fence=Fence("g", 7))
    await log.set_fence(Fence("g", 6))
    assert (await log.append(T0, records(0), stamp=Stamp("p", 1), fence=Fence("g", 8))).duplicate
    with pytest.raises(Fenced):
        await log.set_fence(Fence("g", 7))


@awaited
async def test_a_sealed_or_moved_topic_is_not_expanded(log: Log) -> None:
    await log.create_topic("t", 2)
    await log.create_topic("u", 1)
    for change, refusal in ((log.seal_topic("t", HOLDER), Sealed), (move(log, "t", "u"), Moved)):
        changed = await change
        for partitions in (2, 3):
            with pytest.raises(refusal):
                await log.expand_topic("t", partitions)
        assert await log.topic("t") == changed


@awaited
async def test_a_topic_that_has_moved_is_neither_sealed_unsealed_nor_moved_elsewhere(log: Log) -> None:
    for name in "tuv":
        await log.create_topic(name, 1)
    moved = await move(log, "t", "u")
    again = functools.partial(log.move_topic, "t", holder=HOLDER, generation=moved.generation)
    for call in (log.seal_topic("t", HOLDER), log.unseal_topic("t", HOLDER), again("v"), again("t")):
        with pytest.raises(Moved, match="'t' continues as 'u'"):
            await call
    await move(log, "u", "v")
    assert await again("u") == moved, "also when the successor has moved on"
    await log.delete_topic("u")
    assert await again("u") == moved, "or is gone"


@awaited
async def test_topics_do_not_move_in_circles_nor_to_what_is_not_there(log: Log) -> None:
    for name in "tuv":
        await log.create_topic(name, 1)
    with pytest.raises(InvalidValue, match="successor is 't': expected another topic"):
        await move(log, "t", "t")
    with pytest.raises(UnknownTopic, match="'w'"):
        await move(log, "t", "w")
    assert [topic.successor for topic in await log.topics()] == [None] * 3
    await move(log, "t", "u")
    with pytest.raises(InvalidValue, match=r"successor is 't': expected a topic that does not continue as .* 'u'"):
        await move(log, "u", "t")
    await move(log, "u", "v")
    with pytest.raises(InvalidValue, match="successor is 't'"):
        await move(log, "v", "t")
    assert [topic.successor for topic in await log.topics()] == ["u", "v", None]


# Contracting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, -1, 3, 4, 1.5, True, "1"])
def test_a_topic_has_at_least_one_open_partition_and_fewer_than_it_has(number: Any) -> None:
    with pytest.raises(InvalidValue, match="open_partitions is"):
        Topic("t", 3, open_partitions=number)
    assert [Topic("t", 3, open_partitions=n).receiving for n in (None, 1, 2)] == [3, 1, 2]
    assert list(Topic("t", 2, open_partitions=1)) == [T0, T1]


@awaited
async def test_draining_partitions_take_no_records_and_the_others_do(log: Log) -> None:
    topic = await log.create_topic("t", 4)
    for partition in topic:
        await log.append(partition, records(0))
    contracted = replace(topic, open_partitions=2)
    for _ in range(2):  # once more changes nothing
        assert state(await log.contract_topic("t", 2)) == state(contracted)
        assert state(await log.topic("t")) == state(contracted)
        assert [state(topic) for topic in await log.topics()] == [state(contracted)]
        for partition in topic:
            for path in (list, arrow):
                if partition.index < 2:
                    await log.append(partition, path(records(1)))
                    continue
                message = f"{partition} is draining .* append to partitions 0 to 1"
                with pytest.raises(PartitionDraining, match=message) as refused:
                    await log.append(partition, path(records(1)), stamp=Stamp("p", 1))
                assert (refused.value.partition, refused.value.receiving) == (partition, 2)
    assert [await contents(log, p) for p in topic] == [records(0, *[1] * 4)] * 2 + [records(0)] * 2


@awaited
async def test_a_topic_contracted_to_what_it_has_is_as_it_was(log: Log) -> None:
    topic = await log.create_topic("t", 2)
    assert await log.contract_topic("t", 2) == topic
    await log.append(T1, records(0))
    assert await log.drop_partitions("t", 2) == topic
    assert await contents(log, T1) == records(0)


@awaited
async def test_a_topic_can_be_contracted_further_but_not_to_more_partitions_nor_to_none(log: Log) -> None:
    topic = await log.create_topic("t", 5)
    for number in (4, 2, 1):
        assert state(await log.contract_topic("t", number)) == state(replace(topic, open_partitions=number))
        with pytest.raises(InvalidValue, match=f"expected at most the {number} that 't' has open"):
            await log.contract_topic("t", number + 1)
        with pytest.raises(InvalidValue, match="expected a whole number of at least 1"):
            await log.contract_topic("t", 0)
        with pytest.raises(PartitionDraining):
            await log.append(Partition("t", number), records(0))
        assert state(await log.topic("t")) == state(replace(topic, open_partitions=number))
    await log.append(T0, records(0))


@awaited
async def test_a_draining_partition_can_be_read_and_trimmed_and_retention_applies(log: Log) -> None:
    topic = await log.create_topic("t", 2)
    await log.append(T1, records(*range(6)))
    contracted = await log.contract_topic("t", 1)
    assert await log.span(T1) == spanned(log, topic.epoch, 0, 6)
    assert ids(await log.read(T1, at(log, 4), epoch=topic.epoch)) == ["r4", "r5"]
    assert len(await log.read(T1, end(log, 6), wait=0.01)) == 0
    assert await log.trim(T1, at(log, 2)) == spanned(log, topic.epoch, 2, 6)
    assert await log.offset_at(T1, 0) == at(log, 2)
    await log.maintain()
    assert await contents(log, T1) == records(*range(2, 6))
    assert await log.set_retention("t", Retention(age_ms=1)) == replace(contracted, retention=Retention(age_ms=1))
    await log.maintain()
    assert await log.span(T1) == spanned(log, topic.epoch, 6, 6)


@awaited
async def test_a_retried_append_is_recognised_although_its_partition_is_draining(log: Log) -> None:
    topic = await log.create_topic("t", 2)
    await log.append(T1, records(0, 1), stamp=Stamp("p", 100))
    await log.contract_topic("t", 1)
    again = await log.append(T1, records(0, 1), stamp=Stamp("p", 100))
    assert again == Appended(T1, Position(topic.epoch, at(log, 0)), 2, duplicate=True)
    with pytest.raises(InvalidValue, match="not used for another batch"):
        await log.append(T1, records(0), stamp=Stamp("p", 100))
    with pytest.raises(SequenceTooOld):
        await log.append(T1, records(0), stamp=Stamp("p", 1))
    for _ in range(2):
        with pytest.raises(PartitionDraining):
            await log.append(T1, records(2), stamp=Stamp("p", 101))
    await log.expand_topic("t", 2)
    assert not (await log.append(T1, records(2), stamp=Stamp("p", 101))).duplicate
    assert await contents(log, T1) == records(0, 1, 2)


@awaited
async def test_a_fence_comes_before_closing_and_is_not_raised_by_what_closing_refuses(log: Log) -> None:
    await log.create_topic("t", 2)
    await log.set_fence(Fence("g", 5))
    await log.contract_topic("t", 1)
    with pytest.raises(Fenced):
        await log.append(T1, records(1), fence=Fence("g", 4))
    with pytest.raises(PartitionDraining):
        await log.append(T1, records(1), fence=Fence("g", 7))
    await log.set_fence(Fence("g", 6))


@awaited
async def test_once_a_topic_is_contracted_nothing_comes_after_on_what_is_closing(log: Log) -> None:
    topic = await log.create_topic("t", 4)
    in_flight = asyncio.Event()
    stop = asyncio.Event()

    async def produce(name: int) -> int:
        for n in itertools.count():
            if stop.is_set():
                return n
            try:
                await log.append(Partition("t", name % 4), [Record(f"{name}.{n}", None, b"")])
            except PartitionDraining:
                assert name % 4 >= 2
                return n
            if n == 5:
                in_flight.set()
            await asyncio.sleep(0)  # the others' turn
        raise AssertionError

    producing = [asyncio.ensure_future(produce(name)) for name in range(20)]
    await in_flight.wait()
    await log.contract_topic("t", 2)
    ends = [(await log.span(p)).end for p in list(topic)[2:]]
    refused = [producing[name] for name in range(20) if name % 4 >= 2]
    assert sum(await asyncio.gather(*refused)) == sum([len(await contents(log, p)) for p in list(topic)[2:]])
    assert [(await log.span(p)).end for p in list(topic)[2:]] == ends
    open_end = (await log.span(T0)).end
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while (await log.span(T0)).end < open_end + 10:  # noqa: ASYNC110 the producers know nothing of this
            await asyncio.sleep(0)
    stop.set()
    stored = sum(await asyncio.gather(*producing))
    assert stored == sum([len(await contents(log, p)) for p in topic])


@awaited
async def test_dropped_partitions_are_gone_with_their_records_and_the_others_stay(log: Log) -> None:
    topic = await log.create_topic("t", 4, partitioner="jump", retention=Retention(age_ms=10**15))
    await log.create_topic("t2", 4)
    for partition in [*topic, Partition("t2", 3)]:
        await log.append(partition, records(0, 1))
    await log.contract_topic("t", 2)
    for _ in range(2):  # once more changes nothing
        assert state(await log.drop_partitions("t", 2)) == state(replace(topic, partitions=2))
        assert state(await log.topic("t")) == state(replace(topic, partitions=2))
        for gone in (Partition("t", 2), Partition("t", 3)):
            for call in (log.span(gone), log.read(gone, 0), log.read(gone, 2, wait=TIMEOUT_SECONDS), log.trim(gone, 0)):
                with pytest.raises(PartitionOutOfRange, match="'t' has partitions 0 to 1"):
                    await call
            with pytest.raises(PartitionOutOfRange):
                await log.append(gone, records(2))
            with pytest.raises(PartitionOutOfRange):
                await log.offset_at(gone, 0)
        await log.maintain()
        assert [await contents(log, p) for p in (T0, T1, Partition("t2", 3))] == [records(0, 1)] * 3
    await log.append(T1, records(2))


@awaited
async def test_an_expansion_reopens_draining_partitions_and_they_continue_where_they_were(
    log: Log,
) -> None:
    topic = await log.create_topic("t", 4)
    for partition in topic:
        await log.append(partition, records(0), stamp=Stamp("p", 1))
    await log.contract_topic("t", 1)
    await log.expand_topic("t", 2)
    with pytest.raises(InvalidValue, match="at least the 2 that 't' has open"):
        await log.expand_topic("t", 1)
    assert state(await log.topic("t")) == state(replace(topic, open_partitions=2))
    assert state(await log.expand_topic("t", 2)) == state(replace(topic, open_partitions=2)), (
        "to what is open: nothing changes"
    )
    assert state(await log.expand_topic("t", 3)) == state(replace(topic, open_partitions=3))
    for partition in list(topic)[:3]:
        assert (await log.append(partition, records(0), stamp=Stamp("p", 1))).duplicate
        assert await log.append(partition, records(1)) == Appended(partition, Position(topic.epoch, at(log, 1)), 1)
        assert await contents(log, partition) == records(0, 1)
    with pytest.raises(PartitionDraining):
        await log.append(Partition("t", 3), records(1))
    assert state(await log.expand_topic("t", 4)) == state(topic)
    await log.contract_topic("t", 3)
    assert state(await log.expand_topic("t", 6)) == state(replace(topic, partitions=6))
    assert await contents(log, Partition("t", 3)) == records(0)
    assert await log.append(Partition("t", 5), records(0)) == Appended(
        Partition("t", 5), Position(topic.epoch, at(log, 0)), 1
    )


@awaited
async def test_partitions_are_dropped_only_if_those_that_are_to_stay_are_the_open_ones(log: Log) -> None:
    topic = await log.create_topic("t", 4)
    await log.append(Partition("t", 2), records(0))
    await log.contract_topic("t", 3)
    contracted = await log.contract_topic("t", 2)  # by somebody else, after the first was found to be drained
    for wrong in (3, 1, 4, 0, 2**80, True):
        with pytest.raises(InvalidValue, match="partitions is"):
            await log.drop_partitions("t", wrong)
    assert await log.topic("t") == contracted
    assert await contents(log, Partition("t", 2)) == records(0)
    await log.expand_topic("t", 4)
    with pytest.raises(InvalidValue, match="partitions is 2: expected the 4 that 't' has open"):
        await log.drop_partitions("t", 2)
    assert state(await log.drop_partitions("t", 4)) == state(topic)


@pytest.mark.parametrize("maintained", [False, True])
@awaited
async def test_a_partition_that_is_added_again_is_empty_and_continues_where_the_dropped_one_ended(
    log: Log, maintained: bool
) -> None:
    topic = await log.create_topic("t", 3)
    for path in (list, arrow):
        await log.append(T1, path(records(0, 1, 2)))
    await log.trim(T1, at(log, 1))
    for count in (6, 8, 10):
        ended = end(log, count)
        await log.contract_topic("t", 1)
        await log.drop_partitions("t", 1)
        if maintained:
            await log.maintain()
        kept, gone = {0: spanned(log, topic.epoch, 0, 0)}, spanned(log, topic.epoch, count, count)
        assert await log.ends("t") == kept
        assert await log.ends("t", dropped=True) == {**kept, 1: gone, 2: spanned(log, topic.epoch, 0, 0)}
        assert state(await log.expand_topic("t", 3)) == state(topic)
        assert await log.span(T1) == spanned(log, topic.epoch, count, count)
        assert await log.span(Partition("t", 2)) == spanned(log, topic.epoch, 0, 0), "it never had a record"
        assert await log.offset_at(T1, 0) == ended
        for committed in range(ended):
            with pytest.raises(OffsetTrimmed) as refused:
                await log.read(T1, committed, epoch=topic.epoch)
            assert refused.value.first == ended
        assert len(await log.read(T1, ended, epoch=topic.epoch)) == 0
        with pytest.raises(OffsetBeyondEnd):
            await log.read(T1, ended + 1)
        assert (await log.append(T1, records(7, 8))).first == Position(topic.epoch, at(log, count))
        if maintained:
            await log.maintain()
        assert await contents(log, T1) == records(7, 8)
        assert await log.offset_at(T1, 0) == at(log, count)


@awaited
async def test_partitions_come_back_one_by_one_each_where_it_ended(log: Log) -> None:
    topic = await log.create_topic("t", 4)
    for partition in topic:
        await log.append(partition, records(*range(partition.index)) or records(0))
    await log.contract_topic("t", 1)
    await log.drop_partitions("t", 1)
    for index in (1, 2, 3):
        assert state(await log.expand_topic("t", index + 1)) == state(replace(topic, partitions=index + 1))
        assert await log.span(Partition("t", index)) == spanned(log, topic.epoch, index, index)
    assert await contents(log, T0) == records(0)


@awaited
async def test_a_topic_recreated_after_partitions_were_dropped_starts_at_offset_0(log: Log) -> None:
    await log.create_topic("t", 2)
    await log.append(T1, records(0, 1))
    await log.contract_topic("t", 1)
    await log.drop_partitions("t", 1)
    await log.delete_topic("t")
    topic = await log.create_topic("t", 1)
    await log.maintain()
    await log.expand_topic("t", 2)
    assert await log.span(T1) == spanned(log, topic.epoch, 0, 0)
    await log.contract_topic("t", 1)
    await log.delete_topic("t")
    recreated = await log.create_topic("t", 2)
    assert state(recreated) == Topic("t", 2, epoch=recreated.epoch), "none of it is draining"
    await log.append(T1, records(0))


@awaited
async def test_a_sealed_or_moved_topic_is_neither_contracted_nor_are_its_partitions_dropped(log: Log) -> None:
    await log.create_topic("t", 3)
    await log.create_topic("u", 1)
    whole = await log.create_topic("v", 1)
    await log.append(Partition("t", 2), records(0))
    await log.contract_topic("t", 2)
    changes: list[tuple[Callable[[str], Awaitable[Topic]], type[ShardyardError]]] = [
        (lambda name: log.seal_topic(name, HOLDER), Sealed),
        (lambda name: move(log, name, "u"), Moved),
    ]
    for change, refusal in changes:
        changed = await change("t")
        assert changed.open_partitions == 2
        for call in (log.contract_topic("t", 1), log.contract_topic("t", 2), log.drop_partitions("t", 2)):
            with pytest.raises(refusal):
                await call
        for partition in changed:
            with pytest.raises(refusal):
                await log.append(partition, records(1))
        assert await log.topic("t") == changed
        assert await contents(log, Partition("t", 2)) == records(0)
        await change("v")
        assert (await log.drop_partitions("v", 1)).partitions == whole.partitions, "none is draining"


@awaited
async def test_a_topic_that_was_sealed_and_unsealed_is_closing_as_before(log: Log) -> None:
    await log.create_topic("t", 2)
    contracted = await log.contract_topic("t", 1)
    await log.seal_topic("t", HOLDER)
    assert state(await log.unseal_topic("t", HOLDER)) == state(contracted)
    with pytest.raises(PartitionDraining):
        await log.append(T1, records(0))
    await log.append(T0, records(0))
    await log.drop_partitions("t", 1)


# Order and records -------------------------------------------------------------------------------------------------


@awaited
async def test_offsets_ascend_and_an_append_names_its_first(log: Log) -> None:
    topic = await log.create_topic("t", 2)
    batches = ((0, 1), (1, 3), (4, 2))
    places = [await log.append(T0, records(*range(first, first + count))) for first, count in batches]
    assert places == [Appended(T0, Position(topic.epoch, at(log, first)), count) for first, count in batches]
    assert await numbered(log, T0) == [(at(log, i), record(i)) for i in range(6)]
    assert await log.span(T0) == spanned(log, topic.epoch, 0, 6)
    assert await log.span(T1) == spanned(log, topic.epoch, 0, 0)
    assert await contents(log, T0) == records(*range(6))


@awaited
async def test_every_offset_can_be_read_from(log: Log) -> None:
    await log.create_topic("t", 1)
    for i in range(0, 12, 3):
        await log.append(T0, records(i, i + 1, i + 2))
    for offset in range(end(log, 12) + 1):
        batch = await log.read(T0, offset)
        wanted = [i for i in range(12) if at(log, i) >= offset]
        assert (batch.first, batch.end, batch.records()) == (offset, end(log, 12), records(*wanted))
        assert list(batch.offsets()) == [at(log, i) for i in wanted] == batch.offset_array().tolist()
        for stop in range(offset, end(log, 12) + 2):
            part = batch.before(stop)
            assert (part.first, part.end) == (offset, min(stop, end(log, 12)))
            assert part.records() == records(*(i for i in wanted if at(log, i) < stop))
            assert list(part.offsets()) == [at(log, i) for i in wanted if at(log, i) < stop]


ODD = [
    Record("plain", b"key", b"value", timestamp=1),
    Record("keyless", None, b"value", timestamp=2),
    Record("an empty key is none of none", b"", b"", timestamp=3),
    Record("ключ 🗝 \x00 é", b"\x00\xff", b"\xff" * 300, timestamp=2**53),
    Record("headers", b"k", b"v", ((TAG, b"red"), (TRACE, b""), (TAG, b"blue"), ("ü", b"\x00")), timestamp=5),
]


@pytest.mark.parametrize("rows", [ODD, ODD[:4], ODD[4:], ODD[1:2]], ids=["all", "no headers", "headers", "one"])
@pytest.mark.parametrize("path", [list, tuple, arrow])
@awaited
async def test_a_record_comes_back_as_it_was_appended(
    log: Log, rows: list[Record], path: Callable[[list[Record]], Any]
) -> None:
    await log.create_topic("t", 1)
    await log.append(T0, path(rows))
    batch = await log.read(T0, 0)
    assert batch.records() == rows
    assert batch.data.schema.equals(SCHEMA)
    assert pa.Table.from_batches([arrow(rows)]).equals(batch.data.combine_chunks())


@awaited
async def test_a_slice_of_an_arrow_batch_is_stored_as_that_slice(log: Log) -> None:
    await log.create_topic("t", 1)
    for start, count in ((3, 2), (1, 2), (4, 1)):
        await log.append(T0, arrow(ODD).slice(start, count))
    assert await contents(log, T0) == ODD[3:5] + ODD[1:3] + ODD[4:5]


@awaited
async def test_both_paths_can_take_turns(log: Log) -> None:
    await log.create_topic("t", 1)
    rows = [[record(i), *ODD] for i in range(8)]
    await asyncio.gather(*(log.append(T0, arrow(some) if i % 3 else some) for i, some in enumerate(rows)))
    found = await contents(log, T0)
    assert sorted(r.id for r in found) == sorted(r.id for some in rows for r in some)
    assert [found[i + 1 : i + 6] for i in range(0, 48, 6)] == [ODD] * 8


@awaited
async def test_what_was_placed_under_another_generation_of_a_topic_is_refused(log: Log) -> None:
    before = await log.create_topic("t", 2)
    stamp = Stamp("p", 1)
    first = await log.append(T0, records(0), stamp=stamp, generation=before.generation)
    expanded = await log.expand_topic("t", 4)
    with pytest.raises(Outdated, match="look the topic up and place them again") as refused:
        await log.append(T0, records(1), stamp=Stamp("p", 2), generation=before.generation)
    error = refused.value
    assert (error.topic, error.generation, error.current) == ("t", before.generation, expanded.generation)
    again = await log.append(T0, records(0), stamp=stamp, generation=before.generation)
    assert (again.first, again.duplicate) == (first.first, True), "a batch that is stored already is recognised"
    await log.append(T0, records(1), stamp=Stamp("p", 2), generation=expanded.generation)
    contracted = await log.contract_topic("t", 2)
    with pytest.raises(Outdated):
        await log.append(T0, records(2), generation=expanded.generation)
    with pytest.raises(PartitionDraining):
        await log.append(Partition("t", 3), records(2), generation=expanded.generation)
    with pytest.raises(Outdated):  # although it has as many open partitions again
        await log.append(T0, records(2), generation=before.generation)
    await log.append(T0, records(2), generation=contracted.generation)
    await log.append(T0, records(3))
    assert await contents(log, T0) == records(0, 1, 2, 3)
    await log.delete_topic("t")
    recreated = await log.create_topic("t", 2)
    with pytest.raises(Outdated):
        await log.append(T0, records(3), generation=contracted.generation)
    await log.append(T0, records(3), generation=recreated.generation)
    assert await contents(log, T0) == records(3)


@awaited
async def test_every_change_that_decides_where_records_go_raises_the_generation(log: Log) -> None:
    seen = [(await log.create_topic("t", 2)).generation]
    await log.create_topic("u", 1)

    async def changed(call: Awaitable[Topic]) -> None:
        topic = await call
        assert topic.generation > seen[-1]
        assert await log.topic("t") == topic
        seen.append(topic.generation)

    async def unchanged(call: Awaitable[Topic]) -> None:
        assert (await call).generation == seen[-1]
        assert (await log.topic("t")).generation == seen[-1]

    await unchanged(log.set_retention("t", Retention(age_ms=10**15)))
    await unchanged(log.expand_topic("t", 2))
    await changed(log.expand_topic("t", 4))
    await unchanged(log.contract_topic("t", 4))
    await changed(log.contract_topic("t", 3))
    await unchanged(log.contract_topic("t", 3))
    await changed(log.drop_partitions("t", 3))
    await unchanged(log.drop_partitions("t", 3))
    await unchanged(log.unseal_topic("t", HOLDER))
    await changed(log.seal_topic("t", HOLDER))
    await unchanged(log.seal_topic("t", HOLDER))
    await unchanged(log.unseal_topic("t", "somebody else"))
    await changed(log.unseal_topic("t", HOLDER))
    await changed(log.seal_topic("t", HOLDER))
    sealed = seen[-1]
    await changed(log.move_topic("t", "u", holder=HOLDER, generation=sealed))
    await unchanged(log.move_topic("t", "u", holder=HOLDER, generation=sealed))
    await log.delete_topic("t")
    await changed(log.create_topic("t", 2))


@awaited
async def test_every_change_of_the_catalog_raises_its_version_and_nothing_else_does(opened: Open) -> None:
    log = opened()
    seen = [await log.catalog_version()]

    async def changed(call: Awaitable[Any]) -> None:
        await call
        seen.append(await log.catalog_version())
        assert seen[-1] > seen[-2]

    async def unchanged(call: Awaitable[Any]) -> None:
        await call
        assert await log.catalog_version() == seen[-1]

    await changed(log.create_topic("t", 2))
    await changed(log.create_topic("u", 1))
    await changed(log.expand_topic("t", 4))
    await changed(log.contract_topic("t", 3))
    await changed(log.drop_partitions("t", 3))
    await changed(log.set_retention("t", Retention(age_ms=10**15)))
    await unchanged(log.append(T0, records(0)))
    await unchanged(log.trim(T0, 1))
    await unchanged(log.set_fence(Fence("g", 1)))
    await unchanged(log.topics())
    await changed(log.seal_topic("t", HOLDER))
    await changed(log.unseal_topic("t", HOLDER))
    await changed(log.delete_topic("u"))
    await changed(log.delete_topic("t"))
    await log.close()


@awaited
async def test_arrow_columns_of_kindred_types_are_converted(log: Log) -> None:
    await log.create_topic("t", 1)
    kindred = pa.record_batch(
        {
            "id": pa.array(["a"], pa.large_string()),
            "key": pa.array(["k"]),
            "value": pa.array([b"v"], pa.large_binary()),
            "headers": pa.nulls(1),
            "timestamp": pa.array([7], pa.int32()),
        }
    )
    await log.append(T0, kindred)
    assert await contents(log, T0) == [Record("a", b"k", b"v", timestamp=7)]


@pytest.mark.parametrize("path", [list, arrow])
@awaited
async def test_a_record_with_timestamp_0_gets_the_time_of_the_call(log: Log, path: Callable[..., Any]) -> None:
    await log.create_topic("t", 1)
    before = time.time_ns() // 1_000_000
    await log.append(T0, path([Record("a", None, b"", timestamp=0), Record("b", None, b"", timestamp=5)]))
    after = time.time_ns() // 1_000_000
    first, second = await contents(log, T0)
    assert before <= first.timestamp <= after
    assert second.timestamp == 5


@awaited
async def test_what_the_caller_does_with_its_list_afterwards_changes_nothing(log: Log) -> None:
    await log.create_topic("t", 1)
    buffer = records(0, 1, 2)
    appends = [asyncio.ensure_future(log.append(T0, buffer)) for _ in range(5)]
    await asyncio.sleep(0)  # each has begun
    buffer.clear()
    await asyncio.gather(*appends)
    assert await contents(log, T0) == records(0, 1, 2) * 5


@awaited
async def test_fifty_producers_at_once_keep_their_order(log: Log) -> None:
    topic = await log.create_topic("t", 4)

    async def produce(name: int) -> list[Appended]:
        partition = Partition("t", name % 4)
        path = arrow if name % 5 == 0 else list
        return [
            await log.append(partition, path([Record(f"{name}.{n}.{i}", None, b"v") for i in range(1 + n % 3)]))
            for n in range(10)
        ]

    placed = await asyncio.gather(*(produce(name) for name in range(50)))
    assert [[a.count for a in mine] for mine in placed] == [[1 + n % 3 for n in range(10)]] * 50
    for partition in topic:
        there = await numbered(log, partition)
        found = [r.id for _, r in there]
        place = {offset: i for i, (offset, _) in enumerate(there)}
        mine = [name for name in range(50) if name % 4 == partition.index]
        assert len(found) == len(mine) * 19
        for name in mine:
            offsets = [a.first.offset for a in placed[name]]
            assert offsets == sorted(offsets)
            for n, offset in enumerate(offsets):  # a batch lies together, where its append said
                i = place[offset]
                assert found[i : i + 1 + n % 3] == [f"{name}.{n}.{i}" for i in range(1 + n % 3)]


@awaited
async def test_a_batch_becomes_visible_as_a_whole(log: Log) -> None:
    await log.create_topic("t", 1)
    done = asyncio.Event()

    async def produce() -> None:
        for start in range(0, 400, 20):
            await log.append(T0, records(*range(start, start + 20)))
        done.set()

    producing = asyncio.ensure_future(produce())
    while not done.is_set():
        has = await log.span(T0)
        batch = await log.read(T0, 0)
        assert len(batch) % 20 == 0
        assert batch.end >= has.end
        assert ids(batch) == [f"r{i}" for i in range(len(batch))]
        await asyncio.sleep(0)  # the other's turn
    await producing


# Reading -----------------------------------------------------------------------------------------------------------


@awaited
async def test_a_read_returns_no_more_records_than_asked_for(log: Log) -> None:
    await log.create_topic("t", 1)
    for start in range(0, 20, 5):
        await log.append(T0, records(*range(start, start + 5)))
    for most in (1, 4, 5, 6, 19, 20, 21):
        for offset in (0, 3, 5, 18):
            batch = await log.read(T0, at(log, offset), max_records=most)
            assert batch.records() == records(*range(offset, min(offset + most, 20)))


@awaited
async def test_a_read_returns_no_more_bytes_than_asked_for_but_at_least_one_record(log: Log) -> None:
    await log.create_topic("t", 1)
    for start in range(0, 100, 10):
        await log.append(T0, [record(i, size=1_000) for i in range(start, start + 10)])
    for most in (1, 900, 1_500, 9_500, 10_500, 35_000):
        batch = await log.read(T0, at(log, 3), max_bytes=most)
        size = sum(len(r.value) for r in batch.records())
        assert len(batch) == 1 or size <= most
        assert size >= min(1_000, most), "and not much less than it may"
        assert ids(batch) == [f"r{i}" for i in range(3, 3 + len(batch))]
    assert len(await log.read(T0, at(log, 3), max_bytes=35_000)) >= 20
    assert await contents(log, T0, max_bytes=2_500) == [record(i, size=1_000) for i in range(100)]


@awaited
async def test_at_the_end_a_read_returns_nothing(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    await log.append(T0, records(0))
    last = end(log, 1)
    batch = await log.read(T0, last)
    assert (batch.partition, batch.epoch, batch.first, batch.end, len(batch)) == (T0, topic.epoch, last, last, 0)
    assert batch.records() == []
    assert batch.data.schema.equals(SCHEMA)


@awaited
async def test_beyond_the_end_a_read_is_refused(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.append(T0, records(0))
    for offset in (end(log, 1) + 1, 2**80):
        with pytest.raises(OffsetBeyondEnd) as refused:
            await log.read(T0, offset, wait=TIMEOUT_SECONDS)
        assert (refused.value.partition, refused.value.offset, refused.value.end) == (T0, offset, end(log, 1))


@awaited
async def test_a_gap_at_the_end_is_passed_over_without_waiting_by_an_empty_batch(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.append(T0, records(0, 1))
    for offset in range(at(log, 1) + 1, end(log, 2)):
        batch = await log.read(T0, offset, wait=1_000 * TIMEOUT_SECONDS)
        assert (batch.first, batch.end, batch.records(), list(batch.offsets())) == (offset, end(log, 2), [], [])


@awaited
async def test_a_scan_passes_over_gaps_and_trimmed_records_and_stops_at_its_end(log: Log) -> None:
    await log.create_topic("t", 1)
    for i in range(0, 30, 5):
        await log.append(T0, records(*range(i, i + 5)))
    await log.trim(T0, at(log, 7))
    for stop in range(at(log, 7), end(log, 30) + 3):
        found: list[tuple[int, Record]] = []
        async for batch in scan(log, T0, 0, stop, max_records=4):
            found += zip(batch.offsets(), batch.records(), strict=True)
        assert found == [(at(log, i), record(i)) for i in range(7, 30) if at(log, i) < stop]


@awaited
async def test_a_count_is_never_less_than_the_records_in_a_range(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    assert await log.count(T0, 0, 10) == 0
    for i in range(0, 12, 4):
        await log.append(T0, records(*range(i, i + 4)))
    await log.trim(T0, at(log, 2))
    last = end(log, 12)
    for start in range(last + 2):
        for stop in range(last + 2):
            there = sum(start <= at(log, i) < stop for i in range(2, 12))
            count = await log.count(T0, start, stop)
            assert there <= count <= max(0, stop - start)
            assert count == there, "these engines know it exactly"
    assert (await log.span(T0)).epoch == topic.epoch


@awaited
async def test_a_waiting_reader_gets_each_record_as_it_arrives(log: Log) -> None:
    await log.create_topic("t", 1)
    seen: list[str] = []
    got = asyncio.Event()

    async def consume() -> None:
        while len(seen) < 30:
            batch = await log.read(T0, end(log, len(seen)), wait=TIMEOUT_SECONDS)
            assert len(batch), "nothing arrived"
            seen.extend(ids(batch))
            got.set()

    consumer = asyncio.ensure_future(consume())
    for i in range(30):  # the next one is sent when the reader has gone to wait for it
        await log.span(T0)
        await log.append(T0, records(i))
        await asyncio.wait_for(got.wait(), TIMEOUT_SECONDS)
        got.clear()
    await consumer
    assert seen == [f"r{i}" for i in range(30)]


@awaited
async def test_many_readers_can_wait_for_one_partition_and_for_many(log: Log) -> None:
    topic = await log.create_topic("t", 5)
    readers = [asyncio.ensure_future(log.read(p, 0, wait=TIMEOUT_SECONDS)) for p in topic for _ in range(4)]
    for _ in range(3):
        await log.span(T0)
    assert not any(reader.done() for reader in readers)
    for partition in topic:
        await log.append(partition, records(partition.index))
    assert [ids(batch) for batch in await asyncio.gather(*readers)] == [
        [f"r{p.index}"] for p in topic for _ in range(4)
    ]


@awaited
async def test_a_waiting_read_returns_an_empty_batch_when_its_time_is_over(log: Log) -> None:
    await log.create_topic("t", 1)
    began = time.monotonic()
    batch = await log.read(T0, 0, wait=0.1)
    assert len(batch) == 0
    assert 0.09 < time.monotonic() - began < TIMEOUT_SECONDS


@awaited
async def test_a_waiting_reader_is_not_woken_by_another_partition(log: Log) -> None:
    await log.create_topic("t", 2)
    reader = asyncio.ensure_future(log.read(T1, 0, wait=TIMEOUT_SECONDS))
    for i in range(10):
        await log.append(T0, records(i))
    assert not reader.done()
    await log.append(T1, records(10))
    assert ids(await reader) == ["r10"], "a reader that is woken too early returns an empty batch"


@awaited
async def test_a_cancelled_reader_leaves_the_log_as_it_was(log: Log) -> None:
    await log.create_topic("t", 1)
    reader = asyncio.ensure_future(log.read(T0, 0, wait=TIMEOUT_SECONDS))
    await log.span(T0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await log.append(T0, records(0))
    assert ids(await log.read(T0, 0, wait=TIMEOUT_SECONDS)) == ["r0"]


@awaited
async def test_a_waiting_reader_fails_at_once_when_the_log_is_closed(log: Log) -> None:
    await log.create_topic("t", 1)
    reader = asyncio.ensure_future(log.read(T0, 0, wait=100 * TIMEOUT_SECONDS))
    for _ in range(5):
        await log.span(T0)
    await log.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(reader, TIMEOUT_SECONDS)


@awaited
async def test_a_waiting_reader_fails_at_once_when_its_partition_is_dropped_or_its_topic_deleted(log: Log) -> None:
    await log.create_topic("t", 2)
    await log.append(T1, records(0, 1))
    kept, dropped = (
        asyncio.ensure_future(log.read(p, end(log, n), wait=100 * TIMEOUT_SECONDS)) for p, n in ((T0, 0), (T1, 2))
    )
    for _ in range(5):
        await log.span(T0)
    await log.contract_topic("t", 1)
    for _ in range(5):
        await log.span(T0)
    assert not dropped.done(), "it may yet be opened again"
    await log.drop_partitions("t", 1)
    with pytest.raises(PartitionOutOfRange):
        await asyncio.wait_for(dropped, TIMEOUT_SECONDS)
    assert not kept.done()
    await log.delete_topic("t")
    with pytest.raises(UnknownTopic):
        await asyncio.wait_for(kept, TIMEOUT_SECONDS)


# Several partitions at once ----------------------------------------------------------------------------------------


def news(found: Outcomes) -> dict[int, object]:
    """The ids that were read of the partitions of topic t, or the kind of error."""
    return {p.index: type(one) if isinstance(one, ShardyardError) else ids(one) for p, one in found.items()}


@awaited
async def test_a_read_of_many_partitions_gives_what_reads_of_those_with_news_give(log: Log) -> None:
    topic = await log.create_topic("t", 10)
    parts = list(topic)
    for p in parts:
        await log.append(p, records(0, 1, 2))
    await log.set_fence(Fence("f", 5))
    last = end(log, 3)
    reads = [
        ReadRequest(parts[0], at(log, 1)),
        ReadRequest(parts[1], 0, topic.epoch, Fence("f", 5)),
        ReadRequest(parts[2], last),
        ReadRequest(parts[3], last, topic.epoch, Fence("f", 6)),
        ReadRequest(parts[4], 1000),
        ReadRequest(parts[5], 0, topic.epoch - 1),
        ReadRequest(parts[6], last, topic.epoch - 1),
        ReadRequest(parts[7], 0, fence=Fence("f", 4)),
        ReadRequest(parts[8], last, fence=Fence("f", 4)),
        ReadRequest(Partition("t", 10), 0),
        ReadRequest(Partition("none", 11), 0),
    ]
    refused = {4: OffsetBeyondEnd, 5: WrongEpoch, 6: WrongEpoch, 7: Fenced, 8: Fenced, 10: PartitionOutOfRange}
    for _ in range(2):  # an engine may know more the second time
        found = await log.read_many(reads, wait=TIMEOUT_SECONDS)
        assert news(found) == {0: ["r1", "r2"], 1: ["r0", "r1", "r2"], **refused, 11: UnknownTopic}
    for partition, offset in ((parts[0], at(log, 1)), (parts[1], 0)):
        batch, alone = found[partition], await log.read(partition, offset)
        assert isinstance(batch, Batch)
        assert (batch.partition, batch.epoch, batch.first, batch.end, list(batch.offsets())) == (
            alone.partition,
            alone.epoch,
            alone.first,
            alone.end,
            list(alone.offsets()),
        )
    await log.trim(parts[0], at(log, 2))
    assert news(await log.read_many(reads[:4])) == {0: OffsetTrimmed, 1: ["r0", "r1", "r2"]}
    few = [ReadRequest(parts[0], at(log, 2)), ReadRequest(parts[1], 0), ReadRequest(parts[2], last)]
    assert news(await log.read_many(few, max_records=1)) == {0: ["r2"], 1: ["r0"]}
    assert await log.read_many(few[2:]) == {}
    assert await log.read_many([], wait=TIMEOUT_SECONDS) == {}
    for wrong in ({"max_records": 0}, {"max_bytes": 0}, {"total_bytes": 0}):
        with pytest.raises(InvalidValue):
            await log.read_many(few, **wrong)
    for index in (True, 1.0):  # as numbers they equal that of a partition
        with pytest.raises(InvalidValue):
            await log.read_many([*few, ReadRequest(Partition("t", cast(Any, index)), last)])


@awaited
async def test_a_read_of_many_partitions_notices_each_fence_that_rises(log: Log) -> None:
    topic = await log.create_topic("t", 3)
    for p in topic:
        await log.append(p, records(0))
    lowest = 2**62
    for index in range(3):
        await log.set_fence(Fence(f"f{index}", lowest))

    def reads(*epochs: int) -> list[ReadRequest]:
        return [ReadRequest(p, end(log, 1), fence=Fence(f"f{p.index}", e)) for p, e in zip(topic, epochs, strict=True)]

    for _ in range(2):  # an engine may know more the second time
        assert await log.read_many(reads(lowest, lowest, lowest)) == {}
    await log.set_fence(Fence("f1", lowest + 1))
    assert news(await log.read_many(reads(lowest, lowest, lowest))) == {1: Fenced}
    assert await log.read_many(reads(lowest, lowest + 1, lowest)) == {}
    await log.set_fence(Fence("f0", 2**63 - 1))
    assert news(await log.read_many(reads(lowest, lowest + 1, lowest))) == {0: Fenced}
    assert news(await log.read_many(reads(lowest, lowest, lowest)[::-1])) == {0: Fenced, 1: Fenced}


@awaited
async def test_a_read_of_many_partitions_notices_that_their_topic_was_created_again(log: Log) -> None:
    topic = await log.create_topic("t", 3)
    for p in topic:
        await log.append(p, records(0))
    known = [ReadRequest(p, end(log, 1), topic.epoch) for p in topic]
    for _ in range(2):  # an engine may know more the second time
        assert await log.read_many(known) == {}
    wrong = [*known[:2], ReadRequest(Partition("t", 2), end(log, 1), topic.epoch - 1)]
    assert news(await log.read_many(wrong)) == {2: WrongEpoch}
    await log.delete_topic("t")
    again = await log.create_topic("t", 3)
    for p in again:
        await log.append(p, records(1))
    assert news(await log.read_many(known)) == dict.fromkeys(range(3), WrongEpoch)
    new = [ReadRequest(p, at(log, 0), again.epoch) for p in again]
    assert news(await log.read_many(new)) == {index: ["r1"] for index in range(3)}


@awaited
async def test_a_read_of_many_partitions_ends_when_it_has_read_enough(log: Log) -> None:
    topic = await log.create_topic("t", 4)
    for partition in topic:
        await log.append(partition, [record(0, size=1000), record(1, size=1000)])
    reads = [ReadRequest(Partition("t", index), 0) for index in (2, 0, 3, 1)]
    for total, wanted in ((1, [2]), (3000, [2, 0]), (100_000, [2, 0, 3, 1])):
        found = await log.read_many(reads, total_bytes=total, wait=TIMEOUT_SECONDS)
        assert news(found) == {index: ["r0", "r1"] for index in wanted}


@awaited
async def test_a_read_of_many_partitions_passes_over_gaps(log: Log) -> None:
    topic = await log.create_topic("t", 2)
    for p in topic:
        await log.append(p, records(0, 1, 2))
    after = at(log, 2) + 1
    found = await log.read_many([ReadRequest(p, after) for p in topic], wait=0.01)
    if log.capabilities.dense_offsets:
        assert found == {}
    else:
        batches = [batch for batch in found.values() if isinstance(batch, Batch)]
        assert [(len(batch), batch.end) for batch in batches] == [(0, end(log, 3))] * 2


@awaited
async def test_a_read_of_many_partitions_waits_until_one_of_them_has_a_record(log: Log) -> None:
    topic = await log.create_topic("t", 8)
    reads = [ReadRequest(p, 0) for p in topic if p.index < 6]
    for index in (5, 0, 3):
        reading = asyncio.ensure_future(log.read_many(reads, wait=TIMEOUT_SECONDS))
        for _ in range(5):
            await log.span(T0)
        await log.append(Partition("t", 7), records(7))
        assert not reading.done(), "it does not read that one"
        await log.append(Partition("t", index), records(index))
        assert news(await reading) == {index: [f"r{index}"]}
        reads[index] = ReadRequest(Partition("t", index), end(log, 1))
    began = time.monotonic()
    assert await log.read_many(reads, wait=0.1) == {}
    assert time.monotonic() - began > 0.09


@awaited
async def test_a_waiting_read_of_many_partitions_ends_when_one_is_gone_or_the_log_is_closed(log: Log) -> None:
    await log.create_topic("t", 2)
    await log.create_topic("u", 2)
    reads = [ReadRequest(T0, 0), ReadRequest(Partition("u", 1), 0)]
    waiting = asyncio.ensure_future(log.read_many(reads, wait=100 * TIMEOUT_SECONDS))
    for _ in range(5):
        await log.span(T0)
    assert not waiting.done()
    await log.delete_topic("u")
    assert news(await asyncio.wait_for(waiting, TIMEOUT_SECONDS)) == {1: UnknownTopic}
    waiting = asyncio.ensure_future(log.read_many(reads[:1], wait=100 * TIMEOUT_SECONDS))
    for _ in range(5):
        await log.span(T0)
    await log.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(waiting, TIMEOUT_SECONDS)


@awaited
async def test_a_cancelled_read_of_many_partitions_leaves_the_log_as_it_was(log: Log) -> None:
    topic = await log.create_topic("t", 3)
    reads = [ReadRequest(p, 0) for p in topic]
    reading = asyncio.ensure_future(log.read_many(reads, wait=TIMEOUT_SECONDS))
    for _ in range(5):
        await log.span(T0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await log.append(T1, records(0))
    assert news(await log.read_many(reads, wait=TIMEOUT_SECONDS)) == {1: ["r0"]}


@awaited
async def test_appends_of_one_call_with_the_same_fences_are_fenced_by_one_of_them_that_raises_one(log: Log) -> None:
    await log.create_topic("t", 1)
    shared = [Fence("f", 1), Fence("g", 1)]
    stored = await log.append_many(
        [
            AppendRequest(T0, records(0), fence=shared),
            AppendRequest(T0, records(1), fence=shared),
            AppendRequest(T0, records(2), fence=Fence("g", 2)),
            AppendRequest(T0, records(3), fence=shared),
        ]
    )
    assert [type(one) for one in stored] == [Appended, Appended, Appended, Fenced]


@awaited
async def test_appends_to_many_partitions_are_each_stored_or_refused_by_themselves(log: Log) -> None:
    topic = await log.create_topic("t", 3)
    await log.create_topic("sealed", 1)
    await log.seal_topic("sealed", HOLDER)
    await log.set_fence(Fence("f", 5))
    stored = await log.append_many(
        [
            AppendRequest(T0, records(0, 1), Stamp("p", 1), Fence("f", 5), topic.generation),
            AppendRequest(T1, records(2), fence=[Fence("f", 4), Fence("g", 1)]),
            AppendRequest(T0, arrow(records(3))),
            AppendRequest(T0, records(0, 1), Stamp("p", 1)),
            AppendRequest(T1, records(4), generation=topic.generation + 100),
            AppendRequest(Partition("t", 9), records(5)),
            AppendRequest(Partition("sealed", 0), records(6)),
            AppendRequest(T1, []),
            AppendRequest(T1, records(7), Stamp("p", 1)),
            AppendRequest(T0, records(8)),
        ]
    )
    kinds = [one.duplicate if isinstance(one, Appended) else type(one) for one in stored]
    assert kinds == [False, Fenced, False, True, Outdated, PartitionOutOfRange, Sealed, InvalidValue, False, False]
    places = [one.first.offset for one in stored if isinstance(one, Appended)]
    assert places == [at(log, 0), at(log, 2), at(log, 0), at(log, 0), at(log, 3)]
    assert await contents(log, T0) == records(0, 1, 3, 8)
    assert await contents(log, T1) == records(7)
    assert await log.append_many([]) == []
    await log.set_fence(Fence("g", 0))  # nothing was stored of what was refused, not even its fences
    await log.close()
    with pytest.raises(Closed):
        await log.append_many([AppendRequest(T0, records(9))])


# Idempotent appends ------------------------------------------------------------------------------------------------


@awaited
async def test_a_retried_batch_is_stored_once(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    await log.append(T0, records(9))
    first = await log.append(T0, records(0, 1), stamp=Stamp("p", 5))
    await log.append(T0, records(2), stamp=Stamp("p", 6))
    again = [await log.append(T0, path(records(0, 1)), stamp=Stamp("p", 5)) for path in (list, arrow)]
    assert first == Appended(T0, Position(topic.epoch, at(log, 1)), 2)
    assert again == [Appended(T0, Position(topic.epoch, at(log, 1)), 2, duplicate=True)] * 2
    assert await contents(log, T0) == records(9, 0, 1, 2)


@awaited
async def test_the_same_stamp_sent_many_times_concurrently_is_stored_once(log: Log) -> None:
    await log.create_topic("t", 1)
    placed = await asyncio.gather(*(log.append(T0, records(0, 1), stamp=Stamp("p", 0)) for _ in range(20)))
    assert {a.first for a in placed} == {placed[0].first}
    assert sum(not a.duplicate for a in placed) == 1
    assert await contents(log, T0) == records(0, 1)


@awaited
async def test_stamps_are_apart_for_each_producer_and_partition(log: Log) -> None:
    await log.create_topic("t", 2)
    for partition in (T0, T1):
        for producer in ("p", "P", "q"):
            assert not (await log.append(partition, records(0), stamp=Stamp(producer, 3))).duplicate
    assert (await log.span(T0)).end == (await log.span(T1)).end == end(log, 3)


@awaited
async def test_sequences_may_have_gaps_and_come_in_any_order_within_the_window(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    order = [100, 100 - SEQUENCE_WINDOW + 1, 99, 50, 60]
    for i, sequence in enumerate(order):
        assert (await log.append(T0, records(i), stamp=Stamp("p", sequence))).first == Position(topic.epoch, at(log, i))
    for i, sequence in enumerate(order):
        again = await log.append(T0, records(i), stamp=Stamp("p", sequence))
        assert (again.first.offset, again.duplicate) == (at(log, i), True)
    assert (await log.span(T0)).end == end(log, len(order))


@awaited
async def test_a_sequence_behind_the_window_is_too_old_whether_it_was_stored_or_not(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.append(T0, records(0), stamp=Stamp("p", 10))
    await log.append(T0, records(1), stamp=Stamp("p", 10 + SEQUENCE_WINDOW))
    for sequence in (10, 9, 0):
        with pytest.raises(SequenceTooOld) as refused:
            await log.append(T0, records(2), stamp=Stamp("p", sequence))
        error = refused.value
        assert (error.partition, error.producer, error.sequence, error.last) == (
            T0,
            "p",
            sequence,
            10 + SEQUENCE_WINDOW,
        )
    assert not (await log.append(T0, records(2), stamp=Stamp("p", 11))).duplicate
    assert await contents(log, T0) == records(0, 1, 2)


@awaited
async def test_a_stamp_outlives_its_trimmed_records_and_maintenance(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    await log.append(T0, records(0, 1), stamp=Stamp("p", 1))
    await log.trim(T0, end(log, 2))
    await log.maintain()
    again = await log.append(T0, records(0, 1), stamp=Stamp("p", 1))
    assert again == Appended(T0, Position(topic.epoch, at(log, 0)), 2, duplicate=True)
    assert await log.span(T0) == spanned(log, topic.epoch, 2, 2)


@awaited
async def test_the_ends_of_a_topic_are_the_spans_of_all_its_partitions(log: Log) -> None:
    await log.create_topic("t", 3)
    await log.create_topic("u", 1)
    await log.append(T1, records(0, 1))
    await log.append(Partition("t", 2), records(0))
    await log.trim(T1, at(log, 1))
    await log.contract_topic("t", 2)
    assert await log.ends("t") == {index: await log.span(Partition("t", index)) for index in range(3)}
    await log.drop_partitions("t", 2)
    assert await log.ends("t") == {index: await log.span(Partition("t", index)) for index in range(2)}
    with pytest.raises(UnknownTopic):
        await log.ends("v")
    await log.close()
    with pytest.raises(Closed):
        await log.ends("t")


# Fences ------------------------------------------------------------------------------------------------------------


@awaited
async def test_a_stale_owner_can_neither_append_nor_read(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.append(T0, records(0), fence=Fence("g/t/0", 3))
    await log.set_fence(Fence("g/t/0", 4))
    for call in (log.append(T0, records(1), fence=Fence("g/t/0", 3)), log.read(T0, 0, fence=Fence("g/t/0", 3))):
        with pytest.raises(Fenced, match="epoch 3 of g/t/0 is over: the current one is 4"):
            await call
    await log.append(T0, records(2), fence=Fence("g/t/0", 4))
    assert ids(await log.read(T0, 0, fence=Fence("g/t/0", 4))) == ["r0", "r2"]


@awaited
async def test_an_append_with_a_higher_epoch_raises_the_fence(log: Log) -> None:
    await log.create_topic("t", 2)
    await log.append(T0, records(0), fence=Fence("g", 7))
    for partition in (T0, T1):
        with pytest.raises(Fenced):
            await log.append(partition, records(1), fence=Fence("g", 6))


@awaited
async def test_a_retried_append_with_a_higher_epoch_raises_the_fence_too(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.append(T0, records(0), stamp=Stamp("p", 1), fence=Fence("g", 1))
    assert (await log.append(T0, records(0), stamp=Stamp("p", 1), fence=Fence("g", 2))).duplicate
    with pytest.raises(Fenced):
        await log.append(T0, records(1), fence=Fence("g", 1))


@awaited
async def test_a_retried_append_of_a_stale_owner_is_fenced(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.append(T0, records(0), stamp=Stamp("p", 1), fence=Fence("g", 1))
    await log.set_fence(Fence("g", 2))
    with pytest.raises(Fenced):
        await log.append(T0, records(0), stamp=Stamp("p", 1), fence=Fence("g", 1))


@awaited
async def test_of_several_fences_of_an_append_each_must_hold_and_each_is_raised(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.set_fence(Fence("b", 2))
    with pytest.raises(Fenced):
        await log.append(T0, records(0), fence=[Fence("a", 5), Fence("b", 1)])
    await log.append(T0, records(1), fence=[Fence("a", 4), Fence("b", 3)])
    for stale in (Fence("a", 3), Fence("b", 2)):
        with pytest.raises(Fenced):
            await log.append(T0, records(2), fence=stale)
    with pytest.raises(InvalidValue, match="a Fence"):
        await log.append(T0, records(3), fence=["b"])  # type: ignore[list-item]
    assert ids(await log.read(T0, 0)) == ["r1"]


@awaited
async def test_a_fence_is_only_ever_raised(log: Log) -> None:
    await log.set_fence(Fence("g", 5))
    await log.set_fence(Fence("g", 5))
    with pytest.raises(Fenced):
        await log.set_fence(Fence("g", 4))
    await log.set_fence(Fence("another", 1))
    await log.set_fence(Fence("g", 6))
    with pytest.raises(Fenced):
        await log.set_fence(Fence("g", 5))


@awaited
async def test_calls_without_a_fence_are_not_fenced(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.set_fence(Fence("g", 5))
    await log.append(T0, records(0))
    assert ids(await log.read(T0, 0)) == ["r0"]


@awaited
async def test_of_two_owners_at_once_the_stale_one_is_cut_off_for_good(log: Log) -> None:
    await log.create_topic("t", 1)

    async def own(epoch: int) -> int:
        for n in range(20):
            try:
                await log.append(T0, [Record(f"{epoch}.{n}", None, b"")], fence=Fence("g", epoch))
            except Fenced:
                return n
        return 20

    kept = await asyncio.gather(own(1), own(2))
    owners = [r.id.split(".")[0] for r in await contents(log, T0)]
    assert owners == sorted(owners)
    assert (owners.count("1"), owners.count("2")) == (kept[0], 20)


# Trimming and time -------------------------------------------------------------------------------------------------


@awaited
async def test_trimmed_records_are_gone_and_the_others_keep_their_offsets(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    for start in range(0, 12, 4):
        await log.append(T0, records(*range(start, start + 4)))
    for number in (1, 4, 6, 6, 12):
        before = from_(log, number, 12)
        assert await log.trim(T0, before) == await log.span(T0) == spanned(log, topic.epoch, number, 12)
        assert await contents(log, T0) == records(*range(number, 12))
        await log.maintain()
        assert await contents(log, T0) == records(*range(number, 12))
        with pytest.raises(OffsetTrimmed) as refused:
            await log.read(T0, before - 1)
        assert (refused.value.partition, refused.value.offset, refused.value.first) == (T0, before - 1, before)
    assert (await log.append(T0, records(12))).first == Position(topic.epoch, at(log, 12))
    assert await contents(log, T0) == records(12)


@awaited
async def test_a_trim_below_the_first_offset_brings_nothing_back(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    await log.append(T0, records(*range(5)))
    await log.trim(T0, at(log, 3))
    assert await log.trim(T0, 0) == spanned(log, topic.epoch, 3, 5)
    assert await contents(log, T0) == records(3, 4)


@awaited
async def test_a_trim_beyond_the_end_is_refused(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    await log.append(T0, records(0, 1))
    for before in (end(log, 2) + 1, 2**80):
        with pytest.raises(OffsetBeyondEnd) as refused:
            await log.trim(T0, before)
        assert (refused.value.offset, refused.value.end) == (before, end(log, 2))
    assert await log.span(T0) == spanned(log, topic.epoch, 0, 2)


async def stored_at(log: Log, *batches: Sequence[int]) -> None:
    await log.create_topic("t", 1)
    number = 0
    for timestamps in batches:
        await log.append(T0, [record(number + i, timestamp=t) for i, t in enumerate(timestamps)])
        number += len(timestamps)


@awaited
async def test_an_offset_is_found_by_time(log: Log) -> None:
    await stored_at(log, [10, 20], [30], [30, 40, 50])
    wanted = {-5: 0, 0: 0, 10: 0, 11: 1, 20: 1, 25: 2, 30: 2, 31: 4, 50: 5, 51: 6, 2**62: 6}
    for timestamp, number in wanted.items():
        assert await log.offset_at(T0, timestamp) == from_(log, number, 6)


@awaited
async def test_the_first_one_in_offset_order_counts_where_timestamps_go_back(log: Log) -> None:
    await stored_at(log, [50, 10], [20, 90, 30], [5], [60, 95])
    wanted = {1: 0, 50: 0, 51: 3, 60: 3, 90: 3, 91: 7, 95: 7, 96: 8}
    for timestamp, number in wanted.items():
        assert await log.offset_at(T0, timestamp) == from_(log, number, 8)


@awaited
async def test_trimmed_records_are_not_found_by_time(log: Log) -> None:
    await stored_at(log, [10, 99, 20, 30], [15], [99])
    assert await log.offset_at(T0, 50) == at(log, 1)
    await log.trim(T0, at(log, 2))  # into the middle of a batch, whose latest record is gone
    wanted = {0: 2, 15: 2, 25: 3, 30: 3, 31: 5, 50: 5, 100: 6}
    for timestamp, number in wanted.items():
        assert await log.offset_at(T0, timestamp) == from_(log, number, 6)
    await log.trim(T0, end(log, 6))
    assert await log.offset_at(T0, 0) == end(log, 6)


@awaited
async def test_in_an_empty_partition_every_time_is_at_the_end(log: Log) -> None:
    await log.create_topic("t", 1)
    assert await log.offset_at(T0, 0) == 0


# Retention and maintenance -----------------------------------------------------------------------------------------


def ago(milliseconds: int) -> int:
    return time.time_ns() // 1_000_000 - milliseconds


@awaited
async def test_records_beyond_their_age_are_trimmed_by_maintenance(log: Log) -> None:
    await stored_at(log, [ago(20 * MINUTE)] * 3, [ago(11 * MINUTE)] * 2, [ago(MINUTE)] * 2, [ago(0)])
    await log.maintain()
    assert (await log.span(T0)).first == 0, "without retention all is kept"
    await log.set_retention("t", Retention(age_ms=10 * MINUTE))
    await log.maintain()
    has = await log.span(T0)
    assert (has.first, has.end) == (at(log, 5), end(log, 8))
    assert [r.id for r in await contents(log, T0)] == ["r5", "r6", "r7"]


@awaited
async def test_a_partition_whose_records_are_all_old_is_emptied(log: Log) -> None:
    await stored_at(log, [ago(20 * MINUTE)] * 3, [ago(11 * MINUTE)])
    await log.set_retention("t", Retention(age_ms=10 * MINUTE))
    await log.maintain()
    has = await log.span(T0)
    assert (has.first, has.end) == (end(log, 4), end(log, 4))
    assert (await log.append(T0, records(4))).first.offset == at(log, 4)


@pytest.mark.parametrize("retention", [Retention(age_ms=10 * MINUTE), Retention(bytes_per_partition=1_000_000)])
@awaited
async def test_what_was_trimmed_by_hand_does_not_make_retention_take_more(log: Log, retention: Retention) -> None:
    await stored_at(log, [ago(MINUTE)] * 10)
    await log.trim(T0, at(log, 4))
    await log.set_retention("t", retention)
    await log.maintain()
    assert [r.id for r in await contents(log, T0)] == [f"r{i}" for i in range(4, 10)]


@awaited
async def test_records_beyond_the_size_are_trimmed_by_maintenance_the_oldest_first(log: Log) -> None:
    await log.create_topic("t", 2, retention=Retention(bytes_per_partition=50_000))
    for partition in (T0, T1):
        for start in range(0, 100, 10):
            await log.append(partition, [record(i, size=1_000) for i in range(start, start + 10)])
    await log.trim(T1, at(log, 95))
    await log.maintain()
    kept = await contents(log, T0)
    assert 20_000 <= sum(len(r.value) for r in kept) <= 50_000
    assert kept == [record(i, size=1_000) for i in range(100 - len(kept), 100)]
    assert (await log.span(T1)).first == at(log, 95)


@awaited
async def test_the_newest_batch_is_kept_however_small_the_size(log: Log) -> None:
    await log.create_topic("t", 1, retention=Retention(bytes_per_partition=1))
    for start in range(0, 20, 10):
        await log.append(T0, records(*range(start, start + 10)))
    await log.maintain()
    assert await contents(log, T0) == records(*range(10, 20))


@awaited
async def test_maintenance_changes_nothing_that_a_reader_sees(log: Log) -> None:
    await log.create_topic("t", 2)
    for i in range(300):
        await log.append(T0, [record(i, timestamp=i + 1)])
    await log.trim(T0, at(log, 30))
    before = await log.span(T0)
    for _ in range(3):
        await log.maintain()
        assert await log.span(T0) == before
        assert await contents(log, T0, max_records=37) == [record(i, timestamp=i + 1) for i in range(30, 300)]
        wanted = [from_(log, number, 300) for number in (30, 30, 199, 300)]
        assert [await log.offset_at(T0, t) for t in (1, 31, 200, 301)] == wanted


# What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REFUSED)
@awaited
async def test_a_refused_call_says_why_and_changes_nothing(opened: Open, case: str) -> None:
    call, error = REFUSED[case]
    async with opened(limits=LIMITS) as log:
        await log.create_topic("t", 2)
        await log.append(T0, records(*range(10)), stamp=Stamp("p", 100), fence=Fence("g", 5))
        await log.trim(T0, at(log, 3))

        async def everything() -> Any:
            return await log.topics(), [(await log.span(p), await contents(log, p)) for p in (T0, T1)]

        before = await everything()
        with pytest.raises(error) as refused:
            await call(log)
        assert type(refused.value) is error
        assert str(refused.value)
        assert await everything() == before
        await log.set_fence(Fence("g", 5))  # which has not been raised
        assert (await log.append(T0, records(*range(10)), stamp=Stamp("p", 100))).duplicate
        assert not (await log.append(T0, records(1), stamp=Stamp("p", 101))).duplicate


@awaited
async def test_a_refused_append_does_not_affect_concurrent_appends(opened: Open) -> None:
    async with opened(limits=LIMITS) as log:
        await log.create_topic("t", 2)
        good = [Record(f"good {i}", None, b"v", timestamp=1) for i in range(len(REFUSED))]

        async def tried(call: Callable[[Log], Awaitable[Any]]) -> None:
            with contextlib.suppress(ShardyardError):
                await call(log)

        await asyncio.gather(
            *(
                one
                for row, (name, (call, _)) in zip(good, REFUSED.items(), strict=True)
                for one in (log.append(T0, [row]), *([tried(call)] if name.startswith(("append", "arrow")) else []))
            )
        )
        assert [r for r in await contents(log, T0) if r.id.startswith("good")] == good


@awaited
async def test_what_is_just_within_the_limits_is_taken(opened: Open) -> None:
    async with opened(limits=LIMITS) as log:
        await log.create_topic("x" * 20, 1)
        partition = Partition("x" * 20, 0)
        largest = Record("x", b"k" * 100, b"v" * 800, (("h" * 10, b"x" * 90),), 1)
        for rows in ([largest], [record(i) for i in range(50)], [largest] * 9):
            for path in (list, arrow):
                await log.append(partition, path(rows))
        assert len(await contents(log, partition)) == 120


@pytest.mark.parametrize("partition", [-1, 2, 100])
@awaited
async def test_a_partition_out_of_range_is_named_with_the_range(log: Log, partition: int) -> None:
    await log.create_topic("t", 2)
    with pytest.raises(PartitionOutOfRange, match="'t' has partitions 0 to 1") as refused:
        await log.append(Partition("t", partition), records(0))
    assert (refused.value.partition, refused.value.partitions) == (Partition("t", partition), 2)


@awaited
async def test_a_record_that_is_too_large_is_named_with_its_size(opened: Open) -> None:
    async with opened(limits=LIMITS) as log:
        await log.create_topic("t", 1)
        for rows in (
            [record(1), Record("big", b"kk", b"v" * 999)],
            arrow([record(1), Record("big", b"kk", b"v" * 999)]),
        ):
            with pytest.raises(TooLarge, match="record 'big' in bytes is 1001, beyond the limit of 1000") as refused:
                await log.append(T0, rows)
            assert (refused.value.size, refused.value.limit) == (1001, 1000)


# Closing -----------------------------------------------------------------------------------------------------------

AFTER_CLOSE: dict[str, Callable[[Log], Awaitable[Any]]] = {
    "create_topic": lambda log: log.create_topic("u", 1),
    "expand_topic": lambda log: log.expand_topic("t", 2),
    "contract_topic": lambda log: log.contract_topic("t", 1),
    "drop_partitions": lambda log: log.drop_partitions("t", 1),
    "set_retention": lambda log: log.set_retention("t", Retention()),
    "seal_topic": lambda log: log.seal_topic("t", HOLDER),
    "unseal_topic": lambda log: log.unseal_topic("t", HOLDER),
    "move_topic": lambda log: log.move_topic("t", "u", holder=HOLDER, generation=1),
    "delete_topic": lambda log: log.delete_topic("t"),
    "topic": lambda log: log.topic("t"),
    "topics": lambda log: log.topics(),
    "catalog_version": lambda log: log.catalog_version(),
    "append": lambda log: log.append(T0, records(0)),
    "append_many": lambda log: log.append_many([AppendRequest(T0, records(0))]),
    "read": lambda log: log.read(T0, 0),
    "read_many": lambda log: log.read_many([ReadRequest(T0, 0)]),
    "span": lambda log: log.span(T0),
    "count": lambda log: log.count(T0, 0, 1),
    "ends": lambda log: log.ends("t"),
    "offset_at": lambda log: log.offset_at(T0, 0),
    "trim": lambda log: log.trim(T0, 0),
    "set_fence": lambda log: log.set_fence(Fence("g", 1)),
    "maintain": lambda log: log.maintain(),
}


def test_every_method_is_tried_on_a_closed_log() -> None:
    methods = {name for name, _ in inspect.getmembers(Log, inspect.isfunction) if not name.startswith("_")}
    assert set(AFTER_CLOSE) == methods - {"close"}


@awaited
async def test_a_closed_log_refuses_everything_but_to_be_closed_again(log: Log) -> None:
    await log.create_topic("t", 1)
    await log.append(T0, records(0))
    await log.close()
    for call in AFTER_CLOSE.values():
        with pytest.raises(Closed):
            await call(log)
    await log.close()


@awaited
async def test_a_log_that_was_never_used_can_be_closed(log: Log) -> None:
    await log.close()
    with pytest.raises(Closed):
        await log.topics()


@awaited
async def test_appends_in_flight_are_finished_before_the_log_closes(log: Log) -> None:
    await log.create_topic("t", 1)
    appends = []
    for i in range(20):
        appends.append(asyncio.ensure_future(log.append(T0, records(i))))
        await asyncio.sleep(0)  # it has begun: some are being written, and others wait for them
    await log.close()
    assert [a.first.offset for a in await asyncio.gather(*appends)] == [at(log, i) for i in range(20)]


@awaited
async def test_a_log_is_closed_at_the_end_of_its_with_block_also_by_an_error(opened: Open) -> None:
    log = opened()
    with contextlib.suppress(ZeroDivisionError):
        async with log as entered:
            assert entered is log
            raise ZeroDivisionError
    with pytest.raises(Closed):
        await log.topics()


# Any history -------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(1, 50), min_size=1, max_size=30), st.booleans()),
        st.tuples(st.just("many"), st.integers(1, 80)),
        st.tuples(st.just("retry"), st.integers(0, 10)),
        st.tuples(st.just("trim"), st.floats(0, 1.1)),
        st.tuples(st.just("read"), st.floats(0, 1.1), st.integers(1, 60), st.sampled_from([1, 500, 2**20])),
        st.tuples(st.just("find"), st.integers(0, 52)),
        st.tuples(st.just("maintain")),
    ),
    max_size=20,
)


class Model:
    """A log of one partition as a list, and the log it is compared with."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.rows: list[Record] = []
        self.first = 0
        self.trimmed = 0
        """The first offset, below which records were trimmed."""
        self.stamps: list[tuple[Stamp, int, list[Record]]] = []

    def place(self, share: float) -> int:
        return round(share * len(self.rows))

    def offset(self, number: int) -> int:
        """Of the record of that number; beyond the last one, as far beyond the end."""
        beyond = max(0, number - len(self.rows))
        return from_(self.log, number - beyond, len(self.rows)) + beyond

    async def append(self, timestamps: list[int], as_arrow: bool) -> None:
        number = len(self.rows)
        rows = [record(number + i, timestamp=t) for i, t in enumerate(timestamps)]
        stamp = Stamp("p", len(self.stamps))
        appended = await self.log.append(T0, arrow(rows) if as_arrow else rows, stamp=stamp)
        assert (appended.first.offset, appended.count, appended.duplicate) == (at(self.log, number), len(rows), False)
        self.rows += rows
        self.stamps.append((stamp, at(self.log, number), rows))

    async def many(self, count: int) -> None:
        for i in range(count):
            await self.append([i % 50 + 1], as_arrow=False)

    async def retry(self, back: int) -> None:
        if back < len(self.stamps):
            stamp, first, rows = self.stamps[-1 - back]
            appended = await self.log.append(T0, rows, stamp=stamp)
            assert (appended.first.offset, appended.count, appended.duplicate) == (first, len(rows), True)

    async def trim(self, share: float) -> None:
        if (before := self.place(share)) > len(self.rows):
            with pytest.raises(OffsetBeyondEnd):
                await self.log.trim(T0, self.offset(before))
        elif before:
            self.first = max(self.first, before)
            self.trimmed = max(self.trimmed, self.offset(before))
            assert (await self.log.trim(T0, self.offset(before))).first == self.trimmed

    async def read(self, share: float, max_records: int, max_bytes: int) -> None:
        number = self.place(share)
        offset = self.offset(number)
        if not self.trimmed <= offset <= self.offset(len(self.rows)):
            with pytest.raises(OffsetTrimmed if offset < self.trimmed else OffsetBeyondEnd):
                await self.log.read(T0, offset)
            return
        batch = await self.log.read(T0, offset, max_records=max_records, max_bytes=max_bytes)
        assert batch.records() == self.rows[number : number + len(batch)]
        assert list(batch.offsets()) == [at(self.log, number + i) for i in range(len(batch))]
        assert len(batch) <= max_records
        assert len(batch) or number == len(self.rows)
        if max_bytes == 2**20:
            assert len(batch) == min(max_records, len(self.rows) - number)
        if number + len(batch) == len(self.rows):
            assert batch.end == self.offset(len(self.rows))

    async def find(self, timestamp: int) -> None:
        late = (i for i in range(self.first, len(self.rows)) if self.rows[i].timestamp >= timestamp)
        assert await self.log.offset_at(T0, timestamp) == self.offset(next(late, len(self.rows)))

    async def maintain(self) -> None:
        await self.log.maintain()

    async def check(self) -> None:
        has = await self.log.span(T0)
        assert (has.first, has.end) == (self.trimmed, self.offset(len(self.rows)))
        assert await contents(self.log, T0, max_records=61) == self.rows[self.first :]


@pytest.mark.parametrize("engine", ENGINES)
def test_any_history_of_appends_trims_and_reads_is_as_that_of_a_list(
    engine: str, request: pytest.FixtureRequest
) -> None:
    url = url_for(engine, request)

    @settings(max_examples=20 if engine == "postgresql" else min(60, settings().max_examples))
    @given(steps=STEPS)
    def test(steps: list[tuple[Any, ...]]) -> None:
        asyncio.run(live(steps))

    async def live(steps: list[tuple[Any, ...]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with open_engine(engine, Path(folder), url) as log:
                for topic in await log.topics():  # of the last history
                    await log.delete_topic(topic.name)
                await log.create_topic("t", 1)
                model = Model(log)
                for name, *arguments in steps:
                    await getattr(model, name)(*arguments)
                await model.check()
                await log.maintain()
                await model.check()

    test()
