"""Membership over HTTP: what `GroupCoordinator` and `OwnerLog` ask of a broker. Any broker answers any of it."""

import asyncio
import contextlib
import re
import uuid
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import structs

from shardyard.groups import protocol
from shardyard.groups.broadcast import parent_group
from shardyard.groups.coordinator import JoinRequest, MemberIdentity
from shardyard.groups.protocol import MemberAssignment
from shardyard.model import (
    CommitBeyond,
    Fence,
    InvalidValue,
    NotAllowed,
    Partition,
    PartitionOutOfRange,
    Position,
    UnknownTopic,
    WrongEpoch,
)
from shardyard.model.batch import Batch
from shardyard.model.limits import Limits, check_topic_name
from shardyard.queues.broker import SETTINGS_SECONDS, Broker
from shardyard.queues.failures import Failure
from shardyard.queues.filtering import only_tagged, without_header
from shardyard.queues.retry_topics import ensure_retry_topics, original_topic, with_retry_topics
from shardyard.queues.settings import initial_config
from shardyard.registry import Snapshot
from shardyard.registry.change_signal import ChangeSignal
from shardyard.server.http import Authorised, Index, answer, authorised, queried, takes, told, wants_arrow
from shardyard.wire import records as wire
from shardyard.wire import requests
from shardyard.wire.headers import PUBLISHED
from shardyard.wire.settings import GroupSettings

router = APIRouter(prefix="/v1/groups/{group}", tags=["members"])

LONGEST_WAIT_SECONDS = 30.0
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MEMBER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@router.post("/members", status_code=201, openapi_extra=takes(requests.Join))
async def join(group: str, request: Request, broker: Authorised) -> Response:
    """Become a member. All that follows names the group, the member and the epoch of the answer."""
    asked = await told(request, requests.Join)
    check_group_name(group)
    name = asked.name or uuid.uuid4().hex[:12]
    if _MEMBER.fullmatch(name) is None:
        raise InvalidValue("member name", name, "1 to 200 letters, digits, '.', '_' and '-', not beginning with one")
    protocol.check_session(asked.session_timeout)
    settings = await broker.group_settings(group)
    _check_allowed(settings, group, name, request)
    named = None if asked.partitions is None else [wire.partition_named(text) for text in asked.partitions]
    topics = asked.topics
    await _check_there(broker, topics, named or ())
    shares = not settings.broadcast and asked.partitions is None
    if shares:
        topics = [check_topic_name(topic, Limits()) for topic in with_retry_topics(group, topics)]
    if shares:
        await ensure_retry_topics(broker.log, group, asked.topics)
    joining = JoinRequest(
        group,
        name,
        topics,
        asked.weight,
        asked.static,
        named,
        asked.session_timeout,
        asked.address,
        asked.metadata,
        asked.prepare_seconds,
        initial_config(settings),
    )
    seat = await broker.node.coordinator.join(joining, asked.since)
    heard = _for_members(settings)
    return answer({"group": seat.group, "member": seat.member, "epoch": seat.epoch, "settings": heard}, 201)


def check_group_name(group: str) -> None:
    if _NAME.fullmatch(group) is None:
        raise InvalidValue("group", group, "1 to 100 letters, digits, '_' and '-'")


async def _check_there(broker: Broker, topics: list[str], named: Iterable[Partition]) -> None:
    """Before anything is made for a member: what it asks for is there."""
    counts = {topic: (await broker.log.topic(topic)).partitions for topic in topics}
    for partition in named:
        if partition.topic not in counts:
            raise InvalidValue("partition", str(partition), "one of the topics that are named, too")
        if partition.index >= counts[partition.topic]:
            raise PartitionOutOfRange(partition, counts[partition.topic])


def _for_members(settings: GroupSettings) -> GroupSettings:
    """What concerns members; a webhook may have a secret in it."""
    return structs.replace(settings, webhook=None)


def _check_allowed(settings: GroupSettings, group: str, name: str, request: Request) -> None:
    if not settings.admits(name, request.client.host if request.client else ""):
        raise NotAllowed(group, name)


@router.post("/members/{member}/heartbeat", openapi_extra=takes(requests.Heartbeat))
async def heartbeat(group: str, member: str, request: Request, broker: Authorised) -> Response:
    """Stay a member, and hear what one owns and what is set."""
    asked = await told(request, requests.Heartbeat)
    settings = await broker.group_settings(parent_group(group))
    seat = MemberIdentity(group, member, asked.epoch)
    try:
        _check_allowed(settings, parent_group(group), member, request)
    except NotAllowed:
        await broker.node.coordinator.leave(seat)
        raise
    held = await broker.node.coordinator.heartbeat(seat, [wire.partition_named(text) for text in asked.progress])
    return answer({**_shown(held), "settings": _for_members(settings)})


@router.get("/members/{member}")
async def look(group: str, member: str, epoch: int, broker: Authorised) -> Response:
    """Hear what one owns."""
    return answer(_shown(await broker.node.coordinator.assignment(MemberIdentity(group, member, epoch))))


def _shown(assignment: MemberAssignment) -> dict[str, Any]:
    owned = {
        str(partition): {
            "epoch": grant.epoch,
            "committed": grant.committed and [grant.committed.epoch, grant.committed.offset],
            "revoked": grant.revoked,
        }
        for partition, grant in assignment.owned.items()
    }
    return {"partitions": owned, "incoming": sorted(map(str, assignment.incoming))}


@router.post("/members/{member}/ready", status_code=204, openapi_extra=takes(requests.Ready))
async def ready(group: str, member: str, request: Request, broker: Authorised) -> Response:
    """Incoming partitions are prepared: their owners may release them."""
    asked = await told(request, requests.Ready)
    partitions = [wire.partition_named(text) for text in asked.partitions]
    await broker.node.coordinator.ready(MemberIdentity(group, member, asked.epoch), partitions)
    return Response(status_code=204)


@router.post("/members/{member}/commit", status_code=204, openapi_extra=takes(requests.Commit))
async def commit(group: str, member: str, request: Request) -> Response:
    """Note how far one got; durable when it is answered. All of it or nothing."""
    broker = authorised(request)
    asked = await told(request, requests.Commit)
    positions = {
        wire.partition_named(text): (owned, Position(epoch, offset))
        for text, (owned, epoch, offset) in asked.positions.items()
    }
    for partition, (_, position) in positions.items():
        if not broker.has_read(partition, position):
            await _check_end(broker, partition, position)
    await broker.node.coordinator.commit(MemberIdentity(group, member, asked.epoch), positions)
    return Response(status_code=204)


async def _check_end(broker: Broker, partition: Partition, position: Position) -> None:
    with contextlib.suppress(UnknownTopic, PartitionOutOfRange):  # gone; so is its owner, soon
        span = await broker.log.span(partition)
        if position.epoch > span.epoch:
            raise WrongEpoch(partition, position.epoch, span.epoch)
        if position.epoch == span.epoch and position.offset > span.end:
            raise CommitBeyond(partition, position.offset, span.end)


@router.post("/members/{member}/release", status_code=204, openapi_extra=takes(requests.Release))
async def release(group: str, member: str, request: Request, broker: Authorised) -> Response:
    """Let go of partitions."""
    asked = await told(request, requests.Release)
    held = {wire.partition_named(text): epoch for text, epoch in asked.partitions.items()}
    await broker.node.coordinator.release(MemberIdentity(group, member, asked.epoch), held)
    return Response(status_code=204)


@router.post("/failures", openapi_extra=takes(requests.Failures))
async def failed(group: str, request: Request, broker: Authorised) -> Response:
    """Records whose handling failed are tried again later, or are dead. Once it is answered, commit behind them."""
    asked = await told(request, requests.Failures)
    settings = await broker.group_settings(parent_group(group))
    failures = [Failure(wire.partition_named(f.partition), f.epoch, f.offset, f.reason) for f in asked.failures]
    for failure in failures:
        await broker.check_owner(group, failure.partition, failure.epoch)
    read = await broker.node.transactions.read(
        lambda tx: {t for m in tx.members(group) if m.manual is None for t in m.topics}
    )
    outcomes = await broker.failures.handle(group, settings, failures, read)
    return answer({"outcomes": outcomes})


@router.delete("/members/{member}", status_code=204)
async def leave(group: str, member: str, epoch: int, broker: Authorised) -> Response:
    """Go, giving up everything."""
    await broker.node.coordinator.leave(MemberIdentity(group, member, epoch))
    return Response(status_code=204)


@router.get("/changes")
async def changes(group: str, request: Request, broker: Authorised) -> Response:
    """Wait until the group is another than the one that was seen.

    Query: `seen`, the version of an earlier answer, and `wait_seconds` (at most 30).
    """
    asked = queried(request, requests.Changes)
    seen = asked.seen
    until = broker.clock.monotonic() + min(asked.wait_seconds, LONGEST_WAIT_SECONDS)
    with ChangeSignal(broker.registry, protocol.watch_name(group), broker.clock) as waking:
        while True:
            version = await broker.node.transactions.read(lambda tx: _version(tx, group))
            left = until - broker.clock.monotonic()
            if version != seen or left <= 0 or broker.closing.is_set():
                return answer({"version": version})
            await _first(broker.closing.wait(), waking.wait(left))


def _version(tx: Snapshot, group: str) -> str:
    row = tx.group(group)
    return "" if row is None else f"{row.epoch}.{row.inputs}.{row.assigned}.{row.shape}"


# What an owner reads


@router.post("/partitions/{topic}/{index}/fence", status_code=204, openapi_extra=takes(requests.Fence))
async def fence(group: str, topic: str, index: Index, request: Request, broker: Authorised) -> Response:
    """From now on no earlier owner reads."""
    asked = await told(request, requests.Fence)
    await broker.check_owner(group, Partition(topic, index), asked.epoch)
    await broker.log.set_fence(Fence(_fence_name(group, topic, index), asked.epoch))
    return Response(status_code=204)


@router.get("/partitions/{topic}/{index}/records")
async def read(group: str, topic: str, index: Index, request: Request) -> Response:
    """Read on as the owner of a partition, waiting for records if there are none.

    Query: `offset` to read from, `owner` (the epoch of the ownership), `epoch` (of the partition), `wait_seconds` (at
    most 30), `max_records`, `max_bytes`. Paused partitions have none, and only records with the group's tags are given.
    """
    broker = authorised(request)
    asked = queried(request, requests.Read)
    partition = Partition(topic, index)
    await broker.check_owner(group, partition, asked.owner)
    reading = _Reading(broker, group, partition, asked.owner, asked.epoch, asked.max_records, asked.max_bytes)
    batch = await reading.next(asked.offset, min(asked.wait_seconds, LONGEST_WAIT_SECONDS))
    broker.note_read(partition, Position(batch.epoch, batch.end))
    media = wire.ARROW if wants_arrow(request) else wire.JSON
    return Response(wire.encoded_batch(batch, media), media_type=media)


class _Reading:
    """One request to read, which may wait while settings change."""

    def __init__(
        self,
        broker: Broker,
        group: str,
        partition: Partition,
        owner: int,
        epoch: int | None,
        max_records: int,
        max_bytes: int,
    ) -> None:
        self._broker = broker
        self._group = parent_group(group)
        self._partition = partition
        self._epoch = epoch
        self._fence = Fence(_fence_name(group, partition.topic, partition.index), owner)
        self._max = (max_records, max_bytes)

    async def next(self, offset: int, wait: float) -> Batch:
        until = self._broker.clock.monotonic() + wait
        while True:
            settings = await self._broker.group_settings(self._group)
            left = until - self._broker.clock.monotonic()
            step = min(max(left, 0.0), SETTINGS_SECONDS)
            paused = settings.is_paused(self._partition)
            batch = await self._read(offset, 0.0 if paused else step, 1 if paused else settings.max_records)
            settings = await self._broker.group_settings(self._group)  # they may have changed while it waited
            if len(batch) and not settings.is_paused(self._partition):
                return self._handed_out(only_tagged(batch, settings.tags) if settings.tags else batch)
            if left <= 0 or self._broker.closing.is_set():
                return batch.emptied()
            if paused:
                await _first(self._broker.closing.wait(), asyncio.sleep(step))

    def _handed_out(self, batch: Batch) -> Batch:
        """Without the time of publishing that a record which is tried again bears: it is kept for when it dies."""
        is_retry = original_topic(self._group, batch.partition.topic) != batch.partition.topic
        return without_header(batch, PUBLISHED) if is_retry else batch

    async def _read(self, offset: int, wait: float, most: int) -> Batch:
        max_records, max_bytes = self._max
        return await self._broker.log.read(
            self._partition,
            offset,
            epoch=self._epoch,
            max_records=min(max_records, most),
            max_bytes=max_bytes,
            wait=wait,
            fence=self._fence,
        )


def _fence_name(group: str, topic: str, index: int) -> str:
    return f"{group}/{topic}/{index}"


async def _first(*works: Any) -> None:
    """Until the first of them is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
