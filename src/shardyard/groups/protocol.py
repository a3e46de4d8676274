"""The rebalancing protocol: what members and the rebalancer do to the registry, each function in one transaction.

No I/O, no waiting: the same functions run in production, in tests and in the simulation. Each checks before it changes
anything, so one that raises leaves its transaction as it was.

A partition changes hands in two steps. The rebalancer writes who is to own it (`target`). The owner, told so by its
next heartbeat, finishes and commits what it has in hand and releases it; in the same transaction the partition goes to
its target, under a new epoch. A partition whose target is its owner never pauses. Nobody waits for who is gone.

When a topic moves, its partitions are revoked, and those of its successor given out when all of them are released: no
key is in two members' hands. Partitions that members named themselves stay as they are.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from shardyard.groups.broadcast import groups_of
from shardyard.model import (
    CommitBehind,
    Fenced,
    InvalidValue,
    Member,
    MemberExists,
    Partition,
    PartitionTaken,
    Position,
    Topic,
    UnknownGroup,
    whole_number,
)
from shardyard.placement import ASSIGNORS, assign
from shardyard.registry import GroupRow, MemberRow, OwnershipRow, Snapshot, Transaction

LEAST_SESSION_SECONDS = 1.0
MOST_SESSION_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Grant:
    """A partition in its owner's hands."""

    epoch: int
    """Carried by everything the owner does with it."""
    committed: Position | None
    revoked: bool
    """It is to be released: finish, commit, release."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """How a group shares its partitions. It is stored with the group, and nowhere else."""

    assignor: str = "sticky"
    max_active: int | None = None
    """How many members get partitions; the others stand by. None: all of them."""
    release_after: float | None = None
    """Seconds without progress after which a member that still heartbeats is evicted; None: never."""
    broadcast: bool = False
    """Each member gets every record."""

    def __post_init__(self) -> None:
        if self.assignor not in ASSIGNORS:
            raise InvalidValue("assignor", self.assignor, "one of " + ", ".join(ASSIGNORS))
        if self.max_active is not None:
            whole_number("max_active", self.max_active, at_least=1)
        if self.release_after is not None and not self.release_after > 0:
            raise InvalidValue("release_after", self.release_after, "a number of seconds, more than 0")


DEFAULT_CONFIG = GroupConfig()


@dataclass(frozen=True, slots=True)
class Decision:
    """What a rebalance decided: who had what (of those still there), and who is to have it."""

    before: Mapping[Partition, str]
    after: Mapping[Partition, str]


def watch_name(group: str) -> str:
    """What to watch, to hear of every change in a group."""
    return f"group/{group}"


ANY_GROUP = "groups"
"""What the rebalancer watches: something changed that may call for it."""


# What members do


def join(
    tx: Transaction,
    group: str,
    name: str,
    *,
    topics: Iterable[str],
    weight: int = 1,
    static: bool = False,
    manual: Iterable[Partition] | None = None,
    session_timeout: float = 10.0,
    since: int | None = None,
) -> MemberRow:
    """Become a member. A static member that comes back within its session takes over what it had, under new epochs.

    `since`: the epoch of an earlier life of the same process; `Fenced` if another one has taken its name after that.
    """
    for what, text in (("group", group), ("member name", name)):
        if not isinstance(text, str) or not text:
            raise InvalidValue(what, text, "a text that is not empty")
    Member(name, weight)  # checks the weight
    check_session(session_timeout)
    row = _group_or_new(tx, group)
    before = tx.member(group, name)
    expired = before is not None and before.expires_at <= tx.now
    if before is not None and not expired and not (before.static and static):
        raise MemberExists(group, name)
    if before is not None and not expired and since is not None and before.epoch > since:
        raise Fenced(f"another process is member {name!r} of group {group!r} now")
    named = None if manual is None else tuple(sorted(manual))
    _check_free(tx, group, name, named or ())
    if before is not None and expired:
        row = _put_out(tx, row, before)
        before = None

    epoch = row.epoch + 1
    member = MemberRow(
        group, name, epoch, weight, tuple(sorted(set(topics))), static, named, session_timeout, tx.now + session_timeout
    )
    same = before is not None and replace(member, epoch=before.epoch, expires_at=before.expires_at) == before
    row = replace(row, epoch=epoch, inputs=row.inputs + (not same))
    if before is not None:
        mine = [o for o in tx.ownerships_of(group, name) if o.owner == name]
        row = replace(row, inputs=row.inputs + _ends(mine))
        row = _give(tx, row, (replace(o, owner=None) for o in mine))  # under new epochs: the earlier life is fenced off
    tx.put_member(member)
    tx.put_group(row)
    touch(tx, group)
    return member


def check_session(seconds: object) -> float:
    """`seconds`, if a session may last that long."""
    if not isinstance(seconds, int | float) or not LEAST_SESSION_SECONDS <= seconds <= MOST_SESSION_SECONDS:
        expected = f"a number of seconds, {LEAST_SESSION_SECONDS:g} to {MOST_SESSION_SECONDS:g}"
        raise InvalidValue("session_timeout", seconds, expected)
    return float(seconds)


def _check_free(tx: Transaction, group: str, name: str, named: Iterable[Partition]) -> None:
    for other in tx.members(group):
        if other.name != name and other.expires_at > tx.now:
            for partition in set(named) & set(other.manual or ()):
                raise PartitionTaken(partition, other.name)


def heartbeat(
    tx: Transaction, group: str, name: str, epoch: int, progress: Iterable[Partition] = ()
) -> dict[Partition, Grant]:
    """Stay a member, and hear what one owns. `progress` names partitions that got ahead or have nothing to do.

    What it was given since its last heartbeat got ahead, too: it could not have told.
    """
    member = _member(tx, group, name, epoch)
    heard = member.expires_at - member.session_timeout
    tx.put_member(replace(member, expires_at=tx.now + member.session_timeout))
    ahead = set(progress)
    rows = tx.ownerships_of(group, name)
    tx.put_ownerships(
        replace(o, progress_at=tx.now)
        for o in rows
        if o.owner == name and (o.partition in ahead or o.progress_at > heard)
    )
    return _holdings(rows, name)


def look(tx: Snapshot, group: str, name: str, epoch: int) -> dict[Partition, Grant]:
    """Hear what one owns, without changing anything."""
    _member(tx, group, name, epoch)
    return _holdings(tx.ownerships_of(group, name), name)


def _holdings(rows: Iterable[OwnershipRow], name: str) -> dict[Partition, Grant]:
    return {o.partition: Grant(o.epoch, o.committed, revoked=o.target != name) for o in rows if o.owner == name}


def commit(
    tx: Transaction, group: str, name: str, epoch: int, positions: Mapping[Partition, tuple[int, Position]]
) -> None:
    """Note how far the owner got: (epoch of the ownership, position to go on from), all of them or none."""
    _member(tx, group, name, epoch)
    rows = []
    for partition, (owned_since, position) in positions.items():
        row = _owned(tx, group, name, partition, owned_since)
        if row.committed is not None and position < row.committed:
            raise CommitBehind(partition, position.offset, row.committed.offset)
        rows.append(replace(row, committed=position, progress_at=tx.now))
    tx.put_ownerships(rows)


def release(tx: Transaction, group: str, name: str, epoch: int, partitions: Mapping[Partition, int]) -> None:
    """Let go of partitions (with the epoch of each ownership); they go to their next owners at once."""
    _member(tx, group, name, epoch)
    rows = [_owned(tx, group, name, partition, since) for partition, since in partitions.items()]
    row = _group(tx, group)
    row = replace(row, inputs=row.inputs + _ends(rows))
    tx.put_group(_give(tx, row, [replace(o, owner=None) for o in rows]))
    touch(tx, group)


def leave(tx: Transaction, group: str, name: str, epoch: int) -> None:
    """Go, giving up everything. A static member is kept in mind until its session expires: it may come back."""
    member = _member(tx, group, name, epoch)
    if not member.static:
        tx.put_group(_put_out(tx, _group(tx, group), member))
        touch(tx, group)


# What the rebalancer does


def rebalance(tx: Transaction, group: str, topics: Mapping[str, Topic]) -> Decision | None:
    """Put out who is gone or hung; if anything changed that matters, decide anew who is to own what.

    `topics` are all there are. Returns the decision, if there was one to make.
    """
    row = _group(tx, group)
    for member in tx.members(group):
        if (reason := _why_out(tx, row, member)) is not None:
            row = _put_out(tx, row, member)
            tx.audit("rebalancer", "member put out", group, {"member": member.name, "because": reason})
        elif _lasts_too_long(tx, member):
            tx.put_member(replace(member, expires_at=tx.now + member.session_timeout))

    members = tx.members(group)
    subscribed, shape = _subscribed(members, topics)
    if (row.inputs, shape) == (row.assigned, row.shape):
        return None

    rows = {o.partition: o for o in tx.ownerships(group)}
    gone = [p for p in rows if p.topic not in topics or p.index >= topics[p.topic].partitions]
    tx.delete_ownerships(group, gone)
    for partition in gone:
        del rows[partition]
    before = {p: holder for p, o in rows.items() if (holder := o.owner or o.target) is not None}
    after = _without_waiting(_targets(row, members, subscribed, topics, before), rows, topics)
    changed = []
    for partition in (p for topic in topics.values() for p in topic if p in rows or p in after):
        o = rows.get(partition) or OwnershipRow(group, partition, progress_at=tx.now)
        target = after.get(partition)
        if partition not in rows or o.target != target or o.owner is None:
            changed.append(replace(o, target=target))
    row = _give(tx, replace(row, assigned=row.inputs, shape=shape), changed)
    tx.put_group(row)
    if changed:
        touch(tx, group)
    return Decision(before, after)


def is_due(tx: Snapshot, row: GroupRow, topics: Mapping[str, Topic]) -> bool:
    """Whether there is anything for `rebalance` to do."""
    members = tx.members(row.name)
    if any(_lasts_too_long(tx, member) or _why_out(tx, row, member) is not None for member in members):
        return True
    return (row.inputs, _subscribed(members, topics)[1]) != (row.assigned, row.shape)


def _subscribed(members: Iterable[MemberRow], topics: Mapping[str, Topic]) -> tuple[dict[str, Topic], int]:
    """The topics that somebody wants, also those that moved, and a checksum of their shape."""
    wanted = {name: topics[name] for m in members for name in (*m.topics, *_wants(m, topics)) if name in topics}
    shape = repr(sorted((t.name, t.epoch, t.partitions, t.successor or "") for t in wanted.values()))
    return wanted, zlib.crc32(shape.encode())


def _wants(member: MemberRow, topics: Mapping[str, Topic]) -> list[str]:
    """The topics that a member shares in: those it named, or where these go on."""
    return [_last(name, topics) for name in member.topics if name in topics]


def _last(name: str, topics: Mapping[str, Topic]) -> str:
    """Where a topic goes on, as far as its successors exist."""
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
    """Partitions that members named are theirs; the others are shared by those who want their topic.

    Topics wanted by the same members are balanced together.
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
    """`after`, without the partitions that wait until those of a topic that moved there are released."""
    owned = {p for p, o in rows.items() if o.owner is not None}
    ending = {_last(p.topic, topics) for p in owned if p not in after and topics[p.topic].successor is not None}
    return {p: name for p, name in after.items() if p.topic not in ending or p in owned}


def _why_out(tx: Snapshot, row: GroupRow, member: MemberRow) -> str | None:
    """Why a member is to be put out, if it is: its session is over, or it hangs.

    It hangs if it had not got ahead with a partition for `release_after` seconds when it last heartbeat; what happened
    after that it could not tell yet.
    """
    if member.expires_at <= tx.now:
        return "its session expired"
    if row.release_after is None:
        return None
    heard = member.expires_at - member.session_timeout
    for o in tx.ownerships_of(row.name, member.name):
        if o.owner == member.name and o.progress_at + row.release_after <= heard:
            return f"no progress on {o.partition}"
    return None


# What administrators do


def configure(tx: Transaction, group: str, config: GroupConfig, *, who: str | None) -> GroupRow:
    """Change how a group shares its partitions. It takes effect at once, without restarting any member.

    `who`: for the audit log; None if the caller audits the change itself. `InvalidValue` if `broadcast` changes while
    the group has members.
    """
    row = tx.group(group)
    if row is not None and row.broadcast != config.broadcast and any(tx.members(g) for g in groups_of(tx, group)):
        raise InvalidValue("broadcast", config.broadcast, "no change while the group has members")
    row = replace(_group_or_new(tx, group), **asdict(config))
    row = replace(row, inputs=row.inputs + 1)
    tx.put_group(row)
    if who is not None:
        tx.audit(who, "group configured", group, asdict(config))
    touch(tx, group)
    return row


def config_of(row: GroupRow) -> GroupConfig:
    """The configuration that is stored with a group."""
    return GroupConfig(row.assignor, row.max_active, row.release_after, row.broadcast)


# Shared steps


def _put_out(tx: Transaction, row: GroupRow, member: MemberRow) -> GroupRow:
    """End a membership: its partitions are free, and whoever they are meant for gets them."""
    tx.delete_member(row.name, member.name)
    freed = []
    for o in tx.ownerships_of(row.name, member.name):
        owner = None if o.owner == member.name else o.owner
        # What was meant for the one who is gone stays, for now, with the one who has it.
        freed.append(replace(o, owner=owner, target=owner if o.target == member.name else o.target))
    row = _give(tx, replace(row, inputs=row.inputs + 1), freed)
    tx.put_group(row)
    return row


def _give(tx: Transaction, row: GroupRow, ownerships: Iterable[OwnershipRow]) -> GroupRow:
    """Store the rows, those without an owner as their target's from now on. Returns the group with its new epoch."""
    epoch = row.epoch
    rows = []
    for o in ownerships:
        if o.owner is None and o.target is not None:
            epoch += 1
            rows.append(replace(o, owner=o.target, epoch=epoch, progress_at=tx.now))
        else:
            rows.append(o)
    tx.put_ownerships(rows)
    return replace(row, epoch=epoch)


def _ends(rows: Iterable[OwnershipRow]) -> bool:
    """Whether letting these go ends something, which a successor may have waited for: they are meant for nobody."""
    return any(o.target is None for o in rows)


def _group_or_new(tx: Transaction, name: str) -> GroupRow:
    """Epochs of a new group begin with the time, so that they lie above those of a lost one of the same name."""
    return tx.group(name) or GroupRow(name, epoch=int(tx.now * 1000))


def _group(tx: Transaction, name: str) -> GroupRow:
    row = tx.group(name)
    if row is None:
        raise UnknownGroup(name)
    return row


def _member(tx: Snapshot, group: str, name: str, epoch: int) -> MemberRow:
    member = tx.member(group, name)
    if member is None or member.epoch != epoch:
        raise Fenced(f"member {name!r} (epoch {epoch}) is no longer in group {group!r}: it has to join again")
    return member


def _owned(tx: Transaction, group: str, name: str, partition: Partition, epoch: int) -> OwnershipRow:
    row = tx.ownership(group, partition)
    if row is None or row.owner != name or row.epoch != epoch:
        holder = "nobody" if row is None or row.owner is None else f"{row.owner!r} (epoch {row.epoch})"
        raise Fenced(f"{partition} no longer belongs to {name!r} (epoch {epoch}): {holder} has it")
    return row


def touch(tx: Transaction, group: str) -> None:
    """Tell the members of a group, and the rebalancer, that something changed."""
    tx.touch(watch_name(group))
    tx.touch(ANY_GROUP)
