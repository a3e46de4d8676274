"""Storing what clients send to other users. What comes in one turn of the event loop is stored by one call of the log:
a task for each message would cost more than all the rest of it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from shardyard.log import Log
from shardyard.log.requests import AppendRequest
from shardyard.log.router import PLACE_AGAIN
from shardyard.messaging.config import MessagingConfig
from shardyard.messaging.fresh import FreshRecords
from shardyard.messaging.inbox import Inbox, record_of
from shardyard.messaging.outgoing import Outgoing
from shardyard.messaging.recent import RecentlySent
from shardyard.messaging.snowflakes import LeasedSnowflakes
from shardyard.model import (
    Appended,
    Fence,
    Fenced,
    InvalidValue,
    Malformed,
    OffsetTrimmed,
    RetryLater,
    ShardyardError,
    Stamp,
)
from shardyard.runtime.clock import Clock
from shardyard.runtime.metrics import MESSAGES_SENT
from shardyard.wire import messaging as wire
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.inbox import InboxEntry, Mark, decode_entry

if TYPE_CHECKING:
    from shardyard.messaging.owned import OwnedPartition
    from shardyard.messaging.session import Session

_log = logging.getLogger(__name__)

AGAIN = (RetryLater, *PLACE_AGAIN)
"""Errors after which an append is tried again, one by one."""


class Addressed(Struct, frozen=True, gc=False):
    """An entry for the user that it is addressed to."""

    entry: InboxEntry
    stamp: Stamp
    fence: Fence
    """Of the partition by whose ownership it is sent."""

    @property
    def user(self) -> str:
        return self.entry.sender if self.entry.copy else self.entry.recipient


class Sending:
    """Appends entries to `inbox`, delivers those of users that are served here, and answers the clients that sent
    them."""

    def __init__(
        self,
        log: Log,
        inbox: Inbox,
        ids: LeasedSnowflakes,
        recent: RecentlySent,
        clock: Clock,
        config: MessagingConfig,
        owned_of: "Callable[[str], OwnedPartition | None]",
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`owned_of`: the partition of a user if it is served here. `start` runs something in the background."""
        self.fresh = FreshRecords(log)
        """What was just appended, for those who read it again."""
        self._log = log
        self._inbox = inbox
        self._ids = ids
        self._recent = recent
        self._clock = clock
        self._config = config
        self._owned_of = owned_of
        self._start = start
        self._waiting: list[tuple[Session, Outgoing]] = []
        self._next = 0.0
        """When what waits may be stored, by the event loop's time."""

    def add(self, session: "Session", outgoing: Outgoing) -> None:
        """Store what a client sends: at the end of this turn, or a little later if something was stored just before,
        because each commit of the log has its price."""
        if not self._waiting:
            loop = asyncio.get_running_loop()
            if loop.time() >= self._next:
                loop.call_soon(self._store_waiting)
            else:
                loop.call_at(self._next, self._store_waiting)
        self._waiting.append((session, outgoing))

    def _store_waiting(self) -> None:
        self._next = asyncio.get_running_loop().time() + self._config.pace_seconds
        waiting, self._waiting = self._waiting, []
        sent, addressed = [], []
        for session, outgoing in waiting:
            try:
                each = self._address(session, outgoing)
            except ShardyardError as error:
                session.sends.failed(outgoing, error)
                continue
            if self._inbox.may_be_in_predecessor(each.entry, each.stamp):
                self._start(self._store_again(session, outgoing, each))
            else:
                sent.append((session, outgoing))
                addressed.append(each)
        if sent:
            self._start(self._store(sent, addressed))

    def _address(self, session: "Session", outgoing: Outgoing) -> Addressed:
        owned = session.owned
        if owned is None or owned.ended:
            raise Fenced(f"{session.user} is not served here any more")
        if isinstance(outgoing.content, wire.Post | wire.Join | wire.Leave):
            raise TypeError("this is stored in a channel")
        if isinstance(outgoing.content, Mark) and not self._ids.may_exist(outgoing.content.upto):
            raise InvalidValue("upto", str(outgoing.content.upto), "the id of a message, and none is as new as this")
        entry = InboxEntry(
            self._ids.next(),
            session.user,
            outgoing.recipient,
            session.device,
            outgoing.number,
            int(self._clock.now() * 1000),
            outgoing.content,
        )
        producer = f"{len(session.user)}:{session.user}/{session.device}"
        return Addressed(entry, Stamp(producer, outgoing.number), owned.fence)

    async def _store(self, sent: "Sequence[tuple[Session, Outgoing]]", addressed: Sequence[Addressed]) -> None:
        try:
            outcomes = await self.append_all(addressed)
        except Exception as error:  # noqa: BLE001 nobody awaits this
            for session, outgoing in sent:
                session.sends.failed(outgoing, error)
            return
        for (session, outgoing), each, outcome in zip(sent, addressed, outcomes, strict=True):
            try:
                if isinstance(outcome, Appended) and not outcome.duplicate:
                    self._stored(session, outgoing, each.entry, is_duplicate=False)
                elif isinstance(outcome, (Appended, *AGAIN)):
                    self._start(self._store_again(session, outgoing, each))
                else:
                    session.sends.failed(outgoing, outcome)
            except Exception:  # noqa: BLE001 the others must get their answers
                _log.exception("a message of %s could not be answered", session.user)
                session.close(CloseCode.UNAVAILABLE, "")

    async def _store_again(self, session: "Session", outgoing: Outgoing, addressed: Addressed) -> None:
        """Append it by itself, with retries. If it was stored before, it keeps the id that it got then."""
        entry = addressed.entry
        try:
            appended = await self.append(addressed, self._clock.monotonic() + self._config.store_seconds)
            if appended.duplicate:
                with contextlib.suppress(OffsetTrimmed, Malformed):  # then its id is not known any more
                    batch = await self._log.read(appended.partition, appended.first.offset, max_records=1)
                    entry = decode_entry(batch.records()[0].value) if len(batch) else entry
        except Exception as error:  # noqa: BLE001 nobody awaits this
            session.sends.failed(outgoing, error)
        else:
            self._stored(session, outgoing, entry, is_duplicate=appended.duplicate)

    def _stored(self, session: "Session", outgoing: Outgoing, entry: InboxEntry, *, is_duplicate: bool) -> None:
        # The copies also if it was stored before: a retry here may have found that.
        if self._config.mirror == "local" and self._recent.add(entry) and session.owned is not None:
            session.owned.deliver_copy(entry)
        MESSAGES_SENT.add()
        session.sends.stored(outgoing, wire.Sent(outgoing.number, str(entry.id), entry.at, is_duplicate))

    # Appending

    async def append_all(self, entries: Sequence[Addressed]) -> list[Appended | ShardyardError]:
        """Append entries by one call of the log, and deliver those whose users are served here. The outcome of each."""
        partition_of, generation = self._inbox.partition_of, self._inbox.topic.generation
        owners = [self._owned_of(each.user) for each in entries]
        records = [record_of(each.entry) for each in entries]
        requests = [
            AppendRequest(partition_of(each.user), (record,), each.stamp, each.fence, generation)
            for each, record in zip(entries, records, strict=True)
        ]
        outcomes: list[Appended | ShardyardError] = []
        for owned in owners:
            if owned is not None:
                owned.begin_append()
        try:
            outcomes = await self._log.append_many(requests)
            for record, outcome in zip(records, outcomes, strict=True):
                if isinstance(outcome, Appended) and not outcome.duplicate:
                    self.fresh.add(outcome, record)
        except ShardyardError as error:
            outcomes = [error] * len(entries)
        finally:
            for number, owned in enumerate(owners):
                if owned is not None:
                    _end_append(owned, entries[number], outcomes[number] if outcomes else None)
        return outcomes

    async def append(self, addressed: Addressed, deadline: float) -> Appended:
        """Append one entry, retrying up to a moment of the monotonic clock."""
        owned = self._owned_of(addressed.user)
        appended = None
        if owned is not None:
            owned.begin_append()
        try:
            appended = await self._inbox.append(
                addressed.entry, stamp=addressed.stamp, fence=addressed.fence, deadline=deadline
            )
            return appended
        finally:
            if owned is not None:
                _end_append(owned, addressed, appended)


def _end_append(owned: "OwnedPartition", addressed: Addressed, outcome: Appended | ShardyardError | None) -> None:
    offset = None
    if isinstance(outcome, Appended) and not outcome.duplicate and outcome.partition == owned.partition:
        offset = outcome.first.offset
    owned.end_append(addressed.user, addressed.entry, offset)
