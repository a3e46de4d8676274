"""`TopologyCache`: the topology in memory, kept current by a watch."""

import asyncio
import logging
from types import TracebackType
from typing import Self

from shardyard.groups import Node
from shardyard.model import ShardyardError
from shardyard.registry import ChangeSignal, Snapshot
from shardyard.sharding.rows import WATCH_NAME, read_topology, read_version
from shardyard.sharding.topology import Topology

_log = logging.getLogger(__name__)

REFRESH_SECONDS = 5.0
"""The longest time between two refreshes, also when nothing was signalled."""


class TopologyCache:
    """Follows the topology, from entering the block to leaving it. It may be behind the registry by some milliseconds:
    the log refuses messages for a queue that no longer receives (`Fenced`), and then `refresh` helps."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._changed = asyncio.Event()
        self._reading = asyncio.Lock()
        self._reads = 0
        """How many reads were begun."""
        self._task: asyncio.Task[None] | None = None
        self.current = Topology()

    async def __aenter__(self) -> Self:
        await self.refresh()
        self._task = asyncio.create_task(self._follow(), name="topology of sharded queues")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def changed(self) -> None:
        """Return after the next change of `current`."""
        await self._changed.wait()

    async def refresh(self) -> Topology:
        """Read the registry now, and return what is current then. Callers at the same time share a read."""
        reads = self._reads
        async with self._reading:
            if self._reads == reads:  # none was begun after this call
                self._reads += 1
                topology = await self._node.transactions.read(self._read)
                if topology.version != self.current.version:
                    self.current = topology
                    self._changed.set()
                    self._changed = asyncio.Event()
        return self.current

    def _read(self, tx: Snapshot) -> Topology:
        return self.current if read_version(tx) == self.current.version else read_topology(tx)

    async def _follow(self) -> None:
        with ChangeSignal(self._node.registry, WATCH_NAME, self._node.clock) as changes:
            while True:
                try:
                    await self.refresh()
                except ShardyardError as error:
                    _log.warning("the topology of sharded queues will be refreshed later: %s", error)
                await changes.wait(REFRESH_SECONDS)
