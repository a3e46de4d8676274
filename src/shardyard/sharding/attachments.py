"""`Attachments`: which queues the consumers of a node read.

The consumers of an exchange, of all nodes, are one row in the registry. A node says which consumers it has, and one
transaction attaches all that are waiting there, and spreads them over the shards: so they are spread evenly, however
many come at once, at however many nodes. When shards or consumers come and go, every node with consumers of that
exchange looks whether they have to be spread again, and the first one does it.

A queue that a consumer reads may be newer than the topology that its node knows: then refreshing that one helps.
"""

import asyncio
import contextlib
import logging
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from shardyard.groups import Directory, Node
from shardyard.groups.coordinator import MemberIdentity
from shardyard.model import Closed, Fenced, RetryLater, ShardyardError, TooLarge, UnknownQueue
from shardyard.registry import ChangeSignal, Snapshot
from shardyard.runtime.clock import wait_until_set
from shardyard.runtime.retry import Backoff
from shardyard.sharding.attachment_rows import MAX_CONSUMERS, WATCH_NAME, Row, Wanted, change, plan
from shardyard.sharding.topology import Topology
from shardyard.sharding.topology_cache import TopologyCache

_log = logging.getLogger(__name__)

REFRESH_SECONDS = 5.0
"""The longest time between two looks, also when nothing was signalled."""
COALESCE_SECONDS = 0.02
"""How long changes by others are collected, before consumers are spread again."""
BACKOFF = Backoff(first=0.05, longest=1.0)
"""Before another attempt to spread consumers that failed."""


@dataclass(frozen=True, slots=True)
class AttachedQueues:
    """What a consumer reads."""

    own: str | None
    """The queue that it was attached to; None if there is none for it now."""
    covered: tuple[str, ...] = ()
    """Shards that it reads in addition, because they have no consumer of their own or are draining."""

    @property
    def queues(self) -> tuple[str, ...]:
        return self.covered if self.own is None else (self.own, *self.covered)


class Attachment:
    """A consumer of a queue or of all shards of an exchange, from `Attachments.attach` to `detach`.

    Iterating over it yields what it reads: at once, and after each change (only the last of several in between). It
    ends when the consumer is detached, and raises `UnknownQueue` when what it reads was deleted.
    """

    def __init__(self, source: str, *, local: bool, detach: Callable[["Attachment"], Awaitable[None]]) -> None:
        self.id = uuid.uuid4().hex
        self.source = source
        self.local = local
        self.attached = AttachedQueues(None)
        """What it reads now."""
        self.error: ShardyardError | None = None
        """Why it has ended, if it was not detached."""
        self.is_attached = False
        """Others know of it."""
        self._detach = detach
        self._is_detached = False
        self._changed = asyncio.Event()

    async def detach(self) -> None:
        """End it; others read its shards then. Calling it twice is fine."""
        if not self._is_detached:
            self._is_detached = True
            self._changed.set()
            await self._detach(self)

    async def __aiter__(self) -> AsyncIterator[AttachedQueues]:
        seen: AttachedQueues | None = None
        while not self._is_detached:
            self._changed.clear()
            if self.error is not None:
                raise self.error
            if self.attached != seen:
                seen = self.attached
                yield seen
            else:
                await self._changed.wait()

    def update(self, attached: AttachedQueues) -> None:
        """For `Attachments`: it reads these now."""
        self.is_attached = True
        if attached != self.attached:
            self.attached = attached
            self._changed.set()

    def end(self, error: ShardyardError) -> None:
        """For `Attachments`: what it reads is gone."""
        self.attached, self.error = AttachedQueues(None), error
        self._changed.set()


class Attachments:
    """The consumers whose connections are at this node, from entering the block to leaving it."""

    def __init__(
        self, node: Node, topology: TopologyCache, directory: Directory, identity: Callable[[], MemberIdentity]
    ) -> None:
        """`directory`: of the group of nodes. `identity`: of this node in that group, as of its last join."""
        self._node = node
        self._topology = topology
        self._directory = directory
        self._identity = identity
        self._of_exchange: defaultdict[str, dict[str, Attachment]] = defaultdict(dict)
        """The consumers of each exchange by id, in the order in which they came."""
        self._of_queue: dict[str, Attachment] = {}
        """Those of a single queue, by id. They concern nobody else, so the registry does not know them."""
        self._to_change: set[str] = set()
        """Exchanges whose consumers of this node are others than the registry knows."""
        self._waiting: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._requested = asyncio.Event()
        """Somebody is waiting."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        loops = (
            self._run(),
            self._follow(self._topology.changed),
            self._follow(self._directory.changed),
            self._watch(),
        )
        self._tasks = [asyncio.create_task(loop, name="attachments of sharded queues") for loop in loops]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Detach all consumers, if the registry can be reached; others drop them when this node leaves."""
        exchanges = {exchange: () for exchange, consumers in self._of_exchange.items() if consumers}
        for consumer in (*self._of_queue.values(), *(c for some in self._of_exchange.values() for c in some.values())):
            consumer.end(Closed("node"))
        self._of_exchange.clear()
        self._of_queue.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        _finish(self._waiting, Closed("node"))
        identity = self._identity()
        with contextlib.suppress(RetryLater, Fenced):
            await self._node.transactions.run(lambda tx: change(tx, identity, exchanges))

    async def attach(self, source: str, *, local: bool = False) -> Attachment:
        """Attach a consumer to a queue, or to the active shard with the fewest consumers if `source` is a sharded
        exchange. Returns when others know of it.

        `local`: of the shards, only those that this node owns. `UnknownQueue` if there is neither; `RetryLater` if the
        registry can't be reached, or this node is not a member just now.
        """
        topology = self._topology.current
        if not _is_source(topology, source):
            topology = await self._topology.refresh()
        if not _is_source(topology, source):
            raise UnknownQueue(source)
        attachment = Attachment(source, local=local, detach=self._remove)
        if source in topology.queues:
            attachment.update(AttachedQueues(source))
            self._of_queue[attachment.id] = attachment
            return attachment
        self._of_exchange[source][attachment.id] = attachment
        try:
            await self._settle(source)
            if not attachment.is_attached and attachment.error is None:
                raise TooLarge(f"consumers of {source!r}", MAX_CONSUMERS + 1, MAX_CONSUMERS)
        except BaseException:
            await asyncio.shield(attachment.detach())
            raise
        return attachment

    def count(self, source: str) -> int:
        """How many consumers of a queue or an exchange this node has."""
        of_queue = sum(consumer.source == source for consumer in self._of_queue.values())
        return of_queue + len(self._of_exchange.get(source, ()))

    async def _remove(self, attachment: Attachment) -> None:
        source = attachment.source
        if self._of_queue.pop(attachment.id, None) is None and source in self._of_exchange:
            self._of_exchange[source].pop(attachment.id, None)
            with contextlib.suppress(ShardyardError):  # it is tried again, and logged
                await self._settle(source)

    async def _settle(self, exchange: str) -> None:
        """Return when the registry knows the consumers that this node has now."""
        self._to_change.add(exchange)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        self._requested.set()
        self._wake.set()
        await done

    # In the background

    async def _run(self) -> None:
        failures = 0
        while True:
            await self._wake.wait()
            await wait_until_set(self._requested, COALESCE_SECONDS, self._node.clock)
            self._wake.clear()
            self._requested.clear()
            waiting, self._waiting = self._waiting, []
            to_change, self._to_change = self._to_change, set()
            try:
                await self._round(to_change)
            except ShardyardError as error:
                failures += 1
                if failures == 1:
                    _log.warning("consumers of sharded queues will be spread later: %s", error)
                self._to_change |= to_change
                self._wake.set()
                _finish(waiting, _as_retry_later(error))
                await self._node.clock.sleep(BACKOFF.delay(failures))
            else:
                failures = 0
                _finish(waiting)

    async def _round(self, to_change: set[str]) -> None:
        identity = self._identity()
        wanted = {
            exchange: [Wanted(consumer.id, consumer.local) for consumer in consumers.values()]
            for exchange, consumers in self._of_exchange.items()
        }

        def look(tx: Snapshot) -> tuple[dict[str, Row], bool]:
            plans = plan(tx, identity, wanted)
            is_changing = any(before != after for before, after in plans.values())
            return {exchange: after for exchange, (_, after) in plans.items()}, is_changing

        rows: dict[str, Row] = {}
        is_changing = bool(to_change)
        if wanted and not is_changing:
            rows, is_changing = await self._node.transactions.read(look)
        if is_changing:
            rows = await self._node.transactions.run(lambda tx: change(tx, identity, wanted))
        self._apply(rows)

    def _apply(self, rows: dict[str, Row]) -> None:
        for exchange, row in rows.items():
            consumers = self._of_exchange[exchange]
            for known in row.consumers:
                if (consumer := consumers.get(known.id)) is not None:
                    consumer.update(AttachedQueues(known.own, known.covers))
            if not consumers and not any(known.home == self._identity().member for known in row.consumers):
                del self._of_exchange[exchange]
        self._end_orphans()

    def _end_orphans(self) -> None:
        """End the consumers of what was deleted."""
        topology = self._topology.current
        for exchange, consumers in self._of_exchange.items():
            if consumers and not _is_source(topology, exchange):
                for consumer in consumers.values():
                    consumer.end(UnknownQueue(exchange))
                consumers.clear()
                self._to_change.add(exchange)
                self._wake.set()
        for consumer in [c for c in self._of_queue.values() if c.source not in topology.queues]:
            consumer.end(UnknownQueue(consumer.source))
            del self._of_queue[consumer.id]

    async def _follow(self, changed: Callable[[], Awaitable[None]]) -> None:
        while True:
            await changed()
            self._wake.set()

    async def _watch(self) -> None:
        with ChangeSignal(self._node.registry, WATCH_NAME, self._node.clock) as changes:
            while True:
                await changes.wait(REFRESH_SECONDS)
                self._wake.set()


def _is_source(topology: Topology, name: str) -> bool:
    """Whether one can consume from this name."""
    return name in topology.queues or topology.is_sharded(name) or bool(topology.shards(name))


def _finish(waiting: list["asyncio.Future[None]"], error: ShardyardError | None = None) -> None:
    for done in waiting:
        if not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)


def _as_retry_later(error: ShardyardError) -> ShardyardError:
    """A node that was evicted joins again by itself: its callers may try again."""
    return RetryLater(str(error)) if isinstance(error, Fenced) else error
