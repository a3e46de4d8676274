"""Membership over HTTP: what `GroupCoordinator` and `OwnerLog` need from a broker. Any broker takes any of it."""

import re
import uuid
import zlib
from collections.abc import Iterable

from fastapi import APIRouter, Request, Response

from shardyard.groups import protocol
from shardyard.groups.broadcast import parent_group
from shardyard.groups.coordinator import JoinRequest, MemberIdentity
from shardyard.model import InvalidValue, NotAllowed, Partition, PartitionOutOfRange
from shardyard.model.limits import Limits, check_topic_name
from shardyard.queues.broker import Broker
from shardyard.queues.failures import Disposition, Failure, Outcome
from shardyard.queues.retry_topics import ensure_retry_topics, with_retry_topics
from shardyard.queues.settings import initial_config
from shardyard.registry import ChangeSignal, Snapshot
from shardyard.runtime.metrics import DEAD_LETTERS, JOINS, RETRIES
from shardyard.server.auth import Authorised
from shardyard.server.drain import LongPoll, drain_of
from shardyard.server.http import Index, accepted_media, host_of, read_body, read_query, request_body, respond
from shardyard.server.queues import calls
from shardyard.server.routing import StrictRoute, query_parameters
from shardyard.wire import requests, responses
from shardyard.wire.codec import parse_partition
from shardyard.wire.media import MAX_WAIT_SECONDS

router = APIRouter(prefix="/v1/groups/{group}", tags=["members"], route_class=StrictRoute)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MEMBER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@router.post("/members", status_code=201, openapi_extra=request_body(requests.Join))
async def join(group: str, request: Request, broker: Authorised) -> Response:
    """Become a member. All further requests carry the group, the member and the epoch of the response."""
    body = await read_body(request, requests.Join)
    check_group_name(group)
    name = body.name or uuid.uuid4().hex[:12]
    if _MEMBER.fullmatch(name) is None:
        raise InvalidValue(
            "member name", name, "1 to 200 letters, digits, '.', '_' and '-', not starting with '.' or '-'"
        )
    protocol.check_session(body.session_timeout)
    settings = await broker.settings.group(group)
    if not settings.admits(name, host_of(request)):
        raise NotAllowed(group, name)
    manual = None if body.partitions is None else [parse_partition(partition) for partition in body.partitions]
    await _check_exist(broker, body.topics, manual or ())
    topics = body.topics
    if not settings.broadcast and manual is None:
        topics = [check_topic_name(topic, Limits()) for topic in with_retry_topics(group, topics)]
        await ensure_retry_topics(broker.log, group, body.topics)  # before joining: their creation would rebalance
    candidate = JoinRequest(
        group,
        name,
        topics,
        body.weight,
        body.static,
        manual,
        body.session_timeout,
        body.address,
        body.metadata,
        body.prepare_seconds,
        initial_config(settings),
        body.instance,
    )
    member = await broker.node.coordinator.join(candidate, body.since)
    JOINS.add()
    reported = responses.ReportedSettings.for_members(settings)
    return respond(responses.Joined(member.group, member.member, member.epoch, reported), 201)


def check_group_name(group: str) -> None:
    if _NAME.fullmatch(group) is None:
        raise InvalidValue("group", group, "1 to 100 letters, digits, '_' and '-', and no '.'")


async def _check_exist(broker: Broker, topics: list[str], manual: Iterable[Partition]) -> None:
    """Refuse a join for topics or partitions that do not exist, before anything is created for it."""
    counts = {topic: (await broker.log.topic(topic)).partitions for topic in topics}
    for partition in manual:
        if partition.topic not in counts:
            raise InvalidValue("partition", str(partition), "a partition of one of the topics of the request")
        if partition.index >= counts[partition.topic]:
            raise PartitionOutOfRange(partition, counts[partition.topic])


@router.post("/members/{member}/heartbeat", openapi_extra=request_body(requests.Heartbeat))
async def heartbeat(group: str, member: str, request: Request, broker: Authorised) -> Response:
    """Stay a member. The response has the partitions that the member owns, and the settings of the group."""
    body = await read_body(request, requests.Heartbeat)
    settings = await calls.heartbeat(broker, group, member, host_of(request), body)
    assignment = await calls.assignment(broker, MemberIdentity(group, member, body.epoch))
    reported = responses.ReportedSettings.for_members(settings)
    return respond(responses.HeartbeatResponse(assignment.partitions, assignment.incoming, reported))


@router.get("/members/{member}")
async def show_member(group: str, member: str, epoch: int, broker: Authorised) -> Response:
    """The partitions that a member owns, and those that it will own."""
    return respond(await calls.assignment(broker, MemberIdentity(group, member, epoch)))


@router.post("/members/{member}/ready", status_code=204, openapi_extra=request_body(requests.Ready))
async def ready(group: str, member: str, request: Request, broker: Authorised) -> Response:
    """Report that incoming partitions are prepared, so that their owners release them."""
    body = await read_body(request, requests.Ready)
    partitions = [parse_partition(partition) for partition in body.partitions]
    await broker.node.coordinator.ready(MemberIdentity(group, member, body.epoch), partitions)
    return Response(status_code=204)


@router.post("/members/{member}/commit", status_code=204, openapi_extra=request_body(requests.Commit))
async def commit(group: str, member: str, request: Request, broker: Authorised) -> Response:
    """Commit the positions that a member has reached: all of them or none. Durable when the response comes."""
    await calls.commit(broker, group, member, await read_body(request, requests.Commit))
    return Response(status_code=204)


@router.post("/members/{member}/release", status_code=204, openapi_extra=request_body(requests.Release))
async def release(group: str, member: str, request: Request, broker: Authorised) -> Response:
    """Release partitions, so that their next owners get them."""
    body = await read_body(request, requests.Release)
    partitions = {parse_partition(name): epoch for name, epoch in body.partitions.items()}
    await broker.node.coordinator.release(MemberIdentity(group, member, body.epoch), partitions)
    return Response(status_code=204)


@router.post("/failures", openapi_extra=request_body(requests.Failures))
async def fail(group: str, request: Request, broker: Authorised) -> Response:
    """Report records whose handlers failed. They will be retried, or become dead letters; commit past them then."""
    body = await read_body(request, requests.Failures)
    settings = await broker.settings.group(parent_group(group))
    failures = [Failure(parse_partition(f.partition), f.epoch, f.offset, f.reason, f.traceback) for f in body.failures]
    for failure in failures:
        await broker.check_owner(group, failure.partition, failure.epoch)
    subscribed = await broker.node.transactions.read(
        lambda tx: {topic for member in tx.members(group) if member.manual is None for topic in member.topics}
    )
    outcomes = await broker.failures.handle(group, settings, failures, subscribed)
    RETRIES.add(sum(outcome.disposition == Disposition.RETRY for outcome in outcomes))
    DEAD_LETTERS.add(sum(outcome.disposition == Disposition.DEAD for outcome in outcomes))
    return respond(responses.FailureOutcomes([_outcome(outcome) for outcome in outcomes]))


def _outcome(outcome: Outcome) -> responses.FailureOutcome:
    failure = outcome.failure
    failed = responses.FailedRecord(failure.partition, failure.epoch, failure.offset, failure.reason)
    return responses.FailureOutcome(failed, outcome.disposition, outcome.attempts, outcome.due)


@router.delete("/members/{member}", status_code=204)
async def leave(group: str, member: str, epoch: int, broker: Authorised) -> Response:
    """Leave the group and release all partitions."""
    await broker.node.coordinator.leave(MemberIdentity(group, member, epoch))
    return Response(status_code=204)


@router.get("/changes", openapi_extra=query_parameters(requests.Changes))
async def wait_for_change(group: str, request: Request, broker: Authorised) -> Response:
    """Wait until the version of the group differs from the one that the caller has seen.

    Query: `seen`, the version of an earlier response, and `wait_seconds` (at most 30). With `member`, the version is
    that of what this member owns and will own, and other changes of the group are not waited for.
    """
    query = read_query(request, requests.Changes)
    member = query.member
    poll = LongPoll(drain_of(request), broker.clock, min(query.wait_seconds, MAX_WAIT_SECONDS))
    name = protocol.watch_name(group) if member is None else protocol.member_watch_name(group, member)
    with ChangeSignal(broker.registry, name, broker.clock) as changed:
        while True:
            version = await broker.node.transactions.read(lambda tx: _version(tx, group, member))
            if version != query.seen or poll.over:
                return respond(responses.GroupVersion(version))
            await poll.wait(changed.wait(poll.left))


def _version(tx: Snapshot, group: str, member: str | None) -> str:
    if member is not None:
        owned = [(str(row.partition), row.owner, row.target, row.epoch) for row in tx.ownerships_of(group, member)]
        joined = tx.member(group, member)
        return f"{joined and joined.epoch}.{zlib.crc32(repr(owned).encode())}"
    row = tx.group(group)
    return "" if row is None else f"{row.epoch}.{row.inputs}.{row.assigned}.{row.shape}"


# What the owner of a partition needs from the log


@router.post("/partitions/{topic}/{index}/fence", status_code=204, openapi_extra=request_body(requests.Fence))
async def set_fence(group: str, topic: str, index: Index, request: Request, broker: Authorised) -> Response:
    """Fence off all earlier owners of a partition: they can no longer read it."""
    body = await read_body(request, requests.Fence)
    await calls.set_fence(broker, group, Partition(topic, index), body.epoch)
    return Response(status_code=204)


@router.get("/partitions/{topic}/{index}/records", openapi_extra=query_parameters(requests.Read))
async def read(group: str, topic: str, index: Index, request: Request, broker: Authorised) -> Response:
    """Read as the owner of a partition, waiting for records if there are none.

    Query: `offset` to read from, `owner` (the epoch of the ownership), `epoch` (of the partition), `wait_seconds` (at
    most 30), `max_records`, `max_bytes`. A paused partition returns no records, and a group with tags gets only records
    that have one of them.
    """
    query = read_query(request, requests.Read)
    batch = await calls.read(broker, drain_of(request), group, Partition(topic, index), query, MAX_WAIT_SECONDS)
    media = accepted_media(request)
    return Response(calls.encode_delivery(batch, media), media_type=media)
