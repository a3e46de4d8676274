"""What a member asks of the registry: in its own process, or through whoever carries its words there."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from shardyard.groups import protocol
from shardyard.groups.protocol import Grant
from shardyard.model import Appended, Fence, Partition, Position, Record, Span, Stamp, Topic
from shardyard.model.batch import Batch
from shardyard.registry import Registry
from shardyard.registry.batcher import TransactionBatcher
from shardyard.registry.change_signal import ChangeSignal


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """One life of a member in its group: everything it asks for carries it."""

    group: str
    member: str
    epoch: int


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Who wants to join which group, and how; see `Member`."""

    group: str
    name: str
    topics: Sequence[str]
    weight: int = 1
    static: bool = False
    partitions: Sequence[Partition] | None = None
    session_timeout: float = 10.0


class Changes(Protocol):
    """Tells when something changed."""

    async def wait(self, seconds: float) -> None:
        """Return when something changed, or after `seconds`."""


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
    ) -> Batch: ...
    async def append(
        self,
        partition: Partition,
        records: Sequence[Record] | pa.RecordBatch,
        *,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
    ) -> Appended: ...


class GroupCoordinator(ABC):
    """The steps of `protocol` that members take, each durable when it returns. Answers come in the order of asking."""

    @abstractmethod
    async def join(self, application: JoinRequest, since: int | None) -> MemberIdentity: ...

    @abstractmethod
    async def heartbeat(self, seat: MemberIdentity, progress: Iterable[Partition]) -> dict[Partition, Grant]: ...

    @abstractmethod
    async def look(self, seat: MemberIdentity) -> dict[Partition, Grant]: ...

    @abstractmethod
    async def commit(self, seat: MemberIdentity, positions: Mapping[Partition, tuple[int, Position]]) -> None: ...

    @abstractmethod
    async def release(self, seat: MemberIdentity, partitions: Mapping[Partition, int]) -> None: ...

    @abstractmethod
    async def leave(self, seat: MemberIdentity) -> None: ...

    @abstractmethod
    def changes(self, seat: MemberIdentity) -> AbstractContextManager[Changes]:
        """To hear of changes in the group."""


class LocalCoordinator(GroupCoordinator):
    """With the registry in the same process."""

    def __init__(self, registry: Registry, transactions: TransactionBatcher) -> None:
        self._registry = registry
        self._transactions = transactions

    async def join(self, application: JoinRequest, since: int | None) -> MemberIdentity:
        asks = application
        row = await self._transactions.run(
            lambda tx: protocol.join(
                tx,
                asks.group,
                asks.name,
                topics=asks.topics,
                weight=asks.weight,
                static=asks.static,
                manual=asks.partitions,
                session_timeout=asks.session_timeout,
                since=since,
            )
        )
        return MemberIdentity(row.group, row.name, row.epoch)

    async def heartbeat(self, seat: MemberIdentity, progress: Iterable[Partition]) -> dict[Partition, Grant]:
        return await self._transactions.run(
            lambda tx: protocol.heartbeat(tx, seat.group, seat.member, seat.epoch, progress)
        )

    async def look(self, seat: MemberIdentity) -> dict[Partition, Grant]:
        return await self._transactions.read(lambda tx: protocol.look(tx, seat.group, seat.member, seat.epoch))

    async def commit(self, seat: MemberIdentity, positions: Mapping[Partition, tuple[int, Position]]) -> None:
        await self._transactions.run(lambda tx: protocol.commit(tx, seat.group, seat.member, seat.epoch, positions))

    async def release(self, seat: MemberIdentity, partitions: Mapping[Partition, int]) -> None:
        await self._transactions.run(lambda tx: protocol.release(tx, seat.group, seat.member, seat.epoch, partitions))

    async def leave(self, seat: MemberIdentity) -> None:
        await self._transactions.run(lambda tx: protocol.leave(tx, seat.group, seat.member, seat.epoch))

    def changes(self, seat: MemberIdentity) -> AbstractContextManager[Changes]:
        return ChangeSignal(self._registry, protocol.watch_name(seat.group))


class Host(Protocol):
    """Where a member is: what gives it the log and the office."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> OwnerLog: ...
    @property
    def coordinator(self) -> GroupCoordinator: ...
    @property
    def is_open(self) -> bool: ...
