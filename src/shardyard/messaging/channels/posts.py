"""Posts of channels: storing them in `events`, and pages that have also what the history does not have yet."""

import contextlib

import pyarrow.compute as pc

from shardyard.groups import Node
from shardyard.log.router import client_stamp
from shardyard.messaging.channels.topics import KeyedTopic
from shardyard.messaging.history.channel_materialiser import GROUP
from shardyard.messaging.history.channel_port import ChannelHistory, PostPage
from shardyard.messaging.history.channels import posted
from shardyard.messaging.snowflakes import LeasedSnowflakes
from shardyard.model import Fence, InvalidValue, Malformed, OffsetTrimmed, Record, RetryLater, Stamp, TooLarge
from shardyard.wire.channels import ChannelEvent, decode_event, encode_event, event_producer
from shardyard.wire.inbox import MAX_TEXT_BYTES
from shardyard.wire.messaging import Posted

READ_RECORDS = 20_000
MOST_BEHIND = 200_000
"""Offsets of a partition that are read for a page because the history does not have them yet."""


class Posts:
    """Stores posts and finds them."""

    def __init__(self, node: Node, events: KeyedTopic, ids: LeasedSnowflakes, history: ChannelHistory) -> None:
        self._node = node
        self._log = node.log
        self._events = events
        self._ids = ids
        self._history = history

    async def store(
        self,
        channel: str,
        text: str,
        *,
        sender: str,
        deadline: float,
        device: str = "",
        number: int = 0,
        id_: int | None = None,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
    ) -> tuple[ChannelEvent, bool]:
        """Store a post, once for each stamp. Returns it, and whether it was stored before."""
        if len(text) > MAX_TEXT_BYTES or len(text.encode()) > MAX_TEXT_BYTES:
            raise TooLarge("text in bytes of UTF-8", len(text.encode()), MAX_TEXT_BYTES)
        if id_ is not None and id_ >= 2**63:
            raise InvalidValue("id", id_, "below 2**63")
        now = int(self._node.clock.now() * 1000)
        event = ChannelEvent(self._ids.next() if id_ is None else id_, sender, device, number, now, text)
        if stamp is None:  # so that it can be retried, here or by `fanout.Channels`
            stamp = client_stamp(Stamp(event_producer(event.id, channel), 0), self._events.topic)
        record = Record(str(event.id), channel.encode(), encode_event(event), (), now)
        appended = await self._events.append(channel, (record,), deadline=deadline, stamp=stamp, fence=fence)
        if appended.duplicate:
            with contextlib.suppress(OffsetTrimmed, Malformed):  # then its id is not known any more
                batch = await self._log.read(appended.partition, appended.first.offset, max_records=1)
                event = decode_event(batch.records()[0].value) if len(batch) else event
        return event, appended.duplicate

    async def page(self, channel: str, before: int | None, limit: int) -> PostPage:
        """The newest posts of a channel with ids below `before`. Everything that was durable before is in it."""
        newer = await self._not_in_history(channel)
        if before is not None:
            newer = [post for post in newer if int(post.id) < before]
        page = await self._history.posts(channel, before=before, limit=limit)
        if not newer:
            return page
        merged = {int(post.id): post for post in (*newer, *page.posts)}
        ordered = [merged[id_] for id_ in sorted(merged, reverse=True)]
        return PostPage(ordered[:limit], page.more or len(ordered) > limit)

    async def _not_in_history(self, channel: str) -> list[Posted]:
        """Posts that the history may not have yet: from where its group has committed to the end of the log."""
        partition = self._events.partition_of(channel)
        row = await self._node.transactions.read(lambda tx: tx.ownership(GROUP, partition))
        span = await self._log.span(partition)
        committed = None if row is None else row.committed
        at = max(span.first, committed.offset if committed is not None and committed.epoch == span.epoch else 0)
        if span.end - at > MOST_BEHIND:
            raise RetryLater("the history of channels is too far behind: try again later")
        found: list[Posted] = []
        while at < span.end:
            batch = await self._log.read(partition, at, epoch=span.epoch, max_records=READ_RECORDS)
            for index in pc.indices_nonzero(pc.equal(batch.data.column("key"), channel.encode())).to_pylist():
                with contextlib.suppress(Malformed):
                    found.append(posted(channel, decode_event(batch.data.column("value")[index].as_py())))
            at = batch.end
        return found
