"""A topic of channels, as last known: where its records go, and appending them."""

from collections.abc import Callable, Sequence

from shardyard.log import Log
from shardyard.log.router import PLACE_AGAIN, current_topic
from shardyard.model import Appended, Fence, Partition, Record, Stamp, Topic, UnknownTopic
from shardyard.placement import partitioner_named
from shardyard.runtime.clock import Clock
from shardyard.runtime.retry import retry

PLACE_SECONDS = 0.05
"""Before a topic that has changed is looked up again."""


class KeyedTopic:
    """A topic that places records by their key."""

    def __init__(self, log: Log, clock: Clock, name: str) -> None:
        self._log = log
        self._clock = clock
        self._name = name
        self._topic: Topic | None = None
        self._place: Callable[[bytes], int] = lambda _: 0

    @property
    def topic(self) -> Topic:
        if self._topic is None:
            raise UnknownTopic(self._name)
        return self._topic

    async def refresh(self) -> Topic:
        """Look it up. `UnknownTopic` if there is none."""
        self._topic = topic = await current_topic(self._log, self._name)
        self._place = partitioner_named(topic.partitioner, topic.receiving, topic.hash).place
        return topic

    def partition_of(self, key: str) -> Partition:
        return Partition(self.topic.name, self._place(key.encode()))

    async def append(
        self,
        key: str,
        records: Sequence[Record],
        *,
        deadline: float,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
    ) -> Appended:
        """Append records of one key, up to a moment of the monotonic clock. Without a stamp, they may be stored twice:
        that has to be the same as once."""
        while True:
            partition, generation = self.partition_of(key), self.topic.generation
            try:
                return await retry(
                    lambda to=partition, under=generation: self._log.append(  # type: ignore[misc]
                        to, records, stamp=stamp, fence=fence, generation=under
                    ),
                    clock=self._clock,
                    deadline=deadline,
                )
            except PLACE_AGAIN:
                if self._clock.monotonic() >= deadline:
                    raise
                await self._clock.sleep(PLACE_SECONDS)
                await self.refresh()
