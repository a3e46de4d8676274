"""What a client missed while it was not connected: from memory, from the log, or from the history."""

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import pyarrow as pa
import pyarrow.compute as pc

from shardyard.groups import Node
from shardyard.log.router import current_topic
from shardyard.messaging.history.port import History
from shardyard.messaging.items import Item, Post
from shardyard.messaging.owned import OwnedPartition
from shardyard.messaging.session import MOST_MISSED
from shardyard.messaging.snowflakes import ms_of
from shardyard.model import Malformed, OffsetTrimmed, Partition, RetryLater
from shardyard.wire.channels import decode_event
from shardyard.wire.inbox import POST_KEY, TOPIC, InboxEntry, decode_entry
from shardyard.wire.messaging import CLOCKS_MS, Hello, number_of

if TYPE_CHECKING:
    from shardyard.log import Log

_log = logging.getLogger(__name__)

YOUNG_MS = 10_000
"""New clients get entries that are younger, whether or not the history has them."""
HISTORY_GROUP = "messaging.history"
"""The group that stores the history."""
SCAN_RECORDS = 20_000
"""Records of one read of the log."""
SCANS = 2
"""Clients for which the log is read at a time."""
CAUGHT_UP_SECONDS = 30.0
"""How long to wait until the history has what was sent through other servers."""
FAILURE_SECONDS = 10.0
"""After which it is tried again, if that was too long."""
LOOK_SECONDS = 0.05

MOST_MISSED_BYTES = 16 * 1024 * 1024
TOO_MANY = f"more than {MOST_MISSED} entries, or {MOST_MISSED_BYTES // 2**20} MiB of them, were missed"

AWAY = "posts to channels may have been missed: load the posts of the channels"

How = Literal["new", "position", "id", "lost"]


@dataclass(frozen=True, slots=True)
class Missed:
    """What a client missed, up to the memory of its partition or up to a later offset."""

    how: How
    items: list[Item]
    gap: str | None = None
    """Why something is missing, if it is."""


class Resuming:
    """Finds what clients missed."""

    def __init__(self, node: Node, history: History | None) -> None:
        self._node = node
        self._log: Log = node.log
        self._history = history
        self._scans = asyncio.Semaphore(SCANS)
        self._covered: WeakKeyDictionary[OwnedPartition, asyncio.Task[bool]] = WeakKeyDictionary()
        """Whether the history has what was sent before this server owned the partition."""

    def from_memory(self, owned: OwnedPartition, user: str, device: str, hello: Hello) -> Missed | None:
        """What the client missed, if memory has all of it."""
        position = hello.position
        if position is None:
            behind = self._history is not None and owned.history_end < owned.tail.first
            gap = "the history is behind: load it again later" if behind else None
            return Missed("new", self._not_in_history(owned, user, device), gap)
        if not _is_valid(owned, hello) or not owned.tail.first <= position.offset <= owned.tail.end:
            return None
        return _limited("position", owned, _in_memory(owned, user, position.offset), user, device)

    def _not_in_history(self, owned: OwnedPartition, user: str, device: str) -> list[Item]:
        """What a new client would not find in the history yet: what is not stored there for sure, and what is younger
        than some seconds, because a message and its copy are in different partitions. No posts: a page of a channel has
        everything."""
        if self._history is None:
            return []
        young = int(self._node.clock.now() * 1000) - YOUNG_MS
        items = owned.tail.items(user, owned.tail.first)
        since = (i for i in items if (i.offset or 0) >= owned.history_end or i.entry.at >= young)
        return _for_device(since, user, device)

    async def find(self, owned: OwnedPartition, user: str, device: str, hello: Hello) -> Missed:
        """What the client missed up to the end of memory at the time of the call. The caller holds back what comes
        after that. Raises `RetryLater` if log or history can't be read now."""
        end = owned.tail.end
        async with self._scans:
            if _is_valid(owned, hello) and hello.position is not None and hello.position.offset <= end:
                return await self._by_position(owned, user, device, hello.position.offset, end)
            if hello.last is not None:
                missed = await self._by_id(owned, user, device, number_of(hello.last), end)
                gap = AWAY if owned.channels_of(user) else None  # where it is now, posts may have come for others
                return Missed(missed.how, missed.items, missed.gap or gap)
        return Missed("lost", self._not_in_history(owned, user, device), "the position is not known any more")

    async def _by_position(self, owned: OwnedPartition, user: str, device: str, offset: int, end: int) -> Missed:
        items: list[Item] = []
        first = (await self._log.span(owned.partition)).first
        gap = None
        if offset < first:
            older = await self._from_history(owned, user, offset, first)
            if older is None:
                gap = "the log does not have all of it any more, and the history neither"
            else:
                items += older
                gap = AWAY if owned.channels_of(user) else None  # the history has posts by channel only
        newer, is_cut = await self._scan(owned, max(offset, first), end, user)
        if is_cut:
            return Missed("lost", _for_device(newer, user, device), TOO_MANY)
        return _limited("position", owned, [*items, *newer], user, device, gap)

    async def _by_id(self, owned: OwnedPartition, user: str, device: str, last: int, end: int) -> Missed:
        """The partition is another one, or was created anew: continue after the entry that the client got last."""
        start = await self._log.offset_at(owned.partition, ms_of(last) - CLOCKS_MS)
        items, is_cut = await self._scan(owned, start, end, user)
        if is_cut:
            return Missed("lost", _for_device(items, user, device), TOO_MANY)
        at = next((i for i, item in enumerate(items) if item.entry.id == last), None)
        if at is not None:
            return _limited("id", owned, items[at + 1 :], user, device)
        return _limited("lost", owned, items, user, device, "the last entry is not in the log any more")

    async def _from_history(self, owned: OwnedPartition, user: str, first: int, end: int) -> list[Item] | None:
        """None if the history may not have all of it."""
        history = self._history
        if history is None:
            return None
        row = await self._node.transactions.read(lambda tx: tx.ownership(HISTORY_GROUP, owned.partition))
        committed = None if row is None else row.committed
        if committed is None or committed.epoch != owned.log_epoch or committed.offset < end:
            return None
        found = await history.addressed_to(user, owned.log_epoch, first, end, MOST_MISSED + 1)
        return [Item(each.entry, each.offset, 0) for each in found]

    async def _scan(self, owned: OwnedPartition, start: int, end: int, user: str) -> tuple[list[Item], bool]:
        """The user's entries, and the posts of the user's channels, with offsets from `start` up to `end`; if they are
        too many, the newest of them, and True."""
        items: deque[Item] = deque()
        size, is_cut = 0, False
        partition, epoch = owned.partition, owned.log_epoch
        keys = pa.array([key.encode() for key in _keys(owned, user)], pa.binary())
        while start < end:
            try:
                batch = await self._log.read(partition, start, epoch=epoch, max_records=SCAN_RECORDS)
            except OffsetTrimmed:
                raise RetryLater(f"{partition} was trimmed while it was read: try again") from None
            if not len(batch):
                break
            offsets = batch.offsets()
            for index in pc.indices_nonzero(pc.is_in(batch.data.column("key"), keys)).to_pylist():
                if offsets[index] >= end:
                    break
                key, value = (batch.data.column(name)[index].as_py() for name in ("key", "value"))
                if (entry := _decoded(key, value, partition)) is not None:
                    items.append(Item(entry, int(offsets[index]), len(value)))
                    size += len(value)
                    while len(items) > MOST_MISSED or size > MOST_MISSED_BYTES:
                        size -= items.popleft().size
                        is_cut = True
            start = batch.end
        return list(items), is_cut

    # What the user's other clients sent, where the log has no copies

    async def sent(self, owned: OwnedPartition, user: str, device: str, after: int) -> tuple[list[Item], str | None]:
        """What other clients of the user sent to others with ids above `after`, and why some of it may be missing, if
        so. What was sent through this server since it owns the partition is known to the caller."""
        covered = self._covered.get(owned)
        if covered is None:
            covered = self._covered[owned] = asyncio.create_task(self._wait_for_history())
            covered.add_done_callback(lambda _: self._look_again_unless_covered(owned))
        gap = None if await asyncio.shield(covered) else "the history is behind: load it later"
        if self._history is None:
            return [], gap
        found = await self._history.sent_by(user, after, MOST_MISSED + 1)
        if len(found) > MOST_MISSED:
            gap = f"more than {MOST_MISSED} entries were sent by other clients"
        wanted = (each.entry for each in found if each.entry.device != device and each.entry.recipient != user)
        return [Item(entry, None, 0) for entry in wanted], gap

    def _look_again_unless_covered(self, owned: OwnedPartition) -> None:
        """That it took too long counts for some seconds, so that not every client waits for as long again."""
        task = self._covered[owned]
        if task.cancelled() or task.exception() is not None:
            del self._covered[owned]
        elif not task.result():
            asyncio.get_running_loop().call_later(FAILURE_SECONDS, self._covered.pop, owned, None)

    async def close(self) -> None:
        """Look for nothing any more."""
        tasks = list(self._covered.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_history(self) -> bool:
        """Wait until the history has everything that the log holds now; False if that takes too long."""
        if self._history is None:
            return False
        clock = self._node.clock
        deadline = clock.monotonic() + CAUGHT_UP_SECONDS
        topic = await current_topic(self._log, TOPIC)
        ends = {p: end for p in topic if (end := (await self._log.span(p)).end)}
        while clock.monotonic() < deadline:
            rows = await self._node.transactions.read(lambda tx: tx.ownerships(HISTORY_GROUP))
            done = {row.partition: row.committed for row in rows if row.committed is not None}
            if all(p in done and done[p].epoch == topic.epoch and done[p].offset >= end for p, end in ends.items()):
                return True
            await clock.sleep(LOOK_SECONDS)
        return False


def _is_valid(owned: OwnedPartition, hello: Hello) -> bool:
    """Whether the client's offset is one of this partition."""
    position = hello.position
    return position is not None and (position.partition, position.epoch) == (owned.partition.index, owned.log_epoch)


def _keys(owned: OwnedPartition, user: str) -> list[str]:
    """Of the records that the user's clients get."""
    return [user, *(POST_KEY.decode() + channel for channel in owned.channels_of(user))]


def _in_memory(owned: OwnedPartition, user: str, offset: int) -> Iterable[Item]:
    """What memory has for the user's clients from an offset on."""
    parts = [owned.tail.items(key, offset) for key in _keys(owned, user)]
    return parts[0] if len(parts) == 1 else heapq.merge(*parts, key=lambda item: item.offset or 0)


def _for_device(items: Iterable[Item], user: str, device: str) -> list[Item]:
    """Without what the client sent itself."""
    return [item for item in items if not item.is_from(user, device) and not item.is_away]


def _limited(
    how: How, owned: OwnedPartition, items: Iterable[Item], user: str, device: str, gap: str | None = None
) -> Missed:
    """What the client gets of this, and a gap if posts were not stored for its user meanwhile."""
    missed = list(items)
    if gap is None and owned.channels_of(user) and any(item.is_away for item in missed):
        gap = AWAY
    wanted = _for_device(missed, user, device)
    if len(wanted) > MOST_MISSED:
        return Missed("lost", wanted[-MOST_MISSED:], TOO_MANY)
    return Missed(how, wanted, gap)


def _decoded(key: bytes, value: bytes, partition: Partition) -> InboxEntry | Post | None:
    try:
        if key.startswith(POST_KEY):
            return Post(key[len(POST_KEY) :].decode(), decode_event(value))
        return decode_entry(value)
    except Malformed:
        _log.debug("%s has a record that is no inbox record", partition)
        return None
