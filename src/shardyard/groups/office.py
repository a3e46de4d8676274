"""What a member asks of the registry: in its own process, or through whoever carries its words there."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from shardyard.groups import protocol
from shardyard.groups.desk import Desk
from shardyard.groups.protocol import Holding
from shardyard.groups.waking import Waking
from shardyard.log import Appended, Batch, Fence, Span, Stamp
from shardyard.model import Partition, Position, Record, Topic
from shardyard.registry import Registry


@dataclass(frozen=True, slots=True)
class Seat:
    """One life of a member in its group: everything it asks for carries it."""

    group: str
    member: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Application:
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


class OwnersLog(Protocol):
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


class Office(ABC):
    """The steps of `protocol` that members take, each durable when it returns. Answers come in the order of asking."""

    @abstractmethod
    async def join(self, application: Application, since: int | None) -> Seat: ...

    @abstractmethod
    async def heartbeat(self, seat: Seat, progress: Iterable[Partition]) -> dict[Partition, Holding]: ...

    @abstractmethod
    async def look(self, seat: Seat) -> dict[Partition, Holding]: ...

    @abstractmethod
    async def commit(self, seat: Seat, positions: Mapping[Partition, tuple[int, Position]]) -> None: ...

    @abstractmethod
    async def release(self, seat: Seat, partitions: Mapping[Partition, int]) -> None: ...

    @abstractmethod
    async def leave(self, seat: Seat) -> None: ...

    @abstractmethod
    def changes(self, seat: Seat) -> AbstractContextManager[Changes]:
        """To hear of changes in the group."""


class LocalOffice(Office):
    """With the registry in the same process."""

    def __init__(self, registry: Registry, desk: Desk) -> None:
        self._registry = registry
        self._desk = desk

    async def join(self, application: Application, since: int | None) -> Seat:
        asks = application
        row = await self._desk.do(
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
        return Seat(row.group, row.name, row.epoch)

    async def heartbeat(self, seat: Seat, progress: Iterable[Partition]) -> dict[Partition, Holding]:
        return await self._desk.do(lambda tx: protocol.heartbeat(tx, seat.group, seat.member, seat.epoch, progress))

    async def look(self, seat: Seat) -> dict[Partition, Holding]:
        return await self._desk.look(lambda tx: protocol.look(tx, seat.group, seat.member, seat.epoch))

    async def commit(self, seat: Seat, positions: Mapping[Partition, tuple[int, Position]]) -> None:
        await self._desk.do(lambda tx: protocol.commit(tx, seat.group, seat.member, seat.epoch, positions))

    async def release(self, seat: Seat, partitions: Mapping[Partition, int]) -> None:
        await self._desk.do(lambda tx: protocol.release(tx, seat.group, seat.member, seat.epoch, partitions))

    async def leave(self, seat: Seat) -> None:
        await self._desk.do(lambda tx: protocol.leave(tx, seat.group, seat.member, seat.epoch))

    def changes(self, seat: Seat) -> AbstractContextManager[Changes]:
        return Waking(self._registry, protocol.topic_of(seat.group))


class Place(Protocol):
    """Where a member is: what gives it the log and the office."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> OwnersLog: ...
    @property
    def office(self) -> Office: ...
    @property
    def is_open(self) -> bool: ...
