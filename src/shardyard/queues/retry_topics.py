"""The topics beside a group's topics where failed records go, and the marks that these bear."""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from shardyard.log import Log
from shardyard.model import Record, Topic, TopicExists, TopicKind, UnknownTopic
from shardyard.wire.headers import ATTEMPT, DIED, ERROR, ORIGIN, PUBLISHED, REDRIVEN, RESERVED

_OURS = frozenset({ATTEMPT, ORIGIN, PUBLISHED, ERROR, DIED, REDRIVEN}) | RESERVED
"""Whatever a publisher put there is dropped when the record fails: it means something else here."""

MOST_PARTITIONS = 4
"""Of a retry or dead-letter topic."""
_NUMBER = re.compile(rb"[0-9]{1,15}")
_TIME = re.compile(rb"[0-9]{1,19}")
_PLACE = re.compile(rb"[A-Za-z0-9._-]+/[0-9]{1,15}/[0-9]{1,15}")
RETRY, DEAD = ".retry", ".dead"


def retry_topic(group: str, topic: str) -> str:
    """Where a group's failed records of a topic, or of its retry topic, come back."""
    return f"{group}.{original(group, topic)}{RETRY}"


def dead_topic(group: str, topic: str) -> str:
    """Where a group's dead letters of a topic, or of its retry topic, are."""
    return f"{group}.{original(group, topic)}{DEAD}"


def original(group: str, topic: str) -> str:
    """The topic whose retry topic this is; any other topic is its own."""
    return between(group, topic, RETRY) or topic


class Beside(NamedTuple):
    """Which retry or dead-letter topic it is."""

    group: str
    topic: str
    end: str


def beside(name: str) -> Beside | None:
    """Whose retry or dead-letter topic has this name. There is one answer: names of groups have no dots."""
    group, _, rest = name.partition(".")
    for end in (RETRY, DEAD):
        if group and (topic := rest.removesuffix(end)) and topic != rest:
            return Beside(group, topic, end)
    return None


def between(group: str, topic: str, end: str) -> str | None:
    if topic.startswith(f"{group}.") and topic.endswith(end):
        return topic[len(group) + 1 : -len(end)] or None
    return None


def with_retry_topics(group: str, topics: Iterable[str]) -> list[str]:
    """The topics with their retry topics: what a member of the group subscribes to."""
    wanted: dict[str, None] = {}
    for name in topics:
        wanted[name] = None
        if _has_retries(group, name):
            wanted[retry_topic(group, name)] = None
    return list(wanted)


async def ensure_retry_topics(log: Log, group: str, topics: Iterable[str]) -> list[str]:
    """Make the retry topics of these topics where they are missing; returns the topics with them."""
    names = list(topics)
    for name in names:
        if _has_retries(group, name):
            await made(log, retry_topic(group, name), await log.topic(name), TopicKind.RETRY)
    return with_retry_topics(group, names)


def _has_retries(group: str, topic: str) -> bool:
    return original(group, topic) == topic and between(group, topic, DEAD) is None


async def made(log: Log, name: str, beside: Topic, kind: TopicKind = TopicKind.NORMAL) -> str:
    """`name`, of a topic that is there from now on."""
    try:
        await log.topic(name)
    except UnknownTopic:
        with contextlib.suppress(TopicExists):  # others need it too
            await log.create_topic(name, min(beside.receiving, MOST_PARTITIONS), kind=kind)
    return name


async def home_of(log: Log, group: str, topic: str) -> str:
    """The topic beside which a group keeps the failures of this one: itself, or, if it has no retry topic, one that
    moved there and has one. Members who subscribed before the move read that."""
    name = original(group, topic)
    with contextlib.suppress(UnknownTopic):
        await log.topic(retry_topic(group, name))
        return name
    topics = {found.name: found for found in await log.topics()}
    chain = [name]
    for one in chain:  # which grows meanwhile
        if retry_topic(group, one) in topics:
            return one
        chain += (found.name for found in topics.values() if found.successor == one)
    return name


def bare_record(record: Record) -> Record:
    """As it was published; the log sets the timestamp anew, so that retention counts from then."""
    return replace(record, headers=tuple(header for header in record.headers if header[0] not in _OURS), timestamp=0)


def number(value: bytes | None) -> int | None:
    return int(value) if value is not None and _NUMBER.fullmatch(value) else None


def origin_of(record: Record) -> str | None:
    value = record.header(ORIGIN)
    return value.decode() if value is not None and _PLACE.fullmatch(value) else None


def published_of(record: Record) -> int | None:
    value = record.header(PUBLISHED)
    return int(value) if value is not None and _TIME.fullmatch(value) else None
