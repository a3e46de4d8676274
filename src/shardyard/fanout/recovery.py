"""Taking partitions over: where to go on, and what earlier owners have forwarded and not committed."""

import logging
from collections.abc import Callable

import pyarrow.compute as pc

from shardyard.fanout.config import FanoutConfig
from shardyard.fanout.forwarding import Forwarded, find_forwarded
from shardyard.fanout.rounds import Rounds
from shardyard.fanout.source import Source
from shardyard.groups import Node
from shardyard.model import Partition, Position
from shardyard.model.batch import Batch

_log = logging.getLogger(__name__)

TIMED_RECORDS = 1000
"""Of the records that are not committed, by whose timestamps it is seen since when they may have been forwarded."""


class Recovery:
    """Looks in the topic that is forwarded to. One scan serves all partitions that wait for one."""

    def __init__(self, node: Node, group: str, target: Callable[[], str], config: FanoutConfig) -> None:
        """`target`: the name of the topic."""
        self._node = node
        self._log = node.log
        self._group = group
        self._target = target
        self._config = config
        self._wanted: dict[Partition, tuple[int, int]] = {}
        """For each partition the epoch of its topic, and since when there may be anything, in milliseconds."""
        self._found: dict[Partition, Forwarded] = {}
        self._rounds = Rounds(self._scan)

    async def prepare(self, partition: Partition) -> None:
        """Find what was forwarded so far of a partition that will be ours. `find` will only look at what comes after
        that."""
        row = await self._node.transactions.read(lambda tx: tx.ownership(self._group, partition))
        position, end = await self._begin(partition, None if row is None else row.committed)
        batch = await self._log.read(partition, min(position.offset, end), max_records=TIMED_RECORDS)
        await self._look(partition, batch)

    async def open(self, source: Source) -> None:
        """Set the fence of a partition that is ours now: from here on nobody else forwards any of it. Sets where to
        read first."""
        await self._log.set_fence(source.fence)
        source.position, source.end = await self._begin(source.partition, source.position)

    async def find(self, source: Source) -> Forwarded | None:
        """What was forwarded of the batch that is in flight, or from the position on; None if nothing was."""
        if source.position is None:
            return None
        if source.in_flight is not None:
            batch = source.in_flight.batch
        elif source.position.offset < source.end:
            batch = await self._log.read(source.partition, source.position.offset, max_records=TIMED_RECORDS)
        else:
            self.forget(source.partition)
            return None
        await self._look(source.partition, batch)
        return self._found.pop(source.partition, None) or None

    def forget(self, partition: Partition) -> None:
        """What was found in preparation is not needed."""
        self._found.pop(partition, None)

    async def stop(self) -> None:
        await self._rounds.stop()

    async def _begin(self, partition: Partition, committed: Position | None) -> tuple[Position, int]:
        """Where to read first, and the end of the partition."""
        span = await self._log.span(partition)
        if committed is not None and committed.epoch == span.epoch and committed.offset >= span.first:
            return committed, span.end
        if committed is not None:
            _log.warning("%s continues from offset %d: %s is gone", partition, span.first, committed)
        return Position(span.epoch, span.first), span.end

    async def _look(self, partition: Partition, batch: Batch) -> None:
        """Look for what was forwarded of the records of a batch, and of those after it. None of them was forwarded
        before it was appended, which their timestamps tell. If these lie in the future, they were chosen by the program
        that published them, and tell nothing: then the whole topic is searched."""
        now, skew = int(self._node.clock.now() * 1000), int(self._config.clock_skew_seconds * 1000)
        earliest = pc.min(batch.data["timestamp"]).as_py()
        if earliest is None:
            earliest = now
        since = 0 if earliest > now + skew else min(earliest, now) - skew
        self._wanted[partition] = (batch.epoch, max(since, 0))
        await self._rounds.next()

    async def _scan(self) -> None:
        wanted, self._wanted = self._wanted, {}
        if wanted:
            known = {partition: self._found[partition] for partition in wanted if partition in self._found}
            self._found |= await find_forwarded(self._log, self._target(), wanted, known)
