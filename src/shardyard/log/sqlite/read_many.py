"""Reading from many partitions in one transaction: one statement finds those that have something new."""

import sqlite3
from collections.abc import Sequence

import msgspec

from shardyard.log.appending import outcome_of
from shardyard.log.batch_cache import BatchCache
from shardyard.log.requests import News, ReadRequest
from shardyard.log.sqlite import store
from shardyard.log.waiting import Looked
from shardyard.model import Partition
from shardyard.model.batch import Batch

FEW_RECORDS = 10_000
"""Beyond so many that have arrived, their bytes are not summed up."""
_NEWS = """
SELECT w.key, p."end" FROM json_each(?) w
LEFT JOIN partitions p ON p.id = json_extract(w.value, '$[0]')
LEFT JOIN topics t ON t.name = p.topic AND p.number < t.partitions
WHERE t.name IS NULL OR p."end" != json_extract(w.value, '$[1]')
    OR t.epoch != coalesce(json_extract(w.value, '$[2]'), t.epoch)
"""
"""The requests whose partition does not exist, ends elsewhere or has another epoch."""
_FENCED = """
SELECT w.key FROM json_each(?) w JOIN fences f ON f.name = json_extract(w.value, '$[0]')
WHERE f.epoch > json_extract(w.value, '$[1]')
"""
_json = msgspec.json.Encoder().encode


def read_many(
    db: sqlite3.Connection,
    cache: BatchCache,
    ids: dict[Partition, int],
    requests: Sequence[ReadRequest],
    max_records: int,
    max_bytes: int,
    total_bytes: int | None,
    most: int | None,
) -> Looked | None:
    """What is new. `ids`: of partitions that were read before; those that are read now are added. None if more than
    `most` bytes have arrived, or an unknown number."""
    wanted = [(ids.get(request.partition, 0), request.offset, request.epoch) for request in requests]
    news = dict(db.execute(_NEWS, (_json(wanted).decode(),)))
    if most is not None and not _are_few(db, wanted, news, most):
        return None
    fences = [(fence.name, fence.epoch) for request in requests if (fence := request.fence) is not None]
    if fences and db.execute(_FENCED, (_json(fences).decode(),)).fetchone() is not None:
        news = dict.fromkeys(range(len(requests)))  # which one, their reads find out

    def read(request: ReadRequest) -> Batch:
        place, batch = store.read(
            db, cache, request.partition, request.offset, request.epoch, max_records, max_bytes, request.fence
        )
        ids[request.partition] = place.id
        return batch

    found = News(total_bytes)
    for number in sorted(news):
        if not found.is_enough:
            found.add(requests[number], outcome_of(read, requests[number]))
    if found.outcomes:
        return found.outcomes, []
    return {}, [(ids[request.partition], request.offset) for request in requests]


def _are_few(
    db: sqlite3.Connection, wanted: Sequence[tuple[int, int, int | None]], news: dict[int, int | None], most: int
) -> bool:
    """Whether what has arrived is at most so many bytes."""
    grown = []
    for number, end in news.items():
        if end is None:
            return False
        id_, offset, _ = wanted[number]
        grown.append((id_, offset, end - offset))
    if sum(count for *_, count in grown) > FEW_RECORDS:
        return False
    return sum(store.bytes_from(db, id_, offset) for id_, offset, _ in grown) <= most
