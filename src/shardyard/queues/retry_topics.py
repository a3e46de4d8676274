"""The companion topics where a group keeps the failed records of a topic, and the headers that these records carry.

The companions of the topic `orders` in the group `billing` are its retry topic, `billing.orders.retry`, and its
dead-letter topic, `billing.orders.dead`.
"""

import contextlib
import re
from collections.abc import Iterable

from msgspec import structs

from shardyard.log import Log
from shardyard.model import Record, Topic, TopicExists, TopicKind, UnknownTopic
from shardyard.wire.companions import DEAD, RETRY
from shardyard.wire.headers import ATTEMPT, DIED, ERROR, ORIGIN, PUBLISHED, REDRIVEN, RESERVED, TRACEBACK

_OUR_HEADERS = frozenset({ATTEMPT, ORIGIN, PUBLISHED, ERROR, TRACEBACK, DIED, REDRIVEN}) | RESERVED
"""If a publisher set one of these, it is dropped when the record fails."""

MAX_PARTITIONS = 4
"""Of a retry or dead-letter topic."""
_NUMBER = re.compile(rb"[0-9]{1,15}")
_TIME = re.compile(rb"[0-9]{1,19}")
_RECORD_POSITION = re.compile(rb"[A-Za-z0-9._-]+/[0-9]{1,15}/[0-9]{1,15}")


def retry_topic(group: str, topic: str) -> str:
    """The topic to which a group's failed records of a topic, or of its retry topic, are delivered again."""
    return f"{group}.{original_topic(group, topic)}{RETRY}"


def dead_topic(group: str, topic: str) -> str:
    """The topic with a group's dead letters of a topic, or of its retry topic."""
    return f"{group}.{original_topic(group, topic)}{DEAD}"


def is_dead_topic(group: str, topic: str) -> bool:
    """Whether it has the name of a dead-letter topic of the group."""
    return _infix(group, topic, DEAD) is not None


def original_topic(group: str, topic: str) -> str:
    """The topic whose retry topic this is; the topic itself if it is not a retry topic of the group."""
    return _infix(group, topic, RETRY) or topic


def _infix(group: str, topic: str, suffix: str) -> str | None:
    if topic.startswith(f"{group}.") and topic.endswith(suffix):
        return topic[len(group) + 1 : -len(suffix)] or None
    return None


def with_retry_topics(group: str, topics: Iterable[str]) -> list[str]:
    """The topics and their retry topics: what a member of the group subscribes to."""
    names: dict[str, None] = {}
    for name in topics:
        names[name] = None
        if _has_retry_topic(group, name):
            names[retry_topic(group, name)] = None
    return list(names)


async def ensure_retry_topics(log: Log, group: str, topics: Iterable[str]) -> list[str]:
    """Create the missing retry topics of these topics. Returns the topics and their retry topics."""
    names = list(topics)
    for name in names:
        if _has_retry_topic(group, name):
            await ensure_companion(log, retry_topic(group, name), await log.topic(name), TopicKind.RETRY)
    return with_retry_topics(group, names)


def _has_retry_topic(group: str, topic: str) -> bool:
    return original_topic(group, topic) == topic and not is_dead_topic(group, topic)


async def ensure_companion(log: Log, name: str, topic: Topic, kind: TopicKind = TopicKind.NORMAL) -> str:
    """Create the companion `name` of a topic if it does not exist. Returns its name."""
    try:
        await log.topic(name)
    except UnknownTopic:
        with contextlib.suppress(TopicExists):  # another process created it
            await log.create_topic(name, min(topic.receiving, MAX_PARTITIONS), kind=kind)
    return name


async def home_topic(log: Log, group: str, topic: str) -> str:
    """The topic whose companions take the group's failed records of this topic: the topic itself or, if it has no retry
    topic, a topic that moved to it and has one. Members that subscribed before the move read that one."""
    name = original_topic(group, topic)
    with contextlib.suppress(UnknownTopic):
        await log.topic(retry_topic(group, name))
        return name
    topics = {found.name: found for found in await log.topics()}
    candidates = [name]
    for candidate in candidates:  # the list grows during the iteration
        if retry_topic(group, candidate) in topics:
            return candidate
        candidates += (found.name for found in topics.values() if found.successor == candidate)
    return name


def strip_headers(record: Record) -> Record:
    """The record with the publisher's own headers only. The log gives it a new timestamp, which retention goes by."""
    headers = tuple(header for header in record.headers if header[0] not in _OUR_HEADERS)
    return structs.replace(record, headers=headers, timestamp=0)


def parse_number(value: bytes | None) -> int | None:
    return int(value) if value is not None and _NUMBER.fullmatch(value) else None


def origin_of(record: Record) -> str | None:
    """Where the record was published, such as `orders/3/17`, if its headers say so."""
    value = record.header(ORIGIN)
    return value.decode() if value is not None and _RECORD_POSITION.fullmatch(value) else None


def published_of(record: Record) -> int | None:
    """When the record was published, in ms since 1970, if its headers say so."""
    value = record.header(PUBLISHED)
    return int(value) if value is not None and _TIME.fullmatch(value) else None
