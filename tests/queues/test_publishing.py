"""Publishing over HTTP: where records go, that they are stored once, later, and not too many of them."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardyard.model import SEQUENCE_WINDOW, OutcomeUnknown, OverQuota, Partition, Record
from shardyard.model.batch import from_records
from shardyard.placement import partitioner_named
from shardyard.queues.delays import Delays
from shardyard.queues.publishing import Publisher, Quota
from shardyard.server.http import error_response
from shardyard.wire.arrow import encode_arrow
from shardyard.wire.codec import encode
from shardyard.wire.media import ARROW, JSON, MSGPACK
from shardyard.wire.records import PackedRecord, PackedRecords, Posted
from tests.log.samples import HOLDER, LostResponses, contents, move
from tests.queues.engines import BROKERS
from tests.queues.setup import Cluster, run
from tests.queues.stored import numbered

RECORDS = "/v1/topics/orders/records"


@pytest.mark.parametrize("engine", BROKERS)
def test_one_or_many_records_in_each_medium_are_stored_where_the_response_says(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        packed = [PackedRecord(b"mp%d" % i, b"k%d" % i, f"mp{i}", [("tag", b"red")]) for i in range(10)]
        rows = from_records([Record(f"ar{i}", b"k%d" % i, b"ar%d" % i) for i in range(10)], 0)
        responses = [
            await cluster.do("POST", RECORDS, {"value": "js", "key": "k", "id": "js"}),
            await cluster.do("POST", RECORDS, {"records": [{"value": f"js{i}", "id": f"js{i}"} for i in range(10)]}),
        ]
        for media, body in (
            (MSGPACK, encode(PackedRecords(packed), MSGPACK)),
            (ARROW, encode_arrow(rows)),
            (f"{JSON}; charset=utf-8", b'{"value": "with a charset"}'),
            ("application/x-www-form-urlencoded", b'{"value": "by curl -d"}'),
        ):
            response = await cluster.request("POST", RECORDS, body=body, media=media)
            assert response.status == 200, response.body
            responses.append(response.json)
        topic = await cluster.log.topic("orders")
        numbers = [[pair async for pair in numbered(cluster.log, partition)] for partition in topic]
        stored, epoch = await cluster.records(), topic.epoch
        named: list[str] = []
        for published in responses:
            assert published["delayed"] == 0
            for part in published["stored"]:
                assert (part["topic"], part["epoch"], part["duplicate"]) == ("orders", epoch, False)
                there = [record for offset, record in numbers[part["partition"]] if offset >= part["offset"]]
                assert len(there) >= part["count"]
                named += [record.id for record in there[: part["count"]]]
        assert sorted(named) == sorted(record.id for partition in stored for record in partition)
        assert len(named) == 33
        assert sum(part["count"] for part in responses[1]["stored"]) == 10
        by_id = {record.id: record for partition in stored for record in partition}
        assert by_id["mp3"].headers == (("tag", b"red"),)
        assert by_id["ar7"].value == b"ar7"
        assert by_id["js"].timestamp > 1_600_000_000_000

    run(scenario, tmp_path, engine=engine)


def test_records_without_a_key_are_distributed_round_robin_and_those_with_one_by_its_hash() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=6)
        for i in range(60):
            await cluster.do("POST", RECORDS, {"value": f"{i}"})
        assert [len(partition) for partition in await cluster.records()] == [10] * 6

        for partitioner, hash_ in (("modulus", "fnv1a32"), ("jump", "xxh64")):
            await cluster.topic(partitioner, 6, partitioner=partitioner, hash=hash_)
            keys = [f"customer-{i}" for i in range(100)]
            records = [{"value": key, "key": key} for key in keys]
            await cluster.do("POST", f"/v1/topics/{partitioner}/records", {"records": records})
            place = partitioner_named(partitioner, 6, hash_).place
            for index, partition in enumerate(await cluster.records(partitioner)):
                assert [r.value.decode() for r in partition] == [k for k in keys if place(k.encode()) == index]

        await cluster.do("POST", RECORDS, {"value": "here", "key": "customer-1"}, partition=4)
        assert (await cluster.records())[4][-1].value == b"here"

    run(scenario)


@pytest.mark.parametrize("engine", BROKERS)
def test_a_retry_through_another_broker_is_stored_once(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        body = {"records": [{"value": f"{i}", "key": f"k{i}"} for i in range(20)] + [{"value": "no key"}]}
        stamp = {"producer": "p", "sequence": 7}
        first = await cluster.do("POST", RECORDS, body, **stamp)
        again = await cluster.do("POST", RECORDS, body, broker=1, **stamp)
        assert [p | {"duplicate": True} for p in first["stored"]] == again["stored"]
        assert not any(p["duplicate"] for p in first["stored"])
        assert sum(len(partition) for partition in await cluster.records()) == 21
        await cluster.do("POST", RECORDS, body, **stamp | {"sequence": 8})
        await cluster.do("POST", RECORDS, body, **stamp | {"producer": "q"})
        assert sum(len(partition) for partition in await cluster.records()) == 63

        pinned: dict[str, Any] = {"producer": "r", "partition": 2}
        for sequence in (0, 0, SEQUENCE_WINDOW + 1):
            await cluster.do("POST", RECORDS, {"value": "x"}, **pinned, sequence=sequence)
        old = await cluster.request("POST", RECORDS, {"value": "x"}, **pinned, sequence=0)
        assert (old.status, old.code) == (409, "sequence_too_old")

    run(scenario, tmp_path, engine=engine, brokers=2)


def test_batches_of_one_producer_without_keys_are_distributed_round_robin() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4)
        for sequence in range(8):
            await cluster.publish("a", "b", producer="p", sequence=sequence, broker=sequence % 2)
        assert [len(partition) for partition in await cluster.records()] == [4] * 4

    run(scenario, brokers=2)


@pytest.mark.parametrize("engine", BROKERS)
def test_a_delayed_record_is_delivered_when_it_is_due_and_delays_no_other(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        began = time.time()
        records = [{"value": "later", "delay": 1.0, "key": "k"}, {"value": "now", "key": "k"}]
        response = await cluster.do("POST", RECORDS, {"records": records})
        assert response["delayed"] == 1
        assert sum(part["count"] for part in response["stored"]) == 1
        at = {"value": "at", "deliver_at": int(time.time() * 1000) + 600}
        assert (await cluster.do("POST", RECORDS, at, partition=1)) == {"stored": [], "delayed": 1}
        past = await cluster.do("POST", RECORDS, {"value": "past", "deliver_at": 5})
        assert past["delayed"] == 0

        async def values() -> set[bytes]:
            return {record.value for partition in await cluster.records() for record in partition}

        async def arrived() -> bool:
            return {b"later", b"at"} <= await values()

        assert await values() >= {b"now", b"past"}
        await cluster.until(arrived)
        assert time.time() - began >= 1.0
        assert b"at" in [record.value for record in (await cluster.records())[1]]
        (home,) = [p for p in await cluster.records() if b"now" in [r.value for r in p]]
        assert b"later" in [r.value for r in home]

    run(scenario, tmp_path, engine=engine)


@pytest.mark.parametrize(("wait", "header"), [(0.02, "1"), (1.0, "1"), (3.05, "4")])
def test_over_a_quota_retry_after_is_the_wait_rounded_up(wait: float, header: str) -> None:
    assert error_response(OverQuota("orders", 20, wait)).headers["Retry-After"] == header


def test_a_delay_that_is_too_long_is_named_in_seconds() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        refused = await cluster.request("POST", RECORDS, {"value": "x", "delay": 8_640_000})
        assert refused.json["error"]["message"].startswith("delay is 86")
        assert refused.json["error"]["message"].endswith(": expected at most 7776000 seconds (90 days)")

    run(scenario)


def test_a_quota_refuses_records_for_now_and_takes_them_later() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await cluster.do("PATCH", "/v1/topics/orders", {"records_per_second": 20})
        await cluster.publish(*["x"] * 20)
        refused = await cluster.request("POST", RECORDS, {"records": [{"value": "y"}] * 10})
        assert (refused.status, refused.code) == (429, "over_quota")
        assert int(refused.headers["Retry-After"]) >= 1
        assert sum(len(p) for p in await cluster.records()) == 20

        async def taken() -> bool:
            return (await cluster.request("POST", RECORDS, {"records": [{"value": "y"}] * 10})).status == 200

        began = time.monotonic()
        await cluster.until(taken)
        assert time.monotonic() - began > 0.2
        async with cluster.producer() as producer:  # the client waits and retries
            await producer.publish("orders", [Record.new(b"z") for _ in range(20)])
        assert sum(len(p) for p in await cluster.records()) == 50
        await cluster.do("PATCH", "/v1/topics/orders", {"records_per_second": None})
        await cluster.publish(*["free"] * 500)

    run(scenario)


def test_a_quota_is_a_bucket_of_one_second() -> None:
    class FixedClock:
        at = 100.0

        def monotonic(self) -> float:
            return self.at

    clock: Any = FixedClock()
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


def test_a_publish_goes_to_the_open_partitions_of_a_topic_that_was_contracted() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4)
        await cluster.publish("a", "b", "c", "d")
        await cluster.do("POST", "/v1/topics/orders/contract", {"partitions": 1})
        for sequence in range(3):
            await cluster.publish("e", producer="p", sequence=sequence)
            await cluster.publish("f")
        assert len((await cluster.records())[0]) == 1 + 6
        body = msgspec.json.encode({"value": "g"})
        response = await cluster.request("POST", RECORDS, body=body, partition=3)
        assert (response.status, response.code) == (409, "partition_draining")

    run(scenario)


def test_a_producers_records_without_keys_are_distributed_round_robin_but_large_batches_are_not_split() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4)
        async with cluster.producer() as producer:
            await producer.publish("orders", [Record.new(b"x") for _ in range(8)])
            assert [len(records) for records in await cluster.records()] == [2, 2, 2, 2]
            first = [len(await producer.publish("orders", [Record.new(b"x") for _ in range(100)])) for _ in range(4)]
            assert first == [1, 1, 1, 1], "each batch went to one partition"
            assert [len(records) for records in await cluster.records()] == [102, 102, 102, 102], "and each to another"
            for _ in range(4):
                await producer.send("orders", "x")
            assert [len(records) for records in await cluster.records()] == [103, 103, 103, 103]

    run(scenario)


def test_what_a_busy_producer_sends_in_one_request_goes_to_one_partition_and_the_next_to_another() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4)
        async with cluster.producer() as producer:
            for _ in range(16):
                first = asyncio.create_task(producer.send("orders", "x"))
                await asyncio.sleep(0)  # so that it is sent alone, and the others while it is in flight
                await asyncio.gather(first, *(producer.send("orders", "y") for _ in range(5)))
        stored = [[record.value for record in partition] for partition in await cluster.records()]
        runs = [list(group) for values in stored for value, group in itertools.groupby(values) if value == b"y"]
        assert [values.count(b"x") for values in stored] == [4] * 4, "round-robin"
        assert {len(values) % 5 for values in runs} == {0}, "together"
        assert len([values for values in stored if b"y" in values]) > 1, "in turns"
        assert sum(values.count(b"y") for values in stored) == 80

    run(scenario)


def test_a_batch_with_keys_is_not_kept_together() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4)
        body = {"records": [{"value": "v", "key": f"k{i}"} for i in range(40)]}
        response = await cluster.do("POST", RECORDS, body, producer="p", sequence=0, round_robin_start=3, together=1)
        assert len(response["stored"]) == 4
        body = {"records": [{"value": "v"}] * 3}
        response = await cluster.do("POST", RECORDS, body, producer="p", sequence=1, round_robin_start=4, together=1)
        assert [part["count"] for part in response["stored"]] == [3]

    run(scenario)


def test_brokers_agree_on_a_topic_that_was_just_expanded_or_recreated(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        keys = [f"k{i}" for i in range(8)]
        records = [{"value": key, "key": key} for key in keys]

        async def publish(broker: int) -> None:
            for one in records:
                await cluster.do("POST", RECORDS, one, broker=broker)
            await cluster.do("POST", RECORDS, {"records": records}, broker=broker)

        await cluster.topic(partitions=5)
        for broker in (0, 1):
            await publish(broker)
        await cluster.log.expand_topic("orders", 7)
        stamp = {"producer": "p", "sequence": 1}
        await cluster.do("POST", RECORDS, {"records": records}, broker=0, **stamp)
        again = await cluster.do("POST", RECORDS, {"records": records}, broker=1, **stamp)
        assert all(part["duplicate"] for part in again["stored"])

        await cluster.log.delete_topic("orders")
        await cluster.topic(partitions=7, partitioner="jump", hash="xxh64")
        for broker in (0, 1):
            await publish(broker)
        place = partitioner_named("jump", 7, "xxh64").place
        for index, partition in enumerate(await cluster.records()):
            assert {record.key for record in partition} == {k.encode() for k in keys if place(k.encode()) == index}

    run(scenario, tmp_path, brokers=2)


def test_a_broker_that_knows_an_old_state_of_a_topic_uses_the_new_one_after_a_refusal() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4)
        stamps = itertools.count()

        async def publish() -> set[int]:
            values = [f"{i}" for i in range(8)]
            response = await cluster.publish(*values, producer="p", sequence=next(stamps), broker=1)
            return {part["partition"] for part in response["stored"]}

        assert await publish() == {0, 1, 2, 3}
        await cluster.log.contract_topic("orders", 2)  # not through that broker
        assert await publish() == {0, 1}
        await cluster.log.seal_topic("orders", HOLDER)
        await cluster.topic("more", partitions=1)
        await move(cluster.log, "orders", "more")
        assert (await cluster.do("POST", RECORDS, {"value": "x"}, partition=0, broker=1))["stored"][0][
            "topic"
        ] == "more"
        assert await publish() == {0}
        assert len((await cluster.records("more"))[0]) == 9

    run(scenario, brokers=2)


def test_a_publish_whose_outcome_is_unknown_is_stored_once_whatever_its_form() -> None:
    async def publish(count: int, partition: int | None) -> tuple[list[str], bool]:
        async with LostResponses() as log:
            await log.create_topic("orders", 1)
            publisher = Publisher(log, Delays(log))
            posted = [Posted(Record(f"r{i}", b"k", b"v")) for i in range(count)]
            try:
                await publisher.publish("orders", posted, partition=partition)
            except OutcomeUnknown:
                acknowledged = False
            else:
                acknowledged = True
            return [record.id for record in await contents(log, Partition("orders", 0))], acknowledged

    assert asyncio.run(publish(1, 0)) == (["r0"], True)
    assert asyncio.run(publish(2, 0)) == (["r0", "r1"], True)
    assert asyncio.run(publish(2, None)) == (["r0", "r1"], True)
    assert asyncio.run(publish(1, None)) == (["r0"], False), "a single record has no stamp, so the client has to decide"
