"""The topic `inbox`: which partition a user belongs to, and appending to it."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from shardyard.log import Log
from shardyard.log.router import PLACE_AGAIN, append_with_retry, current_topic
from shardyard.model import (
    Appended,
    Fence,
    Moved,
    Partition,
    Record,
    ShardyardError,
    Stamp,
    Topic,
    TopicExists,
    UnknownTopic,
)
from shardyard.placement import partitioner_named
from shardyard.runtime.clock import Clock
from shardyard.wire.inbox import TOPIC, InboxEntry, encode_entry

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

DEFAULT_PARTITIONS = 16
MAX_CACHED = 100_000
"""Users whose partition is remembered."""
LOOK_SECONDS = 1.0
"""How often to look whether the topic has changed."""


class Inbox:
    """The topic, or the one that continues it, as last known. Users are placed by its own partitioner, which is
    `fnv1a32(user) % partitions` unless it was created otherwise."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self.placements = 0
        """It rises when the topic places users differently than before."""
        self._topic: Topic | None = None
        self._place: Callable[[bytes], int] = lambda _: 0
        self._places: dict[str, Partition] = {}
        self._predecessors: tuple[Topic, ...] = ()
        """The topics that this one continues, as long as they exist."""
        self._new_from: dict[tuple[str, str], int] = {}
        """By producer and user, a sequence that no predecessor has: nor has it a later one, because what a client sends
        to a user is stored in order."""
        self._version = -1
        self._lookup = asyncio.Lock()

    @property
    def topic(self) -> Topic:
        if self._topic is None:
            raise UnknownTopic(TOPIC)
        return self._topic

    async def open(self, partitions: int = DEFAULT_PARTITIONS) -> None:
        """Create the topic if there is none."""
        with contextlib.suppress(TopicExists):
            await self._log.create_topic(TOPIC, partitions)
        await self.refresh()

    async def refresh(self) -> None:
        """Look the topic up."""
        async with self._lookup:
            version = await self._log.catalog_version()
            if version == self._version:
                return
            topic = await current_topic(self._log, TOPIC if self._topic is None else self._topic.name)
            predecessors = _predecessors(topic, await self._log.topics())
            if predecessors != self._predecessors:
                self._predecessors, self._new_from = predecessors, {}
            before, self._topic, self._version = self._topic, topic, version
            if before is not None and _placement(before) == _placement(topic):
                return
            self._place = partitioner_named(topic.partitioner, topic.receiving, topic.hash).place
            self._places = {}
            self.placements += 1

    def partition_of(self, user: str) -> Partition:
        """The partition that a user belongs to."""
        place = self._places.get(user)
        if place is None:
            if len(self._places) >= MAX_CACHED:
                self._places.clear()
            place = self._places[user] = Partition(self.topic.name, self._place(user.encode()))
        return place

    def may_be_in_predecessor(self, entry: InboxEntry, stamp: Stamp) -> bool:
        """Whether an entry may have been stored under its stamp before the topic moved. A copy is made again only under
        another stamp."""
        if not self._predecessors or entry.copy:
            return False
        new_from = self._new_from.get((stamp.producer, entry.recipient))
        return new_from is None or stamp.sequence < new_from

    async def append(self, entry: InboxEntry, *, stamp: Stamp, fence: Fence, deadline: float) -> Appended:
        """Append an entry for the user that it is addressed to, once for each stamp. `fence`: of the partition by whose
        ownership the caller sends. Retries up to a moment of the monotonic clock."""
        user = entry.sender if entry.copy else entry.recipient
        append = partial(
            append_with_retry,
            self._log,
            records=(record_of(entry),),
            clock=self._clock,
            deadline=deadline,
            stamp=stamp,
            fence=fence,
        )
        while True:
            topic, place, is_new = self.topic, self.partition_of(user), not self.may_be_in_predecessor(entry, stamp)
            try:
                for old in () if is_new else self._predecessors:
                    # A topic that has moved knows what it has stored, and refuses everything else.
                    with contextlib.suppress(UnknownTopic, *PLACE_AGAIN):
                        return await append(partition=_place(old, user), generation=old.generation)
                appended = await append(partition=place, generation=topic.generation)
                if not is_new and topic is self._topic:
                    self._note_new(stamp, user)
                return appended
            except PLACE_AGAIN as error:
                if self._clock.monotonic() >= deadline:
                    raise
                if topic is self._topic:
                    await self._follow(topic, error)

    def _note_new(self, stamp: Stamp, user: str) -> None:
        if len(self._new_from) >= MAX_CACHED:
            self._new_from.clear()
        self._new_from[stamp.producer, user] = stamp.sequence

    async def _follow(self, topic: Topic, error: ShardyardError) -> None:
        """An append was refused because the topic has changed since it was looked up."""
        self._version = -1
        await self.refresh()
        if self._topic is topic or (isinstance(error, Moved) and self.topic.name == topic.name):
            await self._clock.sleep(0.05)  # the change is not visible here yet


def record_of(entry: InboxEntry) -> Record:
    """An entry as a record for the user that it is addressed to."""
    user = entry.sender if entry.copy else entry.recipient
    id_ = f"{entry.id}-copy" if entry.copy else str(entry.id)
    return Record(id_, user.encode(), encode_entry(entry), (), entry.at)


def _place(topic: Topic, user: str) -> Partition:
    place = partitioner_named(topic.partitioner, topic.receiving, topic.hash).place
    return Partition(topic.name, place(user.encode()))


def _predecessors(topic: Topic, topics: Sequence[Topic]) -> tuple[Topic, ...]:
    """The topics that have moved to this one, directly or through others, the latest first."""
    found = [topic]
    for successor in found:
        found += [other for other in topics if other.successor == successor.name]
    return tuple(found[1:])


def _placement(topic: Topic) -> tuple[object, ...]:
    return topic.name, topic.epoch, topic.receiving, topic.partitioner, topic.hash
