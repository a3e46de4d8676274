"""`Reader`: the batches of a member's partitions, as an asynchronous iterator."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Self
from weakref import WeakSet

from shardyard.groups.config import GroupConfig
from shardyard.groups.coordinator import Host, JoinRequest, MemberIdentity
from shardyard.groups.fence import ownership_fence
from shardyard.groups.membership import Membership, MembershipListener
from shardyard.groups.partition_reader import OwnedBatch, PartitionReader, Start
from shardyard.groups.protocol import Grant
from shardyard.model import (
    Closed,
    Fenced,
    InvalidCall,
    InvalidValue,
    Partition,
    PartitionOutOfRange,
    Position,
    UnknownTopic,
)

_log = logging.getLogger(__name__)

OLD_WORK_SECONDS = 10.0
"""How long a batch may be in flight before a warning, if the session is shorter."""


class Reader(MembershipListener):
    """A member of a group that reads its partitions, from entering the block to leaving it.

    Iterating gives batches of the partitions that it owns. The next batch of a partition comes after the last one was
    committed. When a partition is revoked, no new batch of it is delivered, the one in flight may be finished and
    committed (for up to `drain` seconds), and then the partition is released. Partitions that stay never pause.

    A member that was out of touch for longer than its session (stalled, or cut off) loses its partitions: commits raise
    `Fenced`. It joins again by itself, under a new epoch; if it was evicted because its work hangs, it does so when it
    becomes active: when it asks for a batch, or commits one.
    """

    def __init__(
        self,
        group: str,
        topics: Iterable[str],
        *,
        node: Host,
        name: str | None = None,
        weight: int = 1,
        static: bool = False,
        partitions: Iterable[Partition] | None = None,
        session_timeout: float = 10.0,
        drain: float | None = None,
        start: Start = "earliest",
        max_records: int = 1000,
        max_bytes: int = 1024 * 1024,
        address: str | None = None,
        metadata: object = None,
        config: GroupConfig | None = None,
    ) -> None:
        """`static`: a restart under the same name within the session moves nothing. `partitions`: own these, and no
        others. `drain`: by default as long as the session. `start`: where a group starts on a partition that it never
        committed. `config`: of the group, if this member is the first to join it."""
        if isinstance(topics, str) or not (wanted := sorted(set(topics))):
            raise InvalidValue("topics", topics, "a list of at least one topic")
        if start not in ("earliest", "latest"):
            raise InvalidValue("start", start, "'earliest' or 'latest'")
        self.group = group
        self.topics = wanted
        self.name = name or f"{node.name}-{uuid.uuid4().hex[:8]}"
        self._host = node
        self._clock = node.clock
        self._session = session_timeout
        self._membership = Membership(
            node,
            JoinRequest(
                group,
                self.name,
                wanted,
                weight,
                static,
                None if partitions is None else sorted(partitions),
                session_timeout,
                address,
                metadata,
                config=config,
            ),
            self,
        )
        self._drain = session_timeout if drain is None else drain
        self._start: Start = start
        self._max = (max_records, max_bytes)
        self._readers: dict[Partition, PartitionReader] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._delivered: asyncio.Queue[OwnedBatch | BaseException] = asyncio.Queue()
        self._warned: WeakSet[OwnedBatch] = WeakSet()
        self._waiting = 0
        """How many callers wait for a batch."""
        self._active = asyncio.Event()
        """A batch was asked for or committed since the last heartbeat."""

    @property
    def owned(self) -> set[Partition]:
        """The partitions that it owns and that are not revoked, as far as it knows."""
        return {partition for partition, reader in self._readers.items() if not reader.stopping}

    @property
    def membership(self) -> Membership:
        return self._membership

    @property
    def identity(self) -> MemberIdentity:
        """The member in its group, as of its last join."""
        return self._membership.identity

    async def __aenter__(self) -> Self:
        await self._membership.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._membership.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._delivered.put_nowait(Closed(f"member {self.name}"))
        await self._membership.__aexit__(kind, error, trace)

    async def __aiter__(self) -> AsyncIterator[OwnedBatch]:
        if not self._membership.is_joined:
            raise InvalidCall(f"member {self.name!r} has not joined: enter it by `async with` first")
        while True:
            batch = await self._next()
            if isinstance(batch, BaseException):
                self._delivered.put_nowait(batch)  # for the next caller
                raise batch
            if not batch.stale:
                batch.resume()
                yield batch

    async def _next(self) -> OwnedBatch | BaseException:
        self._waiting += 1
        self._active.set()
        try:
            return await self._delivered.get()
        finally:
            self._waiting -= 1

    async def commit(self, positions: Mapping[Partition, int]) -> None:
        """Commit the batches in flight of several partitions at once, up to these offsets; all of them or none."""
        commits, batches = {}, []
        for partition, offset in positions.items():
            reader = self._readers.get(partition)
            if reader is None or reader.current is None or not reader.is_in_flight:
                raise InvalidCall(f"member {self.name!r} has no batch of {partition} in flight")
            reader.check()
            commits[partition] = (reader.epoch, reader.current.position(offset))
            batches.append((reader, reader.current, offset))
        await self._commit(commits)
        for reader, batch, offset in batches:
            reader.committed(batch, offset)

    async def _commit(self, positions: Mapping[Partition, tuple[int, Position]]) -> None:
        self._active.set()
        await self._membership.commit(positions)

    # Events of the membership

    def assigned(self, partition: Partition, grant: Grant) -> None:
        fence = ownership_fence(self.identity.group, partition, grant.epoch)
        reader = PartitionReader(partition, grant, self._host.log, fence, self._commit, self._clock)
        self._readers[partition] = reader
        task = asyncio.create_task(self._read(reader), name=f"{partition} of {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def revoked(self, partition: Partition) -> None:
        self._readers[partition].stop()

    def lost(self, partition: Partition) -> None:
        if (reader := self._readers.pop(partition, None)) is not None:
            reader.stop(lost=True)

    def failed(self, error: BaseException) -> None:
        self._delivered.put_nowait(error)

    def progressed(self, owned: Iterable[Partition]) -> list[Partition]:
        was_active = self._active.is_set()
        self._active.clear()
        self._warn_of_old_work()
        return [p for p in owned if self._readers[p].made_progress(others_did=was_active)]

    def rejoin_after(self) -> asyncio.Event | None:
        """A member whose work hangs joins again when it becomes active: until then the others do better without it."""
        hangs = any(reader.is_in_flight for reader in self._readers.values()) and not self._waiting
        return self._active if hangs else None

    def _warn_of_old_work(self) -> None:
        """A batch that is never committed blocks its partition: the commonest mistake, so warn of it once a batch."""
        now = self._clock.monotonic()
        for reader in self._readers.values():
            batch = reader.current
            if batch is None or not reader.is_in_flight or batch.delivered_at is None or batch in self._warned:
                continue
            if (age := now - batch.delivered_at) > max(self._session, OLD_WORK_SECONDS):
                self._warned.add(batch)
                _log.warning("%r has been in flight for %.0f s; its partition waits for its commit", batch, age)

    # Partitions

    async def _read(self, reader: PartitionReader) -> None:
        """Read a partition until it is revoked, then release it."""
        try:
            await reader.run(self._delivered.put_nowait, self._start, *self._max, self._drain)
            if not reader.lost:
                await self._membership.release(reader.partition)
                self._drop(reader)
        except (Fenced, UnknownTopic, PartitionOutOfRange) as error:
            # If we still own it, the next heartbeat assigns it again. That we do not is normal in a rebalance.
            _log.info("%s of %s was released: %s", reader.partition, self.name, error)
            self._drop(reader)
        except Exception as error:  # noqa: BLE001 nobody awaits this task: its end must show elsewhere
            self._drop(reader)
            self._delivered.put_nowait(error)

    def _drop(self, reader: PartitionReader) -> None:
        reader.stop(lost=True)
        if self._readers.get(reader.partition) is reader:
            del self._readers[reader.partition]
            self._membership.forget(reader.partition)
