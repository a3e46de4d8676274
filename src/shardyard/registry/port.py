"""The registry's port: which groups and members exist, who owns which partition, and what is committed. Its docstrings
are the specification of every engine.

A registry stores rows and runs transactions. What the rows mean to each other is decided above it, in `groups`, once
for all engines.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

from msgspec import Struct

from shardyard.model import Busy, Damaged, Partition, Position, RetryLater
from shardyard.runtime.retry import Backoff

T = TypeVar("T")
S = TypeVar("S")

_BACKOFF = Backoff(first=0.001, longest=0.1)
"""Between two attempts at a transaction."""
_MANY_DUPLICATES = 10
"""Attempts in a row that add a row which exists, after which it is not the transactions of others that add it."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group, and how its partitions are to be assigned."""

    name: str
    epoch: int = 0
    """The last epoch issued in this group. Each membership and each ownership gets a new one."""
    inputs: int = 0
    """Incremented by every change of what the assignment depends on: members, their topics and weights, and the
    settings below."""
    assigned: int = -1
    """The value of `inputs` for which the targets were last computed."""
    shape: int = -1
    """A checksum of the topics and partitions that existed at that time."""
    assignor: str = "sticky"
    max_active: int | None = None
    release_after: float | None = None
    """Seconds without progress after which a member that still heartbeats is evicted; None: never."""
    broadcast: bool = False
    """Each member gets every record: it has a group of its own (see `groups.broadcast`)."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member of a group, from the time it joins until it leaves, expires or is evicted."""

    group: str
    name: str
    epoch: int
    """Distinguishes this membership from earlier and later ones of the same name."""
    weight: int
    topics: tuple[str, ...]
    static: bool
    """It keeps its partitions through a restart, until its session expires."""
    manual: tuple[Partition, ...] | None
    """The partitions that the member chose itself; None if the assignor chooses them."""
    session_timeout: float
    expires_at: float
    """Registry time."""
    address: str | None = None
    """The address at which other processes reach it, as given when it joined."""
    metadata: object = None
    """Any JSON value."""
    prepare_seconds: float | None = None
    """How long an owner keeps a partition while this member prepares to take it over; None: it does not prepare."""
    instance: str | None = None
    """Distinguishes the process that joined from others that join under the same name, through all of its joins."""


@dataclass(frozen=True, slots=True)
class OwnershipRow:
    """Who owns a partition in a group, and how far the group has committed it. (CatMQ calls this table queueOffset.)"""

    group: str
    partition: Partition
    owner: str | None = None
    """The member that may read and commit it now."""
    epoch: int = 0
    """New with every change of the owner. Everything an owner does carries its epoch, and a stale one is refused."""
    target: str | None = None
    """The member that is to own it. If that is not the owner, the owner finishes, commits and releases it."""
    committed: Position | None = None
    progress_at: float = 0.0
    """Registry time when the owner last made progress, or had nothing to do."""
    handover_at: float = 0.0
    """Registry time until which the owner keeps the partition while its target prepares; 0: the target is ready."""


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """The exclusive right to do something, for a limited time."""

    name: str
    holder: str
    token: int
    """A fencing token: each acquisition gets a higher one, and writes under the lease are checked against it."""
    expires_at: float
    """Registry time."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting or policy. The scope names what it applies to: `topic/orders`, `group/billing`, `policy`."""

    scope: str
    name: str
    value: object
    """Any JSON value."""
    version: int
    """1 when it is first set, and incremented by every change. A deletion does not reset it."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One administrative change."""

    number: int
    """Ascending, in the order of the entries. There may be gaps."""
    at: float
    """Registry time."""
    who: str
    action: str
    subject: str
    detail: object
    """Any JSON value."""


class PositionCommit(Struct, frozen=True):
    """How far the owner of some partitions got, for `Transaction.commit_positions`."""

    group: str
    owner: str
    positions: Mapping[Partition, tuple[int, Position]]
    """For each partition the epoch of its ownership, and the position to continue from."""


class Heartbeat(Struct, frozen=True):
    """A sign of life of a member, for `Transaction.renew_sessions`."""

    group: str
    member: str
    epoch: int
    progress: Collection[Partition] = ()
    """The partitions that made progress since the last heartbeat, or had nothing to do."""


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """The times of a group that somebody has to act on, all of them registry time."""

    group: str
    first_expiry: float
    """When the first of its sessions expires."""
    last_heartbeat: float
    """When one of its members last sent a heartbeat or joined. It lies in the future if the clock went back."""


class TransactionAborted(RetryLater):
    """Raised by an engine when the database rolled a transaction back because of another one, and the same work may
    succeed in a new transaction: a serialization failure, a deadlock, a lock. `Registry.run` and `read` retry it, so
    their callers do not see it."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} rolled back a transaction because of another one ({why}): run it again")
        self.what = what
        self.why = why


class DuplicateRow(TransactionAborted):
    """Raised by an engine when a row that a transaction adds exists already: another transaction has added it since,
    and the next attempt sees it. One that does not see it either, time and again, reads from a damaged table."""


class Snapshot(Protocol):
    """One state of the registry, to read."""

    @property
    def now(self) -> float:
        """Registry time: seconds since 1970 on the registry's own clock, which is the same for every process that uses
        it. It stands still during a transaction. It may jump."""
        ...

    def group(self, name: str) -> GroupRow | None: ...
    def groups(self) -> list[GroupRow]:
        """All groups, ordered by name."""
        ...

    def member(self, group: str, name: str) -> MemberRow | None: ...
    def members(self, group: str) -> list[MemberRow]:
        """The members of a group, ordered by name."""
        ...

    def ownership(self, group: str, partition: Partition) -> OwnershipRow | None: ...
    def ownerships(self, group: str) -> list[OwnershipRow]:
        """All ownerships of a group, ordered by partition."""
        ...

    def ownerships_of(self, group: str, member: str) -> list[OwnershipRow]:
        """The ownerships of which the member is the owner or the target, ordered by partition."""
        ...

    def subscriptions(self) -> dict[str, set[str]]:
        """For every group that has members, the topics that they subscribe to."""
        ...

    def group_times(self) -> list[GroupTimes]:
        """The times of every group that has members, ordered by name."""
        ...

    def last_progress(self) -> dict[str, float]:
        """For every group with partitions that are owned, the `progress_at` of the one whose owner made no progress for
        the longest time."""
        ...

    def lease(self, name: str) -> LeaseRow | None: ...

    def setting(self, scope: str, name: str) -> SettingRow | None: ...
    def settings(self, scope: str) -> list[SettingRow]:
        """The settings of a scope, ordered by name."""
        ...

    def scopes(self) -> list[str]:
        """The scopes that have settings, in order."""
        ...

    def audit_log(self, limit: int = 100, before: int | None = None) -> list[AuditRow]:
        """Up to `limit` entries, newest first. `before`: only entries with a lower number, for paging."""
        ...


class Transaction(Snapshot, Protocol):
    """A snapshot that can be changed. It reads its own changes. `put` inserts a row, or replaces the row with the same
    identity; deleting a row that does not exist does nothing."""

    def put_group(self, row: GroupRow) -> None: ...
    def delete_group(self, name: str) -> None:
        """Delete a group with its members and ownerships."""
        ...

    def put_member(self, row: MemberRow) -> None:
        """`InvalidValue` if `metadata` is not a JSON value."""
        ...

    def delete_member(self, group: str, name: str) -> None: ...

    def put_ownerships(self, rows: Iterable[OwnershipRow]) -> None: ...
    def delete_ownerships(self, group: str, partitions: Iterable[Partition]) -> None: ...

    def commit_positions(self, commits: Sequence[PositionCommit]) -> list[bool]:
        """Store committed positions, one commit after the other, each as a whole or not at all.

        A commit is stored if every partition of it is owned by `owner` in the epoch that the commit names, and its
        committed position is not behind the one that is stored. `progress_at` becomes `now`. Returns for each commit
        whether it was stored; one that was not has changed nothing.

        For many commits this takes about as many statements as for one, and no rows are read beforehand.
        """
        ...

    def renew_sessions(self, heartbeats: Sequence[Heartbeat]) -> list[bool]:
        """Let the sessions of members last for `session_timeout` from now on, one heartbeat after the other.

        `progress_at` becomes `now` for the partitions that the member owns and that are in `progress`, or whose
        `progress_at` is later than its last heartbeat (at `expires_at - session_timeout`): it could not know of those.
        Returns for each heartbeat whether there is a member of that name and epoch; if not, nothing was changed.
        """
        ...

    def put_lease(self, row: LeaseRow) -> None: ...

    def put_setting(self, scope: str, name: str, value: object) -> SettingRow:
        """Set it, and touch `setting/<scope>`. `InvalidValue` if `value` is not a JSON value. Nothing is written to the
        audit log: the value may be a secret, so the caller decides what to log."""
        ...

    def delete_setting(self, scope: str, name: str) -> None:
        """Delete it, and touch `setting/<scope>`."""
        ...

    def audit(self, who: str, action: str, subject: str, detail: object = None) -> None:
        """Add an entry to the audit log. The entry is part of the transaction, and is rolled back with it."""
        ...

    def touch(self, name: str) -> None:
        """Notify the watches of `name` when the transaction is committed."""
        ...


class Registry(ABC):
    """Rows, read and changed in transactions.

    **Transactions** are serializable: each sees and leaves the rows as if it ran alone. A transaction is durable when
    its call returns; if it raises, nothing was changed, except that after `OutcomeUnknown` all of it may have been.
    Transactions are short, and block the calling thread: an event loop uses a `TransactionBatcher`.

    **Use.** Any number of processes may use one registry, and any number of threads one instance. After `close`, every
    call raises `Closed`.
    """

    busy_wait: float
    """Seconds that `run` waits for the transactions of others before it raises `Busy`."""
    is_embedded: bool = False
    """It is a file of this machine: a transaction that need not wait for others takes as long as a sync to disk."""

    def run(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction, and return its result. When this returns, the changes are durable.

        When the database aborts the transaction because of another one, `work` is run again, in a new transaction on
        the state of that time. So `work` must have no side effects: it reads and changes rows, and returns a result.
        `Busy` if no attempt succeeded within `busy_wait` seconds; `Damaged` if that is not due to others.

        When this raises, nothing was changed, except for `OutcomeUnknown`: the connection was lost during the commit,
        and the database could not be asked about it.
        """
        return self._retry(self._transaction, work)

    def run_guarded(self, work: Callable[[Transaction], T]) -> T:
        """`run`, for work that changes rows by `commit_positions` and `renew_sessions` alone.

        These check the very row that they change, so an engine need not isolate the whole transaction from others to
        keep them right. The rows that `work` reads besides may then be of different moments.
        """
        return self._retry(self._guarded_transaction, work)

    def run_guarded_at_once(self, work: Callable[[Transaction], T]) -> T:
        """`run_guarded` in a single attempt that does not wait: `Busy` or `TransactionAborted` because of others."""
        with self._guarded_transaction(0.0) as tx:
            return work(tx)

    def read(self, work: Callable[[Snapshot], T]) -> T:
        """Run `work` on the state that was last committed, and return its result. It does not wait for writers, and no
        writer waits for it. As in `run`, `work` must have no side effects."""
        return self._retry(lambda _wait: self._snapshot(), work)

    def transaction(self) -> AbstractContextManager[Transaction]:
        """The building block of `run`: a single attempt at a transaction, committed at the end of the block, or
        rolled back if the block raised. Unlike `run`, it may raise `TransactionAborted`."""
        return self._transaction(self.busy_wait)

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        """The building block of `read`: a snapshot that is open for the length of the block."""
        return self._snapshot()

    @abstractmethod
    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback`, from any thread, soon after each transaction, of any process, that touched `name`. A name
        that ends with "/" watches every name that starts with it.

        Several touches may result in one call, and a touch shortly before the watch began in another. It is also called
        when a touch may have been missed, such as after a connection was lost. This does not block. Returns a
        function that ends the watch; calling it twice is fine. A callback must return at once, and must not use the
        registry.
        """

    @abstractmethod
    def close(self) -> None:
        """End the watches and release all resources. Calling it twice is fine. A transaction in progress may finish."""

    @abstractmethod
    def _transaction(self, wait: float) -> AbstractContextManager[Transaction]:
        """For engines: one attempt at a transaction, committed at the end of the block, or rolled back if it raised.

        Wait up to `wait` seconds for transactions of others, then `Busy`. `TransactionAborted`, from the block or at
        its end, if the same work may succeed in a new transaction.
        """

    def _guarded_transaction(self, wait: float) -> AbstractContextManager[Transaction]:
        """For engines that have a cheaper transaction for `run_guarded`."""
        return self._transaction(wait)

    @abstractmethod
    def _snapshot(self) -> AbstractContextManager[Snapshot]:
        """For engines: the state that was last committed. The object has no methods that write."""

    def _retry(self, begin: Callable[[float], AbstractContextManager[S]], work: Callable[[S], T]) -> T:
        deadline = time.monotonic() + self.busy_wait
        attempt = duplicates = 0
        while True:
            attempt += 1
            try:
                with begin(_seconds_until(deadline)) as state:
                    return work(state)
            except TransactionAborted as error:
                duplicates = duplicates + 1 if isinstance(error, DuplicateRow) else 0
                if not _seconds_until(deadline):
                    if duplicates >= _MANY_DUPLICATES:
                        raise Damaged(error.what, f"a row that is not found exists ({error.why})") from error
                    raise Busy(error.what, self.busy_wait) from error
            time.sleep(min(_BACKOFF.delay(attempt), _seconds_until(deadline)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _seconds_until(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
