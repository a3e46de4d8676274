"""The rebalancing protocol: what members and the rebalancer do to the registry, each function in one transaction.

No I/O and no waiting: the same functions run in production, in tests and in the simulation. Each one checks before it
changes anything, so one that raises leaves its transaction as it was.

Members send heartbeats all the time and commit every batch, so `heartbeat` and `commit` take those of many members at
once and have the registry check and store them in one statement each, without reading first.

A partition changes its owner in two steps. The rebalancer decides who is to own it next (`target`). The owner learns
with its next heartbeat that the partition was revoked, finishes and commits what is in flight, and releases it; in the
same transaction the target becomes the owner, under a new epoch. A partition whose target is its owner never pauses.
The partitions of a member that is gone go to their targets at once.

A member that prepares learns first that a partition is incoming. The owner keeps the partition until that member
reports that it is ready, or its time to prepare is over; only then is the partition revoked.

When a topic moves to a successor, its partitions are revoked, and those of the successor are assigned when all of them
are released: no key is with two members at once. Partitions that members named themselves stay with them.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from shardyard.groups.broadcast import groups_of, is_member_group, member_group, parent_group
from shardyard.groups.config import DEFAULT_CONFIG, GroupConfig, config_of
from shardyard.model import (
    CommitBehind,
    Fenced,
    InvalidValue,
    Member,
    MemberExists,
    Partition,
    PartitionTaken,
    Position,
    ShardyardError,
    UnknownGroup,
)
from shardyard.registry import (
    GroupRow,
    Heartbeat,
    MemberRow,
    OwnershipRow,
    PositionCommit,
    Snapshot,
    Transaction,
)
from shardyard.registry.port import TransactionAborted

MIN_SESSION_SECONDS = 1.0
MAX_SESSION_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Grant:
    """The ownership of a partition."""

    epoch: int
    """Everything that the owner does with the partition carries it."""
    committed: Position | None
    revoked: bool
    """The owner is to finish what is in flight, commit it, and release the partition."""


@dataclass(frozen=True, slots=True)
class MemberAssignment:
    """What a member owns, and what it is about to own."""

    owned: Mapping[Partition, Grant]
    incoming: frozenset[Partition] = frozenset()
    """Partitions that it is to prepare; see `ready`."""
    changes_in: float | None = None
    """Seconds after which it changes by itself, because the time of a member to prepare is over. None: it changes only
    when the group does."""


MEMBER_NAMES = 64
"""Names to watch for the members of a group. The registry keeps every name that was ever touched, so they are not as
many as members come and go; members that share one are woken more often than they need."""


def watch_name(group: str) -> str:
    """The name to watch for every change of a group."""
    return f"group/{group}"


def member_watch_name(group: str, member: str) -> str:
    """The name to watch for changes that concern one member: of what it owns, or is about to own."""
    return f"{watch_name(group)}/{zlib.crc32(member.encode()) % MEMBER_NAMES}"


ANY_GROUP = "group/"
"""The name to watch for changes of all groups."""


# What members do


def join(
    tx: Transaction,
    group: str,
    name: str,
    *,
    topics: Iterable[str] = (),
    weight: int = 1,
    static: bool = False,
    manual: Iterable[Partition] | None = None,
    session_timeout: float = 10.0,
    address: str | None = None,
    metadata: object = None,
    prepare_seconds: float | None = None,
    config: GroupConfig | None = None,
    since: int | None = None,
    instance: str | None = None,
) -> MemberRow:
    """Become a member. A static member that comes back within its session keeps its partitions, under new epochs.

    A member without topics owns nothing: it is only present. `config`: of the group if it does not exist yet. `since`:
    the epoch of an earlier membership of the same process; `Fenced` if another process has taken its name since.
    `instance`: of the process, the same in all its joins. A join whose response was lost may be repeated under it, as a
    static member may come back: the new membership takes the place of the one before.
    """
    for what, value in (("group", group), ("member name", name)):
        if not isinstance(value, str) or not value:
            raise InvalidValue(what, value, "a string that is not empty")
    Member(name, weight)  # checks the weight
    check_session(session_timeout)
    if prepare_seconds is not None and not prepare_seconds > 0:
        raise InvalidValue("prepare_seconds", prepare_seconds, "a number of seconds, more than 0, or None")
    row = _group_to_join(tx, group, name, config or DEFAULT_CONFIG)
    group = row.name
    before = tx.member(group, name)
    expired = before is not None and before.expires_at <= tx.now
    if before is not None and not expired and not _is_same_process(before, instance):
        if not (before.static and static):
            raise MemberExists(group, name)
        if since is not None and before.epoch > since:
            raise Fenced(f"another process is member {name!r} of group {group!r} now")
    named = None if manual is None else tuple(sorted(manual))
    _check_free(tx, group, name, named or ())
    if before is not None and expired:
        row = evict(tx, row, before)
        before = None

    epoch = row.epoch + 1
    member = MemberRow(
        group,
        name,
        epoch,
        weight,
        tuple(sorted(set(topics))),
        static,
        named,
        session_timeout,
        tx.now + session_timeout,
        address,
        metadata,
        prepare_seconds,
        instance,
    )
    same = before is not None and _wants_the_same(before, member)
    row = replace(row, epoch=epoch, inputs=row.inputs + (not same))
    if before is not None:
        mine = [o for o in tx.ownerships_of(group, name) if o.owner == name]
        row = replace(row, inputs=row.inputs + _ends(mine))
        row = give(tx, row, (replace(o, owner=None) for o in mine))  # new epochs fence the earlier membership
    tx.put_member(member)
    tx.put_group(row)
    touch(tx, group, name)  # an earlier process of that name learns that it is out
    return member


def _group_to_join(tx: Transaction, name: str, member: str, config: GroupConfig) -> GroupRow:
    """The group, created if it does not exist; in a broadcast group, the own group of the member."""
    row = tx.group(name)
    if row is None:
        row = replace(_new_group(tx, name), **asdict(config))
        if row.broadcast:
            tx.put_group(row)
    if row.broadcast:
        own = member_group(name, member)
        shared = replace(config_of(row), broadcast=False)
        return tx.group(own) or replace(_new_group(tx, own), **asdict(shared))
    return row


def _is_same_process(before: MemberRow, instance: str | None) -> bool:
    return instance is not None and before.instance == instance


def _wants_the_same(before: MemberRow, after: MemberRow) -> bool:
    """Whether a member that came back gets the same partitions as before."""
    return (before.weight, before.topics, before.manual) == (after.weight, after.topics, after.manual)


def check_session(seconds: object) -> float:
    """`seconds`, if a session may last that long."""
    if not isinstance(seconds, int | float) or not MIN_SESSION_SECONDS <= seconds <= MAX_SESSION_SECONDS:
        expected = f"a number of seconds, {MIN_SESSION_SECONDS:g} to {MAX_SESSION_SECONDS:g}"
        raise InvalidValue("session_timeout", seconds, expected)
    return float(seconds)


def _check_free(tx: Snapshot, group: str, name: str, named: Collection[Partition]) -> None:
    for other in tx.members(group) if named else ():
        if other.name != name and other.expires_at > tx.now:
            for partition in set(named) & set(other.manual or ()):
                raise PartitionTaken(partition, other.name)


def heartbeat(tx: Transaction, heartbeats: Sequence[Heartbeat]) -> list[Fenced | None]:
    """Stay a member; for many members at once. Returns for each the error to raise if it is not a member any more.

    The progress of a heartbeat names the partitions that made progress since the last one, or are idle. A partition
    that was assigned since the last heartbeat counts as progress, too: the member could not know of it.
    """
    renewed = tx.renew_sessions(heartbeats)
    return [
        None if is_member else _no_member(h.group, h.member, h.epoch)
        for h, is_member in zip(heartbeats, renewed, strict=True)
    ]


def assignment(tx: Snapshot, group: str, name: str, epoch: int) -> MemberAssignment:
    """What a member owns and is about to own. Changes nothing."""
    _member(tx, group, name, epoch)
    return _assignment(tx, tx.ownerships_of(group, name), name)


def _assignment(tx: Snapshot, rows: Iterable[OwnershipRow], name: str) -> MemberAssignment:
    owned, incoming, preparing = {}, [], []
    for o in rows:
        if is_preparing := o.owner not in (None, o.target) and _is_preparing(tx, o):
            preparing.append(o.handover_at - tx.now)
        if o.owner == name:
            owned[o.partition] = Grant(o.epoch, o.committed, revoked=o.target != name and not is_preparing)
        elif is_preparing:
            incoming.append(o.partition)
    return MemberAssignment(owned, frozenset(incoming), min(preparing, default=None))


def _is_preparing(tx: Snapshot, row: OwnershipRow) -> bool:
    """Whether the owner keeps the partition while its target prepares. A clock that went back ends the preparation,
    rather than prolong it."""
    if row.handover_at <= tx.now or row.target is None:
        return False
    target = tx.member(row.group, row.target)
    return target is not None and row.handover_at <= tx.now + (target.prepare_seconds or 0.0)


def ready(tx: Transaction, group: str, name: str, epoch: int, partitions: Iterable[Partition]) -> None:
    """The member has prepared these incoming partitions: their owners are to release them now.

    Partitions that are not incoming any more are ignored.
    """
    _member(tx, group, name, epoch)
    rows = [row for p in partitions if (row := tx.ownership(group, p)) is not None]
    prepared = [o for o in rows if o.target == name and o.owner not in (None, name) and _is_preparing(tx, o)]
    if prepared:
        tx.put_ownerships(replace(o, handover_at=0.0) for o in prepared)
        touch(tx, group, *(o.owner for o in prepared))


def commit(tx: Transaction, commits: Sequence[PositionCommit]) -> list[ShardyardError | None]:
    """Commit how far owners got, each commit as a whole or not at all; for many at once. Returns for each the error to
    raise if it was refused.

    Only the owner may commit, under the epoch of its ownership. That implies that it is a member: whatever ends a
    membership also ends its ownerships, and each new ownership has a new epoch.
    """
    stored = tx.commit_positions(commits)
    return [None if done else _why_refused(tx, commit) for commit, done in zip(commits, stored, strict=True)]


def _why_refused(tx: Snapshot, commit: PositionCommit) -> ShardyardError:
    for partition, (epoch, position) in commit.positions.items():
        try:
            row = _owned(tx, commit.group, commit.owner, partition, epoch)
        except Fenced as error:
            return error
        if row.committed is not None and position < row.committed:
            return CommitBehind(partition, position.offset, row.committed.offset)
    raise TransactionAborted("registry", f"the rows of {commit} have changed since")  # the commit is tried again


def release(tx: Transaction, group: str, name: str, epoch: int, partitions: Mapping[Partition, int]) -> None:
    """Release partitions (with the epoch of each ownership); their targets become their owners at once."""
    _member(tx, group, name, epoch)
    rows = [_owned(tx, group, name, partition, since) for partition, since in partitions.items()]
    row = group_row(tx, group)
    row = replace(row, inputs=row.inputs + _ends(rows))
    tx.put_group(give(tx, row, [replace(o, owner=None) for o in rows]))
    touch(tx, group)


def leave(tx: Transaction, group: str, name: str, epoch: int) -> None:
    """Leave the group and release everything. A static member stays until its session expires: it may come back."""
    member = _member(tx, group, name, epoch)
    if not member.static:
        evict(tx, group_row(tx, group), member)


# What administrators do


def configure(tx: Transaction, group: str, config: GroupConfig, *, who: str | None) -> GroupRow:
    """Change how a group shares its partitions. It takes effect at once, without restarting any member.

    `who`: for the audit log; None if the caller audits the change itself. `InvalidValue` if `broadcast` changes while
    the group has members.
    """
    row = tx.group(group)
    if row is not None and row.broadcast != config.broadcast and any(tx.members(g) for g in groups_of(tx, group)):
        raise InvalidValue("broadcast", config.broadcast, "no change while the group has members")
    row = replace(tx.group(group) or _new_group(tx, group), **asdict(config))
    row = replace(row, inputs=row.inputs + 1)
    tx.put_group(row)
    if who is not None:
        tx.audit(who, "group configured", group, asdict(config))
    touch(tx, group)
    return row


# Shared steps


def evict(tx: Transaction, row: GroupRow, member: MemberRow) -> GroupRow:
    """End a membership: its partitions go to their targets. Returns the group as it is stored."""
    tx.delete_member(row.name, member.name)
    freed = []
    for o in tx.ownerships_of(row.name, member.name):
        owner = None if o.owner == member.name else o.owner
        if o.target == member.name:  # until the next rebalance the partition stays with its owner, if it has one
            o = replace(o, target=owner, handover_at=0.0)  # noqa: PLW2901 the row as it is to be
        freed.append(replace(o, owner=owner))
    row = give(tx, replace(row, inputs=row.inputs + 1), freed)
    tx.put_group(row)
    touch(tx, row.name, member.name)
    return row


def give(tx: Transaction, row: GroupRow, ownerships: Iterable[OwnershipRow]) -> GroupRow:
    """Store the rows; those without an owner go to their targets. Their owners and targets are notified. Returns the
    group with its new epoch."""
    epoch = row.epoch
    rows = []
    for o in ownerships:
        if o.owner is None and o.target is not None:
            epoch += 1
            rows.append(replace(o, owner=o.target, epoch=epoch, progress_at=tx.now, handover_at=0.0))
        else:
            rows.append(o)
    if rows:
        tx.put_ownerships(rows)
        touch(tx, row.name, *(name for o in rows for name in (o.owner, o.target)))
    return replace(row, epoch=epoch)


def _ends(rows: Iterable[OwnershipRow]) -> bool:
    """Whether the release of these ends the group's work on a topic that moved, for which its successor may wait."""
    return any(o.target is None for o in rows)


def _new_group(tx: Transaction, name: str) -> GroupRow:
    """Epochs of a new group start with the time, so that they lie above those of a lost one of the same name."""
    return GroupRow(name, epoch=int(tx.now * 1000))


def group_row(tx: Snapshot, name: str) -> GroupRow:
    row = tx.group(name)
    if row is None:
        raise UnknownGroup(name)
    return row


def _member(tx: Snapshot, group: str, name: str, epoch: int) -> MemberRow:
    member = tx.member(group, name)
    if member is None or member.epoch != epoch:
        raise _no_member(group, name, epoch)
    return member


def _no_member(group: str, name: str, epoch: int) -> Fenced:
    return Fenced(f"member {name!r} (epoch {epoch}) is no longer in group {group!r}: it must join again")


def _owned(tx: Snapshot, group: str, name: str, partition: Partition, epoch: int) -> OwnershipRow:
    row = tx.ownership(group, partition)
    if row is None or row.owner != name or row.epoch != epoch:
        holder = "nobody" if row is None or row.owner is None else f"{row.owner!r} (epoch {row.epoch})"
        raise Fenced(f"{partition} no longer belongs to {name!r} (epoch {epoch}): {holder} has it")
    return row


def touch(tx: Transaction, group: str, *members: str | None) -> None:
    """Signal a change of a group to the rebalancer and to directories, and to these members whom it concerns. A change
    of the own group of a member of a broadcast group is also one of the broadcast group."""
    tx.touch(watch_name(group))
    if is_member_group(group):
        tx.touch(watch_name(parent_group(group)))
    for name in {member_watch_name(group, member) for member in members if member is not None}:
        tx.touch(name)
