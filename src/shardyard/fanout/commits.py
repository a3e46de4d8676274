"""Committing how far partitions are forwarded."""

import asyncio
import contextlib
from collections.abc import Mapping

from shardyard.groups import Membership
from shardyard.model import Fenced, Partition, Position
from shardyard.runtime.clock import Clock
from shardyard.runtime.retry import Backoff, retry

BACKOFF = Backoff(first=0.02, longest=0.5)


class Commits:
    """Commits the positions of all partitions together, now and then."""

    def __init__(self, membership: Membership, clock: Clock, seconds: float) -> None:
        """`seconds`: between two commits."""
        self._membership = membership
        self._clock = clock
        self._seconds = seconds
        self._positions: dict[Partition, tuple[int, Position]] = {}
        """What is to be committed, with the epoch of the ownership."""
        self._is_due = asyncio.Event()
        self._lock = asyncio.Lock()

    def note(self, partition: Partition, epoch: int, position: Position) -> None:
        """Everything before the position is done."""
        self._positions[partition] = (epoch, position)
        self._is_due.set()

    def forget(self, partition: Partition, epoch: int) -> None:
        """The ownership with this epoch has ended."""
        noted = self._positions.get(partition)
        if noted is not None and noted[0] == epoch:
            del self._positions[partition]

    async def run(self) -> None:
        """Commit what is noted, until cancelled."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            await self.now()
            await self._clock.sleep(self._seconds)

    async def now(self) -> None:
        """Commit everything that is noted. Those partitions that are lost are left out."""
        async with self._lock:
            positions, self._positions = self._positions, {}
            if not positions:
                return
            try:
                await self._commit(positions)
            except Fenced:  # one of them is lost
                for partition, position in positions.items():
                    with contextlib.suppress(Fenced):
                        await self._commit({partition: position})

    async def _commit(self, positions: Mapping[Partition, tuple[int, Position]]) -> None:
        await retry(lambda: self._membership.commit(positions), clock=self._clock, backoff=BACKOFF)
