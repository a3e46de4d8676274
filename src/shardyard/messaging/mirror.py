"""The mirror through the log: a second group re-addresses every entry to its sender, whose other clients get it."""

import asyncio
import logging
from collections import defaultdict
from typing import Protocol

from shardyard.groups import Node, Reader
from shardyard.groups.partition_reader import OwnedBatch
from shardyard.messaging.inbox import Inbox
from shardyard.model import Appended, Fence, Fenced, Malformed, Partition, RetryLater, SequenceTooOld, Stamp
from shardyard.runtime.retry import Backoff, retry
from shardyard.wire.inbox import TOPIC, InboxEntry, decode_entry

_log = logging.getLogger(__name__)

GROUP = "messaging.mirror"
LINGER_SECONDS = 0.05
"""After a batch of a partition was copied, for the next one to become larger."""
_BACKOFF = Backoff(first=0.05, longest=2.0)
"""While the registry is out of reach."""
STORE_SECONDS = 60.0
"""How long an append is retried. After that the batch is delivered again."""


class Append(Protocol):
    """Appends an entry to the partition of the user that it is addressed to."""

    async def __call__(self, entry: InboxEntry, *, stamp: Stamp, fence: Fence, deadline: float) -> Appended: ...


async def run_mirror(node: Node, inbox: Inbox, append: Append, *, session_timeout: float) -> None:
    """Copy the entries of the partitions that this member of the group owns, until cancelled."""
    reader = Reader(GROUP, [TOPIC], node=node, session_timeout=session_timeout)

    async def work(batch: OwnedBatch) -> None:
        try:
            await _copy(batch, inbox, append, node)
            await node.clock.sleep(LINGER_SECONDS)
            await retry(batch.commit, clock=node.clock, backoff=_BACKOFF)
        except RetryLater as error:
            _log.info("%r will be copied again: %s", batch, error)
            raise
        except Fenced:
            _log.debug("%s went to another member of %s", batch.partition, GROUP)

    try:
        async with reader, asyncio.TaskGroup() as tasks:  # partitions side by side; each has one batch in flight
            async for batch in reader:
                tasks.create_task(work(batch), name=f"copying {batch.partition}")
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _copy(batch: OwnedBatch, inbox: Inbox, append: Append, node: Node) -> None:
    """Append a copy of each entry to its sender's partition, those of one partition one after the other.

    The stamp of a copy is the entry's own place in the log, so that a copy that is made again is not stored again. One
    that the log finds too old for its window was stored: a partition gets its copies in the order of the log. When the
    inbox gets other partitions, the batch is copied again, and some copies may be stored twice; clients know their ids.
    """
    placements = inbox.placements
    lanes: defaultdict[Partition, list[tuple[int, InboxEntry]]] = defaultdict(list)
    for record, offset in zip(batch.records(), batch.offsets(), strict=True):
        try:
            entry = decode_entry(record.value)
        except Malformed:
            continue  # the owner of the partition has counted it
        if not entry.copy and entry.sender != entry.recipient:  # one's own message has reached all of one's clients
            lanes[inbox.partition_of(entry.sender)].append((offset, entry))
    deadline = node.clock.monotonic() + STORE_SECONDS
    epoch = batch.position(batch.first).epoch
    producer = f"mirror of {batch.partition} {epoch} over {inbox.topic.receiving}"  # partitions: else it begins anew

    async def copy(entries: list[tuple[int, InboxEntry]]) -> None:
        for offset, entry in entries:
            copied = InboxEntry(
                entry.id, entry.sender, entry.recipient, entry.device, entry.number, entry.at, entry.content, copy=True
            )
            stamp = Stamp(producer, offset)
            try:
                await append(copied, stamp=stamp, fence=batch.fence, deadline=deadline)
            except SequenceTooOld:
                if placements != inbox.placements:  # copies of several lanes go to one partition since
                    raise RetryLater("the inbox has other partitions now: the batch is copied again") from None

    await asyncio.gather(*(copy(entries) for entries in lanes.values()))
