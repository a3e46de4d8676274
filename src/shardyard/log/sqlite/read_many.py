"""Reading from many partitions in one transaction. Most have nothing new, and finding that out costs little: the ends
of all partitions of a topic come as one value, because Python takes longer for a row than SQLite."""

import sqlite3
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter, le

import msgspec

from shardyard.log.appending import outcome_of
from shardyard.log.batch_cache import BatchCache
from shardyard.log.requests import News, ReadRequest
from shardyard.log.sqlite import store
from shardyard.log.stored_batches import Read, decode
from shardyard.log.waiting import Looked
from shardyard.model import Damaged, Partition, Span
from shardyard.model.batch import Batch

FEW_RECORDS = 10_000
"""Beyond so many that have arrived, their bytes are not summed up."""
DENSE = 200
"""Up to so many partitions of a topic are looked at for each that is read: to read it by itself takes as long."""
MOST_KNOWN = 20_000
"""Epochs of fences and ranges of names that are kept. Beyond that, all are looked up again."""
MAX_INT64 = 2**63 - 1
"""SQLite has no larger numbers, and so no partition has one."""
_ENDS = """
SELECT (SELECT epoch FROM topics WHERE name = ?1), json_group_array("end") FROM (
    SELECT p."end" FROM partitions p JOIN topics t ON t.name = p.topic AND p.number < t.partitions
    WHERE p.topic = ?1 AND p.number BETWEEN ?2 AND ?3 ORDER BY p.number
)
"""
"""The epoch of a topic, and the ends of its partitions from one number to another, as far as they exist."""
_FENCE_CHANGES = """
SELECT count(*), sum(epoch >> 32), sum(epoch & 0xffffffff) FROM fences WHERE name BETWEEN ? AND ?
"""
"""These differ from before whenever a fence was set to a higher epoch: epochs only rise. In halves, because their sum
may be larger than SQLite's numbers."""
_FENCES = "SELECT name, epoch FROM fences WHERE name BETWEEN ? AND ?"
_BYTES = """
SELECT coalesce(sum(b.bytes), 0) FROM json_each(?) w
JOIN batches b ON b.partition = json_extract(w.value, '$[0]') AND b.first >= (
    SELECT max(first) FROM batches WHERE partition = json_extract(w.value, '$[0]')
    AND first <= json_extract(w.value, '$[1]')
)
"""
_NEW = """
SELECT w.key, p.first, b.first, b.count, b.checksum, b.data FROM json_each(?) w
JOIN partitions p ON p.id = json_extract(w.value, '$[0]')
JOIN batches b ON b.partition = p.id AND b.first >= (
    SELECT max(first) FROM batches WHERE partition = p.id AND first <= json_extract(w.value, '$[1]')
) AND b.first < json_extract(w.value, '$[1]') + ?
ORDER BY w.key, b.first
"""
"""The batches with the next so many offsets, of several partitions; with their places in the list that is given."""
_json = msgspec.json.Encoder().encode
_numbers = msgspec.json.Decoder(list[int]).decode


class KnownIds:
    """The ids of partitions that were read before. A topic that was deleted and created again has others. Safe to use
    from several threads."""

    def __init__(self) -> None:
        self._topics: dict[str, tuple[int, dict[int, int]]] = {}
        """The epoch of a topic, and the ids of its partitions."""
        self._adding = threading.Lock()

    def find(self, partition: Partition) -> int | None:
        return self._topics.get(partition.topic, _UNREAD)[1].get(partition.index)

    def place(self, partition: Partition) -> tuple[int, int | None]:
        """The epoch of the topic, and the partition's id."""
        epoch, ids = self._topics.get(partition.topic, _UNREAD)
        return epoch, ids.get(partition.index)

    def of(self, topic: str, epoch: int | None) -> dict[int, int]:
        """Those of a topic in this epoch."""
        found, ids = self._topics.get(topic, _UNREAD)
        return ids if found == epoch else {}

    def add(self, partition: Partition, epoch: int, id_: int) -> None:
        """A partition was read."""
        with self._adding:
            found, ids = self._topics.get(partition.topic, _UNREAD)
            if found != epoch:
                ids = {}
                self._topics[partition.topic] = (epoch, ids)
            ids[partition.index] = id_


_UNREAD: tuple[int, dict[int, int]] = (-1, {})


@dataclass(frozen=True, slots=True)
class _TopicReads:
    """The requests for partitions of one topic, in columns."""

    topic: str
    numbers: list[int]
    """Their places among all requests."""
    partitions: list[int]
    offsets: list[int]
    epochs: list[int | None]
    lowest: int
    """The partitions lie between this one and the highest."""
    highest: int

    @classmethod
    def of(cls, topic: str, numbers: list[int], requests: Sequence[ReadRequest]) -> "_TopicReads":
        those = [requests[number] for number in numbers]
        partitions = [request.partition.index for request in those]
        offsets, epochs = [request.offset for request in those], [request.epoch for request in those]
        return cls(topic, numbers, partitions, offsets, epochs, max(min(partitions), 0), max(partitions))

    @property
    def are_dense(self) -> bool:
        """Whether all partitions from the lowest to the highest can be looked at."""
        return -1 <= self.highest - self.lowest < DENSE * len(self.partitions) and self.highest < MAX_INT64

    def news(self, epoch: int | None, ends: list[int], known: Collection[int]) -> dict[int, int | None]:
        """The numbers of the requests that may have something new, each with the partition's end; None if that or the
        partition's id is not known. `ends`: of the partitions from the lowest on, as far as they exist. `known`: those
        whose ids are."""
        if set(self.epochs) <= {epoch, None} and self.highest < self.lowest + len(ends) and self._are_in(known):
            here = [ends[place - self.lowest] for place in self.partitions]
            if here == self.offsets:
                return {}
            columns = zip(self.numbers, here, self.offsets, strict=True)
            return {number: end for number, end, offset in columns if end != offset}
        return self._news_of_each(epoch, ends, known)

    def _are_in(self, known: Collection[int]) -> bool:
        return len(known) >= len(self.partitions) and all(map(known.__contains__, self.partitions))

    def _news_of_each(self, epoch: int | None, ends: list[int], known: Collection[int]) -> dict[int, int | None]:
        found = {place: end for place, end in enumerate(ends, self.lowest) if place in known}
        columns = zip(self.numbers, map(found.get, self.partitions), self.offsets, self.epochs, strict=True)
        return {
            number: end
            for number, end, offset, wanted in columns
            if end != offset or (wanted is not None and wanted != epoch)
        }


class Reads:
    """What a call of `read_many` asks for. A look compares columns of it: there are often hundreds of partitions, and
    most have nothing new."""

    def __init__(self, requests: Sequence[ReadRequest]) -> None:
        self.requests = requests
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            numbers[request.partition.topic].append(number)
        self.topics = [_TopicReads.of(topic, those, requests) for topic, those in numbers.items()]
        fences = [request.fence for request in requests if request.fence is not None]
        self.fence_names = [fence.name for fence in fences]
        self.fence_epochs = [fence.epoch for fence in fences]
        self.between = (min(self.fence_names), max(self.fence_names)) if fences else None
        """The names of the fences lie between these two: those of an owner's partitions follow each other."""


class KnownFences:
    """The epochs of fences, as long as none of them has changed. Safe to use from several threads."""

    def __init__(self) -> None:
        self._epochs: dict[tuple[str, str], tuple[tuple[int, ...], dict[str, int]]] = {}
        """By the names between which they lie: what tells whether one in between has changed, and their epochs."""
        self._count = 0
        """Of all epochs and ranges; about, since threads may add some at the same time."""

    def all_hold(self, db: sqlite3.Connection, reads: Reads) -> bool:
        """Whether no higher epoch of a fence of these reads is known."""
        if reads.between is None:
            return True
        changes = db.execute(_FENCE_CHANGES, reads.between).fetchone()
        seen, epochs = self._epochs.get(reads.between, (None, {}))
        if seen != changes:
            if seen is not None:
                self._count -= 1 + len(epochs)
            epochs = dict(db.execute(_FENCES, reads.between).fetchall())
            self._count += 1 + len(epochs)
            if self._count > MOST_KNOWN:
                self._epochs.clear()
                self._count = 1 + len(epochs)
            self._epochs[reads.between] = (changes, epochs)
        known = map(epochs.get, reads.fence_names, reads.fence_epochs)
        return all(map(le, known, reads.fence_epochs))


class ManyReader:
    """Reads from many partitions, and remembers what the next read would have to look up again. Safe to use from
    several threads."""

    def __init__(self, cache: BatchCache) -> None:
        self._cache = cache
        self.ids = KnownIds()
        self._fences = KnownFences()

    def read(
        self,
        db: sqlite3.Connection,
        reads: Reads,
        max_records: int,
        max_bytes: int,
        total_bytes: int | None,
        most: int | None,
    ) -> Looked | None:
        """What is new. None if more than `most` bytes have arrived, or an unknown number."""
        requests, news = reads.requests, self._find_news(db, reads)
        if most is not None and not self._are_few(db, requests, news, most):
            return None
        if not self._fences.all_hold(db, reads):
            news = dict.fromkeys(range(len(requests)))  # which one does not, their reads find out

        def read(request: ReadRequest) -> Batch:
            place, batch = store.read(
                db, self._cache, request.partition, request.offset, request.epoch, max_records, max_bytes, request.fence
            )
            self.ids.add(request.partition, place.epoch, place.id)
            return batch

        is_all_wanted = most is not None and (total_bytes is None or total_bytes >= most)
        new = self._read_new(db, requests, news, max_records, max_bytes) if is_all_wanted else {}
        found = News(total_bytes)
        for number in sorted(news):
            if not found.is_enough:
                found.add(requests[number], new.get(number) or outcome_of(read, requests[number]))
        if found.outcomes:
            return found.outcomes, {}
        return {}, {self.ids.find(request.partition) or 0: request.offset for request in requests}

    def _read_new(
        self,
        db: sqlite3.Connection,
        requests: Sequence[ReadRequest],
        news: dict[int, int | None],
        max_records: int,
        max_bytes: int,
    ) -> dict[int, Batch]:
        """What is new in partitions whose ids and ends are known, by the numbers of their requests: all of it by one
        statement. Those that it does not suffice for are left out."""
        grown: list[tuple[int, Span]] = []
        places: list[tuple[int, int]] = []
        for number, end in news.items():
            request = requests[number]
            epoch, id_ = self.ids.place(request.partition)
            if (
                end is not None
                and id_ is not None
                and request.offset < end
                and request.epoch in (None, epoch)
                and self._cache.find(request.partition, epoch, request.offset) is None
            ):
                grown.append((number, Span(epoch, 0, end)))
                places.append((id_, request.offset))
        if len(grown) < 2:
            return {}
        found: dict[int, Batch] = {}
        with closing(db.execute(_NEW, (_json(places).decode(), min(max_records, FEW_RECORDS)))) as rows:
            for place, batches in groupby(rows, itemgetter(0)):
                number, span = grown[place]
                request = requests[number]
                wanted = Read(request.partition, span, request.offset, max_records, max_bytes)
                if self._take(wanted, places[place][0], batches):
                    found[number] = wanted.result()
        return found

    def _take(self, wanted: Read, id_: int, rows: Iterable[tuple[int, int, int, int, int, bytes]]) -> bool:
        """Take the records of a partition from the rows of `_NEW`. False if they were trimmed or are damaged, which a
        read by itself reports."""
        for _, start, first, count, checksum, data in rows:
            if start > wanted.offset:
                return False
            if first + count <= wanted.end:
                continue
            try:
                batch = decode(data, checksum, id_, first, count, str(wanted.partition))
                takes_more = wanted.add(batch)
            except Damaged:
                return False
            if not takes_more:
                if wanted.end < batch.end:  # the next read will continue in this batch
                    self._cache.add(wanted.partition, wanted.span.epoch, batch)
                break
        return wanted.end > wanted.offset

    def _find_news(self, db: sqlite3.Connection, reads: Reads) -> dict[int, int | None]:
        """The numbers of the requests that may have something new, each with the partition's end; None if that or the
        partition's id is not known."""
        news: dict[int, int | None] = {}
        for those in reads.topics:
            if not those.are_dense:
                news |= dict.fromkeys(those.numbers)
                continue
            epoch, found = db.execute(_ENDS, (those.topic, those.lowest, those.highest)).fetchone()
            news |= those.news(epoch, _numbers(found), self.ids.of(those.topic, epoch))
        return news

    def _are_few(
        self, db: sqlite3.Connection, requests: Sequence[ReadRequest], news: dict[int, int | None], most: int
    ) -> bool:
        """Whether what has arrived is at most so many bytes."""
        grown, records = [], 0
        for number, end in news.items():
            if end is None:
                return False
            request = requests[number]
            grown.append((self.ids.find(request.partition) or 0, request.offset))
            records += max(end - request.offset, 0)
        if records > FEW_RECORDS:
            return False
        return not grown or db.execute(_BYTES, (_json(grown).decode(),)).fetchone()[0] <= most
