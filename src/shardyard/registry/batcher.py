"""`TransactionBatcher`: the asynchronous edge of a registry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shardyard.model import ShardyardError
from shardyard.registry.port import Registry, Transaction
from shardyard.runtime.group_commit import GroupCommit, Outcome

T = TypeVar("T")

MAX_BATCH = 256
"""Units of work in one transaction, so that other processes get a chance to write."""


@dataclass(frozen=True, slots=True)
class _Unit:
    work: Callable[[Transaction], Any]
    writes: bool


class TransactionBatcher:
    """Runs the registry work of an event loop in a thread, and commits what is waiting together as one transaction
    with one sync to disk. Results arrive in the order of the calls.

    A unit of work must check before it changes anything: when it raises a `ShardyardError`, the other units of the
    same transaction are still committed.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._commits = GroupCommit("registry transactions", self._transact, most=MAX_BATCH)

    async def run(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction. Its changes are durable when this returns."""
        result: T = await self._commits.do(_Unit(work, writes=True))
        return result

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on a snapshot. It blocks no writer in any process."""
        result: T = await self._commits.do(_Unit(work, writes=False))
        return result

    def close(self) -> None:
        """Finish the work that was submitted, then stop."""
        self._commits.close()

    def _transact(self, units: list[_Unit]) -> list[Outcome]:
        begin = self._registry.transaction if any(unit.writes for unit in units) else self._registry.snapshot
        outcomes: list[Outcome] = []
        with begin() as tx:
            for unit in units:
                try:
                    outcomes.append(unit.work(tx))
                except ShardyardError as error:
                    outcomes.append(error)
        return outcomes
