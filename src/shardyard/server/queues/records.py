"""Records over HTTP: publish, inspect, search."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from shardyard.groups.fence import ownership_fence
from shardyard.model import Fence, InvalidValue, Partition, Stamp
from shardyard.queues.broker import Broker
from shardyard.queues.read_at import newest_offset
from shardyard.queues.search import search
from shardyard.runtime.clock import now_ms
from shardyard.runtime.metrics import PUBLISHED_BYTES, PUBLISHED_RECORDS
from shardyard.server.auth import Authorised, AuthorisedPublisher
from shardyard.server.http import media_type_of, read_bytes, read_query, request_body, respond
from shardyard.server.routing import data_plane
from shardyard.wire import requests, responses
from shardyard.wire.batches import encode_batch
from shardyard.wire.codec import parse_partition
from shardyard.wire.media import JSON, MEDIA_TYPES
from shardyard.wire.records import JsonRecord, decode_records, json_record

router = APIRouter(prefix="/v1/topics/{topic}", tags=["records"])

Whole = Annotated[int, Query(ge=0, lt=2**63)]
Count = Annotated[int, Query(ge=1, le=10_000)]


@router.post("/records", openapi_extra=request_body(JsonRecord, media=MEDIA_TYPES))
@data_plane
async def publish(topic: str, request: Request, broker: AuthorisedPublisher) -> Response:
    """Publish one record, or several as `{"records": [...]}`. They are durable when the response comes.

    Query: `partition` stores all of them on that partition. `producer` and `sequence` make a retry of the same batch
    harmless; with them, `round_robin_start` (a number that counts up) says at which partition the distribution of
    records without a key starts, and `together=1` stores all of those on that partition.
    """
    body = await read_bytes(request)
    records = decode_records(body, media_type_of(request), now_ms())
    query = read_query(request, requests.Publish)
    stamp = _stamp(query)
    broker.take_quota(topic, len(records), await broker.topic_settings(topic))
    stored = await broker.publisher.publish(
        topic,
        records,
        partition=query.partition,
        stamp=stamp,
        fence=await _fence(query, broker),
        round_robin_start=query.round_robin_start,
        together=bool(query.together),
    )
    PUBLISHED_RECORDS.add(len(records))
    PUBLISHED_BYTES.add(len(body))
    delayed = len(records) - sum(part.count for part in stored)
    return respond(responses.Published([responses.Stored.of(part) for part in stored], delayed))


def _stamp(query: requests.Publish) -> Stamp | None:
    if query.producer is None and query.sequence is None:
        return None
    if query.producer is None or query.sequence is None:
        raise InvalidValue("producer", query.producer, "both producer and sequence, or neither of them")
    return Stamp(query.producer, query.sequence)


async def _fence(query: requests.Publish, broker: Broker) -> Fence | None:
    """The ownership that the publisher relies on, if it is current."""
    if query.fence is None:
        return None
    if query.owner is None:
        raise InvalidValue("owner", query.owner, "the epoch of the ownership")
    group, _, name = query.fence.partition("/")
    partition = parse_partition(name)
    await broker.check_owner(group, partition, query.owner)
    return ownership_fence(group, partition, query.owner)


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
