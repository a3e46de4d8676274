"""From `events` to `inbox`: who gets what, once and in order, through hand-overs and kills."""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, cast

import pytest

from shardyard.fanout.catch_up import CatchUp
from shardyard.fanout.config import WORKERS_GROUP
from shardyard.fanout.coordinator import Coordinator
from shardyard.fanout.hot_channels import SCOPE, split_targets
from shardyard.fanout.member import ForwardingMember
from shardyard.fanout.routing import RoutingTable
from shardyard.fanout.trimming import trim_processed
from shardyard.fanout.worker import Worker
from shardyard.groups import GroupConfig, Membership, configure
from shardyard.log import Log
from shardyard.log.requests import AppendRequest
from shardyard.model import Partition, Record, Retention
from shardyard.registry import Transaction
from shardyard.runtime.metrics import FANOUT_BUFFER_FULL, FANOUT_HOT_CHANNELS, FANOUT_SKIPPED
from shardyard.wire.channels import CLEARED, EVENTS, FANOUT, PRESENCE
from shardyard.wire.inbox import TOPIC
from tests.fanout.flow import (
    CONFIG,
    EVENT_PARTITIONS,
    Flow,
    fanout_partition,
    flow,
    inbox_partition,
    kill,
    until,
    user_in,
)
from tests.log.samples import awaited
from tests.postgresql import PostgresqlServer

ENGINES = pytest.mark.parametrize("engine", ["memory", "sqlite"])
SQLITE_FIRST = pytest.mark.parametrize("engine", [pytest.param("memory", marks=pytest.mark.long), "sqlite"])
"""For what takes long: `make quick` has it on one engine."""


class StallingLog:
    """A log whose n-th append to a partition never returns. It is made or not, and those after it are not."""

    def __init__(self, log: Log, number: int, *, is_made: bool) -> None:
        self._log = log
        self._left = number
        self._is_made = is_made
        self.stalled = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append_many(self, requests: Sequence[AppendRequest]) -> Any:
        left, self._left = self._left, self._left - len(requests)
        if self._left > 0:
            return await self._log.append_many(requests)
        await self._log.append_many(requests[: max(left if self._is_made else left - 1, 0)])
        self.stalled.set()
        return await asyncio.get_running_loop().create_future()


class CompactingLog:
    """A log in which a partition of `presence` is compacted just before it is read."""

    def __init__(self, log: Log, partition: Partition, online: str) -> None:
        self._log = log
        self._partition = partition
        self._online = online
        self.is_done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def read(self, partition: Partition, *arguments: Any, **options: Any) -> Any:
        if partition == self._partition and not self.is_done:
            self.is_done = True
            kept = (await self._log.span(partition)).end
            state = [Record("clear", None, CLEARED), Record("on", self._online.encode(), b"+phone")]
            await self._log.append(partition, state)
            await self._log.trim(partition, kept)
        return await self._log.read(partition, *arguments, **options)


async def arrived(f: Flow, channel: str, inboxes: list[int]) -> None:
    """Wait until all events of a channel are stored in exactly these partitions of `inbox`."""

    async def all_are_there() -> bool:
        got = await f.received()
        return all(len(got[q].get(channel, [])) >= len(f.posted[channel]) for q in inboxes)

    await until(all_are_there, f"events of {channel} in {inboxes}, {f.posted[channel]}")
    got = await f.received()
    for q, by_channel in got.items():
        assert by_channel.get(channel, []) == (f.posted[channel] if q in inboxes else []), q


@ENGINES
@awaited
async def test_an_event_is_stored_once_in_each_inbox_partition_with_online_members(engine: str) -> None:
    async with flow(engine) as f:
        await f.join("tea", user_in(0), user_in(0, 1), user_in(2), user_in(3))
        await f.online(user_in(0), user_in(0, 1), user_in(2))
        async with f.coordinator("c"), f.worker("w"):
            await f.post("tea", 3)
            await f.post("unknown", 1)
            await arrived(f, "tea", [0, 2])
            await arrived(f, "unknown", [])
            source = (await f.posts())[0][0][2]
            assert (source.topic, source.index) == (FANOUT, fanout_partition("tea"))
            assert source.members == 4


@ENGINES
@awaited
async def test_who_joined_or_came_online_before_an_event_gets_it(engine: str) -> None:
    async with flow(engine) as f, f.coordinator("c"), f.worker("w"):
        for q in range(4):
            await f.join("tea", user_in(q))
            await f.post("tea")
            await f.online(user_in(q))
            await f.post("tea")
        await until(lambda: _has_last(f, [0, 1, 2, 3]), "the last event")
        got = await f.received()
        for q in range(4):
            seen = got[q].get("tea", [])
            owed = f.posted["tea"][2 * q + 1 :]
            assert seen[-len(owed) :] == owed, q
        await f.online(user_in(0), added=False)
        await f.post("tea")
        await until(lambda: _has_last(f, [1, 2, 3]), "the event after it")
        assert (await f.received())[0]["tea"][-1] == f.posted["tea"][-2]


async def _has_last(f: Flow, inboxes: list[int]) -> bool:
    got = await f.received()
    return all(f.posted["tea"][-1] in got[q].get("tea", []) for q in inboxes)


@ENGINES
@awaited
async def test_records_without_a_channel_are_skipped(engine: str) -> None:
    async with flow(engine) as f, f.coordinator("c"), f.worker("w"):
        await f.join("tea", user_in(1))
        await f.online(user_in(1))
        skipped = FANOUT_SKIPPED.value
        for index in range(4):
            odd = [Record("odd", None, b"no channel"), Record("odd", b"", b""), Record("odd", b"x" * 600, b"")]
            await f.log.append(Partition(EVENTS, index), odd)
        await f.post("tea", 2)
        await arrived(f, "tea", [1])
        await until(lambda: FANOUT_SKIPPED.value >= skipped + 12, "they are counted")


@SQLITE_FIRST
@awaited
async def test_nothing_is_lost_or_stored_twice_when_coordinators_and_workers_are_killed(engine: str) -> None:
    """At each kill, a new member takes over what the last one has begun. Events are posted all the time."""
    seeds = range(4) if engine == "memory" else range(2)
    for seed in seeds:
        random = Random(seed)
        channels = [f"channel-{i}" for i in range(12)]
        async with flow(engine) as f:
            members = {channel: random.sample(range(4), random.randint(1, 3)) for channel in channels}
            for channel, inboxes in members.items():
                await f.join(channel, *(user_in(q) for q in inboxes))
            await f.online(*(user_in(q) for q in range(4)))
            await _run_with_kills(f, random, channels)
            async with f.coordinator("last c"), f.worker("last w"):
                for channel, inboxes in members.items():
                    await arrived(f, channel, inboxes)


async def _run_with_kills(f: Flow, random: Random, channels: list[str]) -> None:
    running: dict[str, ForwardingMember] = {}
    for turn in range(16):
        kind = random.choice("cw")
        if kind in running:
            await kill(running.pop(kind))
        else:
            made: ForwardingMember = f.coordinator(f"c{turn}") if kind == "c" else f.worker(f"w{turn}")
            running[kind] = await made.__aenter__()
        for _ in range(random.randint(1, 4)):
            await f.post(random.choice(channels), random.randint(1, 5))
        for _ in range(random.randint(0, 400)):  # so far others get before the next kill
            await asyncio.sleep(0)
    for member in running.values():
        await kill(member)


@pytest.mark.parametrize("is_made", [True, False])
@pytest.mark.parametrize("kind", ["coordinator", "worker"])
@awaited
async def test_a_member_that_is_killed_within_a_step_is_continued(kind: str, is_made: bool) -> None:
    """Its n-th append never returns; the next member completes the step."""
    for number in range(1, 6):
        async with flow("memory") as f:
            members = {"tea": [0, 1, 3], "juice": [1, 2], "water": [0]}
            for channel, inboxes in members.items():
                await f.join(channel, *(user_in(q) for q in inboxes))
                await f.post(channel, 3)
            await f.online(*(user_in(q) for q in range(4)))
            stalling = StallingLog(f.log, number, is_made=is_made)
            host = copy.copy(f.node)
            host.log = cast(Log, stalling)
            one = Coordinator(host, config=CONFIG) if kind == "coordinator" else Worker(host, config=CONFIG)
            async with f.worker("w") if kind == "coordinator" else f.coordinator("c"):
                await one.__aenter__()
                await f.post("tea", 2)
                await until(partial(_has_stalled_or_is_idle, stalling, one), "it stalls, or has done all")
                await kill(one)
                await f.post("juice", 2)
                async with f.coordinator("c2") if kind == "coordinator" else f.worker("w2"):
                    for channel, inboxes in members.items():
                        await arrived(f, channel, inboxes)


@awaited
async def test_a_partition_that_was_prepared_and_does_not_come_is_unloaded() -> None:
    async with flow("memory") as f, f.worker("w1") as first:
        await until(lambda: len(first.owned) == 256, "one worker owns all")
        second = f.worker("w2")

        async def stall(_: Partition) -> None:
            await asyncio.get_running_loop().create_future()

        second._recovery.prepare = stall  # type: ignore[method-assign, assignment]
        async with second:
            await until(lambda: len(second._catch_up.held) == 128, "it has loaded its share")
            await f.node.transactions.run(lambda tx: configure(tx, WORKERS_GROUP, GroupConfig(max_active=1), who="ann"))
            await until(lambda: not second.preparing, "the owner keeps all")
            assert second._catch_up.held == set()
            assert len(first.owned) == 256


def _has_stalled_or_is_idle(log: StallingLog, member: ForwardingMember) -> bool:
    return log.stalled.is_set() or (bool(member.done) and not member._commits._positions)


@SQLITE_FIRST
@awaited
async def test_a_worker_that_joins_prepares_its_partitions_and_order_is_kept_when_they_move(engine: str) -> None:
    async with flow(engine) as f:
        channels = [f"channel-{i}" for i in range(20)]
        for channel in channels:
            await f.join(channel, user_in(0), user_in(2))
        await f.online(user_in(0), user_in(2))
        async with f.coordinator("c"), f.worker("w1") as first:
            await until(lambda: len(first.owned) == 256, "one worker owns all")
            posting = asyncio.create_task(_post_for_a_while(f, channels, 60))
            async with f.worker("w2") as second:
                await until(lambda: len(second.owned) == 128, "the second worker owns half")
                assert second.owned.isdisjoint(first.owned)
                await until(lambda: first._catch_up.held == {p.index for p in first.owned}, "the rest is unloaded")
                await posting
                await until(lambda: not second.preparing, "the second one has opened its partitions")
                state = await second.state()
                assert (len(state.owned), state.preparing) == (128, [])
                mine = [channel for channel in channels if second.lookup(channel) is not None]
                assert all(second.lookup(channel) == [0, 2] and first.lookup(channel) is None for channel in mine)
                await _post_for_a_while(f, channels, 20)
                await until(lambda: bool(second.done), "the second one forwards")
            await until(lambda: len(first.owned) == 256, "the first worker owns all again")
            await _post_for_a_while(f, channels, 10)
            for channel in channels:
                await arrived(f, channel, [0, 2])


async def _post_for_a_while(f: Flow, channels: list[str], count: int) -> None:
    for number in range(count):
        await f.post(channels[number % len(channels)], 1 + number % 3)
        await asyncio.sleep(0.002)


@ENGINES
@awaited
async def test_when_the_buffer_is_full_events_wait_and_nothing_is_lost(engine: str) -> None:
    config = replace(CONFIG, buffer_seconds=0.3)
    async with flow(engine) as f, f.coordinator("c", config) as coordinator:
        await f.join("tea", user_in(1))
        await f.online(user_in(1))
        await f.post("tea", 3)
        await until(lambda: coordinator.buffer.full, "nobody reads `fanout`, so the buffer is full")
        assert str(coordinator.buffer).startswith("buffer full: workers are behind by 3 records")
        assert FANOUT_BUFFER_FULL.value == 1
        await f.post("tea", 4)
        waiting = (await f.log.ends(FANOUT))[fanout_partition("tea")].end
        assert waiting == 3
        async with f.worker("w"):
            await arrived(f, "tea", [1])
        await until(lambda: not coordinator.buffer.full, "it is not full any more")


@ENGINES
@awaited
async def test_only_what_was_processed_is_dropped_from_fanout(engine: str) -> None:
    """However long the workers are down: the topic itself drops nothing."""
    async with flow(engine) as f, f.coordinator("c"):
        await f.join("tea", user_in(1))
        await f.online(user_in(1))
        await f.post("tea", 3)
        partition = Partition(FANOUT, fanout_partition("tea"))

        async def is_left(first: int) -> bool:
            await trim_processed(f.node, 0.001)
            span = await f.log.span(partition)
            return (span.first, span.end) == (first, 3)

        assert (await f.log.topic(FANOUT)).retention == Retention()
        await until(partial(is_left, 0), "it is forwarded")
        assert await is_left(0)
        async with f.worker("w"):
            await arrived(f, "tea", [1])
            await trim_processed(f.node, 3600.0)
            assert (await f.log.span(partition)).first == 0
            await until(partial(is_left, 3), "it is processed")


@awaited
async def test_the_buffer_is_full_by_records_too() -> None:
    config = replace(CONFIG, buffer_records=5)
    async with flow("memory") as f, f.coordinator("c", config) as coordinator:
        await f.join("tea", user_in(1))
        await f.online(user_in(1))
        await f.post("tea", 6)
        await until(lambda: coordinator.buffer.full, "too many records wait")
        await f.post("tea", 4)
        async with f.worker("w"):
            await arrived(f, "tea", [1])


@ENGINES
@awaited
async def test_a_channel_that_becomes_hot_and_cools_down_keeps_its_order(engine: str) -> None:
    async with flow(engine) as f, f.coordinator("c") as coordinator, f.worker("w1") as one, f.worker("w2") as two:
        await f.join("tea", *(user_in(q) for q in range(4)))
        await f.online(*(user_in(q) for q in range(4)))
        await until(lambda: len(one.owned) == len(two.owned) == 128, "both have their share")
        for ways in (2, 4, 1, 4, 1, None):
            if ways is None:  # a channel is forgotten long after it has cooled down
                await arrived(f, "tea", [0, 1, 2, 3])
            await f.post("tea", 3)
            await f.node.transactions.run(partial(split_tea, ways=ways))
            expected: dict[bytes, int] = {} if ways is None else {b"tea": ways}
            await until(partial(_follows, coordinator, expected), "the coordinator follows")
            for _ in range(5):
                await f.post("tea", 2)
        await arrived(f, "tea", [0, 1, 2, 3])
        sources = {source.index for posts in (await f.posts()).values() for _, _, source in posts}
        assert sources == set(split_targets(fanout_partition("tea"), 4))


@awaited
async def test_posts_of_a_hot_channel_say_up_to_where_its_own_members_are_known() -> None:
    """Whichever partition of `fanout` they come from: messaging servers read the partition of the channel."""
    async with flow("memory") as f, f.worker("w"):
        await f.join("tea", *(user_in(q) for q in range(4)))
        await f.node.transactions.run(partial(split_tea, ways=4))
        async with f.coordinator("c"):
            await f.post("tea")
            await arrived(f, "tea", [0, 1, 2, 3])
        assert {source.members for posts in (await f.posts()).values() for _, _, source in posts} == {4}


def split_tea(tx: Transaction, ways: int | None) -> None:
    if ways is None:
        tx.delete_setting(SCOPE, "tea")
    else:
        tx.put_setting(SCOPE, "tea", {"ways": ways, "at": 0})


def _follows(coordinator: Coordinator, expected: dict[bytes, int]) -> bool:
    return coordinator._hot.ways == expected


@pytest.mark.parametrize("before", [1, 4])
@awaited
async def test_a_coordinator_that_is_killed_while_a_channel_is_split_is_continued(before: int) -> None:
    """The next one finds the channel in another state, and completes the step as it was begun."""
    for number in range(1, 5):
        async with flow("memory") as f, f.worker("w"):
            await f.join("tea", *(user_in(q) for q in range(4)))
            await f.online(*(user_in(q) for q in range(4)))
            await f.node.transactions.run(partial(split_tea, ways=before))
            stalling = StallingLog(f.log, number, is_made=True)
            host = copy.copy(f.node)
            host.log = cast(Log, stalling)
            one = Coordinator(host, config=CONFIG)
            await one.__aenter__()
            await f.post("tea", 3)
            await until(partial(_has_stalled_or_is_idle, stalling, one), "it stalls, or has done all")
            await kill(one)
            await f.node.transactions.run(partial(split_tea, ways=5 - before))
            await f.post("tea", 3)
            async with f.coordinator("c"):
                await arrived(f, "tea", [0, 1, 2, 3])


@awaited
async def test_a_channel_that_is_split_only_by_the_next_coordinator_reaches_all_its_partitions() -> None:
    """The one that was killed had forwarded a later event of another channel to one of these partitions."""
    parts = split_targets(fanout_partition("tea"), 4)
    names = (f"other-{n}" for n in range(100_000))
    other = next(
        name
        for name in names
        if fanout_partition(name) in parts
        and fanout_partition(name) < parts[0]
        and inbox_partition(name, EVENT_PARTITIONS) == inbox_partition("tea", EVENT_PARTITIONS)
    )
    async with flow("memory") as f, f.worker("w"):
        for channel in ("tea", other):
            await f.join(channel, *(user_in(q) for q in range(4)))
        await f.online(*(user_in(q) for q in range(4)))
        await f.post("tea", 2)
        await f.post(other, 2)
        stalling = StallingLog(f.log, 2, is_made=False)
        host = copy.copy(f.node)
        host.log = cast(Log, stalling)
        one = Coordinator(host, config=CONFIG)
        await one.__aenter__()
        await until(stalling.stalled.is_set, "it has forwarded the other channel only")
        await kill(one)
        await f.node.transactions.run(partial(split_tea, ways=4))
        async with f.coordinator("c"):
            await arrived(f, "tea", [0, 1, 2, 3])
            await arrived(f, other, [0, 1, 2, 3])


@awaited
async def test_a_channel_with_much_traffic_is_split_and_one_without_is_not_any_more() -> None:
    config = replace(CONFIG, hot_seconds=0.05, hot_load=500.0, cool_load=100.0, hot_members=2, forget_hot_seconds=0.1)
    async with flow("memory") as f, f.coordinator("c") as coordinator, f.worker("w", config) as worker:
        await f.join("tea", *(user_in(q, n) for q in range(4) for n in range(5)))
        await f.online(*(user_in(q, n) for q in range(4) for n in range(5)))
        await f.join("small", user_in(0))

        async def is_hot() -> bool:
            await f.post("tea", 10)
            await f.post("small", 10)
            return coordinator._hot.ways == {b"tea": 4}

        await until(is_hot, "the channel is hot")
        assert FANOUT_HOT_CHANNELS.value == 1
        await f.post("tea", 5)
        await until(lambda: coordinator._hot.ways == {b"tea": 1}, "it is not hot any more")
        await f.post("tea", 5)
        await until(lambda: not worker._hot.ways, "it is forgotten")
        await arrived(f, "tea", [0, 1, 2, 3])


@ENGINES
@awaited
async def test_inbox_can_be_expanded_while_events_are_routed(engine: str) -> None:
    async with flow(engine) as f, f.coordinator("c"), f.worker("w") as worker:
        await f.join("tea", user_in(1), user_in(6, partitions=8))
        await f.online(user_in(1))
        await f.post("tea", 2)
        await until(lambda: _has_last(f, [1]), "routed with 4 partitions")
        await f.log.expand_topic(TOPIC, 8)
        await f.post("tea", 2)
        await until(lambda: len(worker.table.presence_offsets) == 8, "the table has 8 partitions")
        assert (await f.log.topic(PRESENCE)).partitions == 8
        await f.online(user_in(6, partitions=8))
        await f.post("tea", 2)
        await until(lambda: _has_last(f, [6]), "routed to a new partition")
        received = (await f.received())[6]["tea"]  # the two before may be routed after the user came online, too
        assert received == f.posted["tea"][-len(received) :]
        assert len(received) in (2, 3, 4)


@ENGINES
@awaited
async def test_presence_can_be_compacted(engine: str) -> None:
    """Its first record says then that nobody is online but for those that follow. A worker that is behind reads on from
    there, and so does a new one."""
    async with flow(engine) as f, f.coordinator("c"):
        partition = Partition(PRESENCE, 1)
        users = [user_in(1, n) for n in range(3)]
        await f.join("tea", users[0])
        await f.join("juice", users[1])
        async with f.worker("w"):
            await f.online(*users)
            await f.post("tea")
            await arrived(f, "tea", [1])
            await f.online(users[0], added=False)
            kept = (await f.log.span(partition)).end
            await f.log.append(partition, [Record("clear", None, CLEARED), Record("on", users[1].encode(), b"+phone")])
            await f.log.trim(partition, kept)
            before = f.posted["tea"][:]
            await f.post("tea")
            await f.post("juice")
            await arrived(f, "juice", [1])
            assert (await f.received())[1]["tea"] == before
        async with f.worker("w2"):
            await f.post("juice")
            await arrived(f, "juice", [1])
            assert (await f.received())[1]["tea"] == before


@awaited
async def test_who_is_online_is_known_if_presence_is_compacted_while_it_is_read() -> None:
    """What a worker was about to read is gone, and lies beyond the end that it had looked up."""
    async with flow("memory") as f:
        user = user_in(1)
        await f.online(user)
        log = CompactingLog(f.log, Partition(PRESENCE, 1), user)
        catch_up = CatchUp(cast(Log, log), lambda inbox: RoutingTable(inbox.receiving), CONFIG)
        await catch_up.open()
        assert log.is_done
        assert catch_up.table.size().online == 1
        await catch_up.close()


@ENGINES
@awaited
async def test_a_replicated_worker_serves_all_channels_straight_from_events(engine: str) -> None:
    async with flow(engine) as f:
        channels = [f"channel-{i}" for i in range(10)]
        for number, channel in enumerate(channels):
            await f.join(channel, user_in(number % 4))
        await f.online(*(user_in(q) for q in range(4)))
        async with f.worker("w1", source=EVENTS), f.worker("w2", source=EVENTS):
            for channel in channels:
                await f.post(channel, 3)
            for number, channel in enumerate(channels):
                await arrived(f, channel, [number % 4])
        source = (await f.posts())[0][0][2]
        assert (source.topic, source.members) == (EVENTS, 1)


@awaited
async def test_a_worker_out_of_touch_stops_at_the_end_of_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_touch: set[Membership] = set()

    def last_contact(member: Membership) -> float:
        """Heartbeats go on, and must not end the test's outage."""
        return member._last_contact - (10 if member in out_of_touch else 0)

    monkeypatch.setattr(Membership, "last_contact", property(last_contact))
    async with flow("memory") as f, f.coordinator("c"), f.worker("w") as worker:
        await f.join("tea", user_in(1))
        await f.online(user_in(1))
        await f.post("tea")
        await arrived(f, "tea", [1])
        out_of_touch.add(worker._membership)
        await f.post("tea")
        await until(lambda: bool(worker._ready), "the next batch waits")
        assert (await f.received())[1]["tea"] == f.posted["tea"][:1]
        out_of_touch.clear()
        await arrived(f, "tea", [1])


@pytest.mark.server
@awaited
async def test_fan_out_on_postgresql(postgresql: PostgresqlServer) -> None:
    with postgresql.new_database() as url:
        async with flow("postgresql", url) as f:
            for channel in ("tea", "juice"):
                await f.join(channel, user_in(0), user_in(3))
            await f.online(user_in(0), user_in(3))
            await f.post("tea", 3)
            coordinator, worker = f.coordinator("c"), f.worker("w")
            await coordinator.__aenter__()
            await worker.__aenter__()
            await f.post("juice", 3)
            await until(lambda: bool(worker.done), "some is forwarded")
            await kill(coordinator)
            await kill(worker)
            await f.post("tea", 3)
            async with f.coordinator("c2"), f.worker("w2"):
                for channel in ("tea", "juice"):
                    await arrived(f, channel, [0, 3])
