"""The fan-out as it is seen from outside: its mode, its processes, and what waits for them."""

from functools import partial

from msgspec import Struct

from shardyard.fanout.buffer import Buffer
from shardyard.fanout.config import DEFAULT_CONFIG, EVENTS_GROUP, WORKERS_GROUP, FanoutConfig
from shardyard.fanout.hot_channels import SCOPE as HOT_SCOPE
from shardyard.fanout.migration import PROCESSES_GROUP, Migration, committed_positions, offsets_behind
from shardyard.groups import Node
from shardyard.model import UnknownTopic
from shardyard.registry import Snapshot
from shardyard.wire.channels import EVENTS, FANOUT


class FanoutProcessInfo(Struct, frozen=True):
    """A coordinator or worker that runs."""

    name: str
    role: str
    address: str | None
    events: int
    """Partitions of `events` that it owns."""
    fanout: int
    """Partitions of `fanout` that it owns."""


class TopicInfo(Struct, frozen=True):
    """What waits in a topic."""

    topic: str
    group: str
    in_use: bool
    """The mode uses it: in the mode `replicated`, workers read `events` themselves, and nothing is in `fanout`."""
    partitions: int
    unowned: int
    """Partitions that nobody owns now, although it is in use."""
    waiting: int
    """Records that are not committed; at most so many, where offsets have gaps."""


class FanoutStatus(Struct, frozen=True):
    """The state of the fan-out."""

    mode: str
    phase: str
    to: str | None
    version: int
    waits_for: str
    """What a migration that is under way waits for; else empty."""
    buffer: str
    """How far workers are behind with `fanout`, in words."""
    buffer_full: bool
    processes: list[FanoutProcessInfo]
    topics: list[TopicInfo]
    hot_channels: dict[str, int]
    """Channels that are split, and in how many ways."""


async def fanout_status(node: Node, config: FanoutConfig = DEFAULT_CONFIG) -> FanoutStatus:
    """The state now. The node need not be open."""
    progress = await Migration(node.log, node.registry, node.transactions, node.clock, node.name).look()
    processes, owners, hot = await node.transactions.read(_read)
    topics = []
    for topic, group in ((EVENTS, EVENTS_GROUP), (FANOUT, WORKERS_GROUP)):
        try:
            spans = await node.log.ends(topic)
        except UnknownTopic:
            spans = {}
        committed = await node.transactions.read(partial(committed_positions, group=group, topic=topic))
        waiting = sum(offsets_behind(committed.get(index), span) for index, span in spans.items())
        owned = sum(count for (owned_topic, _), count in owners.items() if owned_topic == topic)
        in_use = topic == EVENTS or progress.state.mode == "partitioned"
        unowned = max(len(spans) - owned, 0) if in_use else 0
        topics.append(TopicInfo(topic, group, in_use, len(spans), unowned, waiting))
    try:
        buffer = await Buffer(node, config).measure()
        words, full = str(buffer), buffer.full
    except UnknownTopic:
        words, full = "there is no topic yet", False
    return FanoutStatus(
        progress.state.mode,
        progress.state.phase,
        progress.state.to,
        progress.state.version,
        progress.waits_for,
        words,
        full,
        processes,
        topics,
        hot,
    )


def _read(tx: Snapshot) -> tuple[list[FanoutProcessInfo], dict[tuple[str, str], int], dict[str, int]]:
    """The processes; how many partitions of each topic each member owns; the hot channels."""
    owners: dict[tuple[str, str], int] = {}
    for group, topic in ((EVENTS_GROUP, EVENTS), (WORKERS_GROUP, FANOUT)):
        alive = {row.name for row in tx.members(group)}
        for row in tx.ownerships(group):
            if row.owner in alive and row.owner is not None and row.partition.topic == topic:
                owners[topic, row.owner] = owners.get((topic, row.owner), 0) + 1
    processes = []
    for member in tx.members(PROCESSES_GROUP):
        if member.expires_at > tx.now:
            role = member.metadata.get("role", "?") if isinstance(member.metadata, dict) else "?"
            events, fanout = owners.get((EVENTS, member.name), 0), owners.get((FANOUT, member.name), 0)
            processes.append(FanoutProcessInfo(member.name, str(role), member.address, events, fanout))
    hot = {
        row.name: row.value["ways"]
        for row in tx.settings(HOT_SCOPE)
        if isinstance(row.value, dict) and isinstance(row.value.get("ways"), int) and row.value["ways"] > 1
    }
    return processes, owners, hot


def worker_addresses(tx: Snapshot) -> list[str]:
    """Where the workers that run are reached."""
    return [
        row.address
        for row in tx.members(PROCESSES_GROUP)
        if row.address
        and row.expires_at > tx.now
        and isinstance(row.metadata, dict)
        and row.metadata.get("role") == "worker"
    ]
