"""`TransactionBatcher`: the asynchronous edge of a registry."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shardyard.model import ShardyardError
from shardyard.registry.port import Registry, Snapshot, Transaction, TransactionAborted
from shardyard.runtime.group_commit import GroupCommit, Outcome

T = TypeVar("T")
Item = TypeVar("Item")

MAX_BATCH = 256
"""Units of work in one transaction, so that other processes get a chance to write."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Work of one caller; or an item of work that is done for many callers at once."""

    work: Callable[..., Any]
    writes: bool
    is_bulk: bool = False
    item: Any = None


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

    async def run_bulk(
        self, work: Callable[[Transaction, Sequence[Item]], Sequence[T | ShardyardError]], item: Item
    ) -> T:
        """For work that is cheaper for many callers at once: `work` gets all items that wait for it, in the order of
        the calls, and returns an outcome for each, which is an error for those that it refuses.

        Within a transaction, it is done before the units of `run` and `read`, also before those that were submitted
        earlier: all of them are under way at the same time.
        """
        result: T = await self._commits.do(_Unit(work, writes=True, is_bulk=True, item=item))
        return result

    def close(self) -> None:
        """Finish the work that was submitted, then stop."""
        self._commits.close()

    def _carry_out(self, units: list[_Unit]) -> list[Outcome]:
        if any(unit.writes for unit in units):
            return self._registry.run(lambda tx: _outcomes(units, tx))
        return self._registry.read(lambda snapshot: [_outcome(unit.work, snapshot) for unit in units])


def _outcomes(units: list[_Unit], tx: Transaction) -> list[Outcome]:
    indexes: defaultdict[Callable[..., Any], list[int]] = defaultdict(list)
    for index, unit in enumerate(units):
        if unit.is_bulk:
            indexes[unit.work].append(index)
    outcomes: dict[int, Outcome] = {}
    for work, some in indexes.items():
        found = _outcome(work, tx, [units[index].item for index in some])
        outcomes.update(zip(some, [found] * len(some) if isinstance(found, ShardyardError) else found, strict=True))
    return [outcomes[i] if unit.is_bulk else _outcome(unit.work, tx) for i, unit in enumerate(units)]


def _outcome(work: Callable[..., Any], *arguments: object) -> Outcome:
    try:
        return work(*arguments)
    except TransactionAborted:
        raise  # it concerns all units: the registry runs them again
    except ShardyardError as error:
        return error
