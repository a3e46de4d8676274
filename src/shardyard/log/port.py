"""The log's port. Its docstrings are the specification that every engine keeps and the contract suite checks."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shardyard.log.requests import AppendRequest, News, Outcomes, ReadRequest
from shardyard.model import (
    Appended,
    Closed,
    Fence,
    InvalidValue,
    Partition,
    Retention,
    ShardyardError,
    Span,
    Stamp,
    Topic,
    TopicKind,
)
from shardyard.model.checks import whole_number
from shardyard.model.limits import Records

if TYPE_CHECKING:
    from shardyard.model.batch import Batch

DEFAULT_RETENTION = Retention()
READ_RECORDS = 10_000
READ_BYTES = 8 * 1024 * 1024
SEAL_SECONDS = 10.0
"""How long a seal stays in force after it was last renewed."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine has beyond what every log promises. A call that needs what it lacks raises `Unsupported`, which
    says what to do instead."""

    contraction: bool
    """A topic can get fewer partitions (`contract_topic`, `drop_partitions`)."""
    stamps_across_processes: bool
    """A retried append is recognised by its stamp also when another process, or another instance, appended it first.
    Without it, that is so only for the instance that did; readers that need each record once drop known ids."""
    atomic_batches: bool
    """A batch becomes visible as a whole. Without it a reader may see its first records before the others."""
    dense_offsets: bool
    """Each record has the offset after the one before it: there are no gaps."""


class Catalog(ABC):
    """The topics of a log.

    **Epochs.** A topic gets an epoch when it is created, higher than that of any earlier topic of the same name. A
    position with another epoch than the partition's belongs to records that are gone (`WrongEpoch`).

    **Generations.** Every change of a topic's kind, partitioner, open partitions, seal or successor gives it a new,
    higher generation; a change of its retention, or a call that changes nothing, does not. No two topics of the same
    name share a generation. An append can name the generation its records were placed under, and is refused under any
    other one (`Outdated`), so that producers in all processes switch to a new placement at the same moment.

    **Moving.** To get other partitions or another partitioner, a topic is continued by another topic. It is sealed
    first: its records then stay as they are, and can be copied. Then it is moved: appends are refused with `Moved`,
    which names the successor. Records of a key stay in order, those of the old topic before those of the new one.
    Reading, trimming, retention and deletion work for a sealed or moved topic as for any other.

    **Seals.** A seal has a holder and ends by itself some seconds after the holder last renewed it, by the engine's
    own clock. So a holder that dies stops producers only for that long. A holder that was stalled and lost its seal
    can't move the topic any more: moving names the generation that sealing returned, and is refused with `SealLost` if
    the seal has ended, even if the same holder has sealed the topic again since.

    **Contracting.** To get fewer partitions, a topic is contracted first: the last partitions drain. They take no
    records but can be read, so that consumers reach their end. Then they are dropped. A partition that is added again
    later continues after the offsets of the dropped one: an offset never stands for two records.

    **Names.** Topic names have 1 to 200 letters, digits, `.`, `_` and `-`. Names that begin with `__` are reserved.
    """

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
        """Create a topic; `TopicExists` if there is one of that name.

        `partitioner` and `hash_` (by default the partitioner's own) say how producers place keys. The log only stores
        these names: an append names its partition.
        """

    @abstractmethod
    async def expand_topic(self, name: str, partitions: int) -> Topic:
        """Raise the number of open partitions. Existing partitions keep their records; new ones are empty.

        Draining partitions open again as far as the number reaches, and continue where they were. A partition that was
        dropped comes back empty, with the offset where it ended as its first. `Sealed` or `Moved` if the topic is.
        """

    @abstractmethod
    async def contract_topic(self, name: str, partitions: int) -> Topic:
        """Lower the number of open partitions: those from index `partitions` on drain.

        Once this has returned, no append to them succeeds in any process: it raises `PartitionDraining`. Their records
        can be read and trimmed as before. `InvalidValue` if fewer are open already. `Sealed` or `Moved` if the topic
        is.
        """

    @abstractmethod
    async def drop_partitions(self, name: str, partitions: int) -> Topic:
        """Drop the draining partitions with all their records; the caller has made sure that they were consumed.

        `partitions` are to stay. `InvalidValue` if they are not exactly the open ones, which happens when the topic was
        contracted or expanded in the meantime. Nothing changes if no partition is draining. `Sealed` or `Moved` if the
        topic is and a partition is draining.
        """

    @abstractmethod
    async def set_retention(self, name: str, retention: Retention) -> Topic:
        """Change what maintenance may trim."""

    @abstractmethod
    async def seal_topic(self, name: str, holder: str, *, seconds: float = SEAL_SECONDS) -> Topic:
        """Seal the topic for `seconds`: no append to it succeeds in any process, it raises `Sealed`.

        If `holder` has the topic sealed already, the seal is renewed: it lasts `seconds` from now, and the generation
        stays. `Sealed` while another holder has it sealed, `Moved` if the topic has a successor.

        When the time is over, the topic takes records again and is shown as not sealed. Should the engine's clock be
        set back, the seal ends at once rather than last longer than it was asked for.
        """

    @abstractmethod
    async def unseal_topic(self, name: str, holder: str) -> Topic:
        """End the holder's seal. Nothing changes if `holder` does not have the topic sealed. `Moved` if the topic has a
        successor."""

    @abstractmethod
    async def move_topic(self, name: str, successor: str, *, holder: str, generation: int) -> Topic:
        """Let `successor` continue the topic: the topic stays sealed for good, and appends raise `Moved`. Its records
        stay.

        `SealLost` unless `holder` has it sealed, under the generation that `seal_topic` returned. That is checked in
        the same step as the move, so no record can come in between. Nothing changes if the topic has that successor
        already; `Moved` if it has another one. `UnknownTopic` if the successor does not exist, `InvalidValue` if it is
        the topic itself or has a successor: topics don't move in circles.
        """

    @abstractmethod
    async def delete_topic(self, name: str) -> None:
        """Delete a topic with all its records."""

    @abstractmethod
    async def topic(self, name: str) -> Topic:
        """Describe a topic; `UnknownTopic` if there is none."""

    @abstractmethod
    async def topics(self) -> list[Topic]:
        """Describe all topics, in the order of their names."""

    @abstractmethod
    async def catalog_version(self) -> int:
        """A number that rises with every change of the catalog: when a topic is created, deleted, or changed in any
        way, in any process. A seal whose time is over ends without changing the number.

        It is cheap to read. A caller that keeps the topics in memory reads this number first and the topics after it,
        and reads them again when the number is another one.
        """


class Data(ABC):
    """The records of a log's partitions.

    **Order.** Offsets of a partition ascend from 0 on, in the order in which records become visible: a reader that has
    seen an offset can read every record before it. There may be gaps between offsets, also within a batch that was
    appended, before the first record and after the last one; so the number of records does not follow from offsets. A
    batch that was read names the offset of each record, and the offset to continue from.

    **Durability.** A call that changes something returns when the change is durable: it survives SIGKILL of every
    process and, unless the log was opened with less durability, a power cut. A call that raises has changed nothing,
    with one exception: when the process or the connection breaks off during an append, or the append is cancelled, the
    batch may or may not be stored. Append it again with the same `Stamp`, and it is stored once.
    """

    @abstractmethod
    async def append(
        self,
        partition: Partition,
        records: Records,
        *,
        stamp: Stamp | None = None,
        fence: Fence | Sequence[Fence] | None = None,
        generation: int | None = None,
    ) -> Appended:
        """Append a batch, all or nothing, after everything appended before. Returns when it is durable.

        Records may be given as an Arrow batch with the columns of `SCHEMA`: then nothing handles them one by one.
        `Validated` records are not validated again. A record with the timestamp 0 gets the time of the call.

        `stamp`: a batch that was stored before under the same stamp is not stored again, whatever has become of the
        topic: sealed, moved, changed or draining. (The stamps of a dropped partition may be forgotten.)
        `SequenceTooOld` if the sequence lies `SEQUENCE_WINDOW` or more behind the producer's last one.

        `fence`: refused with `Fenced` if a higher epoch of it is known; a higher one becomes known. Of several fences,
        each must hold.

        `generation`: the generation of the topic by which the partition was chosen; refused with `Outdated` if the
        topic has another one now. None appends under any.

        Also refused are appends to a topic that is sealed (`Sealed`) or has moved (`Moved`), and to a partition that is
        draining (`PartitionDraining`). Nothing is stored under the stamp of an append that was refused.
        """

    async def append_many(self, requests: Sequence[AppendRequest]) -> list[Appended | ShardyardError]:
        """Append several batches, each as `append` does: all or nothing, and refused or stored whatever becomes of the
        others. Those of one partition are appended in their order. Returns the outcome of each when all that were
        stored are durable. They are stored in one commit, for the price of one sync: if the disk is full or the
        database is out of reach, none of them is stored. `Closed` is raised."""

        async def append(request: AppendRequest) -> Appended | ShardyardError:
            try:
                return await self.append(
                    request.partition,
                    request.records,
                    stamp=request.stamp,
                    fence=request.fence,
                    generation=request.generation,
                )
            except Closed:
                raise
            except ShardyardError as error:
                return error

        return [await append(request) for request in requests]

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
    ) -> "Batch":
        """Read the records from `offset` on, as many as the limits allow (bytes are estimated for a part of a batch).

        If there is a record, at least one is returned, however large it is. A read that reaches the end of the
        partition returns a batch whose `end` is the partition's end, so that a gap before it is passed over: where
        there are no records from `offset` on but the end lies beyond it, the batch is empty and its `end` is that end.

        At the end of the partition the batch is empty, after up to `wait` seconds in which a record might arrive. A
        reader in another process sees a new record within a few milliseconds. A waiting reader learns as fast that its
        partition was dropped (`PartitionOutOfRange`) or its topic deleted (`UnknownTopic`).

        `OffsetTrimmed` below the first offset, `OffsetBeyondEnd` above the end, `WrongEpoch` if `epoch` is given and
        is not the partition's, `Fenced` if a higher epoch of the fence is known.
        """

    async def read_many(
        self,
        requests: Sequence[ReadRequest],
        *,
        max_records: int = READ_RECORDS,
        max_bytes: int = READ_BYTES,
        total_bytes: int | None = None,
        wait: float = 0.0,
    ) -> Outcomes:
        """Read from several partitions at once, of each at most once. Returns what `read` returns, or the error with
        which it is refused, for those that have news: records, a gap that is passed over, or an error. Those at whose
        end there is nothing new are left out. `max_records` and `max_bytes` are the limits of each partition. Once
        `total_bytes` were read, those that come later in `requests` are left out, too.

        If none has news, this waits up to `wait` seconds until one has. Errors that concern the log as a whole, such as
        `Closed`, are raised. Engines look at all partitions together, so that those without news cost next to nothing.
        """

        if total_bytes is not None:
            whole_number("total_bytes", total_bytes, at_least=1)

        async def read(request: ReadRequest, seconds: float) -> "Batch | ShardyardError":
            try:
                return await self.read(
                    request.partition,
                    request.offset,
                    epoch=request.epoch,
                    max_records=max_records,
                    max_bytes=max_bytes,
                    wait=seconds,
                    fence=request.fence,
                )
            except (Closed, InvalidValue):
                raise
            except ShardyardError as error:
                return error

        async def look() -> Outcomes:
            news = News(total_bytes)
            outcomes = await asyncio.gather(*(read(request, 0.0) for request in requests))
            for request, outcome in zip(requests, outcomes, strict=True):
                if not news.is_enough:
                    news.add(request, outcome)
            return news.outcomes

        found = await look()
        if found or wait <= 0 or not requests:
            return found
        waiting = [asyncio.create_task(read(request, wait)) for request in requests]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return await look()

    @abstractmethod
    async def span(self, partition: Partition) -> Span:
        """The offsets that the partition holds. `end` lies beyond every record, and the next record is not below it."""

    async def count(self, partition: Partition, start: int, end: int) -> int:
        """At most how many records have offsets from `start` up to, but not including, `end`: exactly so many where the
        engine knows it, and never fewer than there are."""
        start = whole_number("start", start, at_least=0)
        end = whole_number("end", end, at_least=0)
        has = await self.span(partition)
        return max(0, min(end, has.end) - max(start, has.first))

    @abstractmethod
    async def offset_at(self, partition: Partition, timestamp: int) -> int:
        """The first offset whose record has that timestamp (ms) or a later one; the end if there is none."""

    @abstractmethod
    async def trim(self, partition: Partition, before: int) -> Span:
        """Drop all records below the offset `before`. Their space is freed soon after."""

    @abstractmethod
    async def set_fence(self, fence: Fence) -> None:
        """Refuse calls with a lower epoch of this fence from now on. `Fenced` if a higher one is known already."""

    @abstractmethod
    async def maintain(self) -> None:
        """Apply retention, merge small batches and free space. An open log also does this in the background."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what is in progress, then release all resources. May be called twice."""


class Log(Catalog, Data):
    """A durable log of topics, each split into partitions.

    Any number of processes may use one log at the same time. An instance may be used from several tasks of one event
    loop; once that loop is closed, it may be used in another one. Every method raises `Closed` after `close`.
    """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this engine has beyond what every log promises."""

    async def ends(self, topic: str, *, dropped: bool = False) -> dict[int, Span]:  # noqa: ARG002 without contraction
        """The span of each partition of the topic, by index, also of those that are draining; `UnknownTopic` if there
        is none. Every record whose append returned before this call lies below the `end` of its partition. Engines
        look all of them up at once.

        `dropped`: also the spans of partitions that were dropped. They hold nothing, and start and end where the
        partition ended, so that a reader can tell whether it had read everything."""
        partitions = list(await self.topic(topic))
        spans = await asyncio.gather(*map(self.span, partitions))
        return {partition.index: span for partition, span in zip(partitions, spans, strict=True)}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
