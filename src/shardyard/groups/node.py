"""`Node`: a process among the others, with its log, its registry, and a candidate for the rebalancer's lease."""

import asyncio
import os
import socket
import uuid
from types import TracebackType
from typing import Self

from shardyard.groups.coordinator import LocalCoordinator
from shardyard.groups.rebalancer import Rebalancer
from shardyard.log import Log
from shardyard.model import InvalidValue
from shardyard.registry import Registry, TransactionBatcher
from shardyard.runtime.clock import Clock, SystemClock


class Node:
    """The host of a process's members; they share it, so a process needs one.

    While it is open, it rebalances all groups whenever it holds the lease. It closes neither log nor registry.
    """

    def __init__(self, log: Log, registry: Registry, *, name: str | None = None, clock: Clock | None = None) -> None:
        if not isinstance(log, Log) or not isinstance(registry, Registry):
            raise InvalidValue("node", (log, registry), "a log and a registry")
        self.log = log
        self.registry = registry
        self.clock = clock or SystemClock()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.transactions = TransactionBatcher(registry)
        self.rebalancer = Rebalancer(log, registry, self.transactions, self.name, self.clock)
        self.coordinator = LocalCoordinator(registry, self.transactions, self.clock)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._task.done()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.rebalancer.run(), name=f"rebalancer of {self.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self.transactions.close)
