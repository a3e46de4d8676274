"""Reads the messages of a queue into memory, a bounded piece ahead of their delivery."""

from collections.abc import Sequence

from shardyard.log import Log
from shardyard.model import Fence, OffsetTrimmed, Partition, Record
from shardyard.model.batch import Batch
from shardyard.sharding.ack_state import AckState
from shardyard.sharding.config import ShardingConfig
from shardyard.sharding.messages import may_expire
from shardyard.sharding.ready import Ready


class ReadAhead:
    """The part of a partition that was not delivered: what is in memory (`ready`), and what is still to be read."""

    def __init__(self, log: Log, partition: Partition, fence: Fence, state: AckState, config: ShardingConfig) -> None:
        self.ready = Ready()
        self.position = state.floor
        """Everything before it was read, or is settled."""
        self.end = state.floor
        """The end of the partition when it was last looked at."""
        self.may_expire = False
        """Messages were read that expire by themselves."""
        self._log = log
        self._partition = partition
        self._fence = fence
        self._state = state
        self._config = config

    @property
    def has_room(self) -> bool:
        """Whether there is room for more messages."""
        ready, config = self.ready, self._config
        return ready.unread < config.read_ahead_records and ready.size < config.read_ahead_bytes

    @property
    def known_beyond(self) -> int:
        """How many messages are known to wait that are not in memory: never more than there are."""
        return max(0, self.end - self.position) if self._log.capabilities.dense_offsets else 0

    async def count(self) -> int:
        """How many messages wait, in memory and beyond it; never fewer than there are."""
        await self.look()
        return len(self.ready) + await self._log.count(self._partition, self.position, self.end)

    async def look(self) -> int:
        """Where the partition ends now."""
        self.end = (await self._log.span(self._partition)).end
        return self.end

    async def read(self, wait: float) -> Batch:
        """What comes next, after up to `wait` seconds."""
        records = max(1, self._config.read_ahead_records - self.ready.unread)
        size = max(1, self._config.read_ahead_bytes - self.ready.size)
        try:
            return await self._log.read(
                self._partition, self.position, max_records=records, max_bytes=size, wait=wait, fence=self._fence
            )
        except OffsetTrimmed as error:  # somebody has trimmed the topic
            return Batch(self._partition, 0, self.position, (), stop=error.first)

    def take_in(self, batch: Batch, records: list[Record]) -> bool:
        """Add what was read to what is ready, without what is known or settled already. Returns whether it leads
        further. `records`: those of the batch."""
        start, end = self.position, batch.end
        if end <= start:
            return False
        offsets = list(batch.offsets())
        if batch.first < start:
            known = sum(offset < start for offset in offsets)
            offsets, records = offsets[known:], records[known:]
        has_settled = start < self._state.settled_end  # under an earlier owner
        if len(offsets) != end - start:
            self._settle_gaps(offsets, start, end)
        if has_settled:
            kept = [i for i, offset in enumerate(offsets) if not self._state.is_settled(offset)]
            offsets, records = [offsets[i] for i in kept], [records[i] for i in kept]
        self.position = end
        self.end = max(self.end, end)
        self.may_expire = self.may_expire or may_expire(records)
        self.ready.add(offsets, records)
        return True

    def drop_all(self, end: int) -> None:
        """Everything before `end` that waits is settled."""
        while len(self.ready):
            self._state.settle(self.ready.take(len(self.ready))[0])
        if end > self.position:
            self._state.settle_range(self.position, end)
            self.position = end

    def _settle_gaps(self, offsets: Sequence[int], start: int, end: int) -> None:
        """There are no messages between these: nobody has to wait for one."""
        last = start
        for offset in (*offsets, end):
            if offset > last:
                self._state.settle_range(last, offset)
            last = offset + 1
