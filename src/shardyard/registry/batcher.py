"""`TransactionBatcher`: the asynchronous edge of a registry."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from shardyard.model import Closed, ShardyardError
from shardyard.registry.port import Registry, Snapshot, Transaction, TransactionAborted
from shardyard.runtime.group_commit import CommitTimes, GroupCommit, Interrupted, Outcome, settle
from shardyard.runtime.metrics import GROUP_COMMIT_UNITS

_log = logging.getLogger(__name__)
T = TypeVar("T")
Item = TypeVar("Item")

MAX_BATCH = 256
"""Units of work in one transaction, so that other processes get a chance to write."""
SMALL_TURN = 64
"""Bulk work about more rows is left to the thread."""
YIELDED_TURNS = 5
"""Turns of the event loop that bulk work lets pass, because its sync blocks all else: in these, what came together with
it is done first, from a publish to the delivery of its records."""


class _Unit(Struct, frozen=True):
    """Work of one caller; or an item of work that is done for many callers at once."""

    work: Callable[..., Any]
    writes: bool
    is_bulk: bool = False
    item: Any = None


class TransactionBatcher:
    """Runs the registry work of an event loop in a thread, and commits what is waiting together as one transaction
    with one sync to disk. Results arrive in the order of the calls. Bulk work on an embedded registry is done in the
    event loop itself, as long as that takes no longer than going to the thread and back.

    A unit of work must check before it changes anything: when it raises a `ShardyardError`, the other units of the
    same transaction are still committed. As with `Registry.run`, a unit must have no side effects: when the database
    aborts the transaction, all its units are run again.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._commits = GroupCommit("registry transactions", self._carry_out, most=MAX_BATCH)
        self._times = CommitTimes()
        """Of bulk work in the event loop, the transactions as a whole."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: list[tuple[_Unit, asyncio.Future[Any]]] = []
        """Bulk work that was submitted in this turn of the event loop, or in the few before it."""
        self._turn_size = 0
        """How many rows it is about."""
        self._in_thread = 0
        """Units of bulk work that the thread has not done yet."""
        self._closed = False

    async def run(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction. Its changes are durable when this returns."""
        result: T = await self._commits.do(_Unit(work, writes=True))
        return result

    async def read(self, work: Callable[[Snapshot], T]) -> T:
        """Run `work` on a snapshot, or in a transaction together with units that write."""
        result: T = await self._commits.do(_Unit(work, writes=False))
        return result

    async def run_bulk(
        self,
        work: Callable[[Transaction, Sequence[Item]], Sequence[T | ShardyardError]],
        item: Item,
        *,
        size: int = 1,
    ) -> T:
        """For work that is cheaper for many callers at once: `work` gets all items that wait for it, in the order of
        the calls, and returns an outcome for each, which is an error for those that it refuses. It changes rows as
        `Registry.run_guarded` allows. `size`: how many rows the item is about.

        Within a transaction, it is done before the units of `run` and `read`, also before those that were submitted
        earlier: all of them are under way at the same time.
        """
        return await self.submit_bulk(work, item, size=size)

    def submit_bulk(
        self,
        work: Callable[[Transaction, Sequence[Item]], Sequence[T | ShardyardError]],
        item: Item,
        *,
        size: int = 1,
    ) -> "asyncio.Future[T]":
        """The same. The future is done when the item is durable, or has the error that refuses it."""
        unit = _Unit(work, writes=True, is_bulk=True, item=item)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        if loop is not self._loop:  # what the one before has not finished, nobody waits for
            self._loop, self._turn, self._turn_size, self._in_thread = loop, [], 0, 0
        if self._closed or self._in_thread or not (self._registry.is_embedded and self._times.are_short):
            self._leave_to_thread([(unit, done)])
            return done
        self._turn.append((unit, done))
        self._turn_size += size
        if len(self._turn) == 1:
            self._yield_turns(loop, YIELDED_TURNS)
        return done

    def close(self) -> None:
        """Finish the work that was submitted, and stop. Bulk work of the last few turns is still carried out by the
        event loop if it is little and the registry is open by then; otherwise its callers get `Closed`."""
        self._closed = True
        self._commits.close()

    def _yield_turns(self, loop: asyncio.AbstractEventLoop, left: int) -> None:
        if left:
            loop.call_soon(self._yield_turns, loop, left - 1)
        else:
            self._carry_out_turn()

    def _carry_out_turn(self) -> None:
        """Do this bulk work in the event loop, if it is little; or leave it to the thread, which waits for others and
        finds out what is wrong."""
        turn, size = [(unit, done) for unit, done in self._turn if not done.done()], self._turn_size
        self._turn, self._turn_size = [], 0
        if not turn:
            return
        if size > SMALL_TURN:
            self._leave_to_thread(turn)
            return
        GROUP_COMMIT_UNITS.observe(len(turn))
        started = time.monotonic()
        try:
            outcomes = self._registry.run_guarded_at_once(lambda tx: _outcomes([unit for unit, _ in turn], tx))
        except Exception as error:  # noqa: BLE001 the thread meets it again, if it is not about others
            _log.debug("%d units are left to the thread: %s", len(turn), error)
            self._leave_to_thread(turn)
        except BaseException as error:
            settle([done for _, done in turn], [Interrupted(str(error))] * len(turn))
            raise
        else:
            settle([done for _, done in turn], outcomes)
        finally:
            self._times.took(time.monotonic() - started)

    def _leave_to_thread(self, turn: Sequence[tuple[_Unit, "asyncio.Future[Any]"]]) -> None:
        """What comes later is left to it, too, until it is done: so results arrive in the order of the calls."""
        for unit, done in turn:
            try:
                self._commits.submit(unit, done)
            except Closed as error:
                done.set_exception(error)
            else:
                self._in_thread += 1
                done.add_done_callback(self._thread_has_done)

    def _thread_has_done(self, _: "asyncio.Future[Any]") -> None:
        self._in_thread -= 1
        if not self._in_thread:
            self._times.decay()

    def _carry_out(self, units: list[_Unit]) -> list[Outcome]:
        if all(unit.is_bulk for unit in units):
            return self._registry.run_guarded(lambda tx: _outcomes(units, tx))
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
