"""Which companion topics are deleted together with a topic or a group.

Its retry and dead-letter topics are deleted, but not if records would be lost by that, unless the deletion is forced.
Topics that a user created under such a name are left alone: a retry topic is recognised by its kind, and a dead-letter
topic by the headers of its records or, if these are trimmed, by its group having read the topic.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from shardyard.log import Log
from shardyard.log.scan import scan
from shardyard.model import Partition, PartitionOutOfRange, Span, Topic, TopicKind, UnknownTopic
from shardyard.queues import delays
from shardyard.queues.dead_letters import count_dead_letters
from shardyard.queues.partition_spans import spans
from shardyard.queues.retry_topics import retry_topic
from shardyard.queues.topic_readers import TopicReaders
from shardyard.wire.companions import RETRY, Companion, parse_companion
from shardyard.wire.headers import TARGET


@dataclass(frozen=True, slots=True)
class KeptTopic:
    """A companion topic that is not deleted, and why."""

    topic: str
    records: int
    """Records that would be lost: dead letters, or records that wait for a retry."""
    because: str


@dataclass(frozen=True, slots=True)
class Companions:
    """The companion topics of a topic or a group that is deleted."""

    deleted: tuple[str, ...]
    """To be deleted with it."""
    kept: tuple[KeptTopic, ...]


async def companions_of_topic(log: Log, readers: TopicReaders, topic: Topic, *, force: bool) -> Companions:
    """What to delete with a topic. Records that wait for a retry are kept only if the topic continues as another
    one."""
    selection = await _Selection.load(log, readers, force=force)
    names = [name for name, companion in selection.companions.items() if companion.topic == topic.name]
    return await selection.select(names, keep_waiting=topic.successor in selection.topics)


async def companions_of_group(log: Log, readers: TopicReaders, group: str, *, force: bool) -> Companions:
    """What to delete with a group."""
    selection = await _Selection.load(log, readers, force=force)
    names = [name for name, companion in selection.companions.items() if companion.group == group]
    return await selection.select(names, keep_waiting=True)


class _Selection:
    """Decides for companion topics whether they are deleted, on one listing of all topics."""

    def __init__(self, log: Log, readers: TopicReaders, topics: Mapping[str, Topic], *, force: bool) -> None:
        self._log = log
        self._readers = readers
        self._force = force
        self._delayed: Counter[str] | None = None
        self.topics = topics
        self.companions = {name: found for name in topics if (found := parse_companion(name)) is not None}

    @classmethod
    async def load(cls, log: Log, readers: TopicReaders, *, force: bool) -> "_Selection":
        return cls(log, readers, {topic.name: topic for topic in await log.topics()}, force=force)

    async def select(self, names: Iterable[str], *, keep_waiting: bool) -> Companions:
        """Decide for these topics. The companions of a topic that is deleted are deleted, too."""
        deleted: list[str] = []
        kept: list[KeptTopic] = []
        for name in names:
            try:
                decision = await self._keep(name, self.companions[name], keep_waiting=keep_waiting)
            except UnknownTopic:  # it was deleted in the meantime
                continue
            if isinstance(decision, KeptTopic):
                kept.append(decision)
            elif not decision:
                nested = [other for other, companion in self.companions.items() if companion.topic == name]
                more = await self.select(nested, keep_waiting=False)
                deleted += (*more.deleted, name)
                kept += more.kept
        return Companions(tuple(deleted), tuple(kept))

    async def _keep(self, name: str, companion: Companion, *, keep_waiting: bool) -> KeptTopic | bool:
        """False if the topic is to be deleted; True if it is not a companion, in spite of its name."""
        topic = self.topics[name]
        if companion.suffix == RETRY:
            keep = await self._keep_retry_topic(topic, companion, keep_waiting=keep_waiting)
        else:
            keep = await self._keep_dead_topic(topic, companion)
        groups = self._readers.subscribed_groups([name])
        if keep or self._force or not groups:
            return keep
        return KeptTopic(name, 0, f"it is subscribed to by {', '.join(groups)}")

    async def _keep_retry_topic(self, topic: Topic, companion: Companion, *, keep_waiting: bool) -> KeptTopic | bool:
        if topic.kind is not TopicKind.RETRY:
            return True
        if self._force or not keep_waiting or not (waiting := await self._count_waiting(topic, companion.group)):
            return False
        return KeptTopic(topic.name, waiting, "records wait for a retry")

    async def _keep_dead_topic(self, topic: Topic, companion: Companion) -> KeptTopic | bool:
        count = await count_dead_letters(self._log, topic)
        if not count.letters:
            return bool(count.others) or not await self._had_dead_letters(topic, companion)
        if count.others:
            return KeptTopic(topic.name, count.letters + count.others, "it has dead letters and other records")
        return False if self._force else KeptTopic(topic.name, count.letters, "it has dead letters")

    async def _had_dead_letters(self, topic: Topic, companion: Companion) -> bool:
        """Whether an empty topic had dead letters. If it never had any, a user created it."""
        retry = self.topics.get(retry_topic(companion.group, companion.topic))
        has_retry = retry is not None and retry.kind is TopicKind.RETRY
        if not has_retry and not self._readers.has_read(companion.group, companion.topic):
            return False
        return any(span.end for span in (await spans(self._log, topic)).values())

    async def _count_waiting(self, topic: Topic, group: str) -> int:
        """Records that wait for a retry: delayed ones, and those on the retry topic that were not read yet."""
        if self._delayed is None:
            self._delayed = await self._count_delayed()
        unread = 0
        for partition, span in (await spans(self._log, topic)).items():
            unread += await self._log.count(partition, *self._unread(group, partition, span))
        return self._delayed[topic.name] + unread

    def _unread(self, group: str, partition: Partition, span: Span) -> tuple[int, int]:
        start = self._readers.committed_offset(group, partition, span.epoch)
        return max(start, span.first), max(span.end, start)

    async def _count_delayed(self) -> Counter[str]:
        """How many delayed records there are for each topic. The positions were read before, so records that a
        scheduler moves in the meantime are still counted."""
        found: Counter[str] = Counter()
        rungs = [topic for name, topic in self.topics.items() if name.startswith(delays.RUNG)]
        for partition in (partition for rung in rungs for partition in rung):
            try:
                start, end = self._unread(delays.GROUP, partition, await self._log.span(partition))
                async for batch in scan(self._log, partition, start, end):
                    for chunk in batch.data["headers"].chunks:
                        found += _count_targets(chunk)
            except (UnknownTopic, PartitionOutOfRange):
                continue
        return found


def _count_targets(headers: pa.MapArray) -> Counter[str]:
    """How many of the records have each target."""
    import pyarrow.compute as pc  # noqa: PLC0415 it takes 9 MB, and few brokers need it

    if not len(headers):
        return Counter()
    first, last = headers.offsets[0].as_py(), headers.offsets[-1].as_py()
    keys, values = headers.keys.slice(first, last - first), headers.items.slice(first, last - first)
    counted = pc.value_counts(values.filter(pc.equal(keys, TARGET))).to_pylist()
    return Counter({row["values"].decode(errors="replace"): row["counts"] for row in counted})
