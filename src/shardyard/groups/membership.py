"""`Membership`: being a member of a group, and the events of its partitions."""

import asyncio
import contextlib
import logging
import math
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

from shardyard.groups import protocol
from shardyard.groups.coordinator import Host, JoinRequest, MemberIdentity
from shardyard.groups.protocol import Grant, MemberAssignment
from shardyard.model import Fenced, InvalidCall, MemberExists, Partition, PartitionOutOfRange, Position, RetryLater
from shardyard.runtime.retry import Backoff, first_only, retry

_log = logging.getLogger(__name__)

HEARTBEATS_PER_SESSION = 2.5
RETRIES_PER_SESSION = 10
"""How often per session a failed heartbeat is sent again, on average."""
READ_SECONDS = 120.0
"""The longest time between two reads of the assignment, also when no change was signalled."""
RELEASE_BACKOFF = Backoff(first=0.05, longest=0.2)


class MembershipListener:
    """Receives the events of a membership. Inherit from it and override what concerns you.

    The methods are called in the event loop, one at a time, and must return at once: longer work belongs into a task.
    """

    def incoming(self, partition: Partition) -> None:
        """The member will own this partition: prepare it, then call `Membership.ready`. Only a member with
        `prepare_seconds` gets this. If the partition is not coming after all, `lost` follows."""

    def assigned(self, partition: Partition, grant: Grant) -> None:
        """The member owns this partition now, under the epoch of the grant."""

    def revoked(self, partition: Partition) -> None:
        """Another member is to own it: finish what is in flight, commit it, and call `Membership.release`."""

    def lost(self, partition: Partition) -> None:
        """The member does not own this partition any more, or it is no longer incoming. What was not committed is
        done again by another member."""

    def failed(self, error: BaseException) -> None:
        """The membership ended, for a reason that retrying does not mend. Everything it owned is lost."""

    def progressed(self, owned: Iterable[Partition]) -> Iterable[Partition]:
        """Which of these partitions made progress since the last heartbeat, or have nothing to do. A member without
        progress on a partition is evicted after the group's `release_after`."""
        return owned

    def rejoin_after(self) -> asyncio.Event | None:
        """Called when the member was evicted, before it loses its partitions: it joins again when this event is set.
        None: at once."""
        return None


class Membership:
    """A member of a group, from entering the block to leaving it.

    It joins, sends heartbeats, and tells its listener which partitions it owns. A member that was out of touch for
    longer than its session (stalled, or cut off) loses its partitions, and joins again by itself under a new epoch.

    A member may have an address and metadata, which others find in the group's `Directory`. A member without topics
    owns nothing: it is only present.
    """

    def __init__(self, host: Host, request: JoinRequest, listener: MembershipListener) -> None:
        protocol.check_session(request.session_timeout)
        self._host = host
        self._request = replace(request, instance=uuid.uuid4().hex)
        self._listener = listener
        self._session = request.session_timeout
        self._clock = host.clock
        self._identity = MemberIdentity(request.group, request.name, -1)
        self._last_contact = self._clock.monotonic()
        self._owned: dict[Partition, Grant] = {}
        self._revoked: set[Partition] = set()
        self._incoming: frozenset[Partition] = frozenset()
        self._heartbeat_at = self._next_heartbeat()
        self._read_at = -math.inf
        """When to read the assignment next, if no change is signalled before. Both on the monotonic clock."""
        self._cut_off = False
        """It was out of touch for longer than its session, and joins again: if it still were a member, it would get its
        partitions back under the same epochs, with what was in flight."""
        self._warned: set[str] = set()
        """What was logged since it was last in touch with its group."""
        self._task: asyncio.Task[None] | None = None

    @property
    def identity(self) -> MemberIdentity:
        """The member in its group, as of its last join."""
        return self._identity

    @property
    def owned(self) -> Mapping[Partition, Grant]:
        """The partitions that it owns, as far as it knows, also those that are revoked and not released yet."""
        return self._owned

    @property
    def incoming(self) -> frozenset[Partition]:
        """The partitions that it is to prepare."""
        return self._incoming

    @property
    def last_contact(self) -> float:
        """When it last heard of the group, on its own monotonic clock."""
        return self._last_contact

    @property
    def is_joined(self) -> bool:
        return self._task is not None

    async def __aenter__(self) -> Self:
        if not self._host.is_open:
            raise InvalidCall("the node is not open: enter it by `async with` first, and leave it last")
        await self._check_topics()
        await self._join()
        self._task = asyncio.create_task(self._run(), name=f"member {self._request.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        with contextlib.suppress(Fenced):  # the group noticed before us
            await self._host.coordinator.leave(self._identity)

    async def stop(self) -> None:
        """Send no more heartbeats, and lose everything, without leaving the group."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lose_all()

    async def commit(self, positions: Mapping[Partition, tuple[int, Position]]) -> None:
        """Commit how far the member got: (epoch of the ownership, position), all of them or none. Durable on return.

        `Fenced` if one of them is not its own any more.
        """
        await self._host.coordinator.commit(self._identity, positions)

    async def release(self, partition: Partition) -> None:
        """Release a partition that was revoked, retrying while the registry is busy. It stays in `owned` until then.

        `Fenced` if it is not ours any more.
        """
        if (grant := self._owned.get(partition)) is None:
            return
        await retry(
            lambda: self._host.coordinator.release(self._identity, {partition: grant.epoch}),
            clock=self._clock,
            backoff=RELEASE_BACKOFF,
            on_retry=first_only(lambda error: _log.warning("the release of %s will be retried: %s", partition, error)),
        )
        if self._owned.get(partition) == grant:
            self.forget(partition)

    async def ready(self, *partitions: Partition) -> None:
        """These incoming partitions are prepared: their owners may release them."""
        await self._host.coordinator.ready(self._identity, partitions)

    def forget(self, partition: Partition) -> None:
        """Drop a partition without an event. If the member still owns it, it is assigned again with the next
        heartbeat."""
        self._owned.pop(partition, None)
        self._revoked.discard(partition)
        self._read_at = min(self._read_at, self._heartbeat_at)

    # Membership over time

    async def _check_topics(self) -> None:
        for topic in self._request.topics:
            await self._host.log.topic(topic)
        for partition in self._request.partitions or ():
            count = (await self._host.log.topic(partition.topic)).partitions
            if not 0 <= partition.index < count:
                raise PartitionOutOfRange(partition, count)

    async def _run(self) -> None:
        """Send heartbeats and follow the assignment until cancelled; if anything else ends it, the listener gets the
        error."""
        try:
            with self._host.coordinator.changes(self._identity) as changes:
                while True:
                    if self._clock.monotonic() >= self._heartbeat_at:
                        self._heartbeat_at = self._next_heartbeat()
                        await self._update(self._rejoin if self._cut_off else self._heartbeat)
                    if self._clock.monotonic() >= self._read_at and not self._cut_off:
                        self._read_at = self._heartbeat_at  # if this read fails
                        await self._update(self._read_assignment)
                    moment = self._heartbeat_at if self._cut_off else min(self._heartbeat_at, self._read_at)
                    if await changes.wait(max(moment - self._clock.monotonic(), 0.0)):
                        self._read_at = -math.inf
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 nobody awaits this task: its end must show elsewhere
            self._lose_all()
            self._listener.failed(error)

    def _next_heartbeat(self) -> float:
        """The next multiple of the time between two heartbeats: the members of a process send theirs at the same
        moments, so that the registry stores them together."""
        every = self._session / HEARTBEATS_PER_SESSION
        now = self._clock.monotonic()
        moment = (now // every + 1) * every
        return moment if moment > now else moment + every

    async def _update(self, step: Callable[[], Awaitable[None]]) -> None:
        """Send a heartbeat or read the assignment, and join again if the member was evicted."""
        try:
            await step()
        except Fenced as error:
            self._warn("%s", error)
            await self._rejoin()
        except RetryLater as error:
            self._warn("the heartbeat of %s will be retried: %s", self._request.name, error)
            retry_at = self._clock.monotonic() + self._session / RETRIES_PER_SESSION * random.uniform(0.5, 1.5)
            self._heartbeat_at, self._read_at = min(self._heartbeat_at, retry_at), min(self._read_at, retry_at)
            if self._clock.monotonic() - self._last_contact > self._session:
                self._warn("%s was out of touch for longer than its session, and will join again", self._request.name)
                self._lose_all()  # others may own them by now
                self._cut_off = True

    def _warn(self, message: str, *arguments: object) -> None:
        """Log a warning, unless the same was logged since the member was last in touch with its group."""
        if message not in self._warned:
            self._warned.add(message)
            _log.warning(message, *arguments)

    async def _join(self, since: int | None = None) -> None:
        self._identity = await self._host.coordinator.join(self._request, since)
        self._last_contact = self._clock.monotonic()
        self._read_at = -math.inf
        self._cut_off = False

    async def _rejoin(self) -> None:
        active = self._listener.rejoin_after()
        self._lose_all()
        if active is not None:
            await active.wait()
        try:
            await self._join(since=self._identity.epoch)
        except (MemberExists, RetryLater) as error:  # another process may have its name for a while
            self._warn("joining again will be retried: %s", error)
        else:
            self._warned.clear()
            _log.info("%s has joined group %s again", self._request.name, self._request.group)

    async def _heartbeat(self) -> None:
        started = self._clock.monotonic()
        progressed = list(self._listener.progressed(list(self._owned)))
        assignment = await self._host.coordinator.heartbeat(self._identity, progressed)
        self._last_contact = started
        if self._warned:
            self._warned.clear()
            _log.info("%s is in touch with group %s again", self._request.name, self._request.group)
        if assignment is not None:
            self._apply(assignment)

    async def _read_assignment(self) -> None:
        self._apply(await self._host.coordinator.assignment(self._identity))

    def _apply(self, assignment: MemberAssignment) -> None:
        wait = READ_SECONDS if assignment.changes_in is None else min(assignment.changes_in, READ_SECONDS)
        self._read_at = self._clock.monotonic() + wait
        self._tell(assignment)

    def _tell(self, assignment: MemberAssignment) -> None:
        """Tell the listener what changed. Responses come in the order of calls, so an older one never undoes what a
        release did."""
        owned = assignment.owned
        for partition in [p for p, grant in self._owned.items() if p not in owned or owned[p].epoch != grant.epoch]:
            self._lose(partition)
        gone, new = self._incoming - assignment.incoming - set(owned), assignment.incoming - self._incoming
        self._incoming = assignment.incoming  # first, because listeners look at it
        for partition in sorted(gone):
            self._listener.lost(partition)
        for partition in sorted(new):
            self._listener.incoming(partition)
        for partition, grant in owned.items():
            if partition not in self._owned:
                self._owned[partition] = grant
                self._listener.assigned(partition, grant)
            if grant.revoked and partition not in self._revoked:
                self._revoked.add(partition)
                self._listener.revoked(partition)

    def _lose_all(self) -> None:
        for partition in [*self._owned]:
            self._lose(partition)
        incoming, self._incoming = self._incoming, frozenset()
        for partition in sorted(incoming):
            self._listener.lost(partition)

    def _lose(self, partition: Partition) -> None:
        self.forget(partition)
        self._listener.lost(partition)
