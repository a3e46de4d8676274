"""The messages of a queue that are in flight."""

import asyncio
from collections.abc import Sequence

from shardyard.model import Record
from shardyard.runtime.clock import Clock, wait_until_set
from shardyard.sharding.config import ShardingConfig


class InFlight:
    """Messages that were delivered, or are about to be stored as dead letters, and are not settled."""

    __slots__ = ("_config", "_is_empty", "_records", "_size")

    def __init__(self, config: ShardingConfig) -> None:
        self._config = config
        self._records: dict[int, Record] = {}
        """By offset."""
        self._size = 0
        """Bytes of the bodies."""
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, offset: int) -> Record:
        return self._records[offset]

    @property
    def room(self) -> int:
        """How many more may be in flight."""
        if self._size >= self._config.in_flight_bytes:
            return 0
        return max(0, self._config.in_flight_records - len(self._records))

    def add(self, offsets: Sequence[int], records: Sequence[Record]) -> None:
        self._records.update(zip(offsets, records, strict=True))
        self._size += sum([len(record.value) for record in records])
        self._is_empty.clear()

    def remove(self, offsets: Sequence[int]) -> list[Record]:
        """Returns the records of these messages, which are not in flight any more."""
        held = self._records
        records = [held.pop(offset) for offset in offsets]
        self._size -= sum([len(record.value) for record in records])
        if not held:
            self._is_empty.set()
        return records

    def clear(self) -> None:
        """Forget all of them."""
        self.remove(list(self._records))

    async def wait_until_empty(self, seconds: float, clock: Clock) -> None:
        """Return when nothing is in flight, at the latest after so many seconds."""
        await wait_until_set(self._is_empty, seconds, clock)
