"""`Reader`: a share of a group's partitions, as an asynchronous iterator of batches."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Self
from weakref import WeakSet

from shardyard.groups import protocol
from shardyard.groups.coordinator import Host, JoinRequest, MemberIdentity
from shardyard.groups.partition_reader import OwnedBatch, PartitionReader, Start
from shardyard.groups.protocol import Grant
from shardyard.model import (
    Closed,
    Fence,
    Fenced,
    InvalidCall,
    InvalidValue,
    MemberExists,
    Partition,
    PartitionOutOfRange,
    Position,
    RetryLater,
    UnknownTopic,
)
from shardyard.runtime.clock import Clock, SystemClock

_log = logging.getLogger(__name__)

HEARTBEATS_PER_SESSION = 5
RELEASE_AGAIN_SECONDS = 0.2
OLD_WORK_SECONDS = 10.0
"""How long a batch may be in hand before a warning, if the session is shorter."""


class Reader:
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
        clock: Clock | None = None,
    ) -> None:
        """`static`: a restart under the same name within the session moves nothing. `partitions`: own these, and no
        others. `drain`: by default as long as the session. `start`: where to begin if the group never committed."""
        if isinstance(topics, str) or not (wanted := sorted(set(topics))):
            raise InvalidValue("topics", topics, "a list of at least one topic")
        self.group = group
        self.topics = wanted
        self.name = name or f"{node.name}-{uuid.uuid4().hex[:8]}"
        self._node = node
        self._weight = weight
        self._static = static
        self._partitions = None if partitions is None else sorted(partitions)
        if start not in ("earliest", "latest"):
            raise InvalidValue("start", start, "'earliest' or 'latest'")
        self._session = protocol.check_session(session_timeout)
        self._drain = session_timeout if drain is None else drain
        self._start: Start = start
        self._max = (max_records, max_bytes)
        self._clock = clock or SystemClock()
        self._seat = MemberIdentity(group, self.name, -1)
        self._heard = self._clock.monotonic()
        self._claims: dict[Partition, PartitionReader] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: asyncio.Queue[OwnedBatch | BaseException] = asyncio.Queue()
        self._warned: WeakSet[OwnedBatch] = WeakSet()
        self._asking = 0
        """How many wait for a batch."""
        self._stirred = asyncio.Event()
        """Somebody asked for a batch, or committed one, since the last heartbeat."""
        self._living: asyncio.Task[None] | None = None

    @property
    def owned(self) -> set[Partition]:
        """What it owns, as far as it knows."""
        return {partition for partition, claim in self._claims.items() if not claim.stopping}

    @property
    def seat(self) -> MemberIdentity:
        """Its life in the group, as of now."""
        return self._seat

    async def __aenter__(self) -> Self:
        if not self._node.is_open:
            raise InvalidCall("the node is not open: enter it by `async with` first, and leave it last")
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
            await asyncio.gather(self._living, return_exceptions=True)
        self._lose(*self._claims)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ready.put_nowait(Closed(f"member {self.name}"))
        with contextlib.suppress(Fenced):  # others noticed before us
            await self._node.coordinator.leave(self._seat)

    async def __aiter__(self) -> AsyncIterator[OwnedBatch]:
        if self._living is None:
            raise InvalidCall(f"member {self.name!r} has not joined: enter it by `async with` first")
        while True:
            batch = await self._next()
            if isinstance(batch, BaseException):
                self._ready.put_nowait(batch)  # for whoever asks next
                raise batch
            if not batch.stale:
                batch.delivered_at = self._clock.monotonic()
                yield batch

    async def _next(self) -> OwnedBatch | BaseException:
        self._asking += 1
        self._stirred.set()
        try:
            return await self._ready.get()
        finally:
            self._asking -= 1

    async def commit(self, positions: dict[Partition, int]) -> None:
        """Commit the batches in hand of several partitions at once, up to these offsets; all of them or none."""
        self._stirred.set()
        told, batches = {}, []
        for partition, offset in positions.items():
            claim = self._claims.get(partition)
            if claim is None or claim.current is None or not claim.in_hand:
                raise InvalidCall(f"member {self.name!r} has no batch of {partition} in hand")
            claim.check()
            told[partition] = (claim.epoch, claim.current.position(offset))
            batches.append((claim, claim.current, offset))
        await self._node.coordinator.commit(self._seat, told)
        for claim, batch, offset in batches:
            claim.committed(batch, offset)

    # Being a member

    async def _live(self) -> None:
        """Heartbeat until cancelled; whatever else ends it, those who iterate are told."""
        try:
            with self._node.coordinator.changes(self._seat) as changed:
                due = self._clock.monotonic()
                while True:
                    left = due - self._clock.monotonic()
                    if left <= 0:
                        due = self._clock.monotonic() + self._session / HEARTBEATS_PER_SESSION
                    await self._hear(beat=left <= 0)
                    await changed.wait(max(due - self._clock.monotonic(), 0.0))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 nobody awaits this task: its end must show elsewhere
            self._lose(*self._claims)
            self._ready.put_nowait(error)

    async def _hear(self, *, beat: bool) -> None:
        """Hear what we own: with a heartbeat, or just looking."""
        try:
            await (self._heartbeat() if beat else self._look())
        except Fenced as error:
            _log.warning("%s", error)
            await self._come_back()
        except RetryLater as error:
            _log.warning("heartbeat of %s put off: %s", self.name, error)
            if self._clock.monotonic() - self._heard > self._session:
                self._lose(*self._claims)  # others may have them by now

    async def _join(self, since: int | None = None) -> None:
        asks = JoinRequest(
            self.group, self.name, self.topics, self._weight, self._static, self._partitions, self._session
        )
        self._seat = await self._node.coordinator.join(asks, since)
        self._heard = self._clock.monotonic()

    async def _come_back(self) -> None:
        """Join again; one whose work hangs, only when it stirs: until then others do better without it."""
        hangs = any(claim.in_hand for claim in self._claims.values()) and not self._asking
        self._lose(*self._claims)
        if hangs:
            await self._stirred.wait()
        try:
            await self._join(since=self._seat.epoch)
        except (MemberExists, RetryLater) as error:  # its own last join, whose answer was lost, or a busy registry
            _log.warning("joining again put off: %s", error)

    async def _heartbeat(self) -> None:
        stirred = self._stirred.is_set()
        self._stirred.clear()
        ahead = [p for p, claim in self._claims.items() if claim.got_ahead(others_did=stirred)]
        began = self._clock.monotonic()
        self._warn_of_old_work(began)
        told = await self._node.coordinator.heartbeat(self._seat, ahead)
        self._heard = began
        self._follow(told)

    def _warn_of_old_work(self, now: float) -> None:
        """A batch that is never committed holds up its partition: the commonest mistake, so say it, once a batch."""
        for claim in self._claims.values():
            batch = claim.current
            if batch is None or not claim.in_hand or batch.delivered_at is None or batch in self._warned:
                continue
            if now - batch.delivered_at > max(self._session, OLD_WORK_SECONDS):
                self._warned.add(batch)
                age = now - batch.delivered_at
                _log.warning("%r has been in hand for %.0f s; its partition waits for its commit", batch, age)

    async def _look(self) -> None:
        self._follow(await self._node.coordinator.look(self._seat))

    def _follow(self, told: dict[Partition, Grant]) -> None:
        """Do as the registry says: take up what is new, stop what is revoked, forget what is gone.

        The office answers in order, so what a release did is never unsaid by older news.
        """
        self._lose(*(p for p, claim in self._claims.items() if p not in told or told[p].epoch != claim.epoch))
        for partition, holding in told.items():
            claim = self._claims.get(partition)
            if claim is None:
                claim = self._take_up(partition, holding)
            if holding.revoked:
                claim.stop()

    def _lose(self, *partitions: Partition) -> None:
        for partition in partitions:
            self._claims.pop(partition).stop(lost=True)

    def _take_up(self, partition: Partition, holding: Grant) -> PartitionReader:
        fence = Fence(f"{self._seat.group}/{partition}", holding.epoch)
        claim = self._claims[partition] = PartitionReader(
            partition, holding, self._node.log, fence, self._note, self._clock
        )
        task = asyncio.create_task(self._serve(claim), name=f"{partition} of {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return claim

    async def _serve(self, claim: PartitionReader) -> None:
        """Read a partition on until it is to go, then let it go."""
        try:
            await claim.serve(self._ready.put_nowait, self._start, *self._max, self._drain)
            while not claim.lost:
                await self._release(claim)
        except (Fenced, RetryLater, UnknownTopic, PartitionOutOfRange) as error:
            # If it is still ours after all, the next heartbeat takes it up again. That it is not is everyday life.
            level = logging.WARNING if isinstance(error, RetryLater) else logging.INFO
            _log.log(level, "%s of %s is put down: %s", claim.partition, self.name, error)
            self._drop(claim)
        except Exception as error:  # noqa: BLE001 nobody awaits this task: its end must show elsewhere
            self._drop(claim)
            self._ready.put_nowait(error)

    async def _release(self, claim: PartitionReader) -> None:
        """The claim stays until the registry has let it go, so that no heartbeat takes it up anew."""
        held = {claim.partition: claim.epoch}
        try:
            await self._node.coordinator.release(self._seat, held)
        except RetryLater as error:
            _log.warning("release of %s put off: %s", claim.partition, error)
            await self._clock.sleep(RELEASE_AGAIN_SECONDS)
        else:
            self._drop(claim)

    def _drop(self, claim: PartitionReader) -> None:
        claim.stop(lost=True)
        if self._claims.get(claim.partition) is claim:
            del self._claims[claim.partition]

    async def _note(self, claim: PartitionReader, position: Position) -> None:
        self._stirred.set()
        positions = {claim.partition: (claim.epoch, position)}
        await self._node.coordinator.commit(self._seat, positions)
