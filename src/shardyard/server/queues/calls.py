"""The frequent calls of clients, whichever carrier brings them: HTTP or a WebSocket connection."""

import contextlib
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, TypeVar

from shardyard.groups.broadcast import parent_group
from shardyard.groups.coordinator import MemberIdentity
from shardyard.groups.fence import ownership_fence
from shardyard.model import (
    CommitBeyond,
    Fence,
    InvalidValue,
    NotAllowed,
    OffsetTrimmed,
    Partition,
    PartitionOutOfRange,
    Position,
    Stamp,
    UnknownTopic,
    WrongEpoch,
)
from shardyard.model.batch import Batch
from shardyard.queues.broker import Broker
from shardyard.queues.dropped_unread import count_dropped_unread
from shardyard.queues.filtering import only_tagged, without_header
from shardyard.queues.reserved_topics import check_not_reserved
from shardyard.queues.retry_topics import original_topic
from shardyard.queues.settings_cache import MAX_AGE_SECONDS
from shardyard.registry import Heartbeat
from shardyard.runtime.metrics import (
    COMMITS,
    DELIVERED_BYTES,
    DELIVERED_RECORDS,
    HEARTBEATS,
    PUBLISHED_BYTES,
    PUBLISHED_RECORDS,
)
from shardyard.server.drain import Drain, LongPoll
from shardyard.wire import requests, responses
from shardyard.wire.batches import encode_batch
from shardyard.wire.codec import parse_partition
from shardyard.wire.headers import PUBLISHED
from shardyard.wire.settings import GroupSettings

if TYPE_CHECKING:
    import asyncio

    import pyarrow as pa

    from shardyard.wire.records import Posted

T = TypeVar("T")

MAX_BATCH_BYTES = 8 * 1024 * 1024
"""Of a delivery, whatever the owner asks for; a single record that is larger is delivered all the same."""


async def publish(
    broker: Broker, topic: str, records: "pa.RecordBatch | Sequence[Posted]", options: requests.Publish, size: int
) -> responses.Published:
    """Publish records to a topic that is not Shardyard's own. They are durable when it returns. `size`: bytes of the
    call, for the metrics."""
    check_not_reserved(topic, await broker.settings.names(topic))
    stamp = _stamp(options)
    broker.take_quota(topic, len(records), await broker.settings.topic(topic))
    stored = await broker.publisher.publish(
        topic,
        records,
        partition=options.partition,
        stamp=stamp,
        fence=await _fence(options, broker),
        round_robin_start=options.round_robin_start,
        together=bool(options.together),
    )
    PUBLISHED_RECORDS.add(len(records))
    PUBLISHED_BYTES.add(size)
    delayed = len(records) - sum(part.count for part in stored)
    return responses.Published([responses.Stored.of(part) for part in stored], delayed)


def _stamp(options: requests.Publish) -> Stamp | None:
    if options.producer is None and options.sequence is None:
        return None
    if options.producer is None or options.sequence is None:
        raise InvalidValue("producer", options.producer, "both producer and sequence, or neither of them")
    return Stamp(options.producer, options.sequence)


async def _fence(options: requests.Publish, broker: Broker) -> Fence | None:
    """The ownership that the publisher relies on, if it is current."""
    if options.fence is None:
        return None
    if options.owner is None:
        raise InvalidValue("owner", options.owner, "the epoch of the ownership")
    group, _, name = options.fence.partition("/")
    partition = parse_partition(name)
    await broker.check_owner(group, partition, options.owner)
    return ownership_fence(group, partition, options.owner)


def heartbeat_at_once(
    broker: Broker, group: str, member: str, host: str, body: requests.Heartbeat
) -> "tuple[GroupSettings, asyncio.Future[None]] | None":
    """`heartbeat` without a task, of which thousands of idle members would need one every few seconds: the settings,
    and a future that is done when the heartbeat is stored. None if it takes `heartbeat` to carry it out or refuse it.
    """
    settings = broker.settings.known_group(parent_group(group))
    if settings is None or not settings.admits(member, host):
        return None
    try:
        progress = frozenset(map(parse_partition, body.progress))
    except InvalidValue:
        return None
    HEARTBEATS.add()
    return settings, broker.heartbeats.submit(Heartbeat(group, member, body.epoch, progress))


async def heartbeat(broker: Broker, group: str, member: str, host: str, body: requests.Heartbeat) -> GroupSettings:
    """Take the heartbeat of a member. Returns the settings of its group. `host`: where the member runs."""
    parent = parent_group(group)
    settings = await broker.settings.group(parent)
    if not settings.admits(member, host):
        await broker.node.coordinator.leave(MemberIdentity(group, member, body.epoch))
        raise NotAllowed(parent, member)
    await broker.heartbeats.take(Heartbeat(group, member, body.epoch, frozenset(map(parse_partition, body.progress))))
    HEARTBEATS.add()
    return settings


async def assignment(broker: Broker, identity: MemberIdentity) -> responses.Assignment:
    """The partitions that a member owns, and those that it will own."""
    found = await broker.node.coordinator.assignment(identity)
    owned = {
        str(partition): responses.GrantedPartition(
            grant.epoch,
            None if grant.committed is None else (grant.committed.epoch, grant.committed.offset),
            grant.revoked,
        )
        for partition, grant in found.owned.items()
    }
    return responses.Assignment(owned, sorted(map(str, found.incoming)))


def commit_at_once(broker: Broker, group: str, member: str, body: requests.Commit) -> "asyncio.Future[None] | None":
    """`commit` without a task: a future that is done when the positions are stored. None if it takes `commit` to carry
    it out or refuse it."""
    try:
        positions = _positions(body)
    except InvalidValue:
        return None
    if not positions or not all(broker.has_read(p, position) for p, (_, position) in positions.items()):
        return None
    stored = broker.node.coordinator.submit_commit(MemberIdentity(group, member, body.epoch), positions)
    stored.add_done_callback(_count_commit)
    return stored


async def commit(broker: Broker, group: str, member: str, body: requests.Commit) -> None:
    """Commit the positions that a member has reached: all of them or none. Durable when it returns."""
    positions = _positions(body)
    for partition, (_, position) in positions.items():
        if not broker.has_read(partition, position):
            await _check_end(broker, partition, position)
    await broker.node.coordinator.commit(MemberIdentity(group, member, body.epoch), positions)
    COMMITS.add()


def _count_commit(stored: "asyncio.Future[None]") -> None:
    if stored.exception() is None:
        COMMITS.add()


def _positions(body: requests.Commit) -> dict[Partition, tuple[int, Position]]:
    return {
        parse_partition(name): (owned, Position(epoch, offset))
        for name, (owned, epoch, offset) in body.positions.items()
    }


async def _check_end(broker: Broker, partition: Partition, position: Position) -> None:
    """Refuse a position beyond the partition's end."""
    with contextlib.suppress(UnknownTopic, PartitionOutOfRange):  # deleted: its owner will learn of that
        span = await broker.log.span(partition)
        if position.epoch > span.epoch:
            raise WrongEpoch(partition, position.epoch, span.epoch)
        if position.epoch == span.epoch and position.offset > span.end:
            raise CommitBeyond(partition, position.offset, span.end)


async def set_fence(broker: Broker, group: str, partition: Partition, epoch: int) -> None:
    """Fence off all earlier owners of a partition: they can no longer read it."""
    await broker.check_owner(group, partition, epoch)
    await broker.log.set_fence(ownership_fence(group, partition, epoch))


async def read(
    broker: Broker, drain: Drain, group: str, partition: Partition, query: requests.Read, longest: float
) -> Batch:
    """Read as the owner of a partition, waiting for records if there are none, up to the time of the query or the
    `longest` one, or until the server drains."""
    await broker.check_owner(group, partition, query.owner)
    poll = LongPoll(drain, broker.clock, min(query.wait_seconds, longest))
    try:
        batch = await _OwnerRead(broker, group, partition, query).next(poll)
    except OffsetTrimmed as error:
        position = Position((await broker.log.span(partition)).epoch, query.offset)
        await count_dropped_unread(broker.node.transactions, group, {partition: (position, error.first)})
        raise
    broker.note_read(partition, Position(batch.epoch, batch.end))
    return batch


def encode_delivery(batch: Batch, media: str) -> bytes:
    """A batch as it is delivered to the owner of its partition."""
    body = encode_batch(batch, media)
    DELIVERED_RECORDS.add(len(batch))
    DELIVERED_BYTES.add(len(body))
    return body


class _OwnerRead:
    """One call to read, during which the settings of the group may change."""

    def __init__(self, broker: Broker, group: str, partition: Partition, query: requests.Read) -> None:
        self._broker = broker
        self._group = parent_group(group)
        self._partition = partition
        self._query = query
        self._fence = ownership_fence(group, partition, query.owner)

    async def next(self, poll: LongPoll) -> Batch:
        while True:
            settings = await self._broker.settings.group(self._group)
            if settings.is_paused(self._partition):
                batch = await self._read(1)
                if poll.over:
                    return batch.emptied()
                await self._wait(poll, self._broker.clock.sleep(min(poll.left, MAX_AGE_SECONDS)))
                continue
            waited = await self._wait(poll, self._read(settings.max_records, poll.left))
            if waited is None and not poll.over:
                continue  # the settings have changed
            batch = waited if waited is not None else await self._read(settings.max_records)
            settings = await self._broker.settings.group(self._group)  # they may have changed in the meantime
            if len(batch) and not settings.is_paused(self._partition):
                return self._to_deliver(only_tagged(batch, settings.tags) if settings.tags else batch)
            if poll.over:
                return batch.emptied()

    async def _wait(self, poll: LongPoll, work: Awaitable[T]) -> T | None:
        """The result of `work`; None if settings change or the server drains first."""
        return await poll.wait(self._broker.settings.until_changed(work))

    def _to_deliver(self, batch: Batch) -> Batch:
        """Without the time of publishing that retried records carry for the case that they become dead letters."""
        is_retry = original_topic(self._group, batch.partition.topic) != batch.partition.topic
        return without_header(batch, PUBLISHED) if is_retry else batch

    async def _read(self, max_records: int, wait: float = 0.0) -> Batch:
        return await self._broker.log.read(
            self._partition,
            self._query.offset,
            epoch=self._query.epoch,
            max_records=min(self._query.max_records, max_records),
            max_bytes=min(self._query.max_bytes, MAX_BATCH_BYTES),
            wait=wait,
            fence=self._fence,
        )
