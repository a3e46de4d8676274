"""Copying topics from one log to another, so that a team can change to another engine and keep its records.

A copy can be interrupted at any point and run again: it continues where it was. It can also be run again later, to copy
what was appended in the meantime. Each partition has a checkpoint, a pair of offsets that belong together; whatever the
target holds beyond it was appended after the checkpoint was last stored.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from msgspec import structs

from shardyard.log.port import DEFAULT_RETENTION, Log
from shardyard.log.scan import scan
from shardyard.model import Conflict, Damaged, Partition, Position, Topic, TopicExists, Unsupported

COPY_RECORDS = 5_000
"""Records in one append to the target."""
CHECKPOINT_RECORDS = 100_000
"""How many records of a partition may be copied before its checkpoint is stored."""
PARTITIONS_AT_ONCE = 4
NOT_CREATED = -1
"""The target's epoch in the first checkpoint of a topic, which is stored before the topic is created: whoever finds it
knows that an empty topic there is that of a copy which was interrupted."""
HOLDER = "copy"
"""The holder of the seal under which a topic of the target is moved to its successor."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything before `source` was copied, and is before `target`."""

    source: Position
    target: Position

    def translate(self, committed: Position) -> Position | None:
        """Where a position on the source is on the target; None if it belongs to an earlier topic of the same name, or
        lies beyond what was copied."""
        behind = self.source.offset - committed.offset
        if committed.epoch != self.source.epoch or behind < 0:
            return None
        return Position(self.target.epoch, max(self.target.offset - behind, 0))


Checkpoints = dict[Partition, Checkpoint]


@dataclass(frozen=True, slots=True)
class CopiedTopic:
    """What a copy did with a topic."""

    topic: str
    partitions: int
    copied: int
    """Records that this run copied; earlier runs may have copied others."""
    records: int
    """Records that the target holds."""
    remaining: int
    """Records that were appended to the source while the copy ran."""


class LogCopy:
    """A copy of topics with their records, from `source` to `target`. Stamps of producers and fences are not copied."""

    def __init__(
        self,
        source: Log,
        target: Log,
        checkpoints: Checkpoints,
        store: Callable[[Partition, Checkpoint], Awaitable[None]],
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`checkpoints`: of earlier runs; `store` keeps those of this one. `on_progress` gets numbers of records that
        were copied or compared."""
        for log in (source, target):
            if not log.capabilities.dense_offsets:
                raise Unsupported("a copy of a log whose offsets have gaps", "consume it, and publish to the other log")
        self._source = source
        self._target = target
        self.checkpoints = checkpoints
        self._store = store
        self._on_progress = on_progress
        self._at_once = asyncio.Semaphore(PARTITIONS_AT_ONCE)

    async def count(self, topics: list[Topic]) -> int:
        """How many records are to be copied."""
        total = 0
        for partition in (p for topic in topics for p in topic):
            has = await self._source.span(partition)
            known = self.checkpoints.get(partition)
            total += has.end - max(has.first, known.source.offset if known and known.source.epoch == has.epoch else 0)
        return total

    async def count_copied(self, topics: list[Topic]) -> int:
        """How many records there are to compare."""
        spans = [await self._target.span(partition) for topic in topics for partition in topic]
        return sum(span.end - span.first for span in spans)

    async def create(self, topics: list[Topic]) -> None:
        """Create the topics in the target, or check that an earlier run of this copy created them. `TopicExists` if
        something else did: then nothing was created."""
        there = {topic.name: topic for topic in await self._target.topics()}
        for topic in topics:
            if topic.name in there and not await self._is_ours(topic, there[topic.name]):
                raise TopicExists(
                    topic.name,
                    there[topic.name].partitions,
                    "in the target",
                    "it is no copy of this source's topic, so delete it there, or copy to another log",
                )
        for topic in topics:
            made = there.get(topic.name)
            if made is None:
                planned = Checkpoint(Position(topic.epoch, 0), Position(NOT_CREATED, 0))
                await self._keep(Partition(topic.name, 0), planned)
                made = await self._target.create_topic(
                    topic.name, topic.partitions, kind=topic.kind, partitioner=topic.partitioner, hash_=topic.hash
                )
            elif made.successor is None:
                await self._target.set_retention(topic.name, DEFAULT_RETENTION)  # until the copy has been compared
                if made.receiving < topic.partitions:
                    made = await self._target.expand_topic(topic.name, topic.partitions)
            for partition in topic:
                known = self.checkpoints.get(partition)
                if known is None or (known.source.epoch, known.target.epoch) != (topic.epoch, made.epoch):
                    has = await self._source.span(partition)
                    begins = (await self._target.span(partition)).end
                    await self._keep(
                        partition, Checkpoint(Position(topic.epoch, has.first), Position(made.epoch, begins))
                    )

    async def _is_ours(self, topic: Topic, there: Topic) -> bool:
        known = self.checkpoints.get(Partition(topic.name, 0))
        if known is None or known.source.epoch != topic.epoch:
            return False
        if known.target.epoch == NOT_CREATED:
            is_same = not any([(await self._target.span(partition)).end for partition in there])
        else:
            is_same = known.target.epoch == there.epoch
        return is_same and (topic.partitioner, topic.hash) == (there.partitioner, there.hash)

    async def copy(self, topic: Topic) -> int:
        """Copy the records that the topic has now. Returns how many were copied."""
        return sum(await asyncio.gather(*(self._copy_partition(partition) for partition in topic)))

    async def _copy_partition(self, partition: Partition) -> int:
        async with self._at_once:
            at = await self._resume(partition)
            end = (await self._source.span(partition)).end
            copied = since_stored = 0
            async for batch in scan(
                self._source, partition, at.source.offset, end, epoch=at.source.epoch, max_records=COPY_RECORDS
            ):
                if (
                    batch.first != at.source.offset
                ):  # trimmed meanwhile: offsets are apart by another distance from here on
                    at = replace(at, source=structs.replace(at.source, offset=batch.first))
                    await self._keep(partition, at)
                    since_stored = 0
                appended = await self._target.append(partition, batch.data.combine_chunks().to_batches()[0])
                if appended.first != at.target:
                    raise _foreign_records(partition)
                at = Checkpoint(
                    structs.replace(at.source, offset=batch.end),
                    structs.replace(at.target, offset=at.target.offset + len(batch)),
                )
                copied, since_stored = copied + len(batch), since_stored + len(batch)
                if since_stored >= CHECKPOINT_RECORDS:
                    await self._keep(partition, at)
                    since_stored = 0
                self._on_progress(len(batch))
            await self._keep(partition, at)
            return copied

    async def _resume(self, partition: Partition) -> Checkpoint:
        """The checkpoint, moved forward by what was appended after it was stored."""
        known = self.checkpoints[partition]
        has = await self._target.span(partition)
        ahead = has.end - known.target.offset
        if has.epoch != known.target.epoch or ahead < 0:
            raise Conflict(f"{partition} of the target is not what this copy made of it: delete the topic there first")
        source = await self._source.span(partition)
        if known.source.offset + ahead > source.end:
            raise _foreign_records(partition)
        return Checkpoint(
            structs.replace(known.source, offset=known.source.offset + ahead),
            structs.replace(known.target, offset=has.end),
        )

    async def _keep(self, partition: Partition, at: Checkpoint) -> None:
        if self.checkpoints.get(partition) != at:
            self.checkpoints[partition] = at
            await self._store(partition, at)

    async def compare(self, topic: Topic) -> None:
        """Compare every record of the target with that of the source; `Damaged` if one differs or is missing."""
        await asyncio.gather(*(self._compare_partition(partition) for partition in topic))

    async def _compare_partition(self, partition: Partition) -> None:
        async with self._at_once:
            at = self.checkpoints[partition]
            has, made = await self._source.span(partition), await self._target.span(partition)
            comparable = min(at.source.offset - has.first, at.target.offset - made.first)
            offset = at.source.offset - max(comparable, 0)  # what was trimmed on either side is not compared
            while offset < at.source.offset:
                first = at.target.offset - (at.source.offset - offset)
                count = min(COPY_RECORDS, at.source.offset - offset)
                expected, stored = await asyncio.gather(
                    self._source.read(partition, offset, epoch=at.source.epoch, max_records=count),
                    self._target.read(partition, first, epoch=at.target.epoch, max_records=count),
                )
                common = min(len(expected), len(stored))
                if not common or not expected.data.slice(0, common).equals(stored.data.slice(0, common)):
                    raise Damaged(str(partition), f"the copy differs from the source at offset {offset} or after it")
                offset += common
                self._on_progress(common)

    async def finish(self, topics: list[Topic]) -> None:
        """Give the target's topics the retention, the draining partitions and the successors of the source's."""
        for topic in topics:
            made = await self._target.topic(topic.name)
            if made.retention != topic.retention:
                await self._target.set_retention(topic.name, topic.retention)
            if made.successor is None and topic.receiving < made.receiving:
                await self._target.contract_topic(topic.name, topic.receiving)
        for topic in topics:
            if topic.successor is not None and (await self._target.topic(topic.name)).successor is None:
                sealed = await self._target.seal_topic(topic.name, HOLDER)
                await self._target.move_topic(topic.name, topic.successor, holder=HOLDER, generation=sealed.generation)

    async def report(self, topic: Topic, copied: int) -> CopiedTopic:
        """What was done, and what the source got meanwhile."""
        records = remaining = 0
        for partition in topic:
            made = await self._target.span(partition)
            records += made.end - made.first
            end = (await self._source.span(partition)).end
            remaining += end - self.checkpoints[partition].source.offset
        return CopiedTopic(topic.name, topic.partitions, copied, records, remaining)


def _foreign_records(partition: Partition) -> Conflict:
    return Conflict(
        f"{partition} of the target has records that this copy did not append: stop its producers until the copy is"
        " done, delete the topic there, and copy again"
    )
