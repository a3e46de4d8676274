"""Records over HTTP: publish, inspect, search."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from shardyard.model import Partition
from shardyard.queues.read_at import newest_offset
from shardyard.queues.search import search
from shardyard.runtime.clock import now_ms
from shardyard.server.auth import Authorised, AuthorisedPublisher
from shardyard.server.http import media_type_of, read_bytes, read_query, request_body, respond
from shardyard.server.queues import calls
from shardyard.server.routing import StrictRoute, query_parameters
from shardyard.wire import requests
from shardyard.wire.batches import encode_batch
from shardyard.wire.media import JSON, MEDIA_TYPES
from shardyard.wire.records import JsonRecord, decode_records, json_record

router = APIRouter(prefix="/v1/topics/{topic}", tags=["records"], route_class=StrictRoute)

Whole = Annotated[int, Query(ge=0, lt=2**63)]
Count = Annotated[int, Query(ge=1, le=10_000)]


@router.post("/records", openapi_extra=request_body(JsonRecord, media=MEDIA_TYPES) | query_parameters(requests.Publish))
async def publish(topic: str, request: Request, broker: AuthorisedPublisher) -> Response:
    """Publish one record, or several as `{"records": [...]}`. They are durable when the response comes.

    Query: `partition` stores all of them on that partition. `producer` and `sequence` make a retry of the same batch
    harmless; with them, `round_robin_start` (a number that counts up) says at which partition the distribution of
    records without a key starts, and `together=1` stores all of those on that partition.
    """
    body = await read_bytes(request)
    records = decode_records(body, media_type_of(request), now_ms())
    options = read_query(request, requests.Publish)
    return respond(await calls.publish(broker, topic, records, options, len(body)))


@router.get("/records")
async def inspect(
    topic: str, broker: Authorised, partition: Whole = 0, offset: Whole | None = None, limit: Count = 20
) -> Response:
    """Read records of a partition from an offset on (by default the newest), without being a member of a group."""
    where = Partition(topic, partition)
    if offset is None:
        offset = await newest_offset(broker.log, where, limit)
    batch = await broker.log.read(where, offset, max_records=limit)
    return Response(encode_batch(batch, JSON), media_type=JSON)


@router.get("/search")
async def find(
    topic: str,
    broker: Authorised,
    id: str | None = None,  # noqa: A002 the name of the field
    key: str | None = None,
    trace: str | None = None,
    tag: str | None = None,
    since: int | None = None,
    until: int | None = None,
    partition: Whole | None = None,
    limit: Count = 100,
) -> Response:
    """Find records by id, key, trace, tag and time (ms since 1970)."""
    found = await search(
        broker.log,
        topic,
        id=id,
        key=None if key is None else key.encode(),
        trace=trace,
        tag=tag,
        since=since,
        until=until,
        partition=partition,
        limit=limit,
    )
    return respond([json_record(hit.record, hit.partition, hit.offset) for hit in found])
