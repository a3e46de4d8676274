"""Records over HTTP: publish, look at, search."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from shardyard.model import Appended, Fence, InvalidValue, Partition, Stamp, WrongToken
from shardyard.model.batch import now_ms
from shardyard.queues.broker import Broker
from shardyard.queues.search import search
from shardyard.server.http import Authorised, answer, body_of, broker_of, media_of, takes, token_of
from shardyard.wire import records as wire

router = APIRouter(prefix="/v1/topics/{topic}", tags=["records"])

_WHOLE = re.compile(r"[0-9]{1,18}")

Whole = Annotated[int, Query(ge=0, lt=2**63)]
Count = Annotated[int, Query(ge=1, le=10_000)]


@router.post("/records", openapi_extra=takes(wire.JsonRecord, media=wire.MEDIA))
async def publish(topic: str, request: Request) -> Response:
    """Publish one record, or several as `{"records": [...]}`; answered when they are durable.

    Query: `partition` pins them to one; `producer` and `sequence` make a retry of the same batch harmless; with
    them, `turn` (a number that counts up) says at which partition the distribution of records without a key starts, and
    `together=1` that all of them go there.
    """
    broker = broker_of(request)
    settings = await broker.topic_settings(topic)
    token = token_of(request)
    if not settings.admits(token) or (settings.token_hash is None and not broker.admits(token)):
        raise WrongToken(f"topic {topic!r}" if settings.token_hash is not None else "this broker")
    posted = wire.posted_records(await body_of(request), media_of(request), now_ms())
    partition, stamp = _options(request)
    broker.take_quota(topic, len(posted), settings)
    fence = await _fence(request, broker)
    dealing: Any = {"turn": _whole(request, "turn"), "together": bool(_whole(request, "together"))}
    stored = await broker.publisher.publish(topic, posted, partition=partition, stamp=stamp, fence=fence, **dealing)
    return answer({"stored": [_shown(part) for part in stored], "delayed": len(posted) - sum(p.count for p in stored)})


def _options(request: Request) -> tuple[int | None, Stamp | None]:
    """The partition and the stamp, where the query names them."""
    producer, sequence = request.query_params.get("producer"), _whole(request, "sequence")
    if (producer is None) != (sequence is None):
        raise InvalidValue("producer", producer, "both producer and sequence, or none of them")
    stamp = Stamp(producer, sequence) if producer is not None and sequence is not None else None
    return _whole(request, "partition"), stamp


def _whole(request: Request, name: str) -> int | None:
    """A whole number, where the query names one."""
    text = request.query_params.get(name)
    if text is not None and not _WHOLE.fullmatch(text):
        raise InvalidValue(name, text, "a whole number of at least 0")
    return None if text is None else int(text)


async def _fence(request: Request, broker: Broker) -> Fence | None:
    """The ownership that an owner who publishes relies on."""
    name, owner = request.query_params.get("fence"), request.query_params.get("owner")
    if name is None:
        return None
    if owner is None or not _WHOLE.fullmatch(owner):
        raise InvalidValue("owner", owner, "the epoch of the ownership")
    group, _, partition = name.partition("/")
    await broker.check_owner(group, wire.partition_named(partition), int(owner))
    return Fence(name, int(owner))


def _shown(part: Appended) -> dict[str, Any]:
    return {
        "topic": part.partition.topic,
        "partition": part.partition.index,
        "epoch": part.first.epoch,
        "offset": part.first.offset,
        "count": part.count,
        "duplicate": part.duplicate,
    }


@router.get("/records")
async def look(
    topic: str, broker: Authorised, partition: Whole = 0, offset: Whole | None = None, limit: Count = 20
) -> Response:
    """Look at records of a partition from an offset on (by default the newest), without being a member of anything."""
    place = Partition(topic, partition)
    span = await broker.log.span(place)
    if offset is None:
        offset = max(span.first, span.end - limit)
    batch = await broker.log.read(place, offset, max_records=limit)
    return Response(wire.encoded_batch(batch, wire.JSON), media_type=wire.JSON)


@router.get("/search")
async def find(
    topic: str,
    broker: Authorised,
    id: str | None = None,  # noqa: A002 it is what people search for
    key: str | None = None,
    trace: str | None = None,
    tag: str | None = None,
    since: int | None = None,
    until: int | None = None,
    partition: Whole | None = None,
    limit: Count = 100,
) -> Response:
    """Records by id, key, trace, tag and time (ms since 1970)."""
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
    return answer([wire.json_record(hit.record, hit.partition, hit.offset) for hit in found])
