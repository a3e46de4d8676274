"""Topics over HTTP: create, describe, resize, configure, delete."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, structs

from shardyard.model import Partition, Retention, Topic, TopicInUse, UnknownTopic
from shardyard.queues import cascade_delete
from shardyard.queues.broker import Broker
from shardyard.queues.draining import draining_partitions
from shardyard.queues.lineage import lineage, moves_of, with_protectors
from shardyard.queues.partition_spans import spans
from shardyard.queues.reserved_topics import check_can_be_deleted, check_can_be_set, check_not_reserved
from shardyard.queues.settings import (
    change_topic,
    check_topic,
    check_topic_token,
    delete_settings,
    hand_over_token,
    topic_scope,
)
from shardyard.queues.topic_readers import topic_readers, with_predecessors
from shardyard.registry import Snapshot, Transaction
from shardyard.server.auth import Authorised, token_of
from shardyard.server.http import Index, caller_of, read_body, request_body, respond
from shardyard.server.routing import StrictRoute
from shardyard.wire import requests, responses

router = APIRouter(prefix="/v1/topics", tags=["topics"], route_class=StrictRoute)


@router.get("")
async def list_topics(broker: Authorised) -> Response:
    """All topics."""
    return respond([responses.TopicInfo.of(topic) for topic in await broker.log.topics()])


@router.post("", status_code=201, openapi_extra=request_body(requests.NewTopic))
async def create_topic(request: Request, broker: Authorised) -> Response:
    """Create a topic. Names that Shardyard needs for topics of its own are refused: those that begin with `shardyard.`,
    or end with `.retry` or `.dead`, and `events`, `fanout`, `inbox`, `members` and `presence`."""
    body = await read_body(request, requests.NewTopic)
    check_not_reserved(body.name)
    await _finish_deletion(broker, body.name, caller_of(request))
    retention = Retention(body.retention_ms, body.retention_bytes)
    topic = await broker.log.create_topic(
        body.name, body.partitions, retention=retention, partitioner=body.partitioner, hash_=body.hash
    )
    await _audit(broker, caller_of(request), "topic created", topic.name, {"partitions": topic.partitions})
    return respond(responses.TopicInfo.of(topic), 201)


@router.get("/{name}")
async def describe_topic(name: str, broker: Authorised, brief: bool = False) -> Response:
    """A topic with its settings and what its partitions hold. `brief`: only what its producers and consumers need.

    `draining`: its draining partitions, which take no more records, each with the groups that have to read it first.
    """
    topic = await broker.log.topic(name)
    if brief:
        return respond(responses.TopicInfo.of(topic))
    found = await spans(broker.log, topic)
    settings = await broker.settings.topic(name)
    return respond(
        responses.TopicDescription.of(
            topic,
            draining=await _draining(broker, topic),
            token=settings.token_hash is not None,
            records_per_second=settings.records_per_second,
            spans=[responses.OffsetRange(span.first, span.end) for span in found.values()],
        )
    )


async def _resized(broker: Broker, topic: Topic) -> Response:
    return respond(responses.ResizedTopic.of(topic, draining=await _draining(broker, topic)))


async def _draining(broker: Broker, topic: Topic) -> list[responses.DrainingPartition]:
    if topic.open_partitions is None:
        return []
    readers = await broker.node.transactions.read(topic_readers)
    return [
        responses.DrainingPartition(row.partition, row.records, row.waiting_for, row.drained)
        for row in await draining_partitions(broker.log, readers, topic)
    ]


@router.get("/{name}/partitions/{index}")
async def describe_partition(name: str, index: Index, broker: Authorised) -> Response:
    """The offsets that a partition holds."""
    return respond(responses.PartitionSpan.of(await broker.log.span(Partition(name, index))))


@router.post("/{name}/expand", openapi_extra=request_body(requests.Resize))
async def expand_topic(name: str, request: Request, broker: Authorised) -> Response:
    """Raise the number of partitions."""
    await _require_ours(broker, name, request)
    topic = await broker.log.expand_topic(name, (await read_body(request, requests.Resize)).partitions)
    await _audit(broker, caller_of(request), "topic expanded", name, {"partitions": topic.receiving})
    return await _resized(broker, topic)


@router.post("/{name}/contract", openapi_extra=request_body(requests.Resize))
async def contract_topic(name: str, request: Request, broker: Authorised) -> Response:
    """Lower the number of partitions. The others are drained: they take no more records, and are dropped once every
    group that reads the topic has read them. `draining` in the response lists them, each with the groups that have not.
    """
    await _require_ours(broker, name, request)
    topic = await broker.log.contract_topic(name, (await read_body(request, requests.Resize)).partitions)
    await _audit(broker, caller_of(request), "topic contracted", name, {"partitions": topic.receiving})
    return await _resized(broker, topic)


@router.patch("/{name}", openapi_extra=request_body(requests.TopicChanges))
async def set_topic(name: str, request: Request, broker: Authorised) -> Response:
    """Change settings. Those that are not named stay as they are; null removes one.

    If the topic has a token, this takes that token, or the broker's.
    """
    topic = await broker.log.topic(name)
    body = structs.asdict(await read_body(request, requests.TopicChanges))
    changes = {setting: value for setting, value in body.items() if value is not UNSET}
    moves = moves_of(await broker.log.topics())
    check_can_be_set(name, lineage(name, moves), changes)
    current = topic.retention
    limits: dict[str, Any] = {of: changes.pop(of) for of in ("retention_ms", "retention_bytes") if of in changes}
    retention = Retention(
        limits.get("retention_ms", current.age_ms), limits.get("retention_bytes", current.bytes_per_partition)
    )
    check_topic(changes)  # before anything is changed

    def change(tx: Transaction) -> None:
        check_shown_token(tx, broker, name, moves, request)
        change_topic(tx, name, caller_of(request), changes, limits)

    await require_token(broker, name, moves, request)
    if retention != current:
        await broker.log.set_retention(name, retention)
    if changes or retention != current:
        await broker.node.transactions.run(change)
        broker.settings.forget()
    return await describe_topic(name, broker)


@router.delete("/{name}")
async def delete_topic(name: str, request: Request, broker: Authorised, force: bool = False) -> Response:
    """Delete a topic with its records. While it has subscribers, this takes `force`. If it has a token, this takes that
    token, or the broker's.

    Its companion topics, where groups keep retries and dead letters, are deleted too. Those with dead letters are kept,
    unless by `force`, and so is their protection by the token. A deletion that a crash interrupted can be repeated.
    """
    topics = await broker.log.topics()
    moves = moves_of(topics)
    names = lineage(name, moves)
    check_can_be_deleted(name, names)
    who = caller_of(request)
    if await _finish_deletion(broker, name, who):
        return respond(responses.TopicDeleted(name, [], []))
    await require_token(broker, name, moves, request)
    topic = await broker.log.topic(name)
    readers = await broker.node.transactions.read(topic_readers)
    if not force and (groups := readers.subscribed_groups(with_predecessors(name, topics))):
        raise TopicInUse(name, groups)
    companions = await cascade_delete.companions_of_topic(broker.log, readers, topic, force=force)
    # Companions first: if this fails halfway, it can be repeated.
    await delete_topics(broker, companions.deleted, who, {"with": f"topic {name}"})
    heirs = [each.name for each in topics if each.name == topic.successor] + [kept.topic for kept in companions.kept]
    if heirs:
        await broker.node.transactions.run(lambda tx: hand_over_token(tx, name, heirs, names, who))
    await broker.log.delete_topic(name)
    await _forget(broker, name, who, {"force": force})
    return respond(responses.TopicDeleted(name, list(companions.deleted), kept_topics(companions.kept)))


async def _require_ours(broker: Broker, name: str, request: Request) -> None:
    """Refuse a topic of Shardyard's own, and one with a token that the caller has not shown."""
    moves = moves_of(await broker.log.topics())
    check_not_reserved(name, lineage(name, moves))
    await require_token(broker, name, moves, request)


async def require_token(broker: Broker, name: str, moves: Mapping[str, str], request: Request) -> None:
    """`WrongToken` as by `check_shown_token`."""
    await broker.node.transactions.read(lambda tx: check_shown_token(tx, broker, name, moves, request))


def check_shown_token(tx: Snapshot, broker: Broker, name: str, moves: Mapping[str, str], request: Request) -> None:
    """`WrongToken` if the topic has a token, and the caller has shown neither that one nor the broker's."""
    if not broker.has_token:  # otherwise the caller has shown that one
        check_topic_token(tx, name, with_protectors(name, moves), token_of(request.headers))


async def delete_topics(broker: Broker, names: Sequence[str], who: str, detail: object) -> None:
    """Delete those of the topics that still exist."""
    for name in names:
        with contextlib.suppress(UnknownTopic):
            await broker.log.delete_topic(name)
            await _forget(broker, name, who, detail)


def kept_topics(kept: Iterable[cascade_delete.KeptTopic]) -> list[responses.KeptTopic]:
    return [responses.KeptTopic(topic.topic, topic.records, topic.because) for topic in kept]


async def _finish_deletion(broker: Broker, name: str, who: str) -> bool:
    """If the topic is gone and its settings are not, because its deletion was interrupted, delete these: they would
    apply to a new topic of that name. Returns whether there were any."""
    left = await broker.node.transactions.read(lambda tx: tx.settings(topic_scope(name)))
    if not left:
        return False
    with contextlib.suppress(UnknownTopic):
        await broker.log.topic(name)
        return False

    def work(tx: Transaction) -> bool:
        if tx.settings(topic_scope(name)) != left:  # they were changed by another call: a new topic exists by now
            return False
        _delete(tx, name, who, {"interrupted": True})
        return True

    finished = await broker.node.transactions.run(work)
    broker.settings.forget()
    return finished


async def _forget(broker: Broker, name: str, who: str, detail: object) -> None:
    """Delete the settings of a topic that was deleted, and audit it."""
    await broker.node.transactions.run(lambda tx: _delete(tx, name, who, detail))
    broker.settings.forget()


def _delete(tx: Transaction, name: str, who: str, detail: object) -> None:
    delete_settings(tx, topic_scope(name))
    tx.audit(who, "topic deleted", name, detail)


async def _audit(broker: Broker, who: str, action: str, subject: str, detail: object) -> None:
    await broker.node.transactions.run(lambda tx: tx.audit(who, action, subject, detail))
