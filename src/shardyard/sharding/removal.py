"""Removing queues that receive no more messages. See `administration` for the order of the steps."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from shardyard.groups import Node
from shardyard.log import Log
from shardyard.model import Fenced, RetryLater, Span
from shardyard.model.sharding import Queue, QueueState, Remaining, RemainingQueue
from shardyard.registry import Transaction
from shardyard.runtime.retry import retry
from shardyard.sharding.rows import next_version, read_topology, store
from shardyard.sharding.slots import without_queues

_log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_SECONDS = 10.0

CountUnread = Callable[[Queue], Awaitable[int]]
"""At most how many messages of a queue were not acknowledged; 0 only if all were."""


class Removal:
    """Closes and removes draining queues."""

    def __init__(self, node: Node, count_unread: CountUnread | None = None) -> None:
        """`count_unread`: by default, what the log holds is counted."""
        self._node = node
        self._log = node.log
        self._count_unread = count_unread or self._count_stored

    async def close(self, queues: Iterable[Queue], who: str) -> Remaining:
        """Let nothing more be stored in these draining queues, and remove those that are empty. Returns the others."""
        queues = list(queues)

        async def close() -> Remaining:
            counts = await self._count_closed(queues)
            await self._remove(await self._ends([queue for queue, count in counts.items() if not count]), who)
            return Remaining(tuple(RemainingQueue(q.name, count, q.node) for q, count in counts.items() if count))

        return await self._retry(close)

    async def count(self, queues: Iterable[Queue]) -> Remaining:
        """Those of these queues that are not empty. They stay as they are."""
        queues = list(queues)
        counts = await self._retry(lambda: asyncio.gather(*map(self._count_unread, queues)))
        return Remaining(tuple(RemainingQueue(q.name, n) for q, n in zip(queues, counts, strict=True) if n))

    async def discard(self, queues: Iterable[Queue], who: str) -> tuple[int, Remaining]:
        """Remove these draining queues with what is in them. Returns how many messages that were at most, and the
        queues that are still there with messages, because they take messages again by a change of another caller."""
        queues = list(queues)

        async def discard() -> dict[Queue, int]:
            counts = await self._count_closed(queues)
            await self._remove(await self._ends(queues), who)
            return counts

        counts = await self._retry(discard)
        now = await self._retry(lambda: self._node.transactions.read(read_topology))
        places = {(queue.name, queue.slot, queue.first) for queue in now.queues.values()}
        left = {q: count for q, count in counts.items() if count and (q.name, q.slot, q.first) in places}
        remaining = tuple(RemainingQueue(queue.name, count, queue.node) for queue, count in left.items())
        return sum(counts.values()) - sum(left.values()), Remaining(remaining)

    async def remove_if_drained(self, queue: Queue, end: int, who: str) -> bool:
        """Remove a draining queue, if everything in it lies before the offset `end`, up to which its owner has seen
        everything acknowledged. Returns whether it was removed."""
        if queue.state is not QueueState.DRAINING:
            return False
        await self._set_fences([queue])
        ends = await self._ends([queue])
        return ends[queue].end <= end and queue in await self._remove(ends, who)

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """The queues are closed already: what follows is tried for a while before the caller gets an error."""
        return await retry(call, clock=self._node.clock, deadline=self._node.clock.monotonic() + RETRY_SECONDS)

    async def _count_closed(self, queues: Sequence[Queue]) -> dict[Queue, int]:
        """Let nothing more be stored in these queues, and count what is in them."""
        await self._set_fences(queues)
        return dict(zip(queues, await asyncio.gather(*map(self._count_unread, queues)), strict=True))

    async def _set_fences(self, queues: Sequence[Queue]) -> None:
        await asyncio.gather(*(self._set_fence(queue) for queue in queues))

    async def _set_fence(self, queue: Queue) -> None:
        with contextlib.suppress(Fenced):  # it has a later incarnation already, and is not removed as this one
            await self._log.set_fence(queue.routing_fence)

    async def _ends(self, queues: Sequence[Queue]) -> dict[Queue, Span]:
        """What the partitions of these queues hold. Their fences are set, so no more is coming."""
        return dict(zip(queues, await asyncio.gather(*(self._log.span(q.partition) for q in queues)), strict=True))

    async def _count_stored(self, queue: Queue) -> int:
        span = await self._log.span(queue.partition)
        return await self._log.count(queue.partition, max(queue.first, span.first), span.end)

    async def _remove(self, spans: Mapping[Queue, Span], who: str) -> set[Queue]:
        """Remove the queues that are still as they were, and drop their records."""
        if not spans:
            return set()
        ends = {queue: span.end for queue, span in spans.items()}
        states = {queue: await self._log.span(queue.state_partition) for queue in spans}
        removed = await self._node.transactions.run(lambda tx: remove_drained(tx, ends, who))
        for queue in removed:  # only up to the ends from before: another queue may be in the slot by now
            await drop_records(self._log, queue, ends[queue], states[queue].end)
        return removed


async def drop_records(log: Log, queue: Queue, end: int, states_end: int) -> None:
    """Drop what is left in a slot that was freed: the messages and the states before these offsets."""
    try:
        await log.trim(queue.partition, end)
        await log.trim(queue.state_partition, states_end)
    except RetryLater as error:
        _log.warning("the records of %s, which %r has left, stay for now: %s", queue.partition, queue.name, error)


def remove_drained(tx: Transaction, ends: Mapping[Queue, int], who: str) -> set[Queue]:
    """Work for a transaction: remove these draining queues, each with the offset where it ended. One that takes
    messages again, or was removed already, is left as it is. Returns those that were removed."""
    before = read_topology(tx)
    gone = {queue for queue in ends if before.queues.get(queue.name) == queue and queue.state is QueueState.DRAINING}
    if gone:
        after = without_queues(
            replace(before, version=next_version(before, tx.now)), {queue.name: ends[queue] for queue in gone}
        )
        store(tx, before, after)
        for queue in sorted(gone, key=lambda queue: queue.name):
            tx.audit(who, "queue removed", queue.name, {"slot": queue.slot})
    return gone
