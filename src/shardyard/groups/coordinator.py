"""What a member needs from its group: in its own process, or through a server."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from shardyard.groups import protocol
from shardyard.groups.config import GroupConfig
from shardyard.groups.protocol import MemberAssignment
from shardyard.model import Appended, Fence, Partition, Position, Record, Span, Stamp, Topic
from shardyard.model.plain_batch import ReadBatch
from shardyard.registry import ChangeSignal, Heartbeat, PositionCommit, Registry, TransactionBatcher
from shardyard.runtime.clock import Clock

if TYPE_CHECKING:
    import pyarrow as pa


class MemberIdentity(Struct, frozen=True, gc=False):
    """A member of a group from one join to its end. Every call of the member carries it."""

    group: str
    """In a broadcast group, the own group of the member."""
    member: str
    epoch: int


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Which group to join, and how; see `Membership`."""

    group: str
    name: str
    topics: Sequence[str] = ()
    weight: int = 1
    static: bool = False
    partitions: Sequence[Partition] | None = None
    session_timeout: float = 10.0
    address: str | None = None
    metadata: object = None
    prepare_seconds: float | None = None
    config: GroupConfig | None = None
    """The configuration of the group if it is new; one that exists keeps its own."""
    instance: str | None = None
    """The same in all joins of one `Membership`, and in no other's, so that it may repeat a join whose response was
    lost."""


class Changes(Protocol):
    """Signals changes of a group."""

    async def wait(self, seconds: float) -> bool:
        """Return after a change, or after `seconds`. Returns whether there was a change."""


class OwnerLog(Protocol):
    """What an owner needs of a log; see `Log`."""

    async def topic(self, name: str) -> Topic: ...
    async def span(self, partition: Partition) -> Span: ...
    async def set_fence(self, fence: Fence) -> None: ...
    async def read(
        self,
        partition: Partition,
        offset: int,
        *,
        epoch: int | None = None,
        max_records: int = ...,
        max_bytes: int = ...,
        wait: float = 0.0,
        fence: Fence | None = None,
    ) -> ReadBatch: ...
    async def append(
        self,
        partition: Partition,
        records: "Sequence[Record] | pa.RecordBatch",
        *,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
    ) -> Appended: ...


class GroupCoordinator(ABC):
    """The steps of `protocol` that members take, each durable when it returns. Responses come in the order of calls."""

    @abstractmethod
    async def join(self, request: JoinRequest, since: int | None) -> MemberIdentity: ...

    @abstractmethod
    async def heartbeat(self, identity: MemberIdentity, progress: Iterable[Partition]) -> MemberAssignment | None:
        """Stay a member. Returns what the member owns, if that is at hand: None does not mean that it has changed."""

    @abstractmethod
    async def assignment(self, identity: MemberIdentity) -> MemberAssignment: ...

    @abstractmethod
    async def commit(self, identity: MemberIdentity, positions: Mapping[Partition, tuple[int, Position]]) -> None: ...

    @abstractmethod
    async def release(self, identity: MemberIdentity, partitions: Mapping[Partition, int]) -> None: ...

    @abstractmethod
    async def ready(self, identity: MemberIdentity, partitions: Iterable[Partition]) -> None: ...

    @abstractmethod
    async def leave(self, identity: MemberIdentity) -> None: ...

    @abstractmethod
    def changes(self, identity: MemberIdentity) -> AbstractContextManager[Changes]:
        """Signals every change of the group that concerns the member, and possibly others."""


class LocalCoordinator(GroupCoordinator):
    """With the registry in the same process."""

    def __init__(self, registry: Registry, transactions: TransactionBatcher, clock: Clock) -> None:
        self._registry = registry
        self._transactions = transactions
        self._clock = clock

    async def join(self, request: JoinRequest, since: int | None) -> MemberIdentity:
        row = await self._transactions.run(
            lambda tx: protocol.join(
                tx,
                request.group,
                request.name,
                topics=request.topics,
                weight=request.weight,
                static=request.static,
                manual=request.partitions,
                session_timeout=request.session_timeout,
                address=request.address,
                metadata=request.metadata,
                prepare_seconds=request.prepare_seconds,
                config=request.config,
                since=since,
                instance=request.instance,
            )
        )
        return MemberIdentity(row.group, row.name, row.epoch)

    async def heartbeat(self, identity: MemberIdentity, progress: Iterable[Partition]) -> None:
        heartbeat = Heartbeat(identity.group, identity.member, identity.epoch, frozenset(progress))
        await self._transactions.run_bulk(protocol.heartbeat, heartbeat)

    async def assignment(self, identity: MemberIdentity) -> MemberAssignment:
        group, member, epoch = identity.group, identity.member, identity.epoch
        return await self._transactions.read(lambda tx: protocol.assignment(tx, group, member, epoch))

    async def commit(self, identity: MemberIdentity, positions: Mapping[Partition, tuple[int, Position]]) -> None:
        if not positions:
            await self.assignment(identity)  # there is nothing to store, but it must be a member
            return
        await self.submit_commit(identity, positions)

    def submit_commit(
        self, identity: MemberIdentity, positions: Mapping[Partition, tuple[int, Position]]
    ) -> asyncio.Future[None]:
        """Commit at least one position. The future is done when they are stored, or has the error that refuses them."""
        commit = PositionCommit(identity.group, identity.member, positions)
        return self._transactions.submit_bulk(protocol.commit, commit)

    async def release(self, identity: MemberIdentity, partitions: Mapping[Partition, int]) -> None:
        group, member, epoch = identity.group, identity.member, identity.epoch
        await self._transactions.run(lambda tx: protocol.release(tx, group, member, epoch, partitions))

    async def ready(self, identity: MemberIdentity, partitions: Iterable[Partition]) -> None:
        group, member, epoch = identity.group, identity.member, identity.epoch
        await self._transactions.run(lambda tx: protocol.ready(tx, group, member, epoch, partitions))

    async def leave(self, identity: MemberIdentity) -> None:
        group, member, epoch = identity.group, identity.member, identity.epoch
        await self._transactions.run(lambda tx: protocol.leave(tx, group, member, epoch))

    def changes(self, identity: MemberIdentity) -> AbstractContextManager[Changes]:
        name = protocol.member_watch_name(identity.group, identity.member)
        return ChangeSignal(self._registry, name, self._clock)


class Host(Protocol):
    """Where members run: their log, their group coordinator, and the clock they go by."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> OwnerLog: ...
    @property
    def coordinator(self) -> GroupCoordinator: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def is_open(self) -> bool: ...
