"""The registry's port: who is there, who owns what, how far they got. Its docstrings are the specification.

A registry stores rows and makes transactions; what the rows mean to each other is decided above it, in `groups`, once
for all engines.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

from shardyard.model import Partition, Position

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group and how it wants its partitions shared out."""

    name: str
    epoch: int = 0
    """The last epoch handed out in this group; every member and every ownership gets one of its own."""
    inputs: int = 0
    """Counts what the assignment depends on: members, their topics and weights, and the settings below."""
    assigned: int = -1
    """The `inputs` that the targets were last computed for."""
    shape: int = -1
    """A checksum of what topics and partitions there were then."""
    assignor: str = "sticky"
    max_active: int | None = None
    release_after: float | None = None
    """Seconds without progress after which a member that still heartbeats is evicted; None: never."""
    broadcast: bool = False
    """Each member gets every record: it has a group of its own (see `groups.broadcast`)."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member of a group, from its joining until it leaves, expires or is put out."""

    group: str
    name: str
    epoch: int
    """Tells this life of the member from another of the same name."""
    weight: int
    topics: tuple[str, ...]
    static: bool
    """It keeps its partitions through a restart, until its session expires."""
    manual: tuple[Partition, ...] | None
    """The partitions it named itself; None if it takes what it is given."""
    session_timeout: float
    expires_at: float
    """Registry time."""
    address: str | None = None
    """Where others reach it, as it said when it joined."""
    metadata: object = None
    """Anything JSON can hold."""
    prepare_seconds: float | None = None
    """How long an owner keeps a partition while this member prepares to take it over; None: it does not prepare."""


@dataclass(frozen=True, slots=True)
class OwnershipRow:
    """A partition in the eyes of a group: a row of the table that CatMQ calls queueOffset."""

    group: str
    partition: Partition
    owner: str | None = None
    """Who may read and commit it now."""
    epoch: int = 0
    """Given anew with every change of the owner; what an owner does carries it."""
    target: str | None = None
    """Who is to own it: when that is not the owner, the owner finishes, commits and releases it."""
    committed: Position | None = None
    progress_at: float = 0.0
    """Registry time when the owner last made progress, or had nothing to do."""
    handover_at: float = 0.0
    """Registry time until which the owner keeps the partition while its target prepares; 0: the target is ready."""


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """The right to do something alone, for a while."""

    name: str
    holder: str
    token: int
    """Higher for every new holding; writes under the lease are checked against it."""
    expires_at: float
    """Registry time."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting or policy. The scope says what it is about: `topic/orders`, `group/billing`, `policy`."""

    scope: str
    name: str
    value: object
    """Anything JSON can hold."""
    version: int
    """1 when first set, one more with every change, also across a deletion."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One administrative change."""

    number: int
    """Counts upwards without gaps."""
    at: float
    """Registry time."""
    who: str
    action: str
    subject: str
    detail: object
    """Anything JSON can hold."""


class Transaction(Protocol):
    """What can be done inside a transaction. `put` inserts a row or replaces the one with the same identity."""

    @property
    def now(self) -> float:
        """Registry time: seconds since 1970 on one clock, the same for all who use the registry. It may jump."""
        ...

    def group(self, name: str) -> GroupRow | None: ...
    def groups(self) -> list[GroupRow]:
        """By name."""
        ...

    def put_group(self, row: GroupRow) -> None: ...
    def delete_group(self, name: str) -> None:
        """With its members and ownerships."""
        ...

    def member(self, group: str, name: str) -> MemberRow | None: ...
    def members(self, group: str) -> list[MemberRow]:
        """By name."""
        ...

    def put_member(self, row: MemberRow) -> None: ...
    def delete_member(self, group: str, name: str) -> None: ...

    def ownership(self, group: str, partition: Partition) -> OwnershipRow | None: ...
    def ownerships(self, group: str) -> list[OwnershipRow]:
        """By partition."""
        ...

    def ownerships_of(self, group: str, member: str) -> list[OwnershipRow]:
        """Those whose owner or target the member is, by partition."""
        ...

    def put_ownerships(self, rows: Iterable[OwnershipRow]) -> None: ...
    def delete_ownerships(self, group: str, partitions: Iterable[Partition]) -> None: ...

    def lease(self, name: str) -> LeaseRow | None: ...
    def put_lease(self, row: LeaseRow) -> None: ...

    def setting(self, scope: str, name: str) -> SettingRow | None: ...
    def settings(self, scope: str) -> list[SettingRow]:
        """By name."""
        ...

    def put_setting(self, scope: str, name: str, value: object) -> SettingRow:
        """Set it, and touch `setting/<scope>`. Who changes a setting audits it: the value may be a secret."""
        ...

    def delete_setting(self, scope: str, name: str) -> None:
        """Remove it, if it is there, and touch `setting/<scope>`."""
        ...

    def audit(self, who: str, action: str, subject: str, detail: object = None) -> None:
        """Add to the audit log, which is part of the transaction: what did not happen is not in it."""
        ...

    def audit_log(self, limit: int = 100, before: int | None = None) -> list[AuditRow]:
        """The newest first; `before` a number, to page."""
        ...

    def touch(self, name: str) -> None:
        """Tell those who watch `name`, once the transaction is committed."""
        ...


class Registry(ABC):
    """Rows in transactions.

    **Transactions** are serializable: each sees the rows as if it ran alone. On leaving the block they are durable, or,
    if it raised, never happened. They are short, and block: call from a thread where that matters. `Busy` when
    others kept the registry from starting one for too long; nothing was changed then.

    **Use.** Any number of processes may use one registry; an instance may be used from several threads. After `close`
    everything raises `Closed`.
    """

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Transaction]:
        """Read and write."""

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[Transaction]:
        """Only read, all from one state. Nobody waits for it, and it waits for nobody; what it is asked to change, it
        may refuse or forget."""

    def run(self, work: Callable[[Transaction], T]) -> T:
        """The result of `work`, run in a serializable transaction that is durable when this returns. `work` has no side
        effects: it may be run more than once. When it raises, nothing was changed."""
        with self.transaction() as tx:
            return work(tx)

    def read(self, work: Callable[[Transaction], T]) -> T:
        """The result of `work`, run on one state of the registry. It waits for no writer, and no writer waits for
        it."""
        with self.snapshot() as tx:
            return work(tx)

    @abstractmethod
    def watch(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback`, from any thread, soon after each transaction of any process that touched `name`.

        Several touches may be told as one. Returns a function that ends the watch. A callback must return at once, and
        must not use the registry.
        """

    @abstractmethod
    def close(self) -> None:
        """End the watches and let go of everything. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
