"""`Worker`: routes events to the partitions of `inbox` that have online members of their channels."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.fanout import topics
from shardyard.fanout.announcements import are_announcements
from shardyard.fanout.catch_up import CatchUp, Table
from shardyard.fanout.config import DEFAULT_CONFIG, EVENTS_GROUP, WORKERS_GROUP, FanoutConfig
from shardyard.fanout.few_rows import FewRows, rows_of
from shardyard.fanout.forwarding import Outlet, taken_rows
from shardyard.fanout.hot_channels import HEADER, HotChannels, LoadMeter, Split, decode_split
from shardyard.fanout.member import ForwardingMember
from shardyard.fanout.rounds import all_of
from shardyard.fanout.routing import RoutingTable, Snapshot, SnapshotPartition, compile_loops
from shardyard.fanout.routing.users import STORED_HASH
from shardyard.fanout.source import InFlight
from shardyard.fanout.step import StepRows
from shardyard.groups import Node
from shardyard.model import Fence, Fenced, Headers, Partition, Position, RetryLater, ShardyardError, Span, Topic
from shardyard.model.limits import Validated
from shardyard.placement import partitioner_named
from shardyard.runtime.background import keep_running
from shardyard.runtime.metrics import FANOUT_POSTS, FANOUT_ROUTE_SECONDS, FANOUT_ROUTED
from shardyard.wire.channels import FANOUT, FANOUT_PARTITIONS, HASH, MEMBERS, PARTITIONER

_log = logging.getLogger(__name__)

CURRENT_SECONDS = 1.0
"""How often changes of members and presence are applied while no events come."""
BARRIER_SECONDS = 0.02
"""How often to look whether the events before a barrier are done."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker owns and does."""

    owned: Sequence[int]
    """Partitions of its source topic."""
    preparing: Sequence[int]
    behind: int
    """Records of its partitions that it has not forwarded."""
    table: Any
    """The size of its routing table; see `fanout.routing.TableSize`."""


class Worker(ForwardingMember):
    """A member of the group `fanout.workers` over `fanout`, from entering the block to leaving it. It holds the routing
    table of its partitions only, loads it before it takes a partition over, and appends an event once to each partition
    of `inbox` that has online members of its channel.

    With `events` as its source (the mode `replicated`) it is a member of `fanout.events` and holds the whole table.
    """

    def __init__(
        self,
        node: Node,
        *,
        source: str = FANOUT,
        table: Callable[[Topic], Table] | None = None,
        snapshot: Path | None = None,
        config: FanoutConfig = DEFAULT_CONFIG,
        name: str | None = None,
        address: str | None = None,
        metadata: object = None,
    ) -> None:
        """`table` makes an empty routing table for the topic `inbox`. `snapshot`: a folder to load the
        table from; without it, or if it can't be used, the table is built from the topics alone."""
        super().__init__(
            node,
            WORKERS_GROUP if source == FANOUT else EVENTS_GROUP,
            source,
            config,
            name=name,
            address=address,
            metadata=metadata,
            max_records=config.worker_records,
            max_bytes=config.worker_bytes,
            prepares=True,
        )
        self._replicated = source != FANOUT
        self._outlet = Outlet(node.log, node.clock)
        self._catch_up = CatchUp(node.log, table or self._routing_table, config)
        self._folder = snapshot
        self._snapshot: Snapshot | None = None
        partitioner = partitioner_named(PARTITIONER, FANOUT_PARTITIONS, HASH)
        self._place, self._place_one = partitioner.place_array, partitioner.place
        self._hot = HotChannels(node)
        self._meter = LoadMeter(node, config, self._hot)

    @property
    def target(self) -> str:
        return self._catch_up.inbox.name

    @property
    def table(self) -> Table:
        return self._catch_up.table

    def lookup(self, channel: str) -> list[int] | None:
        """The partitions of `inbox` with online members of a channel, as far as the table knows now; None if this
        worker does not hold the channel's partition."""
        p = self._place_one(channel.encode())
        if p not in self._catch_up.held:
            return None
        found = self.table.route(p, pa.array([channel.encode()], pa.binary()))
        return [int(q) for q in np.flatnonzero(found[0])]

    async def state(self) -> WorkerState:
        """What it owns and does now."""
        ends = await self.node.log.ends(self.source)
        behind = sum(max(ends[p.index].end - at.offset, 0) for p, at in self._done.items() if p.index in ends)
        owned, preparing = (sorted(p.index for p in found) for found in (self.owned, self.preparing))
        return WorkerState(owned, preparing, behind, self.table.size())

    # Life cycle

    async def _open(self) -> None:
        await topics.open_all(self.node.log)
        await asyncio.to_thread(compile_loops)
        if self._folder is not None:
            self._snapshot = await asyncio.to_thread(_open_snapshot, self._folder)
        await self._catch_up.open()
        await self._hot.read()
        self._spawn(keep_running("hot channels", self._hot.run, self._clock), "hot channels")
        self._spawn(keep_running("routing table", self._keep_current, self._clock), "keeping the table current")
        if not self._replicated:
            self._spawn(keep_running("load of channels", self._keep_metering, self._clock), "load of channels")

    async def _stop(self) -> None:
        await super()._stop()
        await self._catch_up.close()

    async def _keep_current(self) -> None:
        """Apply changes now and then: the first event after a quiet time need not wait for all of them, and `lookup`
        knows who came online meanwhile. In the mode `replicated`, a worker that owns nothing holds the table, too."""
        while True:
            if self._replicated:
                await self._load(Partition(self.source, 0))
            await self._catch_up.now()
            await self._clock.sleep(CURRENT_SECONDS)

    async def _load(self, partition: Partition) -> None:
        wanted = range(FANOUT_PARTITIONS) if self._replicated else (partition.index,)
        await all_of(self._catch_up.load(p, self._share) for p in wanted if p not in self._catch_up.held)

    async def _share(self, p: int) -> SnapshotPartition | None:
        """The snapshot's share of a partition; None if there is none that can be used."""
        if self._snapshot is None:
            return None
        try:
            return await asyncio.to_thread(self._snapshot.partition, p)
        except (ShardyardError, OSError) as error:
            _log.warning("fan-out partition %d is built from the topics alone: %s", p, error)
            return None

    def _routing_table(self, inbox: Topic) -> Table:
        hash_ = inbox.hash or STORED_HASH
        return RoutingTable(inbox.receiving, self._snapshot, partitioner=inbox.partitioner, hash_=hash_)

    def _unload(self, partition: Partition) -> None:
        if not self._replicated:
            self._catch_up.drop(partition.index)

    # Steps

    async def _forward(self, step: Sequence[InFlight]) -> None:
        await self._catch_up.now()
        inbox = self._catch_up.inbox
        rows = StepRows.of(step) if self._replicated else rows_of(step)
        are_split = any(in_flight.extra for in_flight in step)
        ends = await self.node.log.ends(MEMBERS) if are_split else {}  # most parts lie in partitions of others
        targets, members = self._route(rows, inbox.receiving, ends)
        chosen = np.flatnonzero(targets.any(axis=1))
        if len(chosen):
            parts = _by_target(rows, chosen, targets[chosen], members, self._now_ms())
            await self._outlet.append(inbox.name, parts, self.is_in_touch, inbox.generation)
        FANOUT_ROUTED.add(len(rows))
        FANOUT_POSTS.add(int(targets.sum()))
        FANOUT_ROUTE_SECONDS.observe(max(self._clock.now() - rows.oldest / 1000, 0.0))

    def _route(
        self, rows: FewRows | StepRows, inbox_partitions: int, ends: Mapping[int, Span]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """To which partitions of `inbox` each row goes, and up to which offset the members of its channel are known.
        `ends`: of `members`, if an event of a hot channel is among them."""
        targets, members = self._look_up(rows, inbox_partitions)
        if not self._replicated:
            self._meter.note(rows.good_channels())
        for in_flight, span in rows.batches():
            for row, split in in_flight.extra or ():
                at = span.start + row - in_flight.start
                if in_flight.start <= row < in_flight.stop and split.ways > 1 and rows.good[at]:
                    targets[at] = np.arange(inbox_partitions) % split.ways == split.part
                    members[at] = ends[self._place_one(rows.channel(at))].end
            if in_flight.forwarded is not None:
                next_offsets = in_flight.forwarded.next(inbox_partitions)[:inbox_partitions]
                targets[span] &= rows.offsets[span, None] >= next_offsets[None, :]
        targets &= rows.good[:, None]
        return targets, members

    def _look_up(
        self, rows: FewRows | StepRows, inbox_partitions: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """The same by the routing table alone."""
        targets = np.zeros((len(rows), inbox_partitions), np.bool_)
        members = np.zeros(len(rows), np.int64)
        places, groups = [], []
        for p, mine in self._by_partition(rows):
            if p not in self._catch_up.held:
                raise Fenced(f"the members of fan-out partition {p} are not loaded")
            channels = rows.channels(mine)
            places.append((p, mine, len(channels)))
            groups.append((p, channels))
        found, start = self.table.route_all(groups), 0
        for p, mine, count in places:
            targets[mine] = found[start : start + count, :inbox_partitions]
            known = self.table.members_offset(p)
            members[mine] = 0 if known is None else known.offset
            start += count
        return targets, members

    def _by_partition(self, rows: FewRows | StepRows) -> Iterator[tuple[int, "slice | npt.NDArray[np.int64]"]]:
        """The fan-out partitions of the rows, and the rows of each."""
        if isinstance(rows, FewRows) or not self._replicated:
            for in_flight, span in rows.batches():
                yield in_flight.partition.index, span
            return
        rows.good[are_announcements(rows.headers)] = False
        places = np.asarray(self._place(rows.keys))
        for p in np.unique(places[rows.good]).tolist():
            yield p, np.flatnonzero((places == p) & rows.good)

    # Hot channels

    def _continue(self, in_flight: InFlight) -> Awaitable[None] | None:
        """A batch is cut before an event whose barriers are not reached; when that one is the next, it waits."""
        in_flight.stop = len(in_flight.batch)
        if self._replicated:
            return None
        if in_flight.extra is None:
            in_flight.extra = _splits(in_flight.batch.headers())
        for row, split in in_flight.extra:
            if row >= in_flight.start and split.barriers and not self._are_done(split, {}):
                if row > in_flight.start:
                    in_flight.stop = row
                    return None
                return self._wait_for(split, in_flight)
        return None

    def _are_done(self, split: Split, committed: dict[int, Position]) -> bool:
        def place(p: int) -> int:
            here, there = self._done.get(Partition(FANOUT, p)), committed.get(p)
            return max(0 if here is None else here.offset, 0 if there is None else there.offset)

        return all(place(p) >= end for p, end in split.barriers.items())

    async def _wait_for(self, split: Split, in_flight: InFlight) -> None:
        while not in_flight.source.stopping:
            committed = {}
            with contextlib.suppress(RetryLater):  # the registry is out of reach: look again
                rows = await self.node.transactions.read(lambda tx: tx.ownerships(WORKERS_GROUP))
                committed = {row.partition.index: row.committed for row in rows if row.committed is not None}
            if self._are_done(split, committed):
                in_flight.extra = [
                    (row, Split(s.part, s.ways) if s.barriers == split.barriers else s) for row, s in in_flight.extra
                ]
                return
            await self._clock.sleep(BARRIER_SECONDS)

    async def _keep_metering(self) -> None:
        while True:
            await self._clock.sleep(self.config.hot_seconds)
            if changes := self._meter.evaluate(self._online, self._is_mine):
                await self._meter.declare(changes)

    def _online(self, channel: bytes) -> int:
        p = self._place_one(channel)
        return self.table.online(p, channel) if p in self._catch_up.held else 0

    def _is_mine(self, channel: bytes) -> bool:
        return Partition(FANOUT, self._place_one(channel)) in self.owned


def _splits(headers: Sequence[Headers] | None) -> list[tuple[int, Split]]:
    """The rows of events of hot channels."""
    found = []
    for row, pairs in enumerate(headers or ()):
        for name, value in pairs:
            if name == HEADER and (split := decode_split(value)) is not None:
                found.append((row, split))
    return found


def _by_target(
    rows: FewRows | StepRows,
    chosen: npt.NDArray[np.int64],
    targets: npt.NDArray[np.bool_],
    members: npt.NDArray[np.int64],
    now: int,
) -> Iterator[tuple[int, Validated, Sequence[Fence]]]:
    """The posts of each partition of `inbox`, in their order, with the fences of all sources of the chosen rows.
    `targets`: of these. Records are validated once, not for each partition, and the log compares one list of fences
    once."""
    records, sources = rows.posts(chosen, members, now), np.unique(rows.sources()[chosen]).tolist()
    fences = [rows.step[number].source.fence for number in sources]
    for q in np.flatnonzero(targets.any(axis=0)).tolist():
        mine = np.flatnonzero(targets[:, q])
        part = records if len(mine) == len(records) else records.part(taken_rows(records, mine))
        yield q, part, fences


def _open_snapshot(folder: Path) -> Snapshot | None:
    """The snapshot in a folder; None if there is none that can be used."""
    try:
        snapshot = Snapshot.open(folder)
        _ = snapshot.users  # reads and checks the file
    except (ShardyardError, OSError) as error:
        _log.warning("the routing table is built from the topics alone: %s", error)
        return None
    return snapshot
