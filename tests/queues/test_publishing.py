"""Publishing over HTTP: where records go, that they are stored once, later, and not too many of them."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardyard.model import SEQUENCE_WINDOW, OverQuota, Record
from shardyard.model.batch import from_records
from shardyard.placement import partitioner_named
from shardyard.queues.publishing import Quota
from shardyard.wire.arrow import encode_arrow
from shardyard.wire.codec import encode
from shardyard.wire.media import ARROW, JSON, MSGPACK
from shardyard.wire.records import PackedRecord, PackedRecords
from tests.log.samples import HOLDER, move
from tests.queues.setup import Yard, tell

RECORDS = "/v1/topics/orders/records"


@pytest.mark.parametrize("engine", ["memory", "sparse", "sqlite"])
def test_one_or_many_records_in_each_medium_are_where_the_answer_says(engine: str, tmp_path: Path) -> None:
    async def story(yard: Yard) -> None:
        await yard.topic()
        packed = [PackedRecord(b"mp%d" % i, b"k%d" % i, f"mp{i}", [("tag", b"red")]) for i in range(10)]
        rows = from_records([Record(f"ar{i}", b"k%d" % i, b"ar%d" % i) for i in range(10)], 0)
        answers = [
            await yard.do("POST", RECORDS, {"value": "js", "key": "k", "id": "js"}),
            await yard.do("POST", RECORDS, {"records": [{"value": f"js{i}", "id": f"js{i}"} for i in range(10)]}),
        ]
        for media, body in (
            (MSGPACK, encode(PackedRecords(packed), MSGPACK)),
            (ARROW, encode_arrow(rows)),
            (f"{JSON}; charset=utf-8", b'{"value": "with a charset"}'),
            ("application/x-www-form-urlencoded", b'{"value": "by curl -d"}'),
        ):
            told = await yard.ask("POST", RECORDS, body=body, media=media)
            assert told.status == 200, told.body
            answers.append(told.json)
        stored = await yard.records()
        epoch = (await yard.log.topic("orders")).epoch
        named: list[str] = []
        for answer in answers:
            assert answer["delayed"] == 0
            for part in answer["stored"]:
                assert (part["topic"], part["epoch"], part["duplicate"]) == ("orders", epoch, False)
                there = stored[part["partition"]][part["offset"] : part["offset"] + part["count"]]
                assert len(there) == part["count"]
                named += [record.id for record in there]
        assert sorted(named) == sorted(record.id for partition in stored for record in partition)
        assert len(named) == 33
        assert sum(part["count"] for part in answers[1]["stored"]) == 10
        by_id = {record.id: record for partition in stored for record in partition}
        assert by_id["mp3"].headers == (("tag", b"red"),)
        assert by_id["ar7"].value == b"ar7"
        assert by_id["js"].timestamp > 1_600_000_000_000

    tell(story, tmp_path, engine=engine)


def test_records_without_a_key_are_dealt_in_turn_and_those_with_one_go_where_the_topic_places_them() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=6)
        for i in range(60):
            await yard.do("POST", RECORDS, {"value": f"{i}"})
        assert [len(partition) for partition in await yard.records()] == [10] * 6

        for partitioner, hash_ in (("modulus", "fnv1a32"), ("jump", "xxh64")):
            await yard.topic(partitioner, 6, partitioner=partitioner, hash=hash_)
            keys = [f"customer-{i}" for i in range(100)]
            records = [{"value": key, "key": key} for key in keys]
            await yard.do("POST", f"/v1/topics/{partitioner}/records", {"records": records})
            place = partitioner_named(partitioner, 6, hash_).place
            for index, partition in enumerate(await yard.records(partitioner)):
                assert [r.value.decode() for r in partition] == [k for k in keys if place(k.encode()) == index]

        await yard.do("POST", RECORDS, {"value": "here", "key": "customer-1"}, partition=4)
        assert (await yard.records())[4][-1].value == b"here"

    tell(story)


@pytest.mark.parametrize("engine", ["memory", "sparse", "sqlite"])
def test_a_retry_through_another_broker_is_stored_once(engine: str, tmp_path: Path) -> None:
    async def story(yard: Yard) -> None:
        await yard.topic()
        body = {"records": [{"value": f"{i}", "key": f"k{i}"} for i in range(20)] + [{"value": "no key"}]}
        stamp = {"producer": "p", "sequence": 7}
        first = await yard.do("POST", RECORDS, body, **stamp)
        again = await yard.do("POST", RECORDS, body, broker=1, **stamp)
        assert [p | {"duplicate": True} for p in first["stored"]] == again["stored"]
        assert not any(p["duplicate"] for p in first["stored"])
        assert sum(len(partition) for partition in await yard.records()) == 21
        await yard.do("POST", RECORDS, body, **stamp | {"sequence": 8})
        await yard.do("POST", RECORDS, body, **stamp | {"producer": "q"})
        assert sum(len(partition) for partition in await yard.records()) == 63

        pinned: dict[str, Any] = {"producer": "r", "partition": 2}
        for sequence in (0, 0, SEQUENCE_WINDOW + 1):
            await yard.do("POST", RECORDS, {"value": "x"}, **pinned, sequence=sequence)
        old = await yard.ask("POST", RECORDS, {"value": "x"}, **pinned, sequence=0)
        assert (old.status, old.code) == (409, "sequence_too_old")

    tell(story, tmp_path, engine=engine, brokers=2)


def test_batches_of_one_producer_without_keys_go_round_the_partitions() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=4)
        for sequence in range(8):
            await yard.publish("a", "b", producer="p", sequence=sequence, broker=sequence % 2)
        assert [len(partition) for partition in await yard.records()] == [4] * 4

    tell(story, brokers=2)


@pytest.mark.parametrize("engine", ["memory", "sparse", "sqlite"])
def test_a_delayed_record_comes_when_it_is_due_and_holds_up_nobody(engine: str, tmp_path: Path) -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=2)
        began = time.time()
        records = [{"value": "later", "delay": 1.0, "key": "k"}, {"value": "now", "key": "k"}]
        told = await yard.do("POST", RECORDS, {"records": records})
        assert told["delayed"] == 1
        assert sum(part["count"] for part in told["stored"]) == 1
        at = {"value": "at", "deliver_at": int(began * 1000) + 600}
        assert (await yard.do("POST", RECORDS, at, partition=1)) == {"stored": [], "delayed": 1}
        past = await yard.do("POST", RECORDS, {"value": "past", "deliver_at": 5})
        assert past["delayed"] == 0

        async def values() -> set[bytes]:
            return {record.value for partition in await yard.records() for record in partition}

        async def arrived() -> bool:
            return {b"later", b"at"} <= await values()

        assert await values() == {b"now", b"past"}
        await yard.until(arrived)
        assert time.time() - began >= 1.0
        assert b"at" in [record.value for record in (await yard.records())[1]]
        (home,) = [p for p in await yard.records() if b"now" in [r.value for r in p]]
        assert b"later" in [r.value for r in home]

    tell(story, tmp_path, engine=engine)


def test_a_topics_quota_refuses_what_is_too_much_for_now_and_it_works_again_later() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic()
        await yard.do("PATCH", "/v1/topics/orders", {"records_per_second": 20})
        await yard.publish(*["x"] * 20)
        refused = await yard.ask("POST", RECORDS, {"records": [{"value": "y"}] * 10})
        assert (refused.status, refused.code) == (429, "over_quota")
        assert int(refused.headers["Retry-After"]) >= 1
        assert sum(len(p) for p in await yard.records()) == 20

        async def taken() -> bool:
            return (await yard.ask("POST", RECORDS, {"records": [{"value": "y"}] * 10})).status == 200

        began = time.monotonic()
        await yard.until(taken)
        assert time.monotonic() - began > 0.2
        async with yard.producer() as producer:  # it waits by itself
            await producer.publish("orders", [Record.new(b"z") for _ in range(20)])
        assert sum(len(p) for p in await yard.records()) == 50
        await yard.do("PATCH", "/v1/topics/orders", {"records_per_second": None})
        await yard.publish(*["free"] * 500)

    tell(story)


def test_a_quota_is_a_bucket_of_one_second() -> None:
    class Hand:
        at = 100.0

        def monotonic(self) -> float:
            return self.at

    clock: Any = Hand()
    quota = Quota(clock)
    quota.take("t", 10, 10)
    with pytest.raises(OverQuota) as refused:
        quota.take("t", 5, 10)
    assert refused.value.wait == pytest.approx(0.5)
    clock.at += 0.5
    quota.take("t", 5, 10)
    clock.at += 60
    quota.take("t", 100, 10)  # more than a second's worth needs a full bucket, and is paid for afterwards
    clock.at += 8
    with pytest.raises(OverQuota):
        quota.take("t", 1, 10)
    clock.at += 2
    quota.take("t", 10, 10)


def test_a_publish_finds_its_way_when_the_topic_is_contracted_or_goes_on_as_another() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=4)
        await yard.publish("a", "b", "c", "d")
        await yard.do("POST", "/v1/topics/orders/contract", {"partitions": 1})
        for sequence in range(3):
            await yard.publish("e", producer="p", sequence=sequence)
            await yard.publish("f")
        assert len((await yard.records())[0]) == 1 + 6
        body = msgspec.json.encode({"value": "g"})
        told = await yard.ask("POST", RECORDS, body=body, partition=3)
        assert (told.status, told.code) == (409, "closing")

    tell(story)


def test_a_producers_records_without_keys_are_dealt_in_turn_small_batches_one_by_one_large_ones_whole() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=4)
        async with yard.producer() as producer:
            await producer.publish("orders", [Record.new(b"x") for _ in range(8)])
            assert [len(records) for records in await yard.records()] == [2, 2, 2, 2]
            first = [len(await producer.publish("orders", [Record.new(b"x") for _ in range(100)])) for _ in range(4)]
            assert first == [1, 1, 1, 1], "each batch went to one partition"
            assert [len(records) for records in await yard.records()] == [102, 102, 102, 102], "and each to another"
            for _ in range(4):
                await producer.send("orders", "x")
            assert [len(records) for records in await yard.records()] == [103, 103, 103, 103]

    tell(story)


def test_what_a_busy_producer_sends_together_stays_together_on_one_partition_or_another() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=4)
        async with yard.producer() as producer:
            for _ in range(16):
                first = asyncio.create_task(producer.send("orders", "x"))
                await asyncio.sleep(0)  # so that it goes alone, and the others while it is under way
                await asyncio.gather(first, *(producer.send("orders", "y") for _ in range(5)))
        stored = [[record.value for record in partition] for partition in await yard.records()]
        runs = [list(run) for values in stored for value, run in itertools.groupby(values) if value == b"y"]
        assert [values.count(b"x") for values in stored] == [4] * 4, "in turn"
        assert {len(values) % 5 for values in runs} == {0}, "together"
        assert len([values for values in stored if b"y" in values]) > 1, "by chance"
        assert sum(values.count(b"y") for values in stored) == 80

    tell(story)


def test_a_batch_with_keys_is_not_kept_together() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=4)
        body = {"records": [{"value": "v", "key": f"k{i}"} for i in range(40)]}
        told = await yard.do("POST", RECORDS, body, producer="p", sequence=0, turn=3, together=1)
        assert len(told["stored"]) == 4
        told = await yard.do(
            "POST", RECORDS, {"records": [{"value": "v"}] * 3}, producer="p", sequence=1, turn=4, together=1
        )
        assert [part["count"] for part in told["stored"]] == [3]

    tell(story)


def test_brokers_agree_on_a_topic_that_was_just_expanded_or_made_anew(tmp_path: Path) -> None:
    async def story(yard: Yard) -> None:
        keys = [f"k{i}" for i in range(8)]
        records = [{"value": key, "key": key} for key in keys]

        async def publish(broker: int) -> None:
            for one in records:
                await yard.do("POST", RECORDS, one, broker=broker)
            await yard.do("POST", RECORDS, {"records": records}, broker=broker)

        await yard.topic(partitions=5)
        for broker in (0, 1):
            await publish(broker)
        await yard.log.expand_topic("orders", 7)
        stamp = {"producer": "p", "sequence": 1}
        await yard.do("POST", RECORDS, {"records": records}, broker=0, **stamp)
        again = await yard.do("POST", RECORDS, {"records": records}, broker=1, **stamp)
        assert all(part["duplicate"] for part in again["stored"])

        await yard.log.delete_topic("orders")
        await yard.topic(partitions=7, partitioner="jump", hash="xxh64")
        for broker in (0, 1):
            await publish(broker)
        place = partitioner_named("jump", 7, "xxh64").place
        for index, partition in enumerate(await yard.records()):
            assert {record.key for record in partition} == {k.encode() for k in keys if place(k.encode()) == index}

    tell(story, tmp_path, brokers=2)


def test_a_broker_that_knows_an_old_state_of_a_topic_goes_by_the_new_one_once_it_is_refused() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=4)
        stamps = itertools.count()

        async def publish() -> set[int]:
            values = [f"{i}" for i in range(8)]
            told = await yard.publish(*values, producer="p", sequence=next(stamps), broker=1)
            return {part["partition"] for part in told["stored"]}

        assert await publish() == {0, 1, 2, 3}
        await yard.log.contract_topic("orders", 2)  # not through that broker
        assert await publish() == {0, 1}
        await yard.log.seal_topic("orders", HOLDER)
        await yard.topic("more", partitions=1)
        await move(yard.log, "orders", "more")
        assert (await yard.do("POST", RECORDS, {"value": "x"}, partition=0, broker=1))["stored"][0]["topic"] == "more"
        assert await publish() == {0}
        assert len((await yard.records("more"))[0]) == 9

    tell(story, brokers=2)
