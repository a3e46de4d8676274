"""Reading from many partitions in one transaction. Most have nothing new, and finding that out costs little: the ends
of all partitions of a topic come as one value, because Python takes longer for a row than SQLite."""

import sqlite3
import threading
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from shardyard.log.appending import outcome_of
from shardyard.log.batch_cache import BatchCache
from shardyard.log.requests import News, ReadRequest
from shardyard.log.sqlite import store
from shardyard.log.waiting import Looked
from shardyard.model import Fence, Partition
from shardyard.model.batch import Batch

FEW_RECORDS = 10_000
"""Beyond so many that have arrived, their bytes are not summed up."""
DENSE = 200
"""Up to so many partitions of a topic are looked at for each that is read: to read it by itself takes as long."""
MAX_INT64 = 2**63 - 1
"""SQLite has no larger numbers, and so no partition has one."""
_ENDS = """
SELECT (SELECT epoch FROM topics WHERE name = ?1), json_group_array("end") FROM (
    SELECT p."end" FROM partitions p JOIN topics t ON t.name = p.topic AND p.number < t.partitions
    WHERE p.topic = ?1 AND p.number BETWEEN ?2 AND ?3 ORDER BY p.number
)
"""
"""The epoch of a topic, and the ends of its partitions from one number to another, as far as they exist."""
_HIGHEST_FENCE = "SELECT max(epoch) FROM fences WHERE name BETWEEN ? AND ?"
_FENCES = "SELECT name, epoch FROM fences WHERE name BETWEEN ? AND ?"
_BYTES = """
SELECT coalesce(sum(b.bytes), 0) FROM json_each(?) w
JOIN batches b ON b.partition = json_extract(w.value, '$[0]') AND b.first >= (
    SELECT max(first) FROM batches WHERE partition = json_extract(w.value, '$[0]')
    AND first <= json_extract(w.value, '$[1]')
)
"""
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


def read_many(
    db: sqlite3.Connection,
    cache: BatchCache,
    known: KnownIds,
    requests: Sequence[ReadRequest],
    max_records: int,
    max_bytes: int,
    total_bytes: int | None,
    most: int | None,
) -> Looked | None:
    """What is new. `known`: what is read now is added. None if more than `most` bytes have arrived, or an unknown
    number."""
    news = _find_news(db, known, requests)
    if most is not None and not _are_few(db, known, requests, news, most):
        return None
    if _is_any_fenced(db, [request.fence for request in requests if request.fence is not None]):
        news = dict.fromkeys(range(len(requests)))  # which one, their reads find out

    def read(request: ReadRequest) -> Batch:
        place, batch = store.read(
            db, cache, request.partition, request.offset, request.epoch, max_records, max_bytes, request.fence
        )
        known.add(request.partition, place.epoch, place.id)
        return batch

    found = News(total_bytes)
    for number in sorted(news):
        if not found.is_enough:
            found.add(requests[number], outcome_of(read, requests[number]))
    if found.outcomes:
        return found.outcomes, []
    return {}, [(known.find(request.partition) or 0, request.offset) for request in requests]


def _find_news(db: sqlite3.Connection, known: KnownIds, requests: Sequence[ReadRequest]) -> dict[int, int | None]:
    """The numbers of the requests that may have something new, each with the partition's end; None if that or the
    partition's id is not known."""
    news: dict[int, int | None] = {}
    topics: defaultdict[str, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        topics[request.partition.topic].append(number)
    for topic, numbers in topics.items():
        places = [requests[number].partition.index for number in numbers]
        lowest, highest = max(min(places), 0), max(places)
        if not -1 <= highest - lowest < DENSE * len(places) or highest >= MAX_INT64:
            news |= dict.fromkeys(numbers)
            continue
        epoch, found = db.execute(_ENDS, (topic, lowest, highest)).fetchone()
        ids, ends = known.of(topic, epoch), _numbers(found)
        for number, place in zip(numbers, places, strict=True):
            request, at = requests[number], place - lowest
            end = ends[at] if 0 <= at < len(ends) and place in ids else None
            if end != request.offset or (request.epoch != epoch and request.epoch is not None):
                news[number] = end
    return news


def _are_few(
    db: sqlite3.Connection,
    known: KnownIds,
    requests: Sequence[ReadRequest],
    news: dict[int, int | None],
    most: int,
) -> bool:
    """Whether what has arrived is at most so many bytes."""
    grown, records = [], 0
    for number, end in news.items():
        if end is None:
            return False
        request = requests[number]
        grown.append((known.find(request.partition), request.offset))
        records += max(end - request.offset, 0)
    if records > FEW_RECORDS:
        return False
    return not grown or db.execute(_BYTES, (_json(grown).decode(),)).fetchone()[0] <= most


def _is_any_fenced(db: sqlite3.Connection, fences: Sequence[Fence]) -> bool:
    """Whether a higher epoch of one of these fences is known. Those of an owner's partitions have names that follow
    each other."""
    if not fences:
        return False
    names = [fence.name for fence in fences]
    between = min(names), max(names)
    (highest,) = db.execute(_HIGHEST_FENCE, between).fetchone()
    if highest is None or highest <= min([fence.epoch for fence in fences]):
        return False
    found = dict(db.execute(_FENCES, between).fetchall())
    return any(found.get(fence.name, fence.epoch) > fence.epoch for fence in fences)
