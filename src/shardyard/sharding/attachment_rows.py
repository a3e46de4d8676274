"""The consumers of an exchange: one row in the registry, and the work of a transaction that changes it."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct, structs

from shardyard.groups.coordinator import MemberIdentity
from shardyard.model import Damaged, Fenced, Partition
from shardyard.model.sharding import Queue, QueueState
from shardyard.placement.spread import Spread, spread
from shardyard.registry import Snapshot, Transaction
from shardyard.sharding.rows import read_shards

SCOPE = "sharding/attachment"
WATCH_NAME = f"setting/{SCOPE}"
MAX_CONSUMERS = 10_000
"""Of one exchange."""


class AttachedConsumer(Struct, frozen=True, array_like=True):
    """A consumer of an exchange."""

    id: str
    home: str
    """The node that its connection is at."""
    epoch: int
    """Of that node's membership: when it ends, so does the attachment."""
    local: bool
    """It reads only shards that its home owns."""
    own: str | None = None
    """Its own shard, if there is one for it."""
    covers: tuple[str, ...] = ()
    """The shards that it reads in addition."""


class Row(Struct, frozen=True):
    """All consumers of an exchange, in the order in which they were attached."""

    consumers: tuple[AttachedConsumer, ...] = ()


NO_CONSUMERS = Row()


class Wanted(Struct, frozen=True):
    """A consumer that a node has, and wants to be attached."""

    id: str
    local: bool


def read_row(tx: Snapshot, exchange: str) -> Row:
    """The consumers of an exchange."""
    row = tx.setting(SCOPE, exchange)
    if row is None:
        return NO_CONSUMERS
    try:
        return msgspec.convert(row.value, Row)
    except msgspec.ValidationError as error:
        raise Damaged(f"the setting {SCOPE}/{exchange}", str(error)) from None


Plans = dict[str, tuple[Row, Row]]
"""By exchange, its consumers as they are attached, and as they are to be."""


def plan(tx: Snapshot, home: MemberIdentity, wanted: Mapping[str, Sequence[Wanted]]) -> Plans:
    """The consumers of these exchanges as they are attached, and as they are to be if `home` has those that are
    `wanted`.

    Consumers that their home no longer has are detached, and so are those of homes that are not members any more. The
    others are spread over the shards that there are. New ones beyond `MAX_CONSUMERS` are left out. `Fenced` if `home`
    itself is not a member.
    """
    epochs = {member.name: member.epoch for member in tx.members(home.group)}
    if epochs.get(home.member) != home.epoch and any(wanted.values()):
        raise Fenced(
            f"node {home.member!r} (epoch {home.epoch}) is not a member: its consumers wait until it has joined"
        )
    shards = read_shards(tx)
    plans = {}
    for exchange, own in wanted.items():
        before = read_row(tx, exchange)
        consumers = _consumers(before, home, own, epochs)
        plans[exchange] = before, _spread(tx, home.group, shards.get(exchange, ()), consumers)
    return plans


def change(tx: Transaction, home: MemberIdentity, wanted: Mapping[str, Sequence[Wanted]]) -> dict[str, Row]:
    """Work for a transaction: attach and detach the consumers of a node. Returns the rows of the exchanges."""
    plans = plan(tx, home, wanted)
    for exchange, (before, after) in plans.items():
        if after != before:
            if after.consumers:
                tx.put_setting(SCOPE, exchange, msgspec.to_builtins(after))
            else:
                tx.delete_setting(SCOPE, exchange)
    return {exchange: after for exchange, (_, after) in plans.items()}


def _consumers(
    before: Row, home: MemberIdentity, wanted: Sequence[Wanted], epochs: Mapping[str, int]
) -> list[AttachedConsumer]:
    """Those that are to be attached, in the order in which they came."""
    own = {want.id: want for want in wanted}
    kept = [structs.replace(c, epoch=home.epoch) for c in before.consumers if c.id in own and c.home == home.member]
    others = [c for c in before.consumers if c.home != home.member and epochs.get(c.home) == c.epoch]
    known = {consumer.id: consumer for consumer in (*kept, *others)}
    consumers = [known[c.id] for c in before.consumers if c.id in known]
    added = [AttachedConsumer(w.id, home.member, home.epoch, w.local) for w in wanted if w.id not in known]
    return consumers + added[: max(MAX_CONSUMERS - len(consumers), 0)]


def _spread(tx: Snapshot, group: str, shards: Sequence[Queue], consumers: Sequence[AttachedConsumer]) -> Row:
    previous = Spread(
        {consumer.id: consumer.own for consumer in consumers if consumer.own is not None},
        {shard: consumer.id for consumer in consumers for shard in consumer.covers},
    )
    result = spread(
        [shard.name for shard in shards if shard.state is QueueState.ACTIVE],
        [shard.name for shard in shards if shard.state is QueueState.DRAINING],
        [consumer.id for consumer in consumers],
        previous,
        _allowed(tx, group, shards, consumers),
    )
    covers: dict[str, list[str]] = {consumer.id: [] for consumer in consumers}
    for shard, consumer_id in sorted(result.covered_by.items()):
        covers[consumer_id].append(shard)
    return Row(tuple(structs.replace(c, own=result.own.get(c.id), covers=tuple(covers[c.id])) for c in consumers))


def _allowed(
    tx: Snapshot, group: str, shards: Sequence[Queue], consumers: Sequence[AttachedConsumer]
) -> dict[str, list[str]]:
    """The shards of consumers that read only those that their home owns."""
    homes = {consumer.home for consumer in consumers if consumer.local}
    if not homes:
        return {}
    owners: dict[Partition, str | None] = {row.partition: row.owner for row in tx.ownerships(group)}
    owned = {home: [shard.name for shard in shards if owners.get(shard.partition) == home] for home in homes}
    return {consumer.id: owned[consumer.home] for consumer in consumers if consumer.local}
