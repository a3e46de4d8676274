"""Keeping a routing table current with `members` and `presence`."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.fanout.config import FanoutConfig
from shardyard.fanout.rounds import Rounds, all_of
from shardyard.fanout.topics import follow_inbox
from shardyard.log import Log
from shardyard.log.requests import ReadRequest
from shardyard.model import (
    InvalidCall,
    OffsetBeyondEnd,
    OffsetTrimmed,
    Partition,
    Position,
    Span,
    Topic,
    WrongEpoch,
)
from shardyard.wire.channels import CLEARED, MEMBERS, PRESENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)

READS = 8
"""Partitions that are read at the same time."""


class Table(Protocol):
    """What a worker needs of a `fanout.routing.RoutingTable`."""

    presence_offsets: list[Position | None]

    def apply_presence(self, q: int, keys: Any, values: Any, end: Position) -> None: ...
    def add(self, p: int, snapshot: Any = None) -> None: ...
    def drop(self, p: int) -> None: ...
    def members_offset(self, p: int) -> Position | None: ...
    def apply_members(self, p: int, keys: Any, values: Any, end: Position) -> None: ...
    def route(self, p: int, channels: Any) -> npt.NDArray[np.bool_]: ...
    def route_all(self, groups: Any) -> npt.NDArray[np.bool_]: ...
    def online(self, p: int, channel: bytes) -> int: ...
    def resize(self, inbox_partitions: int) -> None: ...
    def size(self) -> Any: ...


class CatchUp:
    """Applies to a table what `members` and `presence` hold. A worker calls `now` before it routes, so that whoever got
    an acknowledgement for a change before an event was acknowledged gets that event."""

    def __init__(self, log: Log, table: "Callable[[Topic], Table]", config: FanoutConfig) -> None:
        """`table`: makes an empty one for the topic `inbox`."""
        self._log = log
        self._new_table = table
        self._config = config
        self._table: Table | None = None
        self._inbox: Topic | None = None
        self._version = -1
        self._held: set[int] = set()
        """The partitions of `members` that are loaded and kept current."""
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._reads: list[ReadRequest] = []
        """They have no news while the table is current; empty if that has to be found out in another way."""
        self._rounds = Rounds(self._round)
        self._limit = asyncio.Semaphore(READS)

    @property
    def table(self) -> Table:
        if self._table is None:
            raise InvalidCall("the routing table does not exist yet: open it first")
        return self._table

    @property
    def inbox(self) -> Topic:
        """The topic `inbox`, as of the last round."""
        if self._inbox is None:
            raise InvalidCall("the routing table does not exist yet: open it first")
        return self._inbox

    @property
    def held(self) -> set[int]:
        """The fan-out partitions whose members are loaded."""
        return self._held

    async def open(self) -> None:
        """Make the table, and read who is online: while no members are loaded, that is cheapest."""
        await self._follow_inbox()
        await self.now()

    async def close(self) -> None:
        await self._rounds.stop()
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)

    async def now(self) -> None:
        """Return when the table has everything that the topics held at the time of this call. One round serves all
        callers that wait."""
        await self._rounds.next()

    async def load(self, p: int, share: "Callable[[int], Awaitable[Any]]") -> None:
        """Load the members of a fan-out partition, and keep them current from then on. `share` gets a snapshot's
        share of the partition; None builds it from the topic alone."""
        if p in self._held:
            return
        if p not in self._loading:
            task = self._loading[p] = asyncio.create_task(self._load(p, share), name=f"loading {MEMBERS}/{p}")
            task.add_done_callback(lambda _: self._loading.pop(p, None) if self._loading.get(p) is task else None)
        await asyncio.shield(self._loading[p])

    def drop(self, p: int) -> None:
        """Forget a partition."""
        if (task := self._loading.pop(p, None)) is not None:
            task.cancel()
        if p in self._held:
            self._held.discard(p)
            self._reads = []
            self.table.drop(p)

    async def _load(self, p: int, share: "Callable[[int], Awaitable[Any]]") -> None:
        partition = Partition(MEMBERS, p)
        async with self._limit:
            snapshot = await share(p)
        self.table.add(p, snapshot)
        try:
            await self._read_members(p, await self._log.span(partition))
        except BaseException:
            self.table.drop(p)
            raise
        self._held.add(p)
        self._reads = []
        await self.now()

    async def _round(self) -> None:
        """Look up where the partitions end, and apply all records before these ends. A partition of `presence` may be
        compacted in between: who is online is stored again beyond the end that was looked up, and all records before
        that are trimmed. Then the ends are looked up once more."""
        while not await self._read_to_ends():
            _log.debug("presence was compacted while it was read")

    async def _read_to_ends(self) -> bool:
        """Whether all that lies before the ends of the partitions was applied."""
        is_current = bool(self._reads) and not await self._log.read_many(self._reads, max_records=1)
        # After the read: what it saw was written before any change of `inbox` that is not known yet.
        if is_current and await self._log.catalog_version() == self._version:
            return True
        self._reads = []
        members, presence = await self._log.ends(MEMBERS), await self._log.ends(PRESENCE)
        while await self._log.catalog_version() != self._version:
            await self._follow_inbox()
            members, presence = await self._log.ends(MEMBERS), await self._log.ends(PRESENCE)
        behind = [p for p in self._held if (span := members.get(p)) and _is_behind(self.table.members_offset(p), span)]
        if behind:
            await all_of(self._read_members(p, members[p], held=True) for p in behind)
        offsets = self.table.presence_offsets
        behind = [q for q, span in presence.items() if q < len(offsets) and _is_behind(offsets[q], span)]
        compacted: set[int] = set()
        if behind:
            await all_of(self._read_presence(q, presence[q], compacted) for q in behind)
        if compacted:
            return False
        self._reads = self._next_reads()
        return True

    def _next_reads(self) -> list[ReadRequest]:
        """By which it is seen whether there is anything new."""
        places = {Partition(MEMBERS, p): self.table.members_offset(p) for p in self._held}
        places |= {Partition(PRESENCE, q): at for q, at in enumerate(self.table.presence_offsets)}
        return [ReadRequest(p, 0) if at is None else ReadRequest(p, at.offset, at.epoch) for p, at in places.items()]

    async def _follow_inbox(self) -> None:
        """Look the topics up after a change of the catalog. The version is read first: a change after it is seen the
        next time."""
        version = await self._log.catalog_version()
        inbox = await follow_inbox(self._log)
        if self._table is None:
            self._table = self._new_table(inbox)
        elif self._inbox is None or inbox.receiving != self._inbox.receiving:
            self._table.resize(inbox.receiving)
        self._inbox = inbox
        self._version = version if inbox.receiving <= len(self.table.presence_offsets) else -1

    async def _read_members(self, p: int, span: Span, *, held: bool = False) -> None:
        """Apply the changes of memberships up to the end of the span."""
        partition = Partition(MEMBERS, p)
        at = self.table.members_offset(p)
        if at is not None and at.epoch != span.epoch:
            self._start_again(p, f"{partition} was created again")
            at = None
        offset = span.first if at is None else at.offset
        while offset < span.end:
            try:
                async with self._limit:
                    batch = await self._log.read(
                        partition, offset, epoch=span.epoch, max_records=self._config.load_records
                    )
            except (OffsetTrimmed, OffsetBeyondEnd, WrongEpoch) as error:
                self._start_again(p, str(error))
                span = await self._log.span(partition)
                offset = span.first
                continue
            if held and p not in self._held:
                return
            offset = batch.end
            self.table.apply_members(p, batch.data["key"], batch.data["value"], Position(batch.epoch, batch.end))
        if at is None and offset >= span.end and self.table.members_offset(p) is None:
            self._apply_nothing(p, span)

    def _apply_nothing(self, p: int, span: Span) -> None:
        """An empty partition is known up to its end, too."""
        nothing = pa.array([], pa.binary())
        self.table.apply_members(p, nothing, nothing, Position(span.epoch, span.end))

    def _start_again(self, p: int, why: str) -> None:
        _log.warning("the members of fan-out partition %d are read again from the start: %s", p, why)
        self.table.drop(p)
        self.table.add(p)

    async def _read_presence(self, q: int, span: Span, compacted: set[int]) -> None:
        """Apply the changes of presence up to the end of the span. If what was not read yet is trimmed, the first
        record that is left says that nobody is online but for those that follow. If that one lies beyond the span, the
        partition is added to `compacted`."""
        partition = Partition(PRESENCE, q)
        at = self.table.presence_offsets[q]
        if at is not None and at.epoch != span.epoch:
            self._clear_presence(q, span)
            at = None
        offset = span.first if at is None else at.offset
        while offset < span.end:
            try:
                async with self._limit:
                    batch = await self._log.read(
                        partition, offset, epoch=span.epoch, max_records=self._config.load_records
                    )
            except OffsetTrimmed as error:
                offset = error.first
                if span.first < span.end <= offset:
                    compacted.add(q)
                continue
            except (OffsetBeyondEnd, WrongEpoch):
                span = await self._log.span(partition)
                self._clear_presence(q, span)
                offset = span.first
                continue
            batch = batch.before(span.end)
            offset = batch.end
            self.table.apply_presence(q, batch.data["key"], batch.data["value"], Position(batch.epoch, batch.end))

    def _clear_presence(self, q: int, span: Span) -> None:
        _log.warning("the presence of inbox partition %d is read again: its topic was created again", q)
        key, value = pa.array([None], pa.binary()), pa.array([CLEARED], pa.binary())
        self.table.apply_presence(q, key, value, Position(span.epoch, span.first))


def _is_behind(at: Position | None, span: Span) -> bool:
    return at is None or at.epoch != span.epoch or at.offset < span.end
