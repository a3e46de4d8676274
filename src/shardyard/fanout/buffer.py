"""How far the workers are behind: what waits for them in `fanout`, and for how long."""

from dataclasses import dataclass

from shardyard.fanout.config import WORKERS_GROUP, FanoutConfig
from shardyard.groups import Node
from shardyard.model import OffsetTrimmed, Partition, Position, Span
from shardyard.runtime.metrics import FANOUT_BUFFER_FULL, FANOUT_BUFFER_RECORDS, FANOUT_BUFFER_SECONDS
from shardyard.wire.channels import FANOUT


@dataclass(frozen=True, slots=True)
class BufferState:
    """What waits in `fanout`."""

    records: int = 0
    """Not committed by the workers, in all partitions."""
    most: int = 0
    """The same in the partition that has the most."""
    seconds: float = 0.0
    """How long the oldest of these has waited; 0 if it is a second or so at most."""
    full: bool = False
    """Coordinators forward nothing until the workers have caught up; events wait in `events`."""

    def __str__(self) -> str:
        if self.full:
            return f"buffer full: workers are behind by {self.records} records, for {self.seconds:.0f} s"
        return f"{self.records} records are waiting, for {self.seconds:.0f} s"


class Buffer:
    """Measures what waits."""

    def __init__(self, node: Node, config: FanoutConfig) -> None:
        self._node = node
        self._config = config
        self._last: dict[int, Span] = {}
        self._times: dict[tuple[int, int], int] = {}
        """By partition and offset, when the record was appended, in milliseconds."""
        self.state = BufferState()

    async def measure(self) -> BufferState:
        """Look at the positions of the workers and at the ends of the partitions."""
        rows = await self._node.transactions.read(lambda tx: tx.ownerships(WORKERS_GROUP))
        committed = {row.partition.index: row.committed for row in rows if row.partition.topic == FANOUT}
        ends = await self._node.log.ends(FANOUT)
        places = {index: _place(committed.get(index), span) for index, span in ends.items()}
        behind = {index: span.end - places[index] for index, span in ends.items() if span.end > places[index]}
        # What was there at the last look and is not done yet has waited for some time: only then its age is looked up.
        old = [i for i in behind if not self._last or (i in self._last and places[i] < self._last[i].end)]
        times = {(i, places[i]): await self._time(i, places[i]) for i in old}
        self._last, self._times = ends, times
        seconds = max((self._node.clock.now() - time / 1000 for time in times.values()), default=0.0)
        most = max(behind.values(), default=0)
        full = seconds > self._config.buffer_seconds or most > self._config.buffer_records
        self.state = BufferState(sum(behind.values()), most, max(seconds, 0.0), full)
        FANOUT_BUFFER_FULL.set(full)
        FANOUT_BUFFER_RECORDS.set(self.state.records)
        FANOUT_BUFFER_SECONDS.set(round(self.state.seconds, 3))
        return self.state

    async def _time(self, index: int, offset: int) -> int:
        if (known := self._times.get((index, offset))) is not None:
            return known
        try:
            batch = await self._node.log.read(Partition(FANOUT, index), offset, max_records=1)
        except OffsetTrimmed:
            return int(self._node.clock.now() * 1000)
        return int(batch.data["timestamp"][0].as_py()) if len(batch) else int(self._node.clock.now() * 1000)


def _place(committed: Position | None, span: Span) -> int:
    """The offset from which on nothing is committed."""
    if committed is None or committed.epoch != span.epoch:
        return span.first
    return max(committed.offset, span.first)
