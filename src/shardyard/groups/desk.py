"""A process's registry work: what its members ask for together is one transaction, with one sync to disk."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shardyard.model import ShardyardError
from shardyard.model.together import Outcome, Together
from shardyard.registry import Registry, Transaction

T = TypeVar("T")

MOST_TOGETHER = 256
"""Pieces of work in one transaction, so that other processes get their turn."""


@dataclass(frozen=True, slots=True)
class _Piece:
    work: Callable[[Transaction], Any]
    writes: bool


class Desk:
    """Takes work from an event loop and answers there, in the order in which it was asked.

    A piece of work must check before it changes anything: when it raises a `ShardyardError`, the others in its
    transaction go on.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._together = Together("the node", self._transact, most=MOST_TOGETHER)

    async def do(self, work: Callable[[Transaction], T]) -> T:
        """Do this in a transaction; when it returns, what it did is durable."""
        result: T = await self._together.do(_Piece(work, writes=True))
        return result

    async def look(self, work: Callable[[Transaction], T]) -> T:
        """Only read; nobody in any process waits for that."""
        result: T = await self._together.do(_Piece(work, writes=False))
        return result

    def close(self) -> None:
        """Finish what was asked for, then stop."""
        self._together.close()

    def _transact(self, group: list[_Piece]) -> list[Outcome]:
        begin = self._registry.transaction if any(piece.writes for piece in group) else self._registry.snapshot
        outcomes: list[Outcome] = []
        with begin() as tx:
            for piece in group:
                try:
                    outcomes.append(piece.work(tx))
                except ShardyardError as error:
                    outcomes.append(error)
        return outcomes
