"""`TransactionBatcher`: the asynchronous edge of a registry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shardyard.model import ShardyardError
from shardyard.registry.port import Registry, Snapshot, Transaction, TransactionAborted
from shardyard.runtime.group_commit import GroupCommit, Outcome

T = TypeVar("T")

MAX_BATCH = 256
"""Units of work in one transaction, so that other processes get a chance to write."""


@dataclass(frozen=True, slots=True)
class _Unit:
    work: Callable[[Any], Any]
    writes: bool


class TransactionBatcher:
    """Runs the registry work of an event loop in a thread, and commits what is waiting together as one transaction
    with one sync to disk. Results arrive in the order of the calls.

    A unit of work must check before it changes anything: when it raises a `ShardyardError`, the other units of the
    same transaction are still committed. As with `Registry.run`, a unit must have no side effects: when the database
    aborts the transaction, all its units are run again.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._commits = GroupCommit("registry transactions", self._carry_out, most=MAX_BATCH)

    async def run(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction. Its changes are durable when this returns."""
        result: T = await self._commits.do(_Unit(work, writes=True))
        return result

    async def read(self, work: Callable[[Snapshot], T]) -> T:
        """Run `work` on a snapshot, or in a transaction together with units that write."""
        result: T = await self._commits.do(_Unit(work, writes=False))
        return result

    def close(self) -> None:
        """Finish the work that was submitted, then stop."""
        self._commits.close()

    def _carry_out(self, units: list[_Unit]) -> list[Outcome]:
        if any(unit.writes for unit in units):
            return self._registry.run(lambda tx: [_outcome(unit, tx) for unit in units])
        return self._registry.read(lambda snapshot: [_outcome(unit, snapshot) for unit in units])


def _outcome(unit: _Unit, state: Snapshot) -> Outcome:
    try:
        return unit.work(state)
    except TransactionAborted:
        raise  # it concerns all units: the registry runs them again
    except ShardyardError as error:
        return error
