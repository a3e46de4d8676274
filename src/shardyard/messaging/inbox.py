"""The topic `inbox`: which partition a user belongs to, and appending to it."""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from shardyard.log import Log
from shardyard.log.router import PLACE_AGAIN, append_with_retry, current_topic
from shardyard.model import (
    Appended,
    Fence,
    Moved,
    Partition,
    RetryLater,
    ShardyardError,
    Stamp,
    Topic,
    TopicExists,
    UnknownTopic,
)
from shardyard.model.plain_batch import quick_record
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

    async def append(self, entry: InboxEntry, *, stamp: Stamp, fence: Fence, deadline: float) -> Appended:
        """Append an entry for the user that it is addressed to, once for each stamp. `fence`: of the partition by whose
        ownership the caller sends. Retries up to a moment of the monotonic clock."""
        user = entry.sender if entry.copy else entry.recipient
        id_ = f"{entry.id}-copy" if entry.copy else str(entry.id)
        record = quick_record(id_, user.encode(), encode_entry(entry), (), entry.at)
        while True:
            topic = self.topic
            try:
                with contextlib.suppress(RetryLater):  # the usual way, without the cost of retrying
                    return await self._log.append(
                        self.partition_of(user), (record,), stamp=stamp, fence=fence, generation=topic.generation
                    )
                return await append_with_retry(
                    self._log,
                    self.partition_of(user),
                    (record,),
                    clock=self._clock,
                    deadline=deadline,
                    stamp=stamp,
                    fence=fence,
                    generation=topic.generation,
                )
            except PLACE_AGAIN as error:
                if self._clock.monotonic() >= deadline:
                    raise
                if topic is self._topic:
                    await self._follow(topic, error)

    async def _follow(self, topic: Topic, error: ShardyardError) -> None:
        """An append was refused because the topic has changed since it was looked up."""
        self._version = -1
        await self.refresh()
        if self._topic is topic or (isinstance(error, Moved) and self.topic.name == topic.name):
            await self._clock.sleep(0.05)  # the change is not visible here yet


def _placement(topic: Topic) -> tuple[object, ...]:
    return topic.name, topic.epoch, topic.receiving, topic.partitioner, topic.hash
