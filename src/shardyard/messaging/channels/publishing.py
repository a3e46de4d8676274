"""Presence of the users of one partition, published in `presence`: fan-out stores posts where somebody is online."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from shardyard.log import Log
from shardyard.messaging.config import MessagingConfig
from shardyard.model import Fenced, Malformed, OffsetTrimmed, Partition, Record, RetryLater
from shardyard.model.limits import Limits
from shardyard.runtime.clock import Clock
from shardyard.runtime.metrics import PRESENCE_CHANGES
from shardyard.runtime.retry import retry
from shardyard.wire.channels import CLEARED, change, parse_change

if TYPE_CHECKING:
    from shardyard.messaging.owned import OwnedPartition

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.005
MOST_AT_ONCE = 5_000
"""Clients that go offline with one append."""
MOST_RECORDS = Limits().batch_records
"""Of one append: what is larger is not compacted."""

Client = tuple[str, str]
"""A user, and the device."""
AppendAway = Callable[["OwnedPartition", Sequence[str]], Awaitable[int]]
"""Appends an entry to the inbox for each of these users, who go offline. Returns the offset after them."""


class PresencePublisher:
    """What `presence` says of the users of one partition, under one ownership.

    A client that connects is online before it is welcomed. One that disconnects stays online for some seconds, in case
    that it comes back; so do those of an earlier owner, from the moment of taking over.
    """

    def __init__(
        self,
        owned: "OwnedPartition",
        partition: Partition,
        log: Log,
        clock: Clock,
        config: MessagingConfig,
        append_away: AppendAway,
        forget: Callable[[str], None],
        belongs: Callable[[str], bool],
    ) -> None:
        """`partition`: of `presence`. `forget`: called with each user who is offline. `belongs`: whether a user is one
        of the partition's."""
        self._owned = owned
        self._partition = partition
        self._log = log
        self._clock = clock
        self._config = config
        self._append_away = append_away
        self._forget = forget
        self._belongs = belongs
        self._online: dict[str, tuple[str, ...]] = {}
        """The devices of each user that are online."""
        self._coming: dict[Client, None] = {}
        """Those that wait to become online."""
        self._arriving: Counter[Client] = Counter()
        """Clients that are not attached yet, and will be."""
        self._leaving: dict[Client, float] = {}
        """When those that have disconnected go offline, the first ones first."""
        self._away_end = 0
        """The inbox has all entries that say that a user went offline before this offset."""
        self._records = 0
        """Of the partition, since it was last compacted."""
        self._changing = asyncio.Lock()
        """Changes are appended one after the other."""

    async def load(self) -> None:
        """Read who is online, as earlier owners left it."""
        span = await self._log.span(self._partition)
        at, self._online, self._records = span.first, {}, 0
        while at < span.end:
            try:
                batch = await self._log.read(self._partition, at, fence=self._owned.fence)
            except OffsetTrimmed:  # an earlier owner has just compacted it
                raise RetryLater(f"{self._partition} was trimmed while it was read: try again") from None
            for record in batch.records():
                self._apply(record.key, record.value)
            self._records += len(batch)
            at = batch.end
        strangers = [user for user in self._online if not self._belongs(user)]
        for user in strangers:  # the inbox has other partitions since: who is online there must not go offline here
            del self._online[user]
        if strangers:
            self._records = MOST_RECORDS * 2  # compact it soon, without them
        due = self._clock.monotonic() + self._config.away_seconds
        self._leaving = {(user, device): due for user, devices in self._online.items() for device in devices}

    def _apply(self, key: bytes | None, value: bytes) -> None:
        if key is None and value == CLEARED:
            self._online.clear()
            return
        try:
            device, added = parse_change(value)
            self._set((key or b"").decode(), device, online=added)
        except (Malformed, UnicodeDecodeError) as error:
            _log.debug("%s has a record that is no change: %s", self._partition, error)

    def _set(self, user: str, device: str, *, online: bool) -> None:
        devices = self._online.get(user, ())
        others = tuple(each for each in devices if each != device)
        if online:
            self._online[user] = (*others, device)
        elif others:
            self._online[user] = others
        else:
            self._online.pop(user, None)

    # Clients that come and go

    def is_online(self, user: str, device: str) -> bool:
        """Whether the client may be welcomed at once."""
        return device in self._online.get(user, ()) and self._owned.tail.end >= self._away_end

    async def come(self, user: str, device: str) -> None:
        """A client connects: return when `presence` says so, durably. The caller calls `arrived` in any case, as soon
        as it is attached, or will not be. `Fenced` if the partition has moved."""
        client = user, device
        self._arriving[client] += 1
        if device not in self._online.get(user, ()):
            self._coming[client] = None
            await self._publish()
            if device not in self._online.get(user, ()):
                raise RetryLater("the presence could not be stored: try again")
        while self._owned.tail.end < self._away_end and not self._owned.ended:
            await self._clock.sleep(LOOK_SECONDS)  # else it would not be found that the client missed posts

    def arrived(self, user: str, device: str) -> None:
        """A client that came is attached, or will not be."""
        self._arriving[user, device] -= 1
        if self._arriving[user, device] <= 0:
            del self._arriving[user, device]
        self.left(user, device)

    def left(self, user: str, device: str) -> None:
        """A client has disconnected: it goes offline later, unless it comes back."""
        if not self._is_here(user, device) and device in self._online.get(user, ()):
            self._leaving.pop((user, device), None)
            self._leaving[user, device] = self._clock.monotonic() + self._config.away_seconds

    def _is_here(self, user: str, device: str) -> bool:
        return (user, device) in self._arriving or any(
            session.device == device for session in self._owned.sessions_of(user)
        )

    async def _publish(self) -> None:
        """Append everything that waits, in one go."""
        async with self._changing:
            coming, self._coming = self._coming, {}
            if not coming:
                return
            await self._append([_record(user, change(device, added=True)) for user, device in coming])
            for user, device in coming:
                self._set(user, device, online=True)
            PRESENCE_CHANGES.series("online").add(len(coming))

    # In the background

    async def sweep(self) -> None:
        """Let clients go offline whose time is over, and compact the partition if it has grown."""
        if self._owned.ended:
            return
        now = self._clock.monotonic()
        due: list[Client] = []
        for client, at in self._leaving.items():
            if at > now or len(due) >= MOST_AT_ONCE:
                break
            due.append(client)
        if due:
            for client in due:
                del self._leaving[client]
            await self._go_offline(due)
        devices = sum(map(len, self._online.values())) if self._records > self._config.presence_records else 0
        if self._records > max(self._config.presence_records, 2 * devices):
            await self._compact(devices)

    async def _go_offline(self, clients: Iterable[Client]) -> None:
        async with self._changing:
            gone = [
                (user, device)
                for user, device in clients
                if device in self._online.get(user, ()) and not self._is_here(user, device)
            ]
            for user, device in gone:  # now, so that whoever comes back meanwhile is stored after this
                self._set(user, device, online=False)
            away = list(dict.fromkeys(user for user, _ in gone if user not in self._online))
            try:
                if away:
                    self._away_end = max(self._away_end, await self._append_away(self._owned, away))
                if gone:
                    await self._append([_record(user, change(device, added=False)) for user, device in gone])
            except RetryLater:
                for user, device in gone:
                    self._set(user, device, online=True)
                    self.left(user, device)
                raise
            PRESENCE_CHANGES.series("offline").add(len(gone))
            for user in away:
                if not self._owned.sessions_of(user) and not any(each == user for each, _ in self._arriving):
                    self._forget(user)

    async def _compact(self, devices: int) -> None:
        """Append who is online, and trim everything before that."""
        if devices >= MOST_RECORDS:
            return
        async with self._changing:
            state = [_record(None, CLEARED)]
            for user, names in self._online.items():
                state += [_record(user, change(device, added=True)) for device in names]
            first = await self._append(state)
            await self._log.trim(self._partition, first)
            self._records = len(state)

    async def _append(self, records: Sequence[Record]) -> int:
        """Returns the offset of the first one. A retry may store them twice, which is the same as once."""
        try:
            appended = await retry(
                lambda: self._log.append(self._partition, records, fence=self._owned.fence),
                clock=self._clock,
                deadline=self._clock.monotonic() + self._config.store_seconds,
            )
        except Fenced:
            _log.debug("%s belongs to another server now", self._partition)
            raise
        self._records += len(records)
        return appended.first.offset


def _record(user: str | None, value: bytes) -> Record:
    return Record("presence", None if user is None else user.encode(), value, (), 0)
