"""Topics over HTTP: make, describe, resize, set, delete."""

import contextlib
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, structs

from shardyard.model import Partition, Retention, Topic, TopicInUse, UnknownTopic
from shardyard.queues import cascade_delete
from shardyard.queues.broker import Broker
from shardyard.queues.draining import draining_partitions
from shardyard.queues.partition_spans import spans
from shardyard.queues.settings import change_topic, check_topic, delete_settings, topic_scope
from shardyard.queues.topic_readers import topic_readers, with_predecessors
from shardyard.registry import Transaction
from shardyard.server.http import Authorised, Index, answer, caller, takes, told
from shardyard.wire import requests

router = APIRouter(prefix="/v1/topics", tags=["topics"])


def shown(topic: Topic) -> dict[str, Any]:
    """A topic as JSON."""
    return {
        "name": topic.name,
        "partitions": topic.partitions,
        "receiving": topic.receiving,
        "kind": str(topic.kind),
        "partitioner": topic.partitioner,
        "hash": topic.hash,
        "retention_ms": topic.retention.age_ms,
        "retention_bytes": topic.retention.bytes_per_partition,
        "epoch": topic.epoch,
        "sealed": topic.sealed,
        "successor": topic.successor,
    }


@router.get("")
async def list_topics(broker: Authorised) -> Response:
    """All topics."""
    return answer([shown(topic) for topic in await broker.log.topics()])


@router.post("", status_code=201, openapi_extra=takes(requests.NewTopic))
async def create_topic(request: Request, broker: Authorised) -> Response:
    """Make a topic."""
    asked = await told(request, requests.NewTopic)
    retention = Retention(asked.retention_ms, asked.retention_bytes)
    topic = await broker.log.create_topic(
        asked.name, asked.partitions, retention=retention, partitioner=asked.partitioner, hash_=asked.hash
    )
    await _audit(broker, caller(request), "topic created", topic.name, {"partitions": topic.partitions})
    return answer(shown(topic), 201)


@router.get("/{name}")
async def describe_topic(name: str, broker: Authorised) -> Response:
    """A topic, what is in its partitions, and what is set about it.

    `closing`: its partitions that take no more records, each with the groups that are waited for before it goes.
    """
    topic = await broker.log.topic(name)
    found = await spans(broker.log, topic)
    settings = await broker.topic_settings(name)
    return answer(
        {
            **await _resized(broker, topic),
            "token": settings.token_hash is not None,
            "records_per_second": settings.records_per_second,
            "spans": [{"first": span.first, "end": span.end} for span in found.values()],
        }
    )


async def _resized(broker: Broker, topic: Topic) -> dict[str, Any]:
    """A topic as JSON, with its closing partitions."""
    if topic.open_partitions is None:
        return {**shown(topic), "closing": []}
    readers = await broker.node.transactions.read(topic_readers)
    return {**shown(topic), "closing": await draining_partitions(broker.log, readers, topic)}


@router.get("/{name}/partitions/{index}")
async def describe_partition(name: str, index: Index, broker: Authorised) -> Response:
    """Which offsets a partition holds."""
    span = await broker.log.span(Partition(name, index))
    return answer({"epoch": span.epoch, "first": span.first, "end": span.end})


@router.post("/{name}/expand", openapi_extra=takes(requests.Resize))
async def expand_topic(name: str, request: Request, broker: Authorised) -> Response:
    """Raise the number of partitions."""
    topic = await broker.log.expand_topic(name, (await told(request, requests.Resize)).partitions)
    await _audit(broker, caller(request), "topic expanded", name, {"partitions": topic.receiving})
    return answer(await _resized(broker, topic))


@router.post("/{name}/contract", openapi_extra=takes(requests.Resize))
async def contract_topic(name: str, request: Request, broker: Authorised) -> Response:
    """Lower the number of partitions: those beyond take no more records, and go when every group that reads the topic
    is done with them. `closing` of the answer names them, each with the groups that are waited for."""
    topic = await broker.log.contract_topic(name, (await told(request, requests.Resize)).partitions)
    await _audit(broker, caller(request), "topic contracted", name, {"partitions": topic.receiving})
    return answer(await _resized(broker, topic))


@router.patch("/{name}", openapi_extra=takes(requests.TopicChanges))
async def set_topic(name: str, request: Request, broker: Authorised) -> Response:
    """Change settings; those that are not named stay, and null takes one away."""
    topic = await broker.log.topic(name)
    asked = structs.asdict(await told(request, requests.TopicChanges))
    changes = {setting: value for setting, value in asked.items() if value is not UNSET}
    kept = topic.retention
    limits: dict[str, Any] = {of: changes.pop(of) for of in ("retention_ms", "retention_bytes") if of in changes}
    retention = Retention(
        limits.get("retention_ms", kept.age_ms), limits.get("retention_bytes", kept.bytes_per_partition)
    )
    check_topic(changes)  # before anything is changed
    if retention != kept:
        await broker.log.set_retention(name, retention)
    if changes or retention != kept:
        await broker.node.transactions.run(lambda tx: change_topic(tx, name, caller(request), changes, limits))
        broker.forget_settings()
    return await describe_topic(name, broker)


@router.delete("/{name}")
async def delete_topic(name: str, request: Request, broker: Authorised, force: bool = False) -> Response:
    """Delete a topic with its records; not while somebody subscribes to it, unless by force.

    The retry and dead-letter topics that groups have beside it go with it. Those with dead letters are kept, unless by
    force.
    """
    topic = await broker.log.topic(name)
    names = with_predecessors(name, await broker.log.topics())
    readers = await broker.node.transactions.read(topic_readers)
    if not force and (groups := readers.subscribed_groups(names)):
        raise TopicInUse(name, groups)
    left = await cascade_delete.companions_of_topic(broker.log, readers, topic, force=force)
    who = caller(request)
    await delete_topics(broker, left.deleted, who, {"with": f"topic {name}"})  # first, so that it can be done again
    await broker.log.delete_topic(name)
    await _deleted(broker, name, who, {"force": force})
    return answer({"topic": name, "also_deleted": left.deleted, "kept": left.kept})


async def delete_topics(broker: Broker, names: Sequence[str], who: str, detail: object) -> None:
    """Delete these, as far as they are still there."""
    for name in names:
        with contextlib.suppress(UnknownTopic):
            await broker.log.delete_topic(name)
            await _deleted(broker, name, who, detail)


async def _deleted(broker: Broker, name: str, who: str, detail: object) -> None:
    def note(tx: Transaction) -> None:
        delete_settings(tx, topic_scope(name))
        tx.audit(who, "topic deleted", name, detail)

    await broker.node.transactions.run(note)
    broker.forget_settings()


async def _audit(broker: Broker, who: str, action: str, subject: str, detail: object) -> None:
    await broker.node.transactions.run(lambda tx: tx.audit(who, action, subject, detail))
