"""What members see of log and registry through brokers."""

import asyncio
import socket
from typing import Any

import pytest

from shardyard.client import Brokers, Consumer, Producer
from shardyard.client.remote import RemoteCoordinator, RemoteLog
from shardyard.groups.coordinator import JoinRequest, MemberIdentity
from shardyard.model import MemberExists, Partition, Record, TopicKind, Unreachable
from shardyard.runtime.clock import ManualClock
from shardyard.wire import responses
from shardyard.wire.codec import decode
from tests.client.test_producer import dead_address
from tests.log.samples import move
from tests.queues.setup import Cluster, run


def test_a_topic_is_the_same_through_a_broker_also_while_it_drains() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4, retention_ms=60_000, retention_bytes=1_000_000)
        await cluster.topic("later", partitions=2)
        await cluster.log.create_topic("billing.orders.retry", 2, kind=TopicKind.RETRY)
        await cluster.log.append(Partition("orders", 3), [Record.new(b"x")])
        await cluster.do("POST", "/v1/topics/orders/contract", {"partitions": 2})
        await move(cluster.log, "later", "orders")
        async with Brokers(cluster.urls) as brokers:
            remote = RemoteLog(brokers)
            drained = await remote.topic("orders")
            assert (drained.partitions, drained.receiving, drained.open_partitions) == (4, 2, 2)
            for name in ("orders", "later", "billing.orders.retry"):
                assert await remote.topic(name) == await cluster.log.topic(name)
            assert await remote.span(Partition("orders", 3)) == await cluster.log.span(Partition("orders", 3))

    run(scenario)


def test_a_member_joins_under_a_name_that_is_taken_when_its_session_has_expired() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        request = JoinRequest("billing", "m1", ["orders"], session_timeout=1.0)
        async with Brokers(cluster.urls) as brokers:
            first = await RemoteCoordinator(brokers).join(request, None)
            again = await RemoteCoordinator(brokers).join(request, None)
            assert (again.group, again.member) == ("billing", "m1")
            assert again.epoch > first.epoch

    run(scenario)


def test_a_join_gives_up_when_the_name_is_still_taken_after_a_session() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        clock = ManualClock()
        async with Brokers(cluster.urls) as brokers, cluster.consumer("m1", session_timeout=60.0):
            coordinator = RemoteCoordinator(brokers, clock)
            joining = asyncio.create_task(coordinator.join(JoinRequest("billing", "m1", ["orders"]), None))
            await passes(clock, joining)
            with pytest.raises(MemberExists):
                await joining

    run(scenario)


async def run_tasks() -> None:
    """Until all of them wait for something."""
    for _ in range(20):
        await asyncio.sleep(0)


async def passes(clock: ManualClock, task: "asyncio.Task[Any]") -> None:
    """Let virtual time pass until the task is done."""
    async with asyncio.timeout(20):
        while not task.done():
            await clock.advance(0.5)
            await asyncio.sleep(0)


def test_calls_are_retried_on_the_clock_they_are_given() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with Brokers([dead_address(), dead_address()], retry_seconds=600.0, clock=clock) as brokers:
            calling = asyncio.create_task(brokers.get("/healthz"))
            await passes(clock, calling)
            with pytest.raises(Unreachable, match="600 s"):
                await calling

    asyncio.run(scenario())


def test_a_producer_lingers_on_its_clock() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        clock = ManualClock()
        async with Producer(cluster.urls, linger=3600.0, clock=clock) as producer:
            sending = [asyncio.create_task(producer.send("orders", f"{i}")) for i in range(10)]
            await run_tasks()
            await clock.advance(3599.0)
            assert await cluster.count() == 0
            await clock.advance(2.0)
            await asyncio.gather(*sending)
        assert [len(partition) for partition in await cluster.records()] == [10]

    run(scenario)


def test_a_member_that_was_evicted_although_it_sent_heartbeats_waits_for_a_session_before_it_joins_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        clock = ManualClock()
        async with Brokers(cluster.urls) as brokers:
            coordinator = RemoteCoordinator(brokers, clock)
            request = JoinRequest("billing", "m1", ["orders"], session_timeout=10.0)
            member = await coordinator.join(request, None)
            await coordinator.heartbeat(member, [])
            await coordinator.leave(member)
            joining: asyncio.Task[MemberIdentity] = asyncio.create_task(coordinator.join(request, member.epoch))
            await run_tasks()
            await clock.advance(9.0)
            assert (await cluster.get("/v1/groups/billing"))["members"] == []
            await clock.advance(2.0)
            assert (await joining).epoch > member.epoch

    run(scenario)


def test_settings_that_this_version_does_not_know_are_ignored() -> None:
    body = b'{"group": "g", "member": "m", "epoch": 1, "shard": 7, "settings": {"concurrency": 3, "colour": "red"}}'
    joined = decode(body, responses.Joined)
    assert joined.settings.concurrency == 3


def test_a_consumer_uses_the_clock_of_its_brokers() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            brokers = Brokers(f"127.0.0.1:{silent.getsockname()[1]}", clock=clock)
            consumer = Consumer(brokers, "billing", ["orders"])
            assert consumer._clock is consumer._host.coordinator._clock is clock
            assert Producer(brokers)._clock is clock

    asyncio.run(scenario())
