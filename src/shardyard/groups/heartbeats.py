"""Storing the heartbeats of many members together."""

import asyncio
from collections.abc import Sequence

from shardyard.groups import protocol
from shardyard.model import Fenced
from shardyard.registry import Heartbeat, Transaction, TransactionBatcher
from shardyard.runtime.group_commit import settle

INTERVAL_SECONDS = 0.05
"""Heartbeats that come within this time of the last transaction wait for the next one. It is far below any session."""


class Heartbeats:
    """Takes the heartbeats of the members that a server serves. Each is stored when its call returns, but thousands of
    members do not cause a transaction each."""

    def __init__(self, transactions: TransactionBatcher) -> None:
        self._transactions = transactions
        self._waiting: list[tuple[Heartbeat, asyncio.Future[None]]] = []
        self._stored_at = float("-inf")
        """When the last transaction began, by the event loop's time."""
        self._storing: set[asyncio.Task[None]] = set()

    async def take(self, heartbeat: Heartbeat) -> None:
        """Renew the session of a member. `Fenced` if it is not a member any more."""
        await self.submit(heartbeat)

    def submit(self, heartbeat: Heartbeat) -> "asyncio.Future[None]":
        """The same. The future is done when the heartbeat is stored, or has the error that refuses it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((heartbeat, done))
        if len(self._waiting) == 1:
            loop.call_at(max(self._stored_at + INTERVAL_SECONDS, loop.time()), self._start)
        return done

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        waiting, self._waiting, self._stored_at = self._waiting, [], loop.time()
        task = loop.create_task(self._store(waiting))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def _store(self, waiting: "Sequence[tuple[Heartbeat, asyncio.Future[None]]]") -> None:
        heartbeats, results = [heartbeat for heartbeat, _ in waiting], [done for _, done in waiting]
        try:
            outcomes = await self._transactions.run_bulk(_renew, heartbeats, size=len(heartbeats))
        except Exception as error:  # noqa: BLE001 the callers get it
            settle(results, [error] * len(results))
        else:
            settle(results, outcomes)


def _renew(tx: Transaction, parts: Sequence[Sequence[Heartbeat]]) -> list[list[Fenced | None]]:
    outcomes = iter(protocol.heartbeat(tx, [heartbeat for part in parts for heartbeat in part]))
    return [[next(outcomes) for _ in part] for part in parts]
