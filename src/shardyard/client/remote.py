"""A place for members that is not beside the log and the registry: brokers carry their words there."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from shardyard.client.brokers import ANSWER_SECONDS, Brokers, path
from shardyard.groups.coordinator import Changes, GroupCoordinator, JoinRequest, MemberIdentity
from shardyard.groups.protocol import Grant, MemberAssignment
from shardyard.model import (
    Appended,
    Fence,
    MemberExists,
    Partition,
    Position,
    Record,
    RetryLater,
    Span,
    Stamp,
    Topic,
    TopicKind,
)
from shardyard.model.batch import Batch, from_records, now_ms
from shardyard.runtime.clock import SystemClock
from shardyard.wire import records as wire

_log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Of waiting for a change in one call."""
LEAVE_PATIENCE_SECONDS = 2.0
LEAST_BEAT_SECONDS = 0.5
"""That a broker has for answering a heartbeat, however short the session is."""
NAME_AGAIN_SECONDS = 0.5
"""Before asking again for a name that is taken."""


class RemoteCoordinator(GroupCoordinator):
    """`GroupCoordinator`, through brokers."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self.settings: dict[str, Any] = {}
        """Of the group, as last heard."""
        self.heard: Callable[[dict[str, Any]], None] | None = None
        """Told the settings whenever they come."""
        self._beat_at = -math.inf
        """When a heartbeat was last answered."""
        self._beat = 0.0
        """Seconds that a broker has to answer a heartbeat: if it hangs, another is asked before the session is over."""

    async def join(self, application: JoinRequest, since: int | None) -> MemberIdentity:
        asks = {
            "name": application.name,
            "topics": list(application.topics),
            "weight": application.weight,
            "static": application.static,
            "partitions": None if application.partitions is None else [str(p) for p in application.partitions],
            "session_timeout": application.session_timeout,
            "address": application.address,
            "metadata": application.metadata,
            "prepare_seconds": application.prepare_seconds,
            "since": since,
        }
        if since is not None and time.monotonic() - self._beat_at < application.session_timeout / 2:
            # It was in touch, and is out all the same: its work hangs. Let others have that before it gets it again.
            await asyncio.sleep(application.session_timeout)
        self._beat = min(max(application.session_timeout / 5, LEAST_BEAT_SECONDS), self._brokers.turn_seconds)
        told = await self._joined(application, asks)
        self._hear(told["settings"])
        return MemberIdentity(told["group"], told["member"], told["epoch"])

    async def _joined(self, application: JoinRequest, asks: object) -> Any:
        """A name that is taken may be ours: of an earlier life, or of a join whose answer was lost. Wait for the end of
        its session."""
        until = time.monotonic() + application.session_timeout + NAME_AGAIN_SECONDS
        while True:
            try:
                return (await self._brokers.post(path("groups", application.group, "members"), asks)).json()
            except MemberExists as error:
                if time.monotonic() > until:
                    raise
                _log.warning("joining put off: %s", error)
                await asyncio.sleep(NAME_AGAIN_SECONDS)

    async def heartbeat(self, seat: MemberIdentity, progress: Iterable[Partition]) -> MemberAssignment:
        asks = {"epoch": seat.epoch, "progress": [str(partition) for partition in progress]}
        answer = await self._brokers.post(f"{_path(seat)}/heartbeat", asks, timeout=self._beat, patience=2 * self._beat)
        told = answer.json()
        self._beat_at = time.monotonic()
        self._hear(told["settings"])
        return _holdings(told)

    def _hear(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        if self.heard is not None:
            self.heard(settings)

    async def assignment(self, seat: MemberIdentity) -> MemberAssignment:
        told = await self._brokers.get(_path(seat), timeout=self._beat, patience=2 * self._beat, epoch=seat.epoch)
        return _holdings(told.json())

    async def commit(self, seat: MemberIdentity, positions: Mapping[Partition, tuple[int, Position]]) -> None:
        told = {str(p): (owned, position.epoch, position.offset) for p, (owned, position) in positions.items()}
        await self._brokers.post(f"{_path(seat)}/commit", {"epoch": seat.epoch, "positions": told})

    async def ready(self, seat: MemberIdentity, partitions: Iterable[Partition]) -> None:
        asks = {"epoch": seat.epoch, "partitions": [str(partition) for partition in partitions]}
        await self._brokers.post(f"{_path(seat)}/ready", asks)

    async def release(self, seat: MemberIdentity, partitions: Mapping[Partition, int]) -> None:
        told = {str(partition): epoch for partition, epoch in partitions.items()}
        await self._brokers.post(f"{_path(seat)}/release", {"epoch": seat.epoch, "partitions": told})

    async def leave(self, seat: MemberIdentity) -> None:
        await self._brokers.call("DELETE", _path(seat), query={"epoch": seat.epoch}, patience=LEAVE_PATIENCE_SECONDS)

    async def fail(self, seat: MemberIdentity, failures: Sequence[tuple[Partition, int, int, str]]) -> None:
        """Hand over records whose handling failed: (partition, epoch of the ownership, offset, reason)."""
        told = [
            {"partition": str(partition), "epoch": epoch, "offset": offset, "reason": reason}
            for partition, epoch, offset, reason in failures
        ]
        await self._brokers.post(path("groups", seat.group, "failures"), {"failures": told})

    @contextlib.contextmanager
    def changes(self, seat: MemberIdentity) -> Iterator[Changes]:
        yield _RemoteChanges(self._brokers, seat.group, self._beat)


class _RemoteChanges:
    """Asks whether the group has changed, and is answered when it has."""

    def __init__(self, brokers: Brokers, group: str, beat: float) -> None:
        self._brokers = brokers
        self._beat = beat
        self._path = path("groups", group, "changes")
        self._seen = ""

    async def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            step = min(left, LOOK_SECONDS)
            try:
                told = await self._brokers.get(
                    self._path, wait=step, timeout=self._beat, patience=step, seen=self._seen, wait_seconds=step
                )
            except RetryLater:
                continue  # a heartbeat is due all the same, and tells what is wrong
            version, before = told.json()["version"], self._seen
            self._seen = version
            if version != before:
                return


def _path(seat: MemberIdentity) -> str:
    return path("groups", seat.group, "members", seat.member)


def _holdings(told: Mapping[str, Any]) -> MemberAssignment:
    owned = {
        wire.partition_named(text): Grant(
            held["epoch"], held["committed"] and Position(*held["committed"]), held["revoked"]
        )
        for text, held in told["partitions"].items()
    }
    return MemberAssignment(owned, frozenset(map(wire.partition_named, told["incoming"])))


class RemoteLog:
    """`OwnerLog`, through brokers."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def topic(self, name: str) -> Topic:
        told = (await self._brokers.get(path("topics", name))).json()
        return Topic(
            told["name"],
            told["partitions"],
            TopicKind(told["kind"]),
            epoch=told["epoch"],
            partitioner=told["partitioner"],
            hash=told["hash"],
            sealed=told["sealed"],
            successor=told["successor"],
        )

    async def span(self, partition: Partition) -> Span:
        told = (await self._brokers.get(path("topics", partition.topic, "partitions", partition.index))).json()
        return Span(told["epoch"], told["first"], told["end"])

    async def set_fence(self, fence: Fence) -> None:
        await self._brokers.post(f"{_fenced(fence)}/fence", {"epoch": fence.epoch})

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
    ) -> Batch:
        if fence is None:
            raise TypeError("an owner reads under its fence")
        told = await self._brokers.get(
            f"{_fenced(fence)}/records",
            wait=wait,
            accept=wire.ARROW,
            offset=offset,
            owner=fence.epoch,
            epoch=epoch,
            max_records=max_records,
            max_bytes=max_bytes,
            wait_seconds=wait,
        )
        return wire.decoded_batch(partition, told.body)

    async def append(
        self,
        partition: Partition,
        records: Sequence[Record] | pa.RecordBatch,
        *,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
    ) -> Appended:
        rows = records if isinstance(records, pa.RecordBatch) else from_records(records, now_ms())
        told = await self._brokers.call(
            "POST",
            path("topics", partition.topic, "records"),
            wire.arrow_body(rows),
            {"Content-Type": wire.ARROW},
            query={
                "partition": partition.index,
                "producer": None if stamp is None else stamp.producer,
                "sequence": None if stamp is None else stamp.sequence,
                "fence": None if fence is None else fence.name,
                "owner": None if fence is None else fence.epoch,
            },
            timeout=self._brokers.turn_seconds if stamp is not None else ANSWER_SECONDS,
        )
        (part,) = told.json()["stored"]
        return Appended(partition, Position(part["epoch"], part["offset"]), part["count"], part["duplicate"])


def _fenced(fence: Fence) -> str:
    """The path of the partition that the fence is about; see `Member`."""
    group, topic, index = fence.name.rsplit("/", 2)
    return path("groups", group, "partitions", topic, index)


class RemoteHost:
    """`Host`, through brokers."""

    def __init__(self, brokers: Brokers, name: str) -> None:
        self.name = name
        self.log = RemoteLog(brokers)
        self.coordinator = RemoteCoordinator(brokers)
        self.clock = SystemClock()
        self._brokers = brokers

    @property
    def is_open(self) -> bool:
        return self._brokers.is_open
