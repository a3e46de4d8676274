"""What the rebalancer does to the registry: evict members, and decide who is to own which partition.

Like `protocol`, without I/O: each function is one transaction.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardyard.groups import protocol
from shardyard.groups.broadcast import is_member_group, parent_group
from shardyard.model import Member, Partition, Topic
from shardyard.placement import assign
from shardyard.registry import GroupRow, MemberRow, OwnershipRow, Snapshot, Transaction


@dataclass(frozen=True, slots=True)
class Decision:
    """What a rebalance decided: the owners before (of the partitions that still exist), and the owners to be."""

    before: Mapping[Partition, str]
    after: Mapping[Partition, str]


def rebalance(tx: Transaction, group: str, topics: Mapping[str, Topic]) -> Decision | None:
    """Evict the members that are gone or hang; if anything changed that matters, decide who is to own what.

    `topics` are all that exist. Returns the decision, if there was one to make.
    """
    row = protocol.group_row(tx, group)
    for member in tx.members(group):
        if (reason := _why_evict(tx, row, member)) is not None:
            row = protocol.evict(tx, row, member)
            tx.audit("rebalancer", "member evicted", group, {"member": member.name, "because": reason})
        elif _lasts_too_long(tx, member):
            tx.put_member(replace(member, expires_at=tx.now + member.session_timeout))

    members = tx.members(group)
    subscribed, shape = _subscribed(members, topics)
    if (row.inputs, shape) == (row.assigned, row.shape):
        return None

    rows = {o.partition: o for o in tx.ownerships(group)}
    gone = [p for p in rows if p.topic not in topics or p.index >= topics[p.topic].partitions]
    tx.delete_ownerships(group, gone)
    losing = [name for p in gone for name in (rows[p].owner, rows[p].target)]
    """Members that were to own a partition and are not any more."""
    for partition in gone:
        del rows[partition]
    before = {p: holder for p, o in rows.items() if (holder := o.owner or o.target) is not None}
    after = _without_waiting(_targets(row, members, subscribed, topics, before), rows, topics)
    prepare_seconds = {m.name: m.prepare_seconds or 0.0 for m in members}
    concerned = {p.topic for p in (*rows, *after)}
    changed = []
    for partition in (p for name in topics if name in concerned for p in topics[name] if p in rows or p in after):
        o = rows.get(partition) or OwnershipRow(group, partition, progress_at=tx.now)
        target = after.get(partition)
        if partition not in rows or o.target != target or o.owner is None:
            handover_at = 0.0
            if target is not None and o.owner not in (None, target) and prepare_seconds[target]:
                handover_at = tx.now + prepare_seconds[target]
            changed.append(replace(o, target=target, handover_at=handover_at))
            losing.append(o.target)
    tx.put_group(protocol.give(tx, replace(row, assigned=row.inputs, shape=shape), changed))
    if losing:
        protocol.touch(tx, group, *losing)
    return Decision(before, after)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the rebalancer has to do now, and when to look again if nothing changes before."""

    due: Sequence[str]
    """The groups for which `rebalance` has something to do."""
    seconds: float | None
    """Until the first session expires, or the first member may hang; None: there is nothing to wait for."""


def look(tx: Snapshot, topics: Mapping[str, Topic], known: Mapping[str, Topic] | None) -> Outlook:
    """Find the groups that need a rebalance, by a few reads for all groups together.

    `topics` are all that exist. `known` are those that existed when the last look was followed by a rebalance of all
    groups that it named; None if there was no such look.
    """
    rows = tx.groups()
    due = {row.name for row in rows if row.inputs != row.assigned}
    if known is None:
        due |= {row.name for row in rows if _subscribed(tx.members(row.name), topics)[1] != row.shape}
    elif changed := {name for name in {*topics, *known} if topics.get(name) != known.get(name)}:
        due |= {
            group for group, names in tx.subscriptions().items() if not changed.isdisjoint(_successors(names, topics))
        }

    moments = []
    for times in tx.group_times():
        if times.first_expiry <= tx.now or times.last_heartbeat > tx.now:  # the latter: the clock went back
            due.add(times.group)
        moments.append(times.first_expiry)

    limits = {row.name: limit for row in rows if (limit := _release_after(tx, row)) is not None}
    if limits:
        progress = tx.last_progress()
        for row in rows:
            if row.name not in due and row.name in limits and row.name in progress:
                may_hang_at = progress[row.name] + limits[row.name]
                if may_hang_at <= tx.now and any(_why_evict(tx, row, m) is not None for m in tx.members(row.name)):
                    due.add(row.name)
                moments.append(may_hang_at)
    seconds = max(min(moments) - tx.now, 0.0) if moments else None
    return Outlook(sorted(due), seconds)


def _successors(names: Iterable[str], topics: Mapping[str, Topic]) -> set[str]:
    """These topics, and all that continue them."""
    found: set[str] = set()
    for name in names:
        following: str | None = name
        while following is not None and following not in found:
            found.add(following)
            following = topics[following].successor if following in topics else None
    return found


def _subscribed(members: Iterable[MemberRow], topics: Mapping[str, Topic]) -> tuple[dict[str, Topic], int]:
    """The topics that members subscribe to, also those that moved, and a checksum of their shape."""
    wanted = {name: topics[name] for m in members for name in (*m.topics, *_wants(m, topics)) if name in topics}
    shape = repr(sorted((t.name, t.epoch, t.partitions, t.successor or "") for t in wanted.values()))
    return wanted, zlib.crc32(shape.encode())


def _wants(member: MemberRow, topics: Mapping[str, Topic]) -> list[str]:
    """The topics whose partitions a member shares: those it subscribed to, or their successors."""
    return [_last(name, topics) for name in member.topics if name in topics]


def _last(name: str, topics: Mapping[str, Topic]) -> str:
    """The last successor of a topic, as far as its successors exist."""
    while (successor := topics[name].successor) is not None and successor in topics:
        name = successor
    return name


def _lasts_too_long(tx: Snapshot, member: MemberRow) -> bool:
    """The clock went back: no session lasts that long."""
    return member.expires_at > tx.now + member.session_timeout


def _targets(
    row: GroupRow,
    members: list[MemberRow],
    subscribed: Mapping[str, Topic],
    topics: Mapping[str, Topic],
    before: Mapping[Partition, str],
) -> dict[Partition, str]:
    """Partitions that members named are theirs; the others are shared by the subscribers of their topic.

    Topics with the same subscribers are balanced together.
    """
    everything = {partition for topic in subscribed.values() for partition in topic}
    after = {p: m.name for m in members for p in m.manual or () if p in everything}
    sharing = [m for m in members if m.manual is None]
    wants = {m.name: _wants(m, topics) for m in sharing}
    classes: defaultdict[tuple[str, ...], list[Partition]] = defaultdict(list)
    for name, topic in subscribed.items():
        wanting = tuple(m.name for m in sharing if name in wants[m.name])
        classes[wanting].extend(p for p in topic if p not in after)
    kinds = {topic.name: topic.kind for topic in subscribed.values()}
    for wanting, partitions in sorted(classes.items()):
        sharers = [Member(m.name, m.weight) for m in sharing if m.name in wanting]
        after |= assign(partitions, sharers, before, assignor=row.assignor, kinds=kinds, max_active=row.max_active)
    return after


def _without_waiting(
    after: Mapping[Partition, str], rows: Mapping[Partition, OwnershipRow], topics: Mapping[str, Topic]
) -> dict[Partition, str]:
    """`after`, without the partitions of a successor that wait until those of its predecessor are released."""
    owned = {p for p, o in rows.items() if o.owner is not None}
    ending = {_last(p.topic, topics) for p in owned if p not in after and topics[p.topic].successor is not None}
    return {p: name for p, name in after.items() if p.topic not in ending or p in owned}


def _why_evict(tx: Snapshot, row: GroupRow, member: MemberRow) -> str | None:
    """Why a member is to be evicted, if it is: its session expired, or it hangs.

    It hangs if it had made no progress on a partition for `release_after` seconds when it last sent a heartbeat; what
    happened after that it could not report yet.
    """
    if member.expires_at <= tx.now:
        return "its session expired"
    release_after = _release_after(tx, row)
    if release_after is None:
        return None
    last_heartbeat = member.expires_at - member.session_timeout
    for o in tx.ownerships_of(row.name, member.name):
        if o.owner == member.name and o.progress_at + release_after <= last_heartbeat:
            return f"no progress on {o.partition}"
    return None


def _release_after(tx: Snapshot, row: GroupRow) -> float | None:
    """The group's own setting; the own group of a member of a broadcast group goes by the broadcast group's."""
    if is_member_group(row.name) and (parent := tx.group(parent_group(row.name))) is not None:
        return parent.release_after
    return row.release_after
