"""Keeps the limits of a queue: messages that expire, and the maximum length."""

from collections.abc import Callable

from shardyard.model import Record
from shardyard.model.sharding import Overflow, Queue, QueueState
from shardyard.runtime.clock import Clock
from shardyard.sharding.dead_letters import Reason
from shardyard.sharding.messages import expires_at
from shardyard.sharding.read_ahead import ReadAhead

LONGEST_PAUSE = 300.0
WATCH_SECONDS = 0.25
"""How often a queue is looked at whose messages expire, or that is too long to be in memory."""

Drop = Callable[[list[int], list[Record], Reason], None]
"""Gets offsets and records of messages that are not to be delivered any more, and why."""


class LimitKeeper:
    """Takes messages from the head of a queue that have expired, or are too many."""

    def __init__(self, queue: Queue, ahead: ReadAhead, clock: Clock, drop: Drop) -> None:
        self.queue = queue
        """As it is in the topology now."""
        self._ahead = ahead
        self._clock = clock
        self._drop = drop

    @property
    def is_watching(self) -> bool:
        """Whether the head has to be looked at also without consumers."""
        limits = self.queue.limits
        has_limits = self._is_short or limits.message_ttl_ms is not None or limits.dead_letter_exchange is not None
        return has_limits or self.queue.state is QueueState.DRAINING

    @property
    def may_expire(self) -> bool:
        """Whether there may be messages that expire."""
        return self._ahead.may_expire or self.queue.limits.message_ttl_ms is not None

    @property
    def counts_all(self) -> bool:
        """Whether it has to be known how many messages there are."""
        return self.queue.limits.max_length is not None

    def drop_expired(self) -> None:
        """Drop expired messages at the head. Others are found when they get there, or are about to be delivered."""
        if not self.may_expire:
            return
        now, ready = self._now(), self._ahead.ready
        while (first := ready.first()) is not None:
            expiry = expires_at(first, self.queue.limits.message_ttl_ms)
            if expiry is None or expiry > now:
                break
            self._drop(*ready.take(1), Reason.EXPIRED)

    def without_expired(self, offsets: list[int], records: list[Record]) -> tuple[list[int], list[Record]]:
        """Those that have not expired; the others are dropped."""
        if not self.may_expire:
            return offsets, records
        now, ttl = self._now(), self.queue.limits.message_ttl_ms
        expiries = [expires_at(record, ttl) for record in records]
        gone = [i for i, expiry in enumerate(expiries) if expiry is not None and expiry <= now]
        if not gone:
            return offsets, records
        self._drop([offsets[i] for i in gone], [records[i] for i in gone], Reason.EXPIRED)
        kept = sorted(set(range(len(offsets))).difference(gone))
        return [offsets[i] for i in kept], [records[i] for i in kept]

    def drop_head(self) -> None:
        """Drop the oldest messages beyond the maximum length."""
        if not self._is_short:
            return
        ahead = self._ahead
        excess = len(ahead.ready) + ahead.known_beyond - (self.queue.limits.max_length or 0)
        while excess > 0 and len(ahead.ready):
            offsets, records = ahead.ready.take(excess)
            excess -= len(offsets)
            self._drop(offsets, records, Reason.MAX_LENGTH)

    def pause(self, *, is_holding: bool) -> float:
        """For how many seconds nothing has to be done, unless messages come. `is_holding`: some may come back."""
        first = self._ahead.ready.first()
        expiry = None if first is None else expires_at(first, self.queue.limits.message_ttl_ms)
        if expiry is not None:
            return min(max((expiry - self._now()) / 1000, 0.01), WATCH_SECONDS)
        is_full = self.counts_all and not self._ahead.has_room
        return WATCH_SECONDS if is_full or (is_holding and self.may_expire) else LONGEST_PAUSE

    @property
    def _is_short(self) -> bool:
        limits = self.queue.limits
        return limits.max_length is not None and limits.overflow is Overflow.DROP_HEAD

    def _now(self) -> int:
        return int(self._clock.now() * 1000)
