"""`Channels`: who is a member of a channel, and what is posted to it, for programs that have the log at hand."""

import contextlib
import uuid
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from shardyard.fanout import topics
from shardyard.fanout.event_ids import EventIds
from shardyard.fanout.names import Names, check_column, check_event_id, check_event_text, check_name
from shardyard.log import Log, Sender
from shardyard.log.router import Router
from shardyard.model import InvalidValue, Malformed, OffsetTrimmed, Partition, Record, Stamp
from shardyard.model.batch import SCHEMA
from shardyard.model.limits import ANY_SIZE, validate
from shardyard.placement import partitioner_named
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.wire.channels import (
    ADDED,
    EVENTS,
    FANOUT_PARTITIONS,
    HASH,
    MEMBERS,
    PARTITIONER,
    PRESENCE,
    REMOVED,
    ChannelEvent,
    change,
    decode_event,
    encode_event,
    event_producer,
    parse_change,
)

BATCH_ROWS = 20_000
"""Membership changes that are stored at once."""
TIMEOUT_SECONDS = 30.0

_partitioner = partitioner_named(PARTITIONER, FANOUT_PARTITIONS, HASH)


def partition_of(channel: str) -> int:
    """The partition of `fanout` and `members` that a channel belongs to."""
    return _partitioner.place(channel.encode())


@dataclass(frozen=True, slots=True)
class Published:
    """An event that is stored."""

    id: int
    at: int
    """In milliseconds since 1970."""
    duplicate: bool
    """It was stored before; this call has stored nothing."""


class Channels:
    """Changes memberships and publishes events.

    Every call returns when what it did is durable: events that are acknowledged after that reach the channel's new
    members, if they are online. A call with a wrong name, id or text raises `InvalidValue` or `TooLarge` and changes
    nothing. Joining twice, and leaving a channel without being a member, is fine and changes nothing either. Channels
    need not be created: one exists as soon as it has a member.

    Calls that are awaited one after another take effect in that order. Missing topics are created with the first use.
    """

    def __init__(self, log: Log, *, clock: Clock | None = None, timeout: float = TIMEOUT_SECONDS) -> None:
        """`timeout`: seconds for which a call retries what the log refuses for now. The log is not closed by this."""
        self._log = log
        self._clock = clock or SystemClock()
        self._timeout = timeout
        self._ids = EventIds(self._now_ms)
        self._members: Sender | None = None
        self._presence: Sender | None = None
        self._events: Router | None = None

    # Membership

    async def join(self, channel: str, user: str) -> None:
        """Make a user a member of a channel."""
        await self._change(channel, user, added=True)

    async def leave(self, channel: str, user: str) -> None:
        """End the membership of a user."""
        await self._change(channel, user, added=False)

    async def join_many(self, channels: Names, users: Names) -> int:
        """Make each user a member of the channel at the same index. Returns how many changes were stored.

        All names are checked first: `InvalidValue` has the index of the first that is wrong, and nothing was stored.
        More than `BATCH_ROWS` are stored in several steps; if a later one fails, the earlier ones stay, and the same
        call may be repeated.
        """
        return await self._change_many(channels, users, ADDED)

    async def leave_many(self, channels: Names, users: Names) -> int:
        """End the membership of each user in the channel at the same index, likewise."""
        return await self._change_many(channels, users, REMOVED)

    async def change_many(self, channels: pa.Array, users: pa.Array, joins: pa.Array) -> int:
        """Both in one: where `joins` is true the user joins, otherwise leaves. Changes of a channel take effect in
        their order."""
        channels, users = check_column("channel", channels), check_column("user", users)
        if not len(channels) == len(users) == len(joins):
            raise InvalidValue("users", len(users), f"as many as channels and joins, {len(channels)}")
        signs = pc.if_else(joins, pa.scalar(ADDED, pa.binary()), pa.scalar(REMOVED, pa.binary()))
        return await self._append_changes(channels, signs, users)

    async def members(self, channel: str) -> list[str]:
        """The members of a channel, online or not, in the order of their names.

        This reads all membership changes of the channel's partition. It is for people and tests; servers keep them in
        memory.
        """
        partition = Partition(MEMBERS, partition_of(check_name("channel", channel)))
        await topics.open_members(self._log)
        found: dict[str, bool] = {}
        span = await self._log.span(partition)
        offset = span.first
        while offset < span.end:
            batch = await self._log.read(partition, offset, epoch=span.epoch)
            of_channel = batch.data.filter(pc.equal(batch.data["key"], channel.encode()))
            for value in of_channel["value"].to_pylist():
                with contextlib.suppress(Malformed):  # workers skip such records, too
                    user, added = parse_change(value)
                    found[user] = added
            offset = batch.end
        return sorted(user for user, added in found.items() if added)

    async def _change(self, channel: str, user: str, *, added: bool) -> None:
        record = Record.new(change(check_name("user", user), added=added), check_name("channel", channel))
        await (await self._members_sender()).send([record])

    async def _change_many(self, channels: Names, users: Names, sign: bytes) -> int:
        channels, users = check_column("channel", channels), check_column("user", users)
        if len(channels) != len(users):
            raise InvalidValue("users", len(users), f"as many as channels, {len(channels)}")
        return await self._append_changes(channels, pa.scalar(sign, pa.binary()), users)

    async def _append_changes(self, channels: pa.Array, signs: pa.Array | pa.Scalar, users: pa.Array) -> int:
        sender = await self._members_sender()
        keys = channels.cast(pa.binary())
        values = pc.binary_join_element_wise(signs, users.cast(pa.binary()), pa.scalar(b"", pa.binary()))
        for first in range(0, len(keys), BATCH_ROWS):
            await sender.send(_batch(keys.slice(first, BATCH_ROWS), values.slice(first, BATCH_ROWS)))
        return len(keys)

    async def _members_sender(self) -> Sender:
        if self._members is None:
            await topics.open_members(self._log)
            self._members = self._sender(MEMBERS)
        return self._members

    # Events

    async def publish(self, channel: str, text: str, *, sender: str, id: int | None = None) -> Published:  # noqa: A002
        """Post a text to a channel. All clients of its online members get it, those of the sender too. The sender need
        not be a member.

        `id`: of the event, 0 to 2**63 - 1. By default a new one, which sorts by time. A program that retries a publish
        gives the same id again, here or to a messaging server: as long as the log remembers the earlier one (for a
        week, unless `events` got other partitions meanwhile), the event is stored once, with the text of the first
        call. After that it is stored twice, and clients drop the second one. Ids of later events of a channel should be
        greater.
        """
        name, text = check_name("channel", channel), check_event_text(text)
        sender = check_name("sender", sender)
        number = self._ids.next() if id is None else check_event_id(id)
        at = self._now_ms()
        record = Record(
            str(number), name.encode(), encode_event(ChannelEvent(number, sender, "", 0, at, text)), timestamp=at
        )
        if self._events is None:
            await topics.open_events(self._log)
            self._events = Router(self._log, EVENTS, clock=self._clock)
        stamp = None if id is None else Stamp(event_producer(number, name), 0)
        deadline = self._clock.monotonic() + self._timeout
        [stored] = await self._events.send(validate([record], ANY_SIZE, at), deadline=deadline, stamp=stamp)
        if stored.duplicate:
            with contextlib.suppress(OffsetTrimmed, Malformed):  # then its time is not known any more
                batch = await self._log.read(stored.partition, stored.first.offset, max_records=1)
                at = decode_event(batch.records()[0].value).at if len(batch) else at
        return Published(number, at, stored.duplicate)

    # Presence

    async def set_presence(self, user: str, device: str, *, online: bool) -> None:
        """Say that a client of a user is connected, or is not any more: for programs that deliver what is in `inbox`
        themselves. Messaging servers say it of their clients, and forget what others said of the users of a partition
        when they take it over: use one or the other."""
        record = Record.new(change(check_name("device", device), added=online), check_name("user", user))
        if self._presence is None:
            await topics.open_presence(self._log)
            self._presence = self._sender(PRESENCE)
        await self._presence.send([record])

    def _sender(self, topic: str) -> Sender:
        return Sender(self._log, topic, timeout=self._timeout, clock=self._clock)

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)


def _batch(keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
    """Records with ids of their own. The log sets their time."""
    count, prefix = len(keys), uuid.uuid4().hex
    numbers = pa.array(range(count), pa.int32()).cast(pa.string())
    return pa.RecordBatch.from_arrays(
        [
            pc.binary_join_element_wise(prefix, numbers, "-"),
            keys.cast(pa.binary()),
            values.cast(pa.binary()),
            pa.nulls(count, SCHEMA.field("headers").type),
            pa.repeat(pa.scalar(0, pa.int64()), count),
        ],
        schema=SCHEMA,
    )
