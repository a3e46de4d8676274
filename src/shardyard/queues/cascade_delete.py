"""What deleting a topic or a group leaves behind: the retry and dead-letter topics beside it.

They go with it, but not what would be lost by that, unless it is forced. Topics that somebody made by hand under such a
name are left alone: a retry topic is known by its kind, a dead-letter topic by the marks of what is in it, or, if that
is trimmed away, by its group's having read the topic.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from shardyard.log import Log
from shardyard.model import OffsetTrimmed, Partition, PartitionOutOfRange, Span, Topic, TopicKind, UnknownTopic
from shardyard.queues import delays
from shardyard.queues.dead_letters import held
from shardyard.queues.draining import spans
from shardyard.queues.retry_topics import RETRY, Beside, beside, retry_topic
from shardyard.queues.topic_readers import Known
from shardyard.wire.headers import TARGET


@dataclass(frozen=True, slots=True)
class Kept:
    """A topic that stays, and why."""

    topic: str
    records: int
    """That would be lost: dead letters, or those that wait to be tried again."""
    because: str


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The topics beside one, or beside those of a group."""

    going: tuple[str, ...]
    kept: tuple[Kept, ...]


async def beside_topic(log: Log, known: Known, topic: Topic, *, force: bool) -> Leftovers:
    """What is to go with a topic. Records that are to be tried again count only if it goes on as another one."""
    looking = await _Looking.at(log, known, force=force)
    names = [name for name, of in looking.found.items() if of.topic == topic.name]
    return await looking.sorted_out(names, spare_waiting=topic.successor in looking.topics)


async def beside_group(log: Log, known: Known, group: str, *, force: bool) -> Leftovers:
    """What is to go with a group."""
    looking = await _Looking.at(log, known, force=force)
    names = [name for name, of in looking.found.items() if of.group == group]
    return await looking.sorted_out(names, spare_waiting=True)


class _Looking:
    """One look at all topics."""

    def __init__(self, log: Log, known: Known, topics: Mapping[str, Topic], *, force: bool) -> None:
        self._log = log
        self._known = known
        self._force = force
        self._delayed: Counter[str] | None = None
        self.topics = topics
        self.found = {name: of for name in topics if (of := beside(name)) is not None}

    @classmethod
    async def at(cls, log: Log, known: Known, *, force: bool) -> "_Looking":
        return cls(log, known, {topic.name: topic for topic in await log.topics()}, force=force)

    async def sorted_out(self, names: Iterable[str], *, spare_waiting: bool) -> Leftovers:
        """What is beside one that goes, goes too."""
        going: list[str] = []
        kept: list[Kept] = []
        for name in names:
            try:
                stays = await self._stays(name, self.found[name], spare_waiting=spare_waiting)
            except UnknownTopic:  # somebody deletes it, too
                continue
            if isinstance(stays, Kept):
                kept.append(stays)
            elif not stays:
                deeper = [other for other, of in self.found.items() if of.topic == name]
                more = await self.sorted_out(deeper, spare_waiting=False)
                going += (*more.going, name)
                kept += more.kept
        return Leftovers(tuple(going), tuple(kept))

    async def _stays(self, name: str, of: Beside, *, spare_waiting: bool) -> Kept | bool:
        """False if it is to go; True if it is not what its name says."""
        topic = self.topics[name]
        if of.end == RETRY:
            stays = await self._retry_stays(topic, of, spare_waiting=spare_waiting)
        else:
            stays = await self._dead_stays(topic, of)
        groups = self._known.subscribing([name])
        if stays or self._force or not groups:
            return stays
        return Kept(name, 0, f"it is subscribed to by {', '.join(groups)}")

    async def _retry_stays(self, topic: Topic, of: Beside, *, spare_waiting: bool) -> Kept | bool:
        if topic.kind is not TopicKind.RETRY:
            return True
        if self._force or not spare_waiting or not (waiting := await self._waiting(topic, of.group)):
            return False
        return Kept(topic.name, waiting, "records wait to be tried again")

    async def _dead_stays(self, topic: Topic, of: Beside) -> Kept | bool:
        has = await held(self._log, topic)
        if not has.letters:
            return bool(has.others) or not await self._is_drained(topic, of)
        if has.others:
            return Kept(topic.name, has.letters + has.others, "it has dead letters and other records")
        return False if self._force else Kept(topic.name, has.letters, "it has dead letters")

    async def _is_drained(self, topic: Topic, of: Beside) -> bool:
        """Whether dead letters were in it that are gone. One that never had any was made by hand."""
        retry = self.topics.get(retry_topic(of.group, of.topic))
        has_retry = retry is not None and retry.kind is TopicKind.RETRY
        if not has_retry and not self._known.has_read(of.group, of.topic):
            return False
        return any(span.end for span in (await spans(self._log, topic)).values())

    async def _waiting(self, topic: Topic, group: str) -> int:
        """Records that are to be tried again: delayed ones, then those that came meanwhile or before, unread."""
        if self._delayed is None:
            self._delayed = await self._targets()
        unread = 0
        for partition, span in (await spans(self._log, topic)).items():
            start, end = self._unread(group, partition, span)
            unread += end - start
        return self._delayed[topic.name] + unread

    def _unread(self, group: str, partition: Partition, span: Span) -> tuple[int, int]:
        start = self._known.offset(group, partition, span.epoch)
        return max(start, span.first), max(span.end, start)

    async def _targets(self) -> Counter[str]:
        """How many delayed records there are for each topic. Positions were looked up before: what a scheduler moves
        meanwhile still counts."""
        found: Counter[str] = Counter()
        for rung in [p for name, topic in self.topics.items() if name.startswith(delays.RUNG) for p in topic]:
            try:
                start, end = self._unread(delays.GROUP, rung, await self._log.span(rung))
                while start < end:
                    try:
                        batch = await self._log.read(rung, start)
                    except OffsetTrimmed as error:
                        start = error.first
                        continue
                    for chunk in batch.data["headers"].chunks:
                        found += _targets(chunk)
                    start = batch.end if len(batch) else end
            except (UnknownTopic, PartitionOutOfRange):
                continue
        return found


def _targets(headers: pa.MapArray) -> Counter[str]:
    """How many of the records have each target."""
    if not len(headers):
        return Counter()
    first, last = headers.offsets[0].as_py(), headers.offsets[-1].as_py()
    keys, values = headers.keys.slice(first, last - first), headers.items.slice(first, last - first)
    counted = pc.value_counts(values.filter(pc.equal(keys, TARGET))).to_pylist()
    return Counter({row["values"].decode(errors="replace"): row["counts"] for row in counted})
