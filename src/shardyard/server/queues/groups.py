"""Groups over HTTP, for people: who owns what, settings, resets, dead letters, audit."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from shardyard.groups import PartitionStatus, ResetTarget, reset, resolve_positions, status
from shardyard.groups.broadcast import groups_of, is_member_group, parent_group
from shardyard.model import GroupInUse, InvalidCall, Partition, Position, UnknownGroup
from shardyard.queues import cascade_delete
from shardyard.queues.dead_letters import find_dead_topic, list_dead_letters
from shardyard.queues.redrive import redrive as redrive_letters
from shardyard.queues.settings import change_group, delete_settings, group_scope, group_settings, is_joined
from shardyard.queues.topic_readers import topic_readers
from shardyard.registry import MemberRow, Snapshot, Transaction
from shardyard.server.http import Authorised, answer, caller, takes, told
from shardyard.server.queues.members import check_group_name
from shardyard.server.queues.topics import delete_topics
from shardyard.wire import records as wire
from shardyard.wire import requests
from shardyard.wire.settings import GroupSettings

router = APIRouter(prefix="/v1", tags=["groups"])

Limit = Annotated[int, Query(ge=1, le=10_000)]
Number = Annotated[int, Query(ge=0, lt=2**63)]


@router.get("/groups")
async def list_groups(broker: Authorised) -> Response:
    """All groups, with the number of their members and their lag."""
    rows = []
    for name, members in (await broker.node.transactions.read(_groups)).items():
        statuses = [await _status(broker, part) for part in await _parts(broker, name)]
        lag = sum(row.lag for partitions in statuses for row in partitions)
        rows.append({"group": name, "members": members, "lag": lag})
    return answer(rows)


def _groups(tx: Snapshot) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in tx.groups():
        found[parent_group(row.name)] = found.get(parent_group(row.name), 0) + len(tx.members(row.name))
    return found


@router.get("/groups/{group}")
async def show_group(group: str, broker: Authorised) -> Response:
    """A group: its partitions with owner, epoch, committed, end and lag; its members; its settings.

    `joined`: whether anybody ever was a member; settings may be made before.
    """
    those = await _parts(broker, group)
    if not those:
        raise UnknownGroup(group)
    rows = [_row(part, row) for part in those for row in await _status(broker, part)]
    members, joined = await broker.node.transactions.read(
        lambda tx: ([m for part in those for m in tx.members(part)], is_joined(tx, group))
    )
    active = {row["owner"] for row in rows}
    settings = await broker.group_settings(group)
    shown = [_member(member, member.name in active) for member in members]
    return answer({"group": group, "joined": joined, "partitions": rows, "members": shown, "settings": settings})


async def _parts(broker: Authorised, group: str) -> list[str]:
    return await broker.node.transactions.read(lambda tx: groups_of(tx, group))


async def _status(broker: Authorised, group: str) -> list[PartitionStatus]:
    try:
        return await status(broker.log, broker.registry, group)
    except UnknownGroup:  # it went meanwhile
        return []


def _row(group: str, row: PartitionStatus) -> dict[str, Any]:
    return {
        "group": group,
        "topic": row.partition.topic,
        "partition": row.partition.index,
        "owner": row.owner,
        "next_owner": row.target,
        "epoch": row.epoch,
        "committed": row.committed,
        "end": row.end,
        "lag": row.lag,
        "stuck_for": round(row.stuck_for, 3),
    }


def _member(member: MemberRow, active: bool) -> dict[str, Any]:
    return {
        "group": member.group,
        "member": member.name,
        "topics": member.topics,
        "weight": member.weight,
        "static": member.static,
        "session_timeout": member.session_timeout,
        "standby": not active,
    }


@router.patch("/groups/{group}", openapi_extra=takes(GroupSettings))
async def set_group(group: str, request: Request, broker: Authorised) -> Response:
    """Change settings; those that are not named stay. It takes effect at once, for all members."""
    check_group_name(group)
    changes = await told(request, dict[str, Any])
    settings = await broker.node.transactions.run(lambda tx: change_group(tx, group, caller(request), changes))
    broker.forget_settings()
    return answer(settings)


@router.delete("/groups/{group}")
async def delete_group(group: str, request: Request, broker: Authorised, force: bool = False) -> Response:
    """Forget a group that has no members: its positions and settings.

    Its retry and dead-letter topics go with it. Those with records that wait to be tried again, or with dead letters,
    are kept, unless by force; asked again by force, they go.
    """
    left = await cascade_delete.companions_of_group(
        broker.log, await broker.node.transactions.read(topic_readers), group, force=force
    )
    who = caller(request)
    await broker.node.transactions.run(lambda tx: _forget(tx, group, who, is_left=bool(left.deleted or left.kept)))
    broker.forget_settings()
    now = await broker.node.transactions.read(topic_readers)  # somebody may have joined at once
    going = [topic for topic in left.deleted if not now.subscribed_groups([topic])]
    await delete_topics(broker, going, who, {"with": f"group {group}"})
    return answer({"group": group, "also_deleted": going, "kept": left.kept})


def _forget(tx: Transaction, group: str, who: str, *, is_left: bool) -> None:
    """`is_left`: whether topics of its are left, also of one that was forgotten before."""
    those = groups_of(tx, group)
    if not those and is_left:
        return
    if not those:
        raise UnknownGroup(group)
    for member in (member for part in those for member in tx.members(part)):
        raise GroupInUse(group, member.name)
    for part in those:
        tx.delete_group(part)
    delete_settings(tx, group_scope(group))
    tx.audit(who, "group deleted", group)


@router.post("/groups/{group}/reset", openapi_extra=takes(requests.Reset))
async def reset_group(group: str, request: Request, broker: Authorised) -> Response:
    """Let the group go on elsewhere, while its members run."""
    asked = await told(request, requests.Reset)
    positions = await resolve_positions(broker.log, asked.topic, asked.partitions, ResetTarget(asked.to, asked.value))
    await broker.node.transactions.run(lambda tx: _reset(tx, group, positions, caller(request)))
    return answer({str(partition): position.offset for partition, position in positions.items()})


def _reset(tx: Transaction, group: str, positions: dict[Partition, Position], who: str) -> None:
    """Of a broadcast group, those of all members."""
    those = [group]
    if group_settings(tx, group).broadcast:
        those = [part for part in groups_of(tx, group) if is_member_group(part)]
    if not those:
        raise UnknownGroup(group)
    for part in those:
        reset(tx, part, positions, who)


@router.get("/groups/{group}/dead")
async def list_dead(group: str, topic: str, broker: Authorised, limit: Limit = 100) -> Response:
    """Dead letters of a topic, the newest first; also of a group or topic that is gone, as far as they were kept."""
    if await find_dead_topic(broker.log, group, topic) is None and not await _parts(broker, group):
        raise UnknownGroup(group)
    found = await list_dead_letters(broker.log, group, topic, limit=limit)
    return answer(
        [
            {
                "record": wire.json_record(letter.record, letter.partition, letter.offset),
                "reason": letter.reason,
                "attempts": letter.attempts,
                "origin": letter.origin,
                "published": letter.published,
                "died_at": letter.died_at,
            }
            for letter in found
        ]
    )


@router.post("/groups/{group}/dead/redrive", openapi_extra=takes(requests.Redrive))
async def redrive(group: str, request: Request, broker: Authorised) -> Response:
    """Try dead letters again: those with the ids, or all."""
    asked = await told(request, requests.Redrive)
    if not await _parts(broker, group):
        raise UnknownGroup(group)
    if (await broker.group_settings(group)).broadcast:
        raise InvalidCall(f"group {group!r} is a broadcast group: publish its dead letters anew for all of its members")
    count = await redrive_letters(broker.log, group, asked.topic, ids=asked.ids)
    who = caller(request)
    detail = {"topic": asked.topic, "records": count}
    await broker.node.transactions.run(lambda tx: tx.audit(who, "dead letters re-driven", group, detail))
    return answer({"redriven": count})


@router.get("/audit")
async def audit(broker: Authorised, limit: Limit = 100, before: Number | None = None) -> Response:
    """Administrative changes, the newest first."""
    rows = await broker.node.transactions.read(lambda tx: tx.audit_log(limit, before))
    return answer(rows)
