"""The topics of channels: created if they are missing, and refused if they place channels differently."""

import contextlib

from shardyard.log import Log
from shardyard.log.router import current_topic
from shardyard.model import Conflict, Topic, TopicExists
from shardyard.wire.channels import (
    EVENT_PARTITIONS,
    EVENTS,
    FANOUT,
    FANOUT_PARTITIONS,
    HASH,
    MEMBERS,
    PARTITIONER,
    PRESENCE,
)
from shardyard.wire.inbox import TOPIC as INBOX

INBOX_PARTITIONS = 16
"""Of `inbox`, if it does not exist yet."""


class WrongPlacement(Conflict):
    """Raised when a topic has other partitions than fan-out relies on."""

    def __init__(self, topic: Topic, expected: str) -> None:
        super().__init__(
            f"topic {topic.name!r} has {topic.receiving} partitions by {topic.partitioner} and {topic.hash}, and "
            f"fan-out needs {expected}: move its records elsewhere, and delete it"
        )
        self.topic = topic


async def open_members(log: Log) -> Topic:
    """The topic `members`, created if it does not exist. `WrongPlacement` if it does not place channels as `fanout`
    does."""
    return await _by_channel(log, MEMBERS)


async def open_fanout(log: Log) -> Topic:
    """The topic `fanout`, likewise. It has no retention: coordinators drop what was processed; see `trimming`."""
    return await _by_channel(log, FANOUT)


async def open_events(log: Log, partitions: int = EVENT_PARTITIONS) -> Topic:
    """The topic `events`, created with so many partitions if it does not exist."""
    with contextlib.suppress(TopicExists):
        await log.create_topic(EVENTS, partitions)
    return await log.topic(EVENTS)


async def open_presence(log: Log, inbox_partitions: int = INBOX_PARTITIONS) -> Topic:
    """The topic `presence`, created with the partitions and the partitioner of `inbox` if it does not exist; `inbox`,
    likewise, with so many partitions."""
    with contextlib.suppress(TopicExists):
        await log.create_topic(INBOX, inbox_partitions)
    inbox = await log.topic(INBOX)
    with contextlib.suppress(TopicExists):
        await log.create_topic(PRESENCE, inbox.receiving, partitioner=inbox.partitioner, hash_=inbox.hash)
    presence = await log.topic(PRESENCE)
    if (presence.partitioner, presence.hash) != (inbox.partitioner, inbox.hash):
        raise WrongPlacement(presence, f"those of {INBOX!r}: {inbox.receiving} by {inbox.partitioner} and {inbox.hash}")
    await follow_inbox(log)
    return await log.topic(PRESENCE)


async def open_all(log: Log) -> None:
    """All topics that coordinators and workers use."""
    await open_events(log)
    await open_fanout(log)
    await open_members(log)
    await open_presence(log)


async def follow_inbox(log: Log) -> Topic:
    """The topic `inbox`, or the one that continues it. If it was expanded, `presence` is expanded, too."""
    inbox = await current_topic(log, INBOX)
    presence = await log.topic(PRESENCE)
    if presence.receiving < inbox.receiving:
        await log.expand_topic(PRESENCE, inbox.receiving)
    return inbox


async def _by_channel(log: Log, name: str) -> Topic:
    with contextlib.suppress(TopicExists):
        await log.create_topic(name, FANOUT_PARTITIONS, partitioner=PARTITIONER, hash_=HASH)
    topic = await log.topic(name)
    if (topic.receiving, topic.partitioner, topic.hash) != (FANOUT_PARTITIONS, PARTITIONER, HASH):
        raise WrongPlacement(topic, f"{FANOUT_PARTITIONS} by {PARTITIONER} and {HASH}")
    return topic
