"""The log's port. Its docstrings are the specification that every engine keeps and the contract suite checks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import pyarrow as pa

from shardyard.model import (
    Appended,
    Closing,
    Fence,
    InvalidValue,
    Moved,
    OffsetBeyondEnd,
    OffsetTrimmed,
    Outdated,
    Partition,
    Record,
    Retention,
    Sealed,
    Span,
    Stamp,
    Topic,
    TopicKind,
    WrongEpoch,
)
from shardyard.model.batch import Batch
from shardyard.model.checks import check_int64

DEFAULT_RETENTION = Retention()
READ_RECORDS = 10_000
READ_BYTES = 8 * 1024 * 1024


def check_offset(partition: Partition, has: Span, offset: int, epoch: int | None = None) -> None:
    """Whether a partition that holds `has` can be read from `offset`; for engines."""
    if epoch is not None and epoch != has.epoch:
        raise WrongEpoch(partition, epoch, has.epoch)
    if offset < has.first:
        raise OffsetTrimmed(partition, offset, has.first)
    if offset > has.end:
        raise OffsetBeyondEnd(partition, offset, has.end)


def check_partition(partition: object) -> None:
    """Refuse what does not name a partition at all; for engines."""
    if not isinstance(partition, Partition) or (type(partition.topic), type(partition.index)) != (str, int):
        raise InvalidValue("partition", partition, "a Partition: a text as topic and an int as index")


def check_marks(stamp: object, fence: object) -> None:
    """Refuse what is no stamp or no fence; for engines."""
    if not isinstance(stamp, Stamp | None):
        raise InvalidValue("stamp", stamp, "a Stamp or None")
    if not isinstance(fence, Fence | None):
        raise InvalidValue("fence", fence, "a Fence or None")


def check_same_batch(stamp: Stamp, stored: int, count: int) -> None:
    """Refuse a stamp that was used for another batch; for engines."""
    if stored != count:
        raise InvalidValue("stamp", stamp, f"one that was not used for another batch: it has {stored} records stored")


def check_retention(retention: object) -> Retention:
    """`retention`, if it is one that can be stored; for engines."""
    if not isinstance(retention, Retention):
        raise InvalidValue("retention", retention, "a Retention")
    for name in ("age_ms", "bytes_per_partition"):
        if getattr(retention, name) is not None:
            check_int64(name, getattr(retention, name))
    return retention


def check_placement(partitioner: object, partitions: int, hash_: object) -> tuple[str, str | None]:
    """The names of a partitioner and of the hash it works on, if it can place keys with that; for engines."""
    if not isinstance(partitioner, str):
        raise InvalidValue("partitioner", partitioner, "a text")
    if not isinstance(hash_, str | None):
        raise InvalidValue("hash", hash_, "a text or None")
    from shardyard.placement import DEFAULT_HASH, partitioner_named  # noqa: PLC0415 its compiler takes half a second

    partitioner_named(partitioner, partitions, hash_)
    default = DEFAULT_HASH[partitioner]
    return partitioner, default and (hash_ or default)


def check_open(topic: str, sealed: bool, successor: str | None) -> None:
    """Refuse to add anything to a topic that is sealed or has moved; for engines."""
    if successor is not None:
        raise Moved(topic, successor)
    if sealed:
        raise Sealed(topic)


def check_receives(
    partition: Partition, sealed: bool, successor: str | None, epoch: int, receiving: int, placed_on: Topic | None
) -> None:
    """Refuse an append to a topic that is sealed, has moved or is another than was thought, or to a partition that is
    closing; for engines."""
    check_open(partition.topic, sealed, successor)
    if partition.index >= receiving:
        raise Closing(partition, receiving)
    if placed_on is not None and (placed_on.epoch, placed_on.receiving) != (epoch, receiving):
        raise Outdated(partition.topic, receiving)


def expanded(topic: Topic, partitions: int) -> Topic:
    """The topic as it is with so many open, if it can be expanded to that; for engines."""
    check_open(topic.name, topic.sealed, topic.successor)
    if partitions < topic.receiving:
        raise InvalidValue("partitions", partitions, f"at least the {topic.receiving} that {topic.name!r} has open")
    return _with_open(topic, partitions)


def contracted(topic: Topic, partitions: int) -> Topic:
    """The topic as it is with so many open, if it can be contracted to that; for engines."""
    check_open(topic.name, topic.sealed, topic.successor)
    if partitions > topic.receiving:
        raise InvalidValue("partitions", partitions, f"at most the {topic.receiving} that {topic.name!r} has open")
    return _with_open(topic, partitions)


def _with_open(topic: Topic, count: int) -> Topic:
    partitions = max(count, topic.partitions)
    return replace(topic, partitions=partitions, open_partitions=count if count < partitions else None)


def without_closing(topic: Topic, partitions: int) -> Topic:
    """The topic as it is when all but so many partitions are dropped, if they may be; for engines."""
    if partitions != topic.receiving:
        raise InvalidValue("partitions", partitions, f"the {topic.receiving} that {topic.name!r} has open")
    if topic.open_partitions is not None:
        check_open(topic.name, topic.sealed, topic.successor)
    return replace(topic, partitions=topic.receiving, open_partitions=None)


def check_move(topic: Topic, successor: Topic) -> None:
    """Whether a topic that has not moved yet may go on as another one; for engines."""
    if topic.name == successor.name:
        raise InvalidValue("successor", successor.name, "another topic")
    if successor.successor is not None:
        raise InvalidValue("successor", successor.name, f"one that does not go on itself, as {successor.successor!r}")


class Log(ABC):
    """A durable log of topics, each split into partitions.

    **Order.** Offsets of a partition start at 0 and are dense: each record has the next one. Records become visible in
    the order of their offsets: who has seen offset n can read every one before it. A batch becomes visible as a whole.

    **Durability.** A call that changes something returns when the change is durable: it survives SIGKILL of every
    process, and, unless the log was opened for less, a power cut. A call that raised changed nothing, with one
    exception: when the connection or the process breaks off during an append, or the append is cancelled, the batch may
    be stored or not. Append it again with the same `Stamp`, and it is stored once.

    **Epochs.** A topic gets an epoch when it is created, higher than that of any topic of the same name before. A
    position with another epoch than the partition's own belongs to records that are gone (`WrongEpoch`).

    **Moving.** A topic that is to have other partitions, or another partitioner, goes on as another topic. It is sealed
    first: what it holds then stays as it is, and can be carried over. Then it is moved: who appends is told where it
    goes on, and records of a key stay in order, first those of the old topic, then those of the new one. An append that
    was stored before is known by its stamp also on a topic that is sealed or has moved. Reading, trimming, retention
    and deleting work as ever.

    **Contracting.** A topic that is to have fewer partitions is contracted first: the last ones are closing, they take
    no records but can be read, so that who reads comes to their end. Then they are dropped. A partition that comes back
    later goes on where the dropped one ended: an offset never stands for two records. An append that was stored before
    is known by its stamp also on a closing partition; once that is dropped, it may be forgotten.

    **Names.** Topic names have 1 to 200 letters, digits, `.`, `_` and `-`; those that begin with `__` are reserved.

    **Use.** Any number of processes may use one log at once. An instance may be used from several tasks of one event
    loop. Every method raises `Closed` after `close`.
    """

    # Topics

    @abstractmethod
    async def create_topic(
        self,
        name: str,
        partitions: int,
        *,
        kind: TopicKind = TopicKind.NORMAL,
        retention: Retention = DEFAULT_RETENTION,
        partitioner: str = "modulus",
        hash_: str | None = None,
    ) -> Topic:
        """Create a topic; `TopicExists` if there is one.

        `partitioner` and `hash_` (by default the partitioner's own) say how its keys are placed. The log only keeps
        their names: an append names its partition.
        """

    @abstractmethod
    async def expand_topic(self, name: str, partitions: int) -> Topic:
        """Raise the number of open partitions. The ones there are keep their records; new ones are empty.

        Closing ones are open again as far as the number reaches, and go on where they were. One that was dropped comes
        back empty, with the offset where it ended as its first. `Sealed` or `Moved` if the topic is.
        """

    @abstractmethod
    async def contract_topic(self, name: str, partitions: int) -> Topic:
        """From the return on no append to a partition from index `partitions` on succeeds, in any process: it raises
        `Closing`. What these hold can be read, trimmed and retained as ever.

        `InvalidValue` if fewer are open. `Sealed` or `Moved` if the topic is.
        """

    @abstractmethod
    async def drop_partitions(self, name: str, partitions: int) -> Topic:
        """Drop the closing partitions with all their records, read or not: who calls it has made sure that they were.

        `partitions` are to stay: `InvalidValue` if not just these are open, as when the topic was contracted or
        expanded meanwhile. Nothing changes if none is closing. `Sealed` or `Moved` if the topic is and one is closing.
        """

    @abstractmethod
    async def set_retention(self, name: str, retention: Retention) -> Topic:
        """Change what may be trimmed away by itself."""

    @abstractmethod
    async def seal_topic(self, name: str) -> Topic:
        """From the return on no append to the topic succeeds, in any process: it raises `Sealed`.

        Nothing changes if it is sealed already. `Moved` if it has a successor.
        """

    @abstractmethod
    async def unseal_topic(self, name: str) -> Topic:
        """Let it take records again. Nothing changes if it does already. `Moved` if it has a successor."""

    @abstractmethod
    async def move_topic(self, name: str, successor: str) -> Topic:
        """Let a topic go on as another one: it is sealed for good, and appends raise `Moved`. Its records stay.

        Nothing changes if it has that successor already; `Moved` if it has another one. `UnknownTopic` if the successor
        does not exist, `InvalidValue` if it is the topic itself or has a successor of its own: there are no circles.
        """

    @abstractmethod
    async def delete_topic(self, name: str) -> None:
        """Delete a topic with all its records."""

    @abstractmethod
    async def topic(self, name: str) -> Topic:
        """Describe a topic; `UnknownTopic` if there is none."""

    @abstractmethod
    async def topics(self) -> list[Topic]:
        """All topics, by name."""

    # Records

    @abstractmethod
    async def append(
        self,
        partition: Partition,
        records: Sequence[Record] | pa.RecordBatch,
        *,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
        placed_on: Topic | None = None,
    ) -> Appended:
        """Append a batch, all or nothing, behind everything appended before. Returns when it is durable.

        Records may be given as an Arrow batch with the columns of `SCHEMA`: nothing then touches them one by one.
        A record with the timestamp 0 gets the time of the call. A batch that was stored before under the same stamp
        is not stored again. `SequenceTooOld` if its sequence lies `SEQUENCE_WINDOW` or more behind the producer's last.
        Any other batch is refused with `Sealed` or `Moved` if the topic is, with `Closing` if the partition is, with
        `Outdated` if the partition was chosen by a state of the topic (`placed_on`) with other partitions than it has
        now; nothing was stored under its stamp then.
        """

    @abstractmethod
    async def read(
        self,
        partition: Partition,
        offset: int,
        *,
        epoch: int | None = None,
        max_records: int = READ_RECORDS,
        max_bytes: int = READ_BYTES,
        wait: float = 0.0,
        fence: Fence | None = None,
    ) -> Batch:
        """Read from `offset` on: as much as is there, within the limits (bytes are estimated for a part of a batch).

        At least one record is returned if there is one, however large. At the end of the partition the batch is
        empty, after waiting up to `wait` seconds for a record to arrive. A reader in another process sees a new record
        within a few milliseconds, and hears as soon that its partition was dropped (`PartitionOutOfRange`) or its topic
        deleted (`UnknownTopic`).

        `OffsetTrimmed` below the first offset, `OffsetBeyondEnd` above the end, `WrongEpoch` if `epoch` is named and
        is not the partition's.
        """

    @abstractmethod
    async def span(self, partition: Partition) -> Span:
        """Which offsets the partition holds."""

    @abstractmethod
    async def offset_at(self, partition: Partition, timestamp: int) -> int:
        """The first offset whose record has that timestamp (ms) or a later one; the end if there is none."""

    @abstractmethod
    async def trim(self, partition: Partition, before: int) -> Span:
        """Drop all records below the offset `before`. Their room is given back soon after."""

    @abstractmethod
    async def set_fence(self, fence: Fence) -> None:
        """Refuse calls with a lower epoch of this fence from now on. `Fenced` if a higher one is known already."""

    @abstractmethod
    async def maintain(self) -> None:
        """Apply retention, merge small batches, give room back: what an open log also does in the background."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what is under way, then let go of everything. May be called twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
