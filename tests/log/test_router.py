"""Routing: generations that change under a send, stamps of clients, and that a record is validated once."""

import asyncio
from typing import Any

import pytest

from shardyard.log import Capabilities, SequenceWindow
from shardyard.log.memory import MemoryLog
from shardyard.log.router import Router, append_with_retry
from shardyard.model import (
    SEQUENCE_WINDOW,
    InvalidValue,
    OutcomeUnknown,
    Partition,
    PartitionOutOfRange,
    Record,
    Stamp,
    TooLarge,
    Unsupported,
)
from shardyard.model.limits import ANY_SIZE, Limits, Validated, validate
from shardyard.runtime.clock import SystemClock
from tests.log.samples import HOLDER, T0, LostResponses, arrow, awaited, contents, record, records


class FixedLog(MemoryLog):
    """An engine that can't drop partitions, like Kafka."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(contraction=False, stamps_across_processes=True, atomic_batches=True, dense_offsets=True)


class Interrupted(MemoryLog):
    """Does something in the middle of the first appends."""

    def __init__(self, *meanwhile: Any) -> None:
        super().__init__()
        self.meanwhile = list(meanwhile)
        self.stamps: list[Stamp | None] = []

    async def append(self, partition: Partition, records: Any, **options: Any) -> Any:
        self.stamps.append(options["stamp"])
        if self.meanwhile:
            await self.meanwhile.pop(0)(self)
        return await super().append(partition, records, **options)


def deadline() -> float:
    return SystemClock().monotonic() + 5.0


@awaited
async def test_an_engine_without_contraction_names_the_other_way() -> None:
    async with FixedLog() as log:
        topic = await log.create_topic("t", 2)
        for call in (log.contract_topic("t", 1), log.drop_partitions("t", 1)):
            with pytest.raises(Unsupported, match="does not support fewer partitions for a topic: reshard it"):
                await call
        assert await log.topic("t") == topic


async def sealed_for_a_moment(log: MemoryLog) -> None:
    await log.seal_topic("t", HOLDER)
    await log.unseal_topic("t", HOLDER)


@awaited
async def test_a_part_whose_placement_has_not_changed_is_appended_again_under_its_stamp() -> None:
    async with Interrupted(sealed_for_a_moment, sealed_for_a_moment) as log:
        await log.create_topic("t", 1)
        (appended,) = await Router(log, "t").send(validate(records(0, 1), ANY_SIZE, 1), deadline=deadline())
        assert not appended.duplicate
        assert len(log.stamps) == 3
        assert len(set(log.stamps)) == 1
        assert await contents(log, T0) == records(0, 1)


@awaited
async def test_a_clients_batch_that_is_interrupted_by_a_seal_is_recognised_when_it_is_retried() -> None:
    """Its parts keep their stamps, although the generation has changed between them."""

    async def none(_: MemoryLog) -> None:
        pass

    async with Interrupted(none, sealed_for_a_moment) as log:
        topic = await log.create_topic("t", 4)
        batch = validate([Record(f"r{i}", b"%d" % i, b"", timestamp=1) for i in range(20)], ANY_SIZE, 1)
        stored = await Router(log, "t").send(batch, deadline=deadline(), stamp=Stamp("p", 0))
        again = await Router(log, "t").send(batch, deadline=deadline(), stamp=Stamp("p", 0))
        assert {a.partition: a.first for a in again} == {a.partition: a.first for a in stored}
        assert all(a.duplicate for a in again)
        assert sum([len(await contents(log, p)) for p in topic]) == 20


@awaited
async def test_a_window_gives_out_sequences_only_so_far_ahead_of_the_oldest_in_flight() -> None:
    window = SequenceWindow()
    given: list[int] = []
    release = [asyncio.Event() for _ in range(SEQUENCE_WINDOW + 10)]

    async def batch() -> None:
        async with window.sequence() as number:
            given.append(number)
            await release[number].wait()

    tasks = [asyncio.ensure_future(batch()) for _ in release]
    for _ in range(10):
        await asyncio.sleep(0)
    assert given == list(range(SEQUENCE_WINDOW))
    release[3].set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(given) == SEQUENCE_WINDOW, "the oldest one counts"
    release[0].set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert given == list(range(SEQUENCE_WINDOW + 1))
    for event in release:
        event.set()
    await asyncio.gather(*tasks)
    assert given == list(range(len(release)))


# Commits whose response was lost


@awaited
async def test_a_batch_or_a_pinned_record_whose_outcome_is_unknown_is_retried_and_stored_once() -> None:
    for rows, pinned in (([0, 1], False), ([0], True)):
        async with LostResponses() as log:
            await log.create_topic("t", 1)
            router, batch = Router(log, "t"), validate(records(*rows), ANY_SIZE, 1)
            if pinned:
                appended = await router.send_to(0, batch, deadline=deadline())
            else:
                (appended,) = await router.send(batch, deadline=deadline())
            assert appended.duplicate
            assert await contents(log, T0) == records(*rows)


@awaited
async def test_a_record_without_a_stamp_whose_outcome_is_unknown_is_not_retried() -> None:
    async with LostResponses() as log:
        await log.create_topic("t", 1)
        with pytest.raises(OutcomeUnknown):
            await Router(log, "t").send_one(validate(records(0), ANY_SIZE, 1), deadline=deadline())
        assert await contents(log, T0) == records(0)


@awaited
async def test_an_append_without_a_stamp_whose_outcome_is_unknown_is_not_retried() -> None:
    async with LostResponses() as log:
        await log.create_topic("t", 1)
        with pytest.raises(OutcomeUnknown):
            await append_with_retry(log, T0, records(0), clock=SystemClock(), deadline=deadline())
        assert await contents(log, T0) == records(0)


@awaited
async def test_partitions_that_do_not_exist_take_no_memory() -> None:
    async with MemoryLog() as log:
        await log.create_topic("t", 1)
        router = Router(log, "t")
        for index in range(1, 50):
            with pytest.raises(PartitionOutOfRange):
                await router.send_to(index, validate(records(0), ANY_SIZE, 1), deadline=deadline())
        assert not router._windows


# Validation


@pytest.mark.parametrize("path", [list, arrow])
def test_validated_records_are_not_validated_again_unless_they_may_exceed_the_limits(path: Any) -> None:
    batch = validate(path([record(i, size=100) for i in range(10)]), Limits(), 1)
    assert validate(batch, Limits(), 1) is batch
    assert validate(batch, Limits(batch_records=10), 1) is batch
    for narrow in (Limits(batch_records=9), Limits(record_bytes=101), Limits(batch_bytes=1000)):
        with pytest.raises(TooLarge):
            validate(batch, narrow, 1)


@pytest.mark.parametrize("path", [list, arrow])
def test_a_part_that_fits_is_taken_although_the_whole_does_not(path: Any) -> None:
    rows = path([record(0, size=5), record(1, size=1000)])
    batch = validate(rows, ANY_SIZE, 1)
    whole: Any = batch.rows
    part = batch.part(whole[:1] if path is list else whole.slice(0, 1))
    narrow = Limits(record_bytes=100, batch_bytes=500, batch_records=1)
    assert not part.fits(narrow), "it is not known"
    taken = validate(part, narrow, 1)
    assert len(taken) == 1
    assert taken.fits(narrow)
    with pytest.raises(TooLarge):
        validate(batch.part(whole[1:] if path is list else whole.slice(1, 1)), narrow, 1)


def test_what_is_no_batch_is_refused_also_inside_the_marker() -> None:
    with pytest.raises(InvalidValue):
        validate(Validated((), 0, 0, 0), Limits(), 1)
    with pytest.raises(InvalidValue):
        validate([record(0), None], Limits(), 1)


@awaited
async def test_a_send_validates_each_record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardyard.log import Sender  # noqa: PLC0415
    from shardyard.model import limits  # noqa: PLC0415

    checked: list[str] = []
    real = limits._record_size

    def counting(one: Record) -> int:
        checked.append(one.id)
        return real(one)

    monkeypatch.setattr(limits, "_record_size", counting)
    async with MemoryLog() as log:
        await log.create_topic("t", 4)
        await Sender(log, "t").send(records(*range(40)))
    assert sorted(checked) == sorted(r.id for r in records(*range(40)))
