"""Following all partitions of `members`: every change is seen in order, and the newest ones are kept in memory."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from shardyard.log import Log
from shardyard.model import Malformed, OffsetTrimmed, Partition, PartitionOutOfRange, Topic, UnknownTopic, WrongEpoch
from shardyard.model.batch import Batch
from shardyard.runtime.clock import Clock
from shardyard.runtime.metrics import MALFORMED_MEMBER_RECORDS
from shardyard.runtime.retry import Backoff, first_only, retry
from shardyard.wire.channels import parse_change

_log = logging.getLogger(__name__)

READ_SECONDS = 300.0
"""How long one read waits for records."""
READ_RECORDS = 2_000
_BACKOFF = Backoff(first=0.02, longest=0.5)

Apply = Callable[[str, str, bool], None]
"""Called with the user, the channel, and whether the user has joined."""


class RecentChanges:
    """The newest changes of all partitions, by user."""

    def __init__(self, firsts: Sequence[int], most: int) -> None:
        """`firsts`: for each partition, the offset from which on it has all changes."""
        self.firsts = list(firsts)
        self._most = most
        self._all: deque[tuple[int, int, str]] = deque()
        self._by_user: dict[str, deque[tuple[str, bool]]] = {}

    def add(self, partition: int, offset: int, user: str, channel: str, joined: bool) -> None:
        self._all.append((partition, offset, user))
        self._by_user.setdefault(user, deque()).append((channel, joined))
        if len(self._all) > self._most:
            partition, offset, user = self._all.popleft()
            self.firsts[partition] = offset + 1
            mine = self._by_user[user]
            mine.popleft()
            if not mine:
                del self._by_user[user]

    def applied_to(self, user: str, channels: set[str]) -> set[str]:
        """The user's channels after the changes that are remembered."""
        for channel, joined in self._by_user.get(user, ()):
            (channels.add if joined else channels.discard)(channel)
        return channels


class MembersFollower:
    """Applies each change once, partition by partition in order, from entering `run` to its cancellation."""

    def __init__(
        self, log: Log, clock: Clock, topic: Topic, starts: Sequence[int], most_recent: int, apply: Apply
    ) -> None:
        """`starts`: for each partition, the offset to begin with. `most_recent`: changes that are kept in memory."""
        self.topic = topic
        self.offsets = list(starts)
        """For each partition: everything before this offset was applied."""
        self.recent = RecentChanges(starts, most_recent)
        self._log = log
        self._clock = clock
        self._apply = apply

    async def run(self) -> None:
        """Follow all partitions, until cancelled or the topic is gone."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self.offsets)):
                tasks.create_task(self._follow(index))

    async def catch_up(self, index: int, upto: int | None = None) -> None:
        """Apply what a partition holds now, or what it holds before an offset."""
        while upto is None or self.offsets[index] < upto:
            before = self.offsets[index]
            self._take(index, await self._read(index, 0.0))
            if self.offsets[index] <= before:
                return

    async def catch_up_with_all(self) -> None:
        """Apply everything that was appended to any partition before this call."""
        spans = await self._log.ends(self.topic.name)
        behind = [(i, spans[i].end) for i, known in enumerate(self.offsets) if i in spans and known < spans[i].end]
        await asyncio.gather(*(self.catch_up(index, upto) for index, upto in behind))

    async def _follow(self, index: int) -> None:
        try:
            while True:
                self._take(index, await self._read(index, READ_SECONDS))
        except (UnknownTopic, WrongEpoch, PartitionOutOfRange) as error:
            _log.info("%s is not followed any more: %s", self.topic.name, error)

    async def _read(self, index: int, wait: float) -> Batch:
        partition = Partition(self.topic.name, index)

        async def read() -> Batch:
            try:
                return await self._log.read(
                    partition, self.offsets[index], epoch=self.topic.epoch, max_records=READ_RECORDS, wait=wait
                )
            except OffsetTrimmed:
                first = (await self._log.span(partition)).first
                _log.warning("%s does not have the changes before offset %d any more", partition, first)
                self.offsets[index] = max(self.offsets[index], first)
                return await self._log.read(partition, first, epoch=self.topic.epoch, max_records=READ_RECORDS)

        warn = first_only(lambda error: _log.warning("reading %s will be retried: %s", partition, error))
        return await retry(read, clock=self._clock, backoff=_BACKOFF, on_retry=warn)

    def _take(self, index: int, batch: Batch) -> None:
        known = self.offsets[index]
        if batch.end <= known:  # it was read twice: by the one who follows, and by one who could not wait for that
            return
        for record, offset in zip(batch.records(), batch.offsets(), strict=True):
            if offset < known:
                continue
            try:
                user, joined = parse_change(record.value)
                channel = (record.key or b"").decode()
                if not channel:
                    raise Malformed("change", "it has no channel")
            except (Malformed, UnicodeDecodeError) as error:
                MALFORMED_MEMBER_RECORDS.add()
                _log.debug("offset %d of %s is no change of a membership: %s", offset, batch.partition, error)
                continue
            self.recent.add(index, offset, user, channel, joined)
            self._apply(user, channel, joined)
        self.offsets[index] = batch.end
