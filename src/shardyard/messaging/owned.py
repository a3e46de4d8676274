"""A partition of `inbox` that this server owns: it is read as it grows, and delivered to the clients of its users."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from shardyard.groups.fence import ownership_fence
from shardyard.groups.protocol import Grant
from shardyard.log import Log
from shardyard.messaging.config import MessagingConfig
from shardyard.messaging.items import Item, Post, Tail
from shardyard.model import Fence, Malformed, Partition
from shardyard.model import Position as LogPosition
from shardyard.model.batch import Batch
from shardyard.runtime.clock import Clock, wait_until_set
from shardyard.runtime.metrics import MALFORMED_INBOX_RECORDS
from shardyard.runtime.retry import Backoff, first_only, retry
from shardyard.wire.channels import decode_event
from shardyard.wire.inbox import GROUP, POST_KEY, InboxEntry, decode_entry
from shardyard.wire.messaging import Position

if TYPE_CHECKING:
    from shardyard.messaging.channels.channels import PartitionChannels
    from shardyard.messaging.session import Session

_log = logging.getLogger(__name__)
T = TypeVar("T")

READ_SECONDS = 300.0
"""How long one read waits for records."""
READ_RECORDS = 2_000
READ_BYTES = 1024 * 1024
LOOK_SECONDS = 0.25
"""How long a partition is not read while this server keeps appending to it."""
LINGER_SECONDS = 0.005
"""How long it is not read after an append of this server, if other servers append to it, too."""
LONGEST_LINGER_SECONDS = 0.02
"""The same as long as nobody else does: then looking for records of others only takes time."""
ENTRY_BYTES = 300
"""What an entry takes in memory beside its text, about."""
READ_BACKOFF = Backoff(first=0.02, longest=0.5)


class ChannelHooks(Protocol):
    """What channels have to do with a partition."""

    async def begin(self, owned: "OwnedPartition", /) -> None:
        """Called before the first client is attached."""

    async def ready_for(self, batch: Batch, /) -> None:
        """Called before a batch is delivered."""

    def end(self, owned: "OwnedPartition", /) -> None:
        """Called when the partition is not served any more."""


class OwnedPartition:
    """Serves the users of a partition under one ownership."""

    def __init__(
        self,
        partition: Partition,
        grant: Grant,
        log: Log,
        clock: Clock,
        config: MessagingConfig,
        is_in_touch: Callable[[], bool],
        hooks: ChannelHooks | None = None,
        history: "asyncio.Task[Mapping[Partition, LogPosition]] | None" = None,
    ) -> None:
        """`is_in_touch`: whether the server still knows that nobody else owns its partitions. `history`: how far the
        history has got, which is being looked up."""
        self.partition = partition
        self.epoch = grant.epoch
        """Of the ownership."""
        self.fence: Fence = ownership_fence(GROUP, partition, grant.epoch)
        self.log_epoch = 0
        """Of the partition in the log, for positions."""
        self.tail = Tail(0, most=config.tail_records, most_bytes=config.tail_bytes)
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it can be served: False if the ownership ended before."""
        self.history_end = 0
        """The history has everything before this offset."""
        self.ended = False
        """It is not served any more."""
        self.channels: PartitionChannels | None = None
        """None as long as there are no channels."""
        self._hooks = hooks
        self._history = history
        self._ended_at = 0.0
        self._log = log
        self._clock = clock
        self._config = config
        self._is_in_touch = is_in_touch
        self._sessions: dict[str, list[Session]] = {}
        self._appending = 0
        """Appends of this server to the partition that are in flight."""
        self._has_appended = False
        """Since it was last looked at."""
        self._linger = LINGER_SECONDS
        self._is_behind = False
        """There are records that it has not delivered."""
        self._waiting: asyncio.Task[Batch] | None = None
        """A read that waits for records."""
        self._is_interrupted = False
        """It was cancelled because this server appends."""
        self._may_read = asyncio.Event()
        """Not while all that comes is appended by this server, which then need not read it from the log."""
        self._may_read.set()

    # Clients

    def attach(self, session: "Session") -> None:
        self._sessions.setdefault(session.user, []).append(session)

    def detach(self, session: "Session") -> None:
        sessions = self._sessions.get(session.user)
        if sessions is not None and session in sessions:
            sessions.remove(session)
            if not sessions:
                del self._sessions[session.user]

    def sessions_of(self, user: str) -> "list[Session]":
        return self._sessions.get(user, [])

    def sessions(self) -> "Iterator[Session]":
        return (session for sessions in list(self._sessions.values()) for session in list(sessions))

    def channels_of(self, user: str) -> Collection[str]:
        """The channels that a user has joined who is online."""
        return () if self.channels is None else self.channels.members.channels_of(user)

    @property
    def users(self) -> int:
        """How many have a client connected."""
        return len(self._sessions)

    def position(self, offset: int) -> Position:
        return Position(self.partition.index, self.log_epoch, offset)

    def deliver_copy(self, entry: InboxEntry) -> None:
        """Hand an entry to the other clients of its sender; the sending one may have gone. One to the sender itself
        reaches them without that."""
        others = [each for each in self._sessions.get(entry.sender, ()) if each.device != entry.device]
        if others and entry.sender != entry.recipient:
            item = Item(entry, None, 0)
            for session in others:
                session.deliver(item)

    # What this server appends itself

    def begin_append(self) -> None:
        """This server appends to the partition: the next records are probably its own."""
        self._appending += 1
        self._may_read.clear()
        if self._waiting is not None:  # it would be woken, only to find what is delivered anyway
            self._waiting.cancel()
            self._is_interrupted = True

    def end_append(self, user: str, entry: InboxEntry, offset: int | None) -> None:
        """The append has ended. If its record is the next one, it is delivered without reading it from the log.
        `offset`: None if it failed, or was stored before."""
        self._appending -= 1
        self._has_appended = True
        if offset is not None and offset == self.tail.end and self.ready.done() and self._is_in_touch():
            size = len(entry.content) if isinstance(entry.content, str) else 0
            self._deliver_entry(user, entry, offset, size + ENTRY_BYTES)
        elif offset is not None and offset >= self.tail.end:
            self._is_behind = True  # records of others lie before it
            self._may_read.set()
        if not self._appending:
            self._may_read.set()

    # Reading

    async def run(self) -> None:
        """Read the partition until cancelled or fenced off. First what clients may have missed is loaded."""
        await self._retry(lambda: self._log.set_fence(self.fence))
        span = await self._retry(lambda: self._log.span(self.partition))
        self.log_epoch = span.epoch
        offset = max(span.first, span.end - self._config.tail_records)
        self.tail = Tail(offset, most=self._config.tail_records, most_bytes=self._config.tail_bytes)
        while offset < span.end:
            offset = self._deliver(await self._read(offset, 0.0))
        self.tail.end = max(self.tail.end, offset)
        await self._take_history()
        if (hooks := self._hooks) is not None:
            await self._retry(lambda: hooks.begin(self))
        if not self.ready.done():
            self.ready.set_result(True)
        read_at = self._clock.monotonic()
        while True:
            await wait_until_set(self._may_read, LOOK_SECONDS, self._clock)
            is_due = self._is_behind or self._clock.monotonic() - read_at > LOOK_SECONDS
            if self._has_appended and not is_due:  # probably it appends again soon: then nothing needs to be read
                self._has_appended = False
                await self._clock.sleep(self._linger)
                continue
            self._is_behind = False
            batch = await self._read_unless_appending()
            read_at = self._clock.monotonic()
            if batch is None or batch.end <= self.tail.end:  # it was delivered when it was appended
                self._linger = min(2 * self._linger, LONGEST_LINGER_SECONDS)
                continue
            self._linger = LINGER_SECONDS
            if self._hooks is not None:
                await self._hooks.ready_for(batch)
            while not self._is_in_touch():  # another server may serve these users by now
                await self._clock.sleep(0.05)
            self.tail.end = max(self.tail.end, self._deliver(batch))

    async def _take_history(self) -> None:
        """Take what was looked up when the partition was assigned, before it is ready: a new client would get all that
        memory has."""
        if self._history is not None:
            committed = (await asyncio.shield(self._history)).get(self.partition)
            if not self.history_end:  # else a newer look has come first
                self.note_history(committed)

    def note_history(self, committed: LogPosition | None) -> None:
        """The history has everything before this position, unless that is one of an earlier topic of this name."""
        if committed is not None and committed.epoch == self.log_epoch:
            self.history_end = committed.offset

    async def _read_unless_appending(self) -> Batch | None:
        """What comes next; None if this server begins to append before that."""
        self._is_interrupted = False
        self._waiting = asyncio.create_task(self._read(self.tail.end, READ_SECONDS))
        try:
            return await self._waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_interrupted or (task is not None and task.cancelling()):
                raise
            return None
        finally:
            self._waiting = None

    def end(self) -> None:
        """Serve it no more."""
        self.ended = True
        self._ended_at = self._clock.monotonic()
        if self._hooks is not None:
            self._hooks.end(self)
        if not self.ready.done():
            self.ready.set_result(False)

    def ended_for(self, now: float) -> float:
        """For how many seconds it has not been served any more, on the monotonic clock."""
        return now - self._ended_at if self.ended else 0.0

    async def _read(self, offset: int, wait: float) -> Batch:
        return await self._retry(
            lambda: self._log.read(
                self.partition,
                offset,
                epoch=self.log_epoch,
                max_records=READ_RECORDS,
                max_bytes=READ_BYTES,
                wait=wait,
                fence=self.fence,
            )
        )

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        warn = first_only(lambda error: _log.warning("reading %s will be retried: %s", self.partition, error))
        return await retry(call, clock=self._clock, backoff=READ_BACKOFF, on_retry=warn)

    def _deliver(self, batch: Batch) -> int:
        """Deliver a batch. Returns the offset to read from next."""
        for record, offset in zip(batch.records(), batch.offsets(), strict=True):
            if offset < self.tail.end:  # it was delivered when it was appended
                continue
            key = record.key or b""
            size = len(record.value) + ENTRY_BYTES
            try:
                if key.startswith(POST_KEY):
                    post = Post(key[len(POST_KEY) :].decode(), decode_event(record.value))
                    self._deliver_post(key.decode(), post, offset, size)
                else:
                    self._deliver_entry(key.decode(), decode_entry(record.value), offset, size)
            except (Malformed, UnicodeDecodeError) as error:
                MALFORMED_INBOX_RECORDS.add()
                _log.warning("offset %d of %s is no inbox record: %s", offset, self.partition, error)
        return batch.end

    def _deliver_entry(self, user: str, entry: InboxEntry, offset: int, size: int) -> None:
        item = Item(entry, offset, size)
        self.tail.add(user, item, offset)
        sessions = self._sessions.get(user)
        if sessions is not None and not entry.away:
            for session in list(sessions):
                if not (entry.copy and session.device == entry.device):
                    session.deliver(item)

    def _deliver_post(self, key: str, post: Post, offset: int, size: int) -> None:
        """Deliver a post to the clients of the channel's members, except the one that sent it."""
        item = Item(post, offset, size)
        self.tail.add(key, item, offset)
        if self.channels is not None:
            for user in self.channels.members.users_of(post.channel):
                for session in list(self._sessions.get(user, ())):
                    if not item.is_from(user, session.device):
                        session.deliver(item)
