"""Deciding on appends: which are refused, which were stored before, which offsets the others get. No I/O.

An engine looks up what is stored, lets `Appending` decide, and stores the `Changes`, all in one transaction.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import pyarrow as pa
from msgspec import Struct

from shardyard.log import rules
from shardyard.log.stored_batches import FEW_RECORDS, LoadedBatch, StoredBatch, encode, encode_few
from shardyard.model import (
    SEQUENCE_WINDOW,
    Appended,
    Fence,
    Partition,
    Position,
    Record,
    SequenceTooOld,
    ShardyardError,
    Stamp,
)
from shardyard.model.batch import from_records
from shardyard.runtime.group_commit import Outcome


class Append(Struct, frozen=True):
    """Validated records for a partition."""

    partition: Partition
    records: Sequence[Record] | pa.RecordBatch
    size: int
    stamp: Stamp | None
    fences: Sequence[Fence]
    generation: int | None


class PartitionState(Struct):
    """A partition's row, with what its topic's row says about appends."""

    id: int
    epoch: int
    first: int
    end: int
    sealed: bool
    """Also when the seal has ended, until an append finds that out."""
    successor: str | None
    receiving: int
    generation: int
    sealed_since: int
    sealed_until: int


class AppendLookup(Protocol):
    """What is stored, as far as appends depend on it. Nobody else changes it until the changes are stored."""

    def partition(self, partition: Partition) -> PartitionState:
        """`UnknownTopic` or `PartitionOutOfRange` if there is none."""
        ...

    def fence(self, name: str) -> int | None:
        """The highest known epoch."""
        ...

    def stamp(self, partition_id: int, stamp: Stamp) -> tuple[int, int] | None:
        """The first offset and the number of records that were stored under this stamp."""
        ...

    def last_sequence(self, partition_id: int, producer: str) -> int | None:
        """The producer's highest sequence in this partition."""
        ...


class StoredStamp(Struct, frozen=True, gc=False):
    partition_id: int
    producer: str
    sequence: int
    first: int
    count: int


@dataclass(slots=True)
class Changes:
    """What is to be stored for appends that were accepted."""

    batches: list[tuple[int, StoredBatch]] = field(default_factory=list)
    """With the partition's id."""
    ends: dict[int, int] = field(default_factory=dict)
    """By partition id."""
    stamps: list[StoredStamp] = field(default_factory=list)
    fences: dict[str, int] = field(default_factory=dict)
    """Epochs that became known."""
    unsealed: set[str] = field(default_factory=set)
    """Topics whose seal has ended. That is stored, so that a clock that is set back can't put it in force again."""
    loaded: list[tuple[Partition, int, LoadedBatch]] = field(default_factory=list)
    """The batches of a few records, with partition and epoch, as they will be when they are read."""

    def forgotten_stamps(self) -> Iterator[tuple[int, str, int]]:
        """Partition id, producer, and the sequence up to which its stamps are out of the window now."""
        last: dict[tuple[int, str], int] = {}
        for stamp in self.stamps:
            key = (stamp.partition_id, stamp.producer)
            last[key] = max(stamp.sequence, last.get(key, 0))
        for (partition_id, producer), sequence in last.items():
            if sequence >= SEQUENCE_WINDOW:
                yield partition_id, producer, sequence - SEQUENCE_WINDOW


class Appending:
    """Decides on appends in their order, for one transaction."""

    def __init__(self, stored: AppendLookup, now: int) -> None:
        """`now`: the time in milliseconds."""
        self._stored = stored
        self._now = now
        self._partitions: dict[Partition, PartitionState] = {}
        self._parts: dict[int, list[tuple[int, Sequence[Record] | pa.RecordBatch]]] = {}
        self._stamps: dict[tuple[int, Stamp], StoredStamp] = {}
        self._last: dict[tuple[int, str], int | None] = {}
        self._fences: dict[str, int] = {}
        self._known_fences: Sequence[Fence] = ()
        """They have the known epochs, as long as no fence rises."""
        self._unsealed: set[str] = set()
        self._loaded: list[tuple[Partition, int, LoadedBatch]] = []

    def append(self, request: Append) -> Appended:
        """Accept an append, or raise the error that refuses it. Nothing is stored for one that was refused."""
        partition, stamp = request.partition, request.stamp
        rules.check_partition(partition)
        state = self._partitions.get(partition)
        if state is None:
            state = self._partitions[partition] = self._stored.partition(partition)
        rising = self._rising(request.fences)
        known = stamp and self._find_stamp(partition, state, stamp)
        if stamp and known:
            rules.check_same_batch(stamp, known[1], len(request.records))
        else:
            self._check_receives(request, state)
        for fence in rising:
            self._fences[fence.name] = fence.epoch
            self._known_fences = ()
        if known:
            return Appended(partition, Position(state.epoch, known[0]), known[1], duplicate=True)
        first, count = state.end, len(request.records)
        if stamp is not None:
            self._put_stamp(state, stamp, first, count)
        self._parts.setdefault(state.id, []).append((first, request.records))
        state.end = first + count
        return Appended(partition, Position(state.epoch, first), count)

    def changes(self) -> Changes:
        """Everything that is to be stored."""
        return Changes(
            list(self._batches()),
            {state.id: state.end for state in self._partitions.values() if state.id in self._parts},
            list(self._stamps.values()),
            self._fences,
            self._unsealed,
            self._loaded,
        )

    def _rising(self, fences: Sequence[Fence]) -> Sequence[Fence]:
        """Those whose epoch is higher than the known one; `Fenced` if one is lower. Appends of one call often carry the
        same fences, which are compared once."""
        if fences is self._known_fences:
            return ()
        rising = [fence for fence in fences if rules.check_fence(fence, self._known_epoch(fence.name))]
        if not rising:
            self._known_fences = fences
        return rising

    def _known_epoch(self, name: str) -> int | None:
        return self._fences[name] if name in self._fences else self._stored.fence(name)

    def _find_stamp(self, partition: Partition, state: PartitionState, stamp: Stamp) -> tuple[int, int] | None:
        key = (state.id, stamp.producer)
        if key not in self._last:
            self._last[key] = self._stored.last_sequence(*key)
        last = self._last[key]
        if last is None or stamp.sequence > last:  # the usual case: it is new
            return None
        if (new := self._stamps.get((state.id, stamp))) is not None:
            return new.first, new.count
        if (found := self._stored.stamp(state.id, stamp)) is not None:
            return found
        if stamp.sequence <= last - SEQUENCE_WINDOW:
            raise SequenceTooOld(partition, stamp.producer, stamp.sequence, last)
        return None

    def _put_stamp(self, state: PartitionState, stamp: Stamp, first: int, count: int) -> None:
        self._stamps[state.id, stamp] = StoredStamp(state.id, stamp.producer, stamp.sequence, first, count)
        last = self._last[state.id, stamp.producer]
        self._last[state.id, stamp.producer] = stamp.sequence if last is None else max(last, stamp.sequence)

    def _check_receives(self, request: Append, state: PartitionState) -> None:
        topic = request.partition.topic
        if (
            state.sealed
            and state.successor is None
            and not rules.is_in_force(state.sealed_since, state.sealed_until, self._now)
        ):
            self._unsealed.add(topic)
            state.sealed = False
        rules.check_receives(
            request.partition, state.sealed, state.successor, state.receiving, state.generation, request.generation
        )

    def _batches(self) -> Iterator[tuple[int, StoredBatch]]:
        """Appends of records to a partition that follow each other become one batch. For speed, the records of all
        partitions that are not few are converted to Arrow at once."""
        many: list[tuple[int, int, list[Record]]] = []
        partitions = {state.id: (partition, state.epoch) for partition, state in self._partitions.items()}
        for partition_id, parts in self._parts.items():
            for is_arrow, same in groupby(parts, lambda part: isinstance(part[1], pa.RecordBatch)):
                if is_arrow:
                    for first, data in same:
                        yield partition_id, encode(partition_id, first, data)
                    continue
                run = list(same)
                records = [record for _, part in run for record in part]
                if len(records) <= FEW_RECORDS:
                    stored = encode_few(partition_id, run[0][0], records, self._now)
                    if 0 not in [record.timestamp for record in records]:  # those without one are read with that of now
                        self._loaded.append(
                            (*partitions[partition_id], LoadedBatch(stored.first, len(stored.data), records))
                        )
                    yield partition_id, stored
                else:
                    many.append((partition_id, run[0][0], records))
        if many:
            data = from_records([record for *_, records in many for record in records], self._now)
            at = 0
            for partition_id, first, records in many:
                yield partition_id, encode(partition_id, first, data.slice(at, len(records)))
                at += len(records)


def outcome_of(work: Callable[..., Any], *arguments: object) -> Outcome:
    """The result of a request in a group, or the error that refuses it before it has changed anything: then the others
    continue."""
    try:
        return work(*arguments)
    except ShardyardError as error:
        return error
