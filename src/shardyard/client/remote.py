"""`Host` for members whose log and registry are elsewhere: brokers carry out their requests."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shardyard.client.bodies import packed
from shardyard.client.brokers import Brokers, Response
from shardyard.client.carrier import AssignmentWatch, Carrier
from shardyard.client.paths import member_path, path
from shardyard.groups.coordinator import Changes, GroupCoordinator, JoinRequest, MemberIdentity
from shardyard.groups.fence import fenced_partition
from shardyard.groups.protocol import Grant, MemberAssignment
from shardyard.model import (
    Appended,
    Fence,
    Fenced,
    MemberExists,
    NotAllowed,
    Partition,
    Position,
    Record,
    RetryLater,
    Span,
    Stamp,
    Topic,
)
from shardyard.model.plain_batch import PlainBatch
from shardyard.runtime.clock import Clock
from shardyard.runtime.retry import Backoff, first_only, retry
from shardyard.wire import frames, requests, responses
from shardyard.wire.batches import decode_batch
from shardyard.wire.codec import parse_partition
from shardyard.wire.settings import GroupSettings

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)

WATCH_BACKOFF_SECONDS = 0.5
"""Before the assignment of a member is watched again, after its broker was lost."""
LEAVE_SECONDS = 2.0
"""For how long leaving a group is retried."""
MIN_HEARTBEAT_SECONDS = 0.5
"""A broker has at least this long to respond to a heartbeat, however short the session is."""
NAME_BACKOFF = Backoff(first=0.5, longest=0.5)
"""Between two attempts to join with a name that is taken."""
ADMISSION_BACKOFF = Backoff(first=0.5, longest=5.0)
"""Between two attempts to join a group whose allow and deny lists keep the member out."""


class RemoteCoordinator(GroupCoordinator):
    """`GroupCoordinator`, through brokers."""

    def __init__(self, brokers: Brokers, clock: Clock | None = None) -> None:
        self._brokers = brokers
        self._clock = clock or brokers.clock
        self.settings = GroupSettings()
        """Of the group, as of the last heartbeat."""
        self.on_settings: Callable[[GroupSettings], None] | None = None
        """Called with the settings that each heartbeat returns."""
        self._settings_version = ""
        self._heartbeat_at = -math.inf
        """When a broker last responded to a heartbeat."""
        self._heartbeat_timeout = 0.0
        """Seconds after which a heartbeat fails over to another broker, early enough for the session to survive."""

    async def join(self, request: JoinRequest, since: int | None) -> MemberIdentity:
        timeout = request.session_timeout
        if since is not None and self._clock.monotonic() - self._heartbeat_at < timeout / 2:
            # It sent heartbeats and was evicted all the same, because its handler hangs. Wait for a session, so that
            # other members get its partitions first.
            await self._clock.sleep(timeout)
        self._heartbeat_timeout = min(max(timeout / 5, MIN_HEARTBEAT_SECONDS), self._brokers.failover_seconds)
        body = requests.Join(
            topics=list(request.topics),
            name=request.name,
            weight=request.weight,
            static=request.static,
            partitions=None if request.partitions is None else [str(p) for p in request.partitions],
            session_timeout=timeout,
            address=request.address,
            metadata=request.metadata,
            prepare_seconds=request.prepare_seconds,
            since=since,
            instance=request.instance,
        )

        async def post() -> Response:
            return await self._brokers.post(path("groups", request.group, "members"), body)

        async def post_until_name_is_free() -> Response:
            # A name that is taken may be ours: of an earlier process, or of a join whose response was lost. Retry until
            # that session has expired.
            return await retry(
                post,
                clock=self._clock,
                deadline=self._clock.monotonic() + timeout + NAME_BACKOFF.longest,
                backoff=NAME_BACKOFF,
                retry_on=MemberExists,
                on_retry=first_only(lambda error: _log.warning("joining will be retried: %s", error)),
            )

        refused = False

        def log_refusal(error: NotAllowed) -> None:
            nonlocal refused
            refused = True
            _log.warning("%s; waiting until they let it in", error)

        response = await retry(
            post_until_name_is_free,
            clock=self._clock,
            backoff=ADMISSION_BACKOFF,
            retry_on=NotAllowed,
            on_retry=first_only(log_refusal),
        )
        joined = response.decode(responses.Joined)
        if refused:
            _log.warning("member %r is allowed in group %r now, and has joined it", joined.member, request.group)
        self._update_settings(joined.settings)
        return MemberIdentity(joined.group, joined.member, joined.epoch)

    async def heartbeat(self, identity: MemberIdentity, progress: Iterable[Partition]) -> MemberAssignment | None:
        body = requests.Heartbeat(identity.epoch, [str(partition) for partition in progress])
        call = frames.Heartbeat(identity.group, identity.member, body, self._settings_version)
        try:
            answer = await self._brokers.heartbeat(call, self._heartbeat_timeout)
        except NotAllowed:
            self._heartbeat_at = -math.inf  # it was not evicted because it hangs: it may join as soon as it is let in
            left = f"member {identity.member!r} had to leave group {identity.group!r}"
            raise Fenced(left) from None  # so it stops working, and joins again
        self._heartbeat_at = self._clock.monotonic()
        self._settings_version = answer.version
        if answer.settings is not None:
            self._update_settings(answer.settings)
        return None if answer.assignment is None else _assignment(answer.assignment)

    def _update_settings(self, settings: GroupSettings) -> None:
        self.settings = settings
        if self.on_settings is not None:
            self.on_settings(settings)

    async def assignment(self, identity: MemberIdentity) -> MemberAssignment:
        call = frames.Assignment(identity.group, identity.member, identity.epoch)
        return _assignment(await self._brokers.assignment(call, self._heartbeat_timeout))

    async def commit(self, identity: MemberIdentity, positions: Mapping[Partition, tuple[int, Position]]) -> None:
        named = {str(p): (owned, position.epoch, position.offset) for p, (owned, position) in positions.items()}
        body = requests.Commit(identity.epoch, named)
        await self._brokers.commit(frames.Commit(identity.group, identity.member, body))

    async def release(self, identity: MemberIdentity, partitions: Mapping[Partition, int]) -> None:
        named = {str(partition): epoch for partition, epoch in partitions.items()}
        await self._brokers.post(f"{_member_path(identity)}/release", requests.Release(identity.epoch, named))

    async def ready(self, identity: MemberIdentity, partitions: Iterable[Partition]) -> None:
        body = requests.Ready(identity.epoch, [str(partition) for partition in partitions])
        await self._brokers.post(f"{_member_path(identity)}/ready", body)

    async def leave(self, identity: MemberIdentity) -> None:
        await self._brokers.call(
            "DELETE",
            _member_path(identity),
            query={"epoch": identity.epoch},
            retry_seconds=LEAVE_SECONDS,
        )

    async def fail(self, identity: MemberIdentity, failures: Sequence[requests.Failed]) -> None:
        """Report records whose handlers failed."""
        await self._brokers.post(path("groups", identity.group, "failures"), requests.Failures(list(failures)))

    @contextlib.contextmanager
    def changes(self, identity: MemberIdentity) -> Iterator[Changes]:
        changes = _RemoteChanges(self._brokers, self._clock, identity, self._heartbeat_timeout)
        try:
            yield changes
        finally:
            changes.close()


class _RemoteChanges:
    """Changes of a member's assignment, as the broker that is used now tells of them."""

    def __init__(self, brokers: Brokers, clock: Clock, identity: MemberIdentity, timeout: float) -> None:
        self._brokers = brokers
        self._clock = clock
        self._call = frames.Watch(identity.group, identity.member, identity.epoch)
        self._timeout = timeout
        self._carrier: Carrier | None = None
        self._watch: AssignmentWatch | None = None

    async def wait(self, seconds: float) -> bool:
        deadline = self._clock.monotonic() + seconds
        while (left := deadline - self._clock.monotonic()) > 0:
            try:
                watch = await self._watching(min(left, self._timeout))
                if await watch.wait(deadline - self._clock.monotonic()):
                    return True
            except (ConnectionError, RetryLater):
                self.close()
                await self._clock.sleep(min(left, WATCH_BACKOFF_SECONDS))  # the next heartbeat will report it
        return False

    async def _watching(self, timeout: float) -> AssignmentWatch:  # noqa: ASYNC109 of connecting
        """The watch at the broker that is used now. A new one tells of a change at once."""
        carrier = await self._brokers.connect(timeout)
        if self._watch is None or carrier is not self._carrier:
            self.close()
            self._carrier, self._watch = carrier, carrier.watch(self._call, self._timeout, self._clock)
        return self._watch

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _member_path(identity: MemberIdentity) -> str:
    return member_path(identity.group, identity.member)


def _assignment(response: responses.Assignment) -> MemberAssignment:
    owned = {
        parse_partition(name): Grant(
            granted.epoch, None if granted.committed is None else Position(*granted.committed), granted.revoked
        )
        for name, granted in response.partitions.items()
    }
    return MemberAssignment(owned, frozenset(map(parse_partition, response.incoming)))


class RemoteLog:
    """`OwnerLog`, through brokers."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def topic(self, name: str) -> Topic:
        response = await self._brokers.get(path("topics", name), brief="true")
        return response.decode(responses.TopicInfo).topic()

    async def span(self, partition: Partition) -> Span:
        return (await self._brokers.span(frames.Span(str(partition)))).span()

    async def set_fence(self, fence: Fence) -> None:
        group, partition = fenced_partition(fence)
        await self._brokers.set_fence(frames.Fence(group, str(partition), fence.epoch))

    async def read(
        self,
        partition: Partition,
        offset: int,
        *,
        epoch: int | None = None,
        max_records: int = 500,
        max_bytes: int = 1024 * 1024,
        wait: float = 0.0,
        fence: Fence | None = None,
    ) -> PlainBatch:
        if fence is None:
            raise TypeError("an owner reads under its fence")
        group, owned = fenced_partition(fence)
        query = requests.Read(offset, fence.epoch, epoch, wait, max_records, max_bytes)
        return decode_batch(partition, await self._brokers.read(frames.Read(group, str(owned), query)))

    async def append(
        self,
        partition: Partition,
        records: "Sequence[Record] | pa.RecordBatch",
        *,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
    ) -> Appended:
        options = requests.Publish(
            partition.index,
            producer=None if stamp is None else stamp.producer,
            sequence=None if stamp is None else stamp.sequence,
            fence=None if fence is None else fence.name,
            owner=None if fence is None else fence.epoch,
        )
        call = frames.Publish(partition.topic, packed(records), options)
        (part,) = (await self._brokers.publish(call, is_stamped=stamp is not None)).stored
        return part.appended()


class RemoteHost:
    """`Host`, through brokers."""

    def __init__(self, brokers: Brokers, name: str, *, clock: Clock | None = None) -> None:
        self.name = name
        self.log = RemoteLog(brokers)
        self.clock = clock or brokers.clock
        self.coordinator = RemoteCoordinator(brokers, self.clock)
        self._brokers = brokers

    @property
    def is_open(self) -> bool:
        return self._brokers.is_open
