"""Sending by key, on every engine: where records go, in which order, and what happens when their topic moves."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardyard.log import Log, Sender
from shardyard.log.memory import MemoryLog
from shardyard.log.sqlite import SqliteLog
from shardyard.model import (
    SEQUENCE_WINDOW,
    Appended,
    Busy,
    Fence,
    InvalidValue,
    Partition,
    Record,
    Sealed,
    Stamp,
    TooLarge,
    Topic,
    UnknownTopic,
)
from shardyard.model.limits import Limits, Records
from shardyard.placement import partitioner_named
from shardyard.runtime.clock import ManualClock, SystemClock
from tests.log.samples import HOLDER, arrow, awaited, contents, move
from tests.sqlite_files import with_log

Path_ = Callable[[Sequence[Record]], Any]
both_paths = pytest.mark.parametrize("path", [list, arrow])


class Refusing(MemoryLog):
    """Raises the given errors, once each, before or after it has stored a batch. Notes the stamps of appends, and how
    often a topic was looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Exception] = []
        self.after: list[Exception] = []
        self.stamps: list[Stamp | None] = []
        self.looks = 0

    async def topic(self, name: str) -> Topic:
        self.looks += 1
        return await super().topic(name)

    async def append(
        self,
        partition: Partition,
        records: Records,
        *,
        stamp: Stamp | None = None,
        fence: Fence | Sequence[Fence] | None = None,
        generation: int | None = None,
    ) -> Appended:
        self.stamps.append(stamp)
        await asyncio.sleep(0)
        if self.before:
            raise self.before.pop(0)
        appended = await super().append(partition, records, stamp=stamp, fence=fence, generation=generation)
        if self.after:
            raise self.after.pop(0)
        return appended


class Hurried(ManualClock):
    """A clock on which sleeping takes no time, but for what is done meanwhile."""

    def __init__(self, meanwhile: Callable[[], Awaitable[Any]] | None = None) -> None:
        super().__init__()
        self.slept: list[float] = []
        self._meanwhile = meanwhile

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.advance(seconds)
        if self._meanwhile is not None:
            await self._meanwhile()


@pytest.fixture(params=["memory", "sqlite"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Log:
    return (
        MemoryLog()
        if request.param == "memory"
        else SqliteLog(with_log(tmp_path), durability="process", maintain_every=None)
    )


def keyed(*numbers: int, keys: int = 20) -> list[Record]:
    return [Record(f"r{i}", b"k%d" % (i % keys), b"v", timestamp=1) for i in numbers]


def keyless(*numbers: int) -> list[Record]:
    return [Record(f"r{i}", None, b"v", (("tag", b"%d" % i),) if i % 2 else (), timestamp=1) for i in numbers]


async def until_sent(sent: Sequence[int], more: int) -> None:
    """Wait until producers have sent so many more. `sent`: how many each of them has sent."""
    goal = sum(sent) + more
    while sum(sent) < goal:  # noqa: ASYNC110 the producers know nothing of this
        await asyncio.sleep(0.001)


async def everything(log: Log, topic: str) -> dict[int, list[Record]]:
    return {p.index: await contents(log, p) for p in await log.topic(topic)}


# Placement and order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{}, {"hash_": "murmur2"}, {"partitioner": "jump"}, {"partitioner": "jump", "hash_": "fnv1a64"}], ids=str
)
@both_paths
@awaited
async def test_records_go_where_the_topics_own_partitioner_places_their_keys(
    log: Log, how: dict[str, Any], path: Path_
) -> None:
    topic = await log.create_topic("t", 7, **how)
    place = partitioner_named(topic.partitioner, 7, topic.hash).place
    appended = await Sender(log, "t").send(path(keyed(*range(100))))
    found = await everything(log, "t")
    assert sum(a.count for a in appended) == 100
    assert {a.partition.index: a.count for a in appended} == {i: len(rows) for i, rows in found.items() if rows}
    for index, rows in found.items():
        assert rows == [r for r in keyed(*range(100)) if place(r.key) == index], "and in their order"


@both_paths
@awaited
async def test_records_without_a_key_are_distributed_round_robin_and_the_others_go_to_their_partitions(
    log: Log, path: Path_
) -> None:
    await log.create_topic("t", 4)
    sender = Sender(log, "t")
    empty = Record("an empty key is a key", b"", b"", timestamp=1)
    rows = [*keyless(*range(7)), *keyed(*range(10, 16)), empty, *keyless(*range(7, 10))]
    for at in range(0, len(rows), 5):
        await sender.send(path(rows[at : at + 5]))
    found = await everything(log, "t")
    distributed = [sum(r.key is None for r in some) for some in found.values()]
    assert sorted(distributed) == [2, 2, 3, 3]
    place = partitioner_named("modulus", 4).place
    assert all(r.key is None or place(r.key) == index for index, some in found.items() for r in some)
    assert sorted((r for some in found.values() for r in some), key=lambda r: r.id) == sorted(rows, key=lambda r: r.id)


@both_paths
@awaited
async def test_a_round_robin_topic_ignores_keys(log: Log, path: Path_) -> None:
    await log.create_topic("t", 4, partitioner="round_robin")
    sender = Sender(log, "t")
    for at in range(0, 30, 3):
        await sender.send(path(keyed(at, at + 1, at + 2, keys=1)))
    assert sorted(len(rows) for rows in (await everything(log, "t")).values()) == [7, 7, 8, 8]


@awaited
async def test_sends_one_after_another_keep_the_order_of_each_key(log: Log) -> None:
    await log.create_topic("t", 3)
    sender = Sender(log, "t")
    for at in range(0, 60, 4):
        await sender.send((arrow if at % 8 else list)(keyed(*range(at, at + 4))))
    for rows in (await everything(log, "t")).values():
        assert [int(r.id[1:]) for r in rows] == sorted(int(r.id[1:]) for r in rows)


@awaited
async def test_no_records_are_nothing_to_do_and_wrong_ones_are_refused_before_any_is_stored(log: Log) -> None:
    await log.create_topic("t", 2)
    sender = Sender(log, "t")
    assert sender.topic is None
    assert await sender.send([]) == []
    assert await sender.send(arrow([])) == []
    bad: list[Any] = [None, "x", keyed(1)[0], [*keyed(*range(9)), None], [*keyed(1), Record("x", "k", b"v")]]  # type: ignore[arg-type]
    bad += [arrow(keyed(1)).drop_columns(["key"]), arrow([*keyed(*range(9)), Record("", b"k", b"v")])]
    for records in bad:
        with pytest.raises(InvalidValue):
            await sender.send(records)
    assert await everything(log, "t") == {0: [], 1: []}
    with pytest.raises(UnknownTopic):
        await Sender(log, "u").send(keyed(1))


@awaited
async def test_a_part_beyond_the_limits_is_refused_by_the_log() -> None:
    async with MemoryLog(limits=Limits(batch_records=3)) as log:
        await log.create_topic("t", 1)
        with pytest.raises(TooLarge):
            await Sender(log, "t").send(keyed(*range(4)))


@awaited
async def test_when_one_part_is_refused_the_others_are_finished_first() -> None:
    async with MemoryLog(limits=Limits(record_bytes=100)) as log:
        await log.create_topic("t", 8)
        with pytest.raises(TooLarge):
            await Sender(log, "t").send([Record("x", b"large", b"v" * 200), *keyless(*range(8))])
        found = [r.id for rows in (await everything(log, "t")).values() for r in rows]
        assert len(found) >= 7


# Trying again ------------------------------------------------------------------------------------------------------


@awaited
async def test_an_append_that_may_succeed_later_is_retried_with_the_same_stamp_and_stored_once() -> None:
    async with Refusing() as log:
        await log.create_topic("t", 1)
        log.before = [Busy("the log", 1.0), Busy("the log", 1.0)]
        log.after = [Busy("the log", 1.0)]  # stored, and the answer is lost
        (appended,) = await Sender(log, "t").send(keyed(1, 2))
        assert appended.duplicate
        assert len(log.stamps) == 4
        assert len(set(log.stamps)) == 1
        assert await contents(log, Partition("t", 0)) == keyed(1, 2)


@awaited
async def test_a_send_gives_up_at_its_timeout_and_the_waits_grow_up_to_a_limit() -> None:
    async with Refusing() as log:
        await log.create_topic("t", 1)
        await log.seal_topic("t", HOLDER)
        clock = Hurried()
        with pytest.raises(Sealed):
            await Sender(log, "t", timeout=3.0, clock=clock).send(keyed(1))
        for slept, longest in zip(clock.slept, [0.01, 0.02, 0.04, 0.08, 0.16, 0.2, 0.2, 0.2], strict=False):
            assert longest / 2 <= slept <= longest
        assert sum(clock.slept) == pytest.approx(3.0)


@awaited
async def test_many_sends_at_once_are_never_too_far_ahead_of_one_that_waits() -> None:
    async with Refusing() as log:
        await log.create_topic("t", 1)
        log.before = [Busy("the log", 1.0)] * 5
        sender = Sender(log, "t")
        sends = [sender.send([Record(f"r{i}", b"k", b"")]) for i in range(3 * SEQUENCE_WINDOW)]
        await asyncio.gather(*sends)
        found = Counter(r.id for r in await contents(log, Partition("t", 0)))
        assert found == Counter(f"r{i}" for i in range(3 * SEQUENCE_WINDOW))


# Topics that change ------------------------------------------------------------------------------------------------


@awaited
async def test_the_topic_is_looked_up_when_it_has_changed_and_not_with_every_send() -> None:
    async with Refusing() as log:
        await log.create_topic("t", 2)
        sender = Sender(log, "t")
        for i in range(10):
            await sender.send(keyed(i))
        assert log.looks == 1
        expanded = await log.expand_topic("t", 8)
        await sender.send(keyed(*range(10, 50)))
        assert log.looks == 2
        assert sender.topic == expanded
        place = partitioner_named("modulus", 8).place
        for index, rows in (await everything(log, "t")).items():
            late = [r for r in rows if int(r.id[1:]) >= 10]
            assert all(place(r.key) == index for r in late)


@awaited
async def test_a_topic_recreated_with_fewer_partitions_is_noticed_at_once(log: Log) -> None:
    await log.create_topic("t", 8)
    sender = Sender(log, "t")
    await sender.send(keyed(*range(20)))
    await log.delete_topic("t")
    recreated = await log.create_topic("t", 1)
    await sender.send(keyed(*range(20)))
    assert sender.topic == recreated
    assert len(await contents(log, Partition("t", 0))) == 20


@both_paths
@awaited
async def test_a_sender_goes_over_the_partitions_that_take_records(log: Log, path: Path_) -> None:
    await log.create_topic("t", 8, partitioner="jump")
    contracted = await log.contract_topic("t", 3)
    sender = Sender(log, "t")
    rows = [*keyed(*range(40)), *keyless(*range(40, 70))]
    appended = await sender.send(path(rows))
    assert sorted(a.partition.index for a in appended) == [0, 1, 2], "at the first try"
    assert sender.topic == contracted
    found = await everything(log, "t")
    place = partitioner_named("jump", 3).place
    assert all(r.key is None or place(r.key) == index for index, some in found.items() for r in some)
    assert [sum(r.key is None for r in some) for some in found.values()] == [10] * 3 + [0] * 5
    assert sum(map(len, found.values())) == 70


@both_paths
@awaited
async def test_a_contraction_is_noticed_at_once_and_what_was_refused_goes_elsewhere(log: Log, path: Path_) -> None:
    await log.create_topic("t", 8)
    sender = Sender(log, "t", clock=ManualClock())
    await sender.send(path(keyed(*range(20))))
    before = await everything(log, "t")
    contracted = await log.contract_topic("t", 2)
    rows = [*keyed(*range(20, 40)), *keyless(*range(40, 56))]
    assert sum(a.count for a in await sender.send(path(rows))) == 36
    assert sender.topic == contracted
    found = await everything(log, "t")
    assert [found[i] for i in range(2, 8)] == [before[i] for i in range(2, 8)]
    late = [r for i in range(2) for r in found[i][len(before[i]) :]]
    assert sorted(r.id for r in late) == sorted(r.id for r in rows)
    contracted = await log.drop_partitions("t", 2)
    await sender.send(path(keyed(*range(60, 80))))
    assert sum(map(len, (await everything(log, "t")).values())) == sum(len(found[i]) for i in range(2)) + 20
    assert contracted.partitions == 2


@awaited
async def test_what_was_stored_before_a_contraction_is_not_stored_again_elsewhere() -> None:
    async with Refusing() as log:
        await log.create_topic("t", 4)
        place = partitioner_named("modulus", 4).place
        rows = [r for r in keyed(*range(20)) if place(r.key) == 3]
        log.after = [Busy("the log", 1.0)]  # stored, and the answer is lost
        clock = Hurried(meanwhile=lambda: log.contract_topic("t", 1))
        (appended,) = await Sender(log, "t", clock=clock).send(rows)
        assert (appended.partition, appended.duplicate) == (Partition("t", 3), True)
        assert await everything(log, "t") == {0: [], 1: [], 2: [], 3: rows}
        assert rows


@awaited
async def test_while_a_topic_is_contracted_and_expanded_again_no_record_is_lost_or_doubled(log: Log) -> None:
    await log.create_topic("t", 8)
    sent = [0] * 6
    stop = asyncio.Event()
    chance = random.Random(1)

    async def produce(name: int) -> None:
        sender = Sender(log, "t")
        while not stop.is_set():
            numbers = range(sent[name], sent[name] + chance.randint(1, 12))
            rows = [Record(f"{name}.{i}", b"%d" % i if i % 3 else None, b"", timestamp=1) for i in numbers]
            await sender.send(arrow(rows) if chance.random() < 0.5 else rows)
            sent[name] += len(rows)
            await asyncio.sleep(0)  # the others' turn

    producing = [asyncio.ensure_future(produce(name)) for name in range(6)]
    count: Counter[str] = Counter()
    for fewer in (5, 2):
        await until_sent(sent, 200)
        contracted = await log.contract_topic("t", fewer)
        await until_sent(sent, 100)
        for partition in list(contracted)[fewer:]:  # drained: nothing comes after
            count.update(r.id for r in await contents(log, partition))
        await until_sent(sent, 100)
        await log.drop_partitions("t", fewer)
    assert sum(count.values()) > 100
    await until_sent(sent, 100)
    await log.expand_topic("t", 8)
    await until_sent(sent, 100)
    stop.set()
    await asyncio.gather(*producing)
    for rows in (await everything(log, "t")).values():
        count.update(r.id for r in rows)
    assert count == Counter(f"{name}.{i}" for name in range(6) for i in range(sent[name]))


@both_paths
@awaited
async def test_a_sender_waits_while_a_topic_is_sealed(log: Log, path: Path_) -> None:
    await log.create_topic("t", 4)
    await log.seal_topic("t", HOLDER)
    clock = Hurried(meanwhile=lambda: log.unseal_topic("t", HOLDER))
    assert sum(a.count for a in await Sender(log, "t", clock=clock).send(path(keyed(*range(20))))) == 20
    assert 0.005 <= clock.slept[0] <= 0.01
    assert sum(map(len, (await everything(log, "t")).values())) == 20


@both_paths
@awaited
async def test_a_sender_follows_a_topic_that_moved_more_than_once(log: Log, path: Path_) -> None:
    await log.create_topic("t", 4)
    sender = Sender(log, "t")
    await sender.send(path(keyed(*range(20))))
    await log.create_topic("u", 1)
    await move(log, "t", "u")
    last = await log.create_topic("v", 7, partitioner="jump")
    await move(log, "u", "v")
    rows = [*keyed(*range(20, 40)), *keyless(*range(40, 50))]
    appended = await sender.send(path(rows))
    assert sender.topic == last
    assert {a.partition.topic for a in appended} == {"v"}
    place = partitioner_named("jump", 7).place
    found = await everything(log, "v")
    assert sum(map(len, found.values())) == 30
    assert all(r.key is None or place(r.key) == index for index, some in found.items() for r in some)
    await log.delete_topic("t")
    await log.delete_topic("u")
    await sender.send(path(keyed(50)))
    await log.create_topic("w", 1)
    await move(log, "w", "v")
    late = Sender(log, "w")
    await late.send(path(keyed(51)))
    assert late.topic == last


@awaited
async def test_during_a_move_no_record_is_lost_or_doubled_and_each_key_keeps_its_order(log: Log) -> None:
    await log.create_topic("t", 4)
    chance = random.Random(1)
    sent = [0] * 6
    stop = asyncio.Event()
    waiting = set[int]()
    all_wait = asyncio.Event()

    class Watched(SystemClock):
        async def sleep(self, seconds: float) -> None:
            waiting.add(id(self))
            if len(waiting) == len(sent):
                all_wait.set()
            await super().sleep(seconds)

    async def produce(name: int) -> None:
        """A key has one producer, and that one awaits each send."""
        sender = Sender(log, "t", clock=Watched())
        while not stop.is_set():
            rows = [
                Record(f"{name}.{sent[name] + i}", b"%d.%d" % (name, (sent[name] + i) % 7), b"", timestamp=1)
                for i in range(chance.randint(1, 12))
            ]
            await sender.send(arrow(rows) if chance.random() < 0.5 else rows)
            sent[name] += len(rows)
            await asyncio.sleep(0)  # the others' turn

    producing = [asyncio.ensure_future(produce(name)) for name in range(6)]
    await until_sent(sent, 300)
    await log.seal_topic("t", HOLDER)
    await all_wait.wait()
    await log.create_topic("u", 9, partitioner="jump")
    await move(log, "t", "u")
    await until_sent(sent, 300)
    stop.set()
    await asyncio.gather(*producing)

    by_key: defaultdict[bytes | None, list[int]] = defaultdict(list)
    count: Counter[str] = Counter()
    for topic in ("t", "u"):  # of each key, all that the old topic took before what the new one has
        for rows in (await everything(log, topic)).values():
            for r in rows:
                by_key[r.key].append(int(r.id.split(".")[1]))
                count[r.id] += 1
        assert sum(count.values()) > 200, "each topic has its share"
    assert count == Counter(f"{name}.{i}" for name in range(6) for i in range(sent[name]))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
