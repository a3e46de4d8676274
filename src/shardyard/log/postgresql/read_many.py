"""Reading from many partitions: one statement finds those that have something new, and only those are read."""

from collections.abc import Sequence

from shardyard.log.appending import outcome_of
from shardyard.log.batch_cache import BatchCache
from shardyard.log.postgresql import reading
from shardyard.log.requests import News, ReadRequest
from shardyard.log.waiting import Looked
from shardyard.model import Partition
from shardyard.model.batch import Batch
from shardyard.runtime.postgresql import Connection

_NEWS = """
SELECT w.number FROM unnest(%(ids)s::bigint[], %(offsets)s::bigint[], %(epochs)s::bigint[], %(names)s::text[],
    %(fences)s::bigint[]) WITH ORDINALITY w (id, "offset", epoch, name, fence, number)
LEFT JOIN (log_partitions p JOIN log_topics t ON t.name = p.topic AND p.number < t.partitions) ON p.id = w.id
LEFT JOIN log_fences f ON f.name = w.name
WHERE p.id IS NULL OR p."end" != w."offset" OR t.epoch != coalesce(w.epoch, t.epoch) OR f.epoch > w.fence
"""
"""The requests, numbered from 1 on, whose partition does not exist, ends elsewhere, has another epoch or is fenced."""
_HIGHEST = 2**63 - 1


def read_many(
    connection: Connection,
    cache: BatchCache,
    ids: dict[Partition, int],
    requests: Sequence[ReadRequest],
    max_records: int,
    max_bytes: int,
    total_bytes: int | None,
) -> Looked:
    """What is new. `ids`: of partitions that were read before; those that are read now are added."""
    wanted = {
        "ids": [ids.get(request.partition, 0) for request in requests],
        "offsets": [min(request.offset, _HIGHEST) for request in requests],
        "epochs": [request.epoch for request in requests],
        "names": [request.fence and request.fence.name for request in requests],
        "fences": [request.fence and request.fence.epoch for request in requests],
    }
    news = connection.execute(_NEWS, wanted, binary=True).fetchall()

    def read(request: ReadRequest) -> Batch:
        place, batch = reading.read(
            connection,
            cache,
            request.partition,
            request.offset,
            request.epoch,
            max_records,
            max_bytes,
            request.fence,
        )
        ids[request.partition] = place.id
        return batch

    found = News(total_bytes)
    for (number,) in sorted(news):
        if not found.is_enough:
            found.add(requests[number - 1], outcome_of(read, requests[number - 1]))
    if found.outcomes:
        return found.outcomes, {}
    return {}, {ids[request.partition]: request.offset for request in requests}
