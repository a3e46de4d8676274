"""Groups over HTTP: partitions and their owners, settings, resets, dead letters, audit log."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from shardyard.groups import PartitionStatus, ResetTarget, reset, resolve_positions, status
from shardyard.groups.broadcast import groups_of, is_member_group, parent_group
from shardyard.model import GroupInUse, InvalidCall, Partition, Position, UnknownGroup
from shardyard.queues import cascade_delete
from shardyard.queues.broker import Broker
from shardyard.queues.dead_letters import find_dead_topic, list_dead_letters
from shardyard.queues.dropped_unread import dropped_unread
from shardyard.queues.lineage import moves_of
from shardyard.queues.redrive import redrive as redrive_letters
from shardyard.queues.retry_topics import dead_topic, home_topic, retry_topic
from shardyard.queues.settings import change_group, delete_settings, group_scope, group_settings, is_joined
from shardyard.queues.topic_readers import topic_readers
from shardyard.registry import MemberRow, Snapshot, Transaction
from shardyard.server.auth import Authorised
from shardyard.server.http import caller_of, read_body, request_body, respond
from shardyard.server.queues.members import check_group_name
from shardyard.server.queues.topics import check_shown_token, delete_topics, kept_topics, require_token
from shardyard.server.routing import StrictRoute
from shardyard.wire import requests, responses
from shardyard.wire.records import json_record
from shardyard.wire.settings import GroupSettings

router = APIRouter(prefix="/v1", tags=["groups"], route_class=StrictRoute)

Limit = Annotated[int, Query(ge=1, le=10_000)]
Number = Annotated[int, Query(ge=0, lt=2**63)]


@router.get("/groups")
async def list_groups(broker: Authorised) -> Response:
    """All groups, with the number of their members and their lag."""
    rows = []
    for name, members in (await broker.node.transactions.read(_members_by_group)).items():
        statuses = [await _status(broker, part) for part in await _parts(broker, name)]
        lag = sum(row.lag for partitions in statuses for row in partitions)
        rows.append(responses.GroupSummary(name, members, lag))
    return respond(rows)


def _members_by_group(tx: Snapshot) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in tx.groups():
        found[parent_group(row.name)] = found.get(parent_group(row.name), 0) + len(tx.members(row.name))
    return found


@router.get("/groups/{group}")
async def show_group(group: str, broker: Authorised) -> Response:
    """A group: its partitions with owner, epoch, committed, end and lag; its members; its settings.

    `joined`: whether it ever had a member; settings can be made before.
    """
    parts = await _parts(broker, group)
    if not parts:
        raise UnknownGroup(group)
    dropped = await broker.node.transactions.read(lambda tx: {part: dropped_unread(tx, part) for part in parts})
    rows = [_partition(part, row, dropped[part]) for part in parts for row in await _status(broker, part)]
    members, joined = await broker.node.transactions.read(
        lambda tx: ([m for part in parts for m in tx.members(part)], is_joined(tx, group))
    )
    owners = {row.owner for row in rows}
    settings = responses.ReportedSettings.of(await broker.settings.group(group))
    shown = [_member(member, standby=member.name not in owners) for member in members]
    return respond(responses.GroupDescription(group, joined, rows, shown, settings))


async def _parts(broker: Broker, group: str) -> list[str]:
    """The group itself, or the groups of the members of a broadcast group."""
    return await broker.node.transactions.read(lambda tx: groups_of(tx, group))


async def _status(broker: Broker, group: str) -> list[PartitionStatus]:
    try:
        return await status(broker.log, broker.registry, group)
    except UnknownGroup:  # it was deleted in the meantime
        return []


def _partition(group: str, row: PartitionStatus, dropped: Mapping[str, int]) -> responses.PartitionInfo:
    return responses.PartitionInfo(
        group=group,
        topic=row.partition.topic,
        partition=row.partition.index,
        owner=row.owner,
        next_owner=row.target,
        epoch=row.epoch,
        committed=row.committed,
        end=row.end,
        lag=row.lag,
        stuck_for=round(row.stuck_for, 3) if row.lag else 0.0,
        dropped_unread=dropped.get(str(row.partition), 0),
    )


def _member(member: MemberRow, *, standby: bool) -> responses.MemberInfo:
    return responses.MemberInfo(
        group=member.group,
        member=member.name,
        topics=list(member.topics),
        weight=member.weight,
        static=member.static,
        session_timeout=member.session_timeout,
        standby=standby,
    )


@router.patch("/groups/{group}", openapi_extra=request_body(GroupSettings))
async def set_group(group: str, request: Request, broker: Authorised) -> Response:
    """Change settings. Those that are not named stay as they are. They take effect at once, for all members."""
    check_group_name(group)
    changes = await read_body(request, dict[str, Any])
    settings = await broker.node.transactions.run(lambda tx: change_group(tx, group, caller_of(request), changes))
    broker.settings.forget()
    return respond(responses.ReportedSettings.of(settings))


@router.delete("/groups/{group}")
async def delete_group(group: str, request: Request, broker: Authorised, force: bool = False) -> Response:
    """Delete a group that has no members, with its positions and settings.

    Its retry and dead-letter topics are deleted too. Those with records that wait for a retry, or with dead letters,
    are kept, unless by `force`; a second request with `force` deletes them.

    If one that is to be deleted belongs to a topic that has a token, this takes that token, or the broker's; otherwise
    nothing is deleted.
    """
    readers = await broker.node.transactions.read(topic_readers)
    companions = await cascade_delete.companions_of_group(broker.log, readers, group, force=force)
    who = caller_of(request)
    has_topics = bool(companions.deleted or companions.kept)
    moves = moves_of(await broker.log.topics())

    def delete(tx: Transaction) -> None:
        for topic in companions.deleted:  # before anything is changed
            check_shown_token(tx, broker, topic, moves, request)
        _delete(tx, group, who, has_topics=has_topics)

    await broker.node.transactions.run(delete)
    broker.settings.forget()
    now = await broker.node.transactions.read(topic_readers)  # a member may have joined in the meantime
    deleted = [topic for topic in companions.deleted if not now.subscribed_groups([topic])]
    await delete_topics(broker, deleted, who, {"with": f"group {group}"})
    return respond(responses.GroupDeleted(group, deleted, kept_topics(companions.kept)))


def _delete(tx: Transaction, group: str, who: str, *, has_topics: bool) -> None:
    """`has_topics`: companion topics exist, perhaps of a group that was deleted before."""
    parts = groups_of(tx, group)
    if not parts and has_topics:
        return
    if not parts:
        raise UnknownGroup(group)
    for member in (member for part in parts for member in tx.members(part)):
        raise GroupInUse(group, member.name)
    for part in parts:
        tx.delete_group(part)
        delete_settings(tx, group_scope(part))
    delete_settings(tx, group_scope(group))
    tx.audit(who, "group deleted", group)


@router.post("/groups/{group}/reset", openapi_extra=request_body(requests.Reset))
async def reset_group(group: str, request: Request, broker: Authorised) -> Response:
    """Let the group continue elsewhere. Its members keep running."""
    body = await read_body(request, requests.Reset)
    target = ResetTarget(body.to, body.value)
    positions = await resolve_positions(broker.log, body.topic, body.partitions, target)
    await broker.node.transactions.run(lambda tx: _reset(tx, group, positions, caller_of(request)))
    offsets: responses.ResetOffsets = {str(partition): position.offset for partition, position in positions.items()}
    return respond(offsets)


def _reset(tx: Transaction, group: str, positions: dict[Partition, Position], who: str) -> None:
    """Reset the positions of the group, or of all members of a broadcast group."""
    parts = [group]
    if group_settings(tx, group).broadcast:
        parts = [part for part in groups_of(tx, group) if is_member_group(part)]
    if not parts:
        raise UnknownGroup(group)
    for part in parts:
        reset(tx, part, positions, who)


@router.get("/groups/{group}/dead")
async def show_dead_letters(group: str, topic: str, broker: Authorised, limit: Limit = 100) -> Response:
    """Dead letters of a topic, the newest first; also those that were kept of a group or topic that was deleted."""
    if await find_dead_topic(broker.log, group, topic) is None and not await _parts(broker, group):
        raise UnknownGroup(group)
    found = await list_dead_letters(broker.log, group, topic, limit=limit)
    return respond(
        [
            responses.DeadLetterInfo(
                id=letter.record.id,
                record=json_record(letter.record, letter.partition, letter.offset),
                reason=letter.reason,
                traceback=letter.traceback,
                attempts=letter.attempts,
                origin=letter.origin,
                published=letter.published,
                died_at=letter.died_at,
            )
            for letter in found
        ]
    )


@router.post("/groups/{group}/dead/redrive", openapi_extra=request_body(requests.Redrive))
async def redrive(group: str, request: Request, broker: Authorised) -> Response:
    """Redrive dead letters: those with the ids of the request, or all.

    If the topic has a token, this takes that token, or the broker's.
    """
    body = await read_body(request, requests.Redrive)
    if not await _parts(broker, group):
        raise UnknownGroup(group)
    if (await broker.settings.group(group)).broadcast:
        raise InvalidCall(
            f"group {group!r} is a broadcast group: publish its dead letters again for all of its members"
        )
    home = await home_topic(broker.log, group, body.topic)
    moves = moves_of(await broker.log.topics())
    for name in (dead_topic(group, home), retry_topic(group, home)):  # letters move from one to the other
        await require_token(broker, name, moves, request)
    count = await redrive_letters(broker.log, group, body.topic, ids=body.ids)
    who = caller_of(request)
    detail = {"topic": body.topic, "records": count}
    await broker.node.transactions.run(lambda tx: tx.audit(who, "dead letters re-driven", group, detail))
    return respond(responses.Redriven(count))


@router.get("/audit")
async def audit(broker: Authorised, limit: Limit = 100, before: Number | None = None) -> Response:
    """Administrative changes, the newest first."""
    rows = await broker.node.transactions.read(lambda tx: tx.audit_log(limit, before))
    return respond(
        [responses.AuditEntry(row.number, row.at, row.who, row.action, row.subject, row.detail) for row in rows]
    )
