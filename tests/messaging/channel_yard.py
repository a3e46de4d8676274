"""Channels in tests of messaging servers: their topics, and what fan-out would do with posts."""

import asyncio
import itertools

import pytest

from shardyard.messaging.history.channel_materialiser import GROUP as CHANNELS_GROUP
from shardyard.model import Partition, Record
from shardyard.placement import partitioner_named
from shardyard.wire import messaging as wire
from shardyard.wire.channels import (
    EVENTS,
    FANOUT_PARTITIONS,
    HASH,
    MEMBERS,
    PARTITIONER,
    PRESENCE,
    ChannelEvent,
    change,
    encode_event,
    parse_change,
)
from shardyard.wire.inbox import POST_KEY, TOPIC
from tests.messaging.clients import Client
from tests.messaging.servers import PARTITIONS, Running, Yard, eventually

_place = partitioner_named(PARTITIONER, FANOUT_PARTITIONS, HASH).place
_place(b"")  # what computes it is loaded now: that would hold up the servers of a test for seconds
_offsets = itertools.count(1)


def partition_of_channel(channel: str) -> Partition:
    """Of `members`."""
    return Partition(MEMBERS, _place(channel.encode()))


async def create_topics(yard: Yard) -> None:
    """What fan-out does when it is first started."""
    await yard.log.create_topic(EVENTS, 2)
    await yard.log.create_topic(MEMBERS, FANOUT_PARTITIONS, partitioner=PARTITIONER, hash_=HASH)
    await yard.log.create_topic(PRESENCE, PARTITIONS)


def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers notice sooner that topics were created or deleted, and that clients are to go offline."""
    monkeypatch.setattr("shardyard.messaging.server.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("shardyard.messaging.channels.channels.SWEEP_SECONDS", 0.05)


async def change_members(yard: Yard, channel: str, *users: str, joined: bool = True) -> int:
    """Let users join or leave, as a program would that uses the log. Returns the end of the partition."""
    records = [Record("id", channel.encode(), change(user, added=joined)) for user in users]
    appended = await yard.log.append(partition_of_channel(channel), records)
    return appended.first.offset + len(records)


async def post(
    yard: Yard,
    channel: str,
    *texts: str,
    to: int,
    members: int | None = None,
    sender: str = "",
    device: str = "",
) -> None:
    """Append posts to a partition of `inbox`, as a worker does. `members`: how far it has read the memberships."""
    at = partition_of_channel(channel)
    if members is None:
        members = (await yard.log.span(at)).end
    records = []
    for text in texts:
        number = next(_offsets)
        event = ChannelEvent(1000 + number, sender, device, number, 1_794_911_298_800, text)
        id_ = f"fanout.{at.index}.1.{number}.{members}"
        records.append(Record(id_, POST_KEY + channel.encode(), encode_event(event)))
    await yard.log.append(Partition(TOPIC, to), records)


async def online(yard: Yard, partition: int) -> set[tuple[str, str]]:
    """The clients that `presence` says are online."""
    found: set[tuple[str, str]] = set()
    at = Partition(PRESENCE, partition)
    offset = (await yard.log.span(at)).first
    while True:
        batch = await yard.log.read(at, offset)
        for record in batch.records():
            if record.key is None:
                found.clear()
                continue
            device, added = parse_change(record.value)
            (found.add if added else found.discard)((record.key.decode(), device))
        if batch.end == offset:
            return found
        offset = batch.end


async def until_online(yard: Yard, partition: int, *clients: tuple[str, str]) -> None:
    """Wait until these are online, and no others."""
    async with asyncio.timeout(60):
        while await online(yard, partition) != set(clients):  # noqa: ASYNC110 it has no event
            await asyncio.sleep(0.01)


async def in_history(yard: Yard) -> None:
    """Wait until the history has all events and members."""
    partitions = [p for name in (EVENTS, MEMBERS) for p in await yard.log.topic(name)]
    ends = {p: end for p in partitions if (end := (await yard.log.span(p)).end)}

    def done() -> bool:
        with yard.registry.snapshot() as tx:
            rows = tx.ownerships(CHANNELS_GROUP)
        offsets = {row.partition: row.committed.offset for row in rows if row.committed is not None}
        return all(offsets.get(p, 0) >= end for p, end in ends.items())

    await eventually(done)


async def join_channel(client: Client, number: int, channel: str) -> None:
    await client.send(wire.Join(number, channel))
    await client.until(lambda: wire.Done(number) in client.frames)


async def refused(client: Client, number: int) -> wire.Refused:
    answer = await client.answer(number)
    assert isinstance(answer, wire.Refused), answer
    return answer


def posts(client: Client) -> list[str]:
    return [entry.text for entry in client.entries if isinstance(entry, wire.Posted)]


def gaps(client: Client) -> list[str]:
    return [frame.reason for frame in client.frames if isinstance(frame, wire.Gap)]


def end_linger(server: Running, user: str) -> None:
    """Let clients that have disconnected, of users in the same partition, go offline now."""
    owned = server.server.owned_of(user)
    assert owned is not None
    assert owned.channels is not None
    leaving = owned.channels.presence._leaving
    leaving.update(dict.fromkeys(leaving, 0.0))
