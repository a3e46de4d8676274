"""`ChannelMaterialiser`: a member of the group that stores the posts and memberships of channels in the history."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack

from shardyard.groups import Node, OwnedBatch, Reader
from shardyard.messaging.history.channel_port import ChannelHistory, ChannelPost, MemberChange
from shardyard.messaging.history.checks import check_change, check_post
from shardyard.model import Fenced, InvalidCall, Malformed, Partition, RetryLater
from shardyard.runtime.metrics import HISTORY_MALFORMED_RECORDS
from shardyard.runtime.retry import Backoff, first_only, retry
from shardyard.wire.channels import EVENTS, MEMBERS, decode_event, parse_change

GROUP = "messaging.channels"

SESSION_SECONDS = 10.0
"""Nobody waits for the history, and taking over some hundred partitions takes a while."""
LOOK_SECONDS = 1.0
"""How often to look whether there are channels."""
LINGER_SECONDS = 0.1
"""After a batch of a partition was stored, for the next one to become larger."""
_BACKOFF = Backoff(first=0.05, longest=2.0)
"""While the history or the registry is out of reach, in seconds."""

_log = logging.getLogger(__name__)


class ChannelMaterialiser:
    """Stores the records of its partitions of `events` and `members`, and commits them when they are durable.

    It does nothing as long as there are no such topics. Every record is stored at least once, and the history knows it.
    One that is malformed is logged, once for each partition, counted and skipped.
    """

    def __init__(self, node: Node, history: ChannelHistory, *, session_timeout: float = SESSION_SECONDS) -> None:
        self._node = node
        self._history = history
        self._clock = node.clock
        self._session_timeout = session_timeout
        self._warned: set[Partition] = set()
        """The partitions with a malformed record that was logged."""

    async def run(self) -> None:
        """Until cancelled. While the history or the registry is out of reach, calls are retried."""
        await self._wait_for_topics()
        reader = Reader(GROUP, [EVENTS, MEMBERS], node=self._node, session_timeout=self._session_timeout)
        try:
            async with AsyncExitStack() as stack:
                await retry(
                    lambda: stack.enter_async_context(reader),
                    clock=self._clock,
                    backoff=_BACKOFF,
                    on_retry=first_only(lambda error: _log.warning("joining %s will be retried: %s", GROUP, error)),
                )
                # Partitions are stored side by side, so that they share transactions. Each has one batch in flight.
                tasks = await stack.enter_async_context(asyncio.TaskGroup())
                async for batch in reader:
                    tasks.create_task(self._store(batch), name=f"storing {batch.partition}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _wait_for_topics(self) -> None:
        version = -1
        while True:
            try:
                now = await self._node.log.catalog_version()
                if now != version:
                    names = {topic.name for topic in await self._node.log.topics()}
                    if {EVENTS, MEMBERS} <= names:
                        return
                    version = now
            except RetryLater as error:
                _log.warning("the topics of channels will be looked up again: %s", error)
            await self._clock.sleep(LOOK_SECONDS)

    async def _store(self, batch: OwnedBatch) -> None:
        def retried(error: RetryLater) -> None:
            if batch.lost:  # whoever owns the partition now stores it
                raise error
            warn(error)

        warn = first_only(lambda error: _log.warning("storing %r will be retried: %s", batch, error))
        try:
            if batch.partition.topic == EVENTS:
                posts = list(self._posts(batch))
                await retry(
                    lambda: self._history.store_posts(posts), clock=self._clock, backoff=_BACKOFF, on_retry=retried
                )
            else:
                changes = list(self._changes(batch))
                await retry(
                    lambda: self._history.store_changes(changes), clock=self._clock, backoff=_BACKOFF, on_retry=retried
                )
            await self._clock.sleep(LINGER_SECONDS)
            await retry(batch.commit, clock=self._clock, backoff=_BACKOFF, on_retry=retried)
        except (Fenced, RetryLater) as error:
            _log.info("%r is left to the next owner of its partition: %s", batch, error)

    def _posts(self, batch: OwnedBatch) -> Iterator[ChannelPost]:
        for offset, key, value in _rows(batch):
            try:
                post = ChannelPost(_text(key), decode_event(value))
                check_post(post)
            except InvalidCall as error:
                self._skip(batch.partition, offset, error)
            else:
                yield post

    def _changes(self, batch: OwnedBatch) -> Iterator[MemberChange]:
        epoch = batch.position(batch.first).epoch  # of the topic; the batch's own is that of the ownership
        for offset, key, value in _rows(batch):
            try:
                user, joined = parse_change(value)
                change = MemberChange(_text(key), user, joined, epoch, offset)
                check_change(change)
            except InvalidCall as error:
                self._skip(batch.partition, offset, error)
            else:
                yield change

    def _skip(self, partition: Partition, offset: int, error: InvalidCall) -> None:
        HISTORY_MALFORMED_RECORDS.add()
        if partition not in self._warned:
            self._warned.add(partition)
            _log.warning(
                "the record at offset %d of %s is skipped, as others like it will be: %s", offset, partition, error
            )


def _rows(batch: OwnedBatch) -> Iterator[tuple[int, bytes | None, bytes]]:
    columns = [batch.data.column(name).to_pylist() for name in ("key", "value")]  # quicker than whole records
    return zip(batch.offsets(), *columns, strict=True)


def _text(key: bytes | None) -> str:
    """The channel. `Malformed` if the record has none."""
    try:
        if key:
            return key.decode()
    except UnicodeDecodeError as error:
        raise Malformed("channel", str(error)) from None
    raise Malformed("channel", "the record has no key")
