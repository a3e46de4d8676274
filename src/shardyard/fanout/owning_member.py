"""`OwningMember`: a member of a group that forwards: its life cycle, and how it gains and loses partitions."""

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Any, Self

from shardyard.fanout.commits import BACKOFF, Commits
from shardyard.fanout.config import FanoutConfig
from shardyard.fanout.recovery import Recovery
from shardyard.fanout.source import Source
from shardyard.groups import GroupConfig, JoinRequest, Membership, MembershipListener, Node
from shardyard.groups.protocol import Grant
from shardyard.model import (
    Fenced,
    InvalidCall,
    Partition,
    PartitionOutOfRange,
    Position,
    ShardyardError,
    UnknownTopic,
)
from shardyard.runtime.retry import first_only, retry

_log = logging.getLogger(__name__)

RETRY_SECONDS = 0.05
"""Until something that has failed is retried."""


class OwningMember(MembershipListener, ABC):
    """A member of a group, from entering the block to leaving it.

    A partition that comes from another member is first brought to the state in which that one left it: its fence is
    set, and what was forwarded and not committed is found. The partitions that are owned already are forwarded
    meanwhile. A partition that is revoked is released when what is in flight of it is committed.
    """

    rejoins = True
    """Whether it joins its group again by itself when it was evicted. If not, its work ends with an error."""

    def __init__(
        self,
        node: Node,
        group: str,
        source: str,
        config: FanoutConfig,
        *,
        name: str | None,
        address: str | None,
        metadata: object,
        prepares: bool,
    ) -> None:
        """`prepares`: it loads something before it takes a partition over, and the owner keeps the partition
        meanwhile."""
        self.node = node
        self.config = config
        self.group = group
        self.source = source
        self.name = name or f"{node.name}-{uuid.uuid4().hex[:8]}"
        self._clock = node.clock
        request = JoinRequest(
            group,
            self.name,
            [source],
            session_timeout=config.session_timeout,
            address=address,
            metadata=metadata,
            prepare_seconds=config.prepare_seconds if prepares else None,
            config=GroupConfig(config.assignor),
        )
        self._membership = Membership(node, request, self)
        self._commits = Commits(self._membership, node.clock, config.commit_seconds)
        self._recovery = Recovery(node, group, lambda: self.target, config)
        self._sources: dict[Partition, Source] = {}
        """The partitions that are owned. Those that were read last come last."""
        self._done: dict[Partition, Position] = {}
        """How far the partitions that are owned are forwarded."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: asyncio.Future[None] | None = None
        self._closing = False

    # What a subclass does

    @property
    @abstractmethod
    def target(self) -> str:
        """The topic that it forwards to."""

    @abstractmethod
    async def _open(self) -> None:
        """Before it joins its group."""

    async def _load(self, partition: Partition) -> None:
        """What is needed before a batch of the partition can be forwarded."""

    def _unload(self, partition: Partition) -> None:
        """The partition is neither owned nor incoming any more."""

    @abstractmethod
    async def _take_steps(self) -> None:
        """Forward what the partitions hold, until cancelled."""

    @abstractmethod
    def _continue_with(self, source: Source) -> None:
        """A partition can be read, or its batch that is in flight can be retried."""

    @abstractmethod
    def _discard(self, source: Source) -> None:
        """Take no further step with a partition. One that is being taken is finished."""

    # Life cycle

    async def run(self) -> None:
        """Work until cancelled. An error that retrying does not mend is raised."""
        async with self:
            await self.failure()

    async def failure(self) -> None:
        """Wait for the error that ends its work, and raise it."""
        if self._ended is None:
            raise InvalidCall(f"{self.name!r} has not joined: enter it by `async with` first")
        await asyncio.shield(self._ended)

    async def __aenter__(self) -> Self:
        self._ended = asyncio.get_running_loop().create_future()
        self._closing = False
        try:
            await self._open()
            await self._membership.__aenter__()
        except BaseException:
            await self._stop()
            raise
        self._spawn(self._take_steps(), f"steps of {self.name}")
        self._spawn(self._commits.run(), f"commits of {self.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        try:
            releasing = [self._withdraw(source) for source in [*self._sources.values()]]
            if releasing and self._ended is not None and not self._ended.done():
                await asyncio.wait(releasing, timeout=self.config.session_timeout)
        finally:
            await self._membership.stop()
            await self._stop()
        await self._membership.__aexit__(kind, error, trace)

    async def _stop(self) -> None:
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._recovery.stop()
        if self._ended is not None and not self._ended.done():
            self._ended.cancel()
        if self._ended is not None and not self._ended.cancelled():
            self._ended.exception()  # it may be that nobody waits for it

    def _spawn(self, work: Any, name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Awaitable[Any]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 nobody awaits this task: its end must show elsewhere
            self.failed(error)

    # State

    @property
    def owned(self) -> set[Partition]:
        """The partitions that it owns and that are not revoked, as far as it knows."""
        return {partition for partition, source in self._sources.items() if not source.stopping}

    @property
    def preparing(self) -> set[Partition]:
        """The partitions that it will own and prepares, and those that it owns and cannot forward yet."""
        return {*self._membership.incoming, *(p for p, source in self._sources.items() if not source.is_open)}

    @property
    def done(self) -> Mapping[Partition, Position]:
        """How far each partition that it owns is forwarded, as far as it has forwarded any of it."""
        return self._done

    def is_in_touch(self) -> bool:
        """Whether nobody else can own its partitions yet."""
        return self._clock.monotonic() - self._membership.last_contact < self.config.session_timeout

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)

    # Events of the membership

    def incoming(self, partition: Partition) -> None:
        if not self._closing:
            self._spawn(self._prepare(partition), f"preparing {partition}")

    def assigned(self, partition: Partition, grant: Grant) -> None:
        if self._closing:
            return
        source = self._sources[partition] = Source.assigned(self.group, partition, grant)
        self._spawn(self._open_source(source), f"opening {partition}")

    def revoked(self, partition: Partition) -> None:
        if (source := self._sources.get(partition)) is not None:
            self._withdraw(source)

    def lost(self, partition: Partition) -> None:
        if (source := self._sources.pop(partition, None)) is not None:
            self._forget(source)
        self._forget_unless_needed(partition)

    def rejoin_after(self) -> asyncio.Event | None:
        if self.rejoins:
            return None
        self.failed(Fenced(f"{self.name} was evicted from the group {self.group}"))
        return asyncio.Event()  # it is not set: whoever gets the error ends the membership

    def failed(self, error: BaseException) -> None:
        if self._ended is not None and not self._ended.done():
            _log.error("%s of group %s has ended", self.name, self.group, exc_info=error)
            self._ended.set_exception(error)

    # Gaining partitions

    async def _prepare(self, partition: Partition) -> None:
        """Load what the partition needs, find what of it was forwarded so far, and report that it is ready."""
        try:
            await self._load(partition)
            await self._recovery.prepare(partition)
            self._forget_unless_needed(partition)  # it may have been lost before loading it began
            if partition in self._membership.incoming:
                await retry(lambda: self._membership.ready(partition), clock=self._clock, backoff=BACKOFF)
        except ShardyardError as error:  # it comes without preparation, then
            _log.warning("%s could not be prepared: %s", partition, error)

    def _forget_unless_needed(self, partition: Partition) -> None:
        if partition not in self._sources and partition not in self._membership.incoming:
            self._recovery.forget(partition)
            self._unload(partition)

    async def _open_source(self, source: Source) -> None:
        """Bring a partition to the state in which its last owner left it; then it is read, or its batch that is in
        flight is retried."""
        warn = first_only(lambda error: _log.warning("taking %s over will be retried: %s", source.partition, error))
        while not source.stopping:
            try:
                await self._recovery.open(source)
                await self._load(source.partition)
                source.forwarded = await self._recovery.find(source)
            except (Fenced, UnknownTopic, PartitionOutOfRange) as error:
                if not source.stopping:
                    self._give_up(source, error)
                return
            except ShardyardError as error:
                warn(error)
                await self._clock.sleep(RETRY_SECONDS)
            else:
                self._opened(source)
                return

    def _opened(self, source: Source) -> None:
        self._forget_unless_needed(source.partition)
        if source.stopping:
            return
        source.is_open = True
        self._continue_with(source)

    # Losing partitions

    def _withdraw(self, source: Source) -> "asyncio.Task[Any]":
        """It is revoked: take no further step with it. A batch of it that is in flight is finished."""
        source.stopping = True
        self._discard(source)
        return self._spawn(self._release(source), f"releasing {source.partition}")

    async def _release(self, source: Source) -> None:
        """Commit and release a partition once none of it is in flight."""
        await source.idle.wait()
        if source.lost:
            return
        try:
            await self._commits.now()
            if self._closing:  # leaving the group releases all partitions at once
                return
            await self._membership.release(source.partition)
        except Fenced as error:
            _log.info("%s of %s was lost: %s", source.partition, self.name, error)
        self._drop(source)

    def _give_up(self, source: Source, error: ShardyardError) -> None:
        """If it is still ours, the next heartbeat assigns it again. That it is not is normal in a rebalance."""
        _log.info("%s of %s was released: %s", source.partition, self.name, error)
        self._drop(source)

    def _drop(self, source: Source) -> None:
        self._forget(source)
        if self._sources.get(source.partition) is source:
            del self._sources[source.partition]
            self._membership.forget(source.partition)
            self._forget_unless_needed(source.partition)

    def _forget(self, source: Source) -> None:
        source.stopping = source.lost = True
        self._discard(source)
        self._commits.forget(source.partition, source.epoch)
        self._done.pop(source.partition, None)
