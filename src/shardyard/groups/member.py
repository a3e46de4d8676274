"""`Member`: a share of a group's partitions, as an asynchronous iterator of batches."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Self

from shardyard.groups import protocol
from shardyard.groups.claim import Claim, OwnedBatch, Start
from shardyard.groups.node import Node
from shardyard.groups.protocol import Holding
from shardyard.groups.waking import Waking
from shardyard.log import Fence
from shardyard.model import (
    Clock,
    Closed,
    Fenced,
    MemberExists,
    OffsetBeyondEnd,
    Partition,
    PartitionOutOfRange,
    Position,
    RetryLater,
    ShardyardError,
    SystemClock,
    UnknownTopic,
)

_log = logging.getLogger(__name__)

HEARTBEATS_PER_SESSION = 5


class Member:
    """A member of a group, from entering the block to leaving it.

    Iterating gives batches of the partitions it owns, as they come; a partition's next batch comes after the last
    one was committed. When a partition is to go to another member, no new batch of it is begun, the one in hand may be
    finished and committed (for up to `drain` seconds), and then it goes. Partitions that stay never pause.

    A member that was out of touch for longer than its session (stalled, or cut off) finds its partitions gone: commits
    raise `Fenced`. It joins again by itself, under a new epoch; if it was put out because its work hangs, when it asks
    for a batch or commits one.
    """

    def __init__(
        self,
        group: str,
        topics: Iterable[str],
        *,
        node: Node,
        name: str | None = None,
        weight: int = 1,
        static: bool = False,
        partitions: Iterable[Partition] | None = None,
        session_timeout: float = 10.0,
        drain: float | None = None,
        start: Start = "earliest",
        max_records: int = 1000,
        max_bytes: int = 1024 * 1024,
        clock: Clock | None = None,
    ) -> None:
        """`static`: a restart under the same name within the session moves nothing. `partitions`: own these, and no
        others. `drain`: by default as long as the session. `start`: where to begin if the group never committed."""
        self.group = group
        self.topics = sorted(set(topics))
        self.name = name or f"{node.name}-{uuid.uuid4().hex[:8]}"
        self._node = node
        self._weight = weight
        self._static = static
        self._partitions = None if partitions is None else sorted(partitions)
        self._session = session_timeout
        self._drain = session_timeout if drain is None else drain
        self._start: Start = start
        self._max = (max_records, max_bytes)
        self._clock = clock or SystemClock()
        self._epoch = -1
        self._heard = self._clock.monotonic()
        self._claims: dict[Partition, Claim] = {}
        self._released: dict[Partition, int] = {}
        """The last epoch in which each partition was ours and we let it go."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: asyncio.Queue[OwnedBatch | BaseException] = asyncio.Queue()
        self._stirred = asyncio.Event()
        """Somebody asked for a batch, or committed one, since the last heartbeat."""
        self._living: asyncio.Task[None] | None = None
        self._waking: Waking | None = None

    @property
    def owned(self) -> set[Partition]:
        """What it owns, as far as it knows."""
        return {partition for partition, claim in self._claims.items() if not claim.stopping}

    async def __aenter__(self) -> Self:
        for topic in self.topics:
            await self._node.log.topic(topic)
        for partition in self._partitions or ():
            count = (await self._node.log.topic(partition.topic)).partitions
            if not 0 <= partition.index < count:
                raise PartitionOutOfRange(partition, count)
        await self._join()
        self._living = asyncio.create_task(self._live(), name=f"member {self.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._living is not None:
            self._living.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._living
        self._lose(*self._claims)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ready.put_nowait(Closed(f"member {self.name}"))
        with contextlib.suppress(Fenced):  # others noticed before us
            await self._node.desk.do(lambda tx: protocol.leave(tx, self.group, self.name, self._epoch))

    async def __aiter__(self) -> AsyncIterator[OwnedBatch]:
        while True:
            self._stirred.set()
            batch = await self._ready.get()
            if isinstance(batch, BaseException):
                self._ready.put_nowait(batch)  # for whoever asks next
                raise batch
            if not batch.stale:
                batch.delivered = True
                yield batch

    async def commit(self, positions: dict[Partition, int]) -> None:
        """Note how far one got in several partitions at once: the offsets to go on from, all of them or none."""
        told = {}
        for partition, offset in positions.items():
            claim = self._claims.get(partition)
            if claim is None or claim.lost:
                raise Fenced(f"{partition} does not belong to member {self.name!r}")
            span = await self._node.log.span(partition)
            if offset > span.end:
                raise OffsetBeyondEnd(partition, offset, span.end)
            told[partition] = (claim.epoch, Position(span.epoch, offset))
        await self._node.desk.do(lambda tx: protocol.commit(tx, self.group, self.name, self._epoch, told))

    # Being a member

    async def _live(self) -> None:
        with Waking(self._node.registry, protocol.topic_of(self.group)) as self._waking:
            while True:
                try:
                    await self._heartbeat()
                except Fenced as error:
                    _log.warning("%s", error)
                    await self._come_back()
                except RetryLater as error:
                    _log.warning("heartbeat of %s put off: %s", self.name, error)
                    if self._clock.monotonic() - self._heard > self._session:
                        self._lose(*self._claims)  # others may have them by now
                except ShardyardError as error:
                    self._ready.put_nowait(error)
                    raise
                await self._waking.wait(self._session / HEARTBEATS_PER_SESSION)

    async def _join(self) -> None:
        row = await self._node.desk.do(
            lambda tx: protocol.join(
                tx,
                self.group,
                self.name,
                topics=self.topics,
                weight=self._weight,
                static=self._static,
                manual=self._partitions,
                session_timeout=self._session,
            )
        )
        self._epoch = row.epoch
        self._heard = self._clock.monotonic()

    async def _come_back(self) -> None:
        """Join again; one whose work hangs, only when it stirs: until then others do better without it."""
        hangs = any(claim.busy for claim in self._claims.values())
        self._lose(*self._claims)
        if hangs:
            self._stirred.clear()
            await self._stirred.wait()
        try:
            await self._join()
        except (MemberExists, RetryLater) as error:  # a static member's name may be taken by its successor
            _log.warning("joining again put off: %s", error)

    async def _heartbeat(self) -> None:
        stirred = self._stirred.is_set()
        self._stirred.clear()
        ahead = []
        for partition, claim in self._claims.items():
            waits_its_turn = stirred and not claim.busy
            if claim.idle or claim.committed_since or waits_its_turn:
                ahead.append(partition)
            claim.committed_since = False
        began = self._clock.monotonic()
        told = await self._node.desk.do(lambda tx: protocol.heartbeat(tx, self.group, self.name, self._epoch, ahead))
        self._heard = began
        self._follow(told)

    def _follow(self, told: dict[Partition, Holding]) -> None:
        """Do as the registry says: take up what is new, stop what is revoked, forget what is gone."""
        self._lose(*(p for p, claim in self._claims.items() if p not in told or told[p].epoch != claim.epoch))
        for partition, holding in told.items():
            claim = self._claims.get(partition)
            if claim is not None and holding.revoked:
                claim.stop()
            elif claim is None and holding.epoch > self._released.get(partition, -1):  # else the news is old
                self._take_up(partition, holding)

    def _lose(self, *partitions: Partition) -> None:
        for partition in partitions:
            self._claims.pop(partition).stop(lost=True)

    def _take_up(self, partition: Partition, holding: Holding) -> None:
        fence = Fence(f"{self.group}/{partition}", holding.epoch)
        claim = Claim(partition, holding, self._node.log, fence, self._commit)
        self._claims[partition] = claim
        if holding.revoked:
            claim.stop()
        task = asyncio.create_task(self._serve(claim), name=f"{partition} of {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, claim: Claim) -> None:
        """Read a partition on until it is to go, then let it go."""
        try:
            await claim.serve(self._ready.put_nowait, self._start, *self._max, self._drain)
            if not claim.lost:
                await self._release(claim)
        except Fenced:
            self._drop(claim)
            if self._waking is not None:
                self._waking.poke()  # the next heartbeat tells what became of it
        except (RetryLater, UnknownTopic) as error:
            _log.warning("%s of %s is put down: %s", claim.partition, self.name, error)
            self._drop(claim)  # if it is still ours, the next heartbeat takes it up again
        except ShardyardError as error:
            self._ready.put_nowait(error)

    async def _release(self, claim: Claim) -> None:
        self._drop(claim)
        self._released[claim.partition] = claim.epoch
        held = {claim.partition: claim.epoch}
        await self._node.desk.do(lambda tx: protocol.release(tx, self.group, self.name, self._epoch, held))

    def _drop(self, claim: Claim) -> None:
        claim.stop(lost=True)
        if self._claims.get(claim.partition) is claim:
            del self._claims[claim.partition]

    async def _commit(self, claim: Claim, position: Position) -> None:
        self._stirred.set()
        if claim.lost:
            raise Fenced(f"{claim.partition} (epoch {claim.epoch}) has gone to another member")
        positions = {claim.partition: (claim.epoch, position)}
        await self._node.desk.do(lambda tx: protocol.commit(tx, self.group, self.name, self._epoch, positions))
