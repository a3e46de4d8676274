"""The mirror through the log: a second group re-addresses every entry to its sender, whose other clients get it."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from msgspec import structs

from shardyard.groups import Node, Reader
from shardyard.groups.partition_reader import OwnedBatch
from shardyard.messaging.sending import AGAIN, Addressed, Sending
from shardyard.model import (
    Fenced,
    Malformed,
    RetryLater,
    SequenceTooOld,
    ShardyardError,
    Stamp,
)
from shardyard.runtime.retry import Backoff, retry
from shardyard.wire.inbox import POST_KEY, TOPIC, decode_entry

_log = logging.getLogger(__name__)

GROUP = "messaging.mirror"
TOGETHER = 256
"""Copies that are appended by one call of the log, which is one commit. The messages that users send wait for it, so it
has to be short. Memory needs no limit beyond that of the batch: its copies are about as large as it is."""
LINGER_SECONDS = 0.05
"""After a batch of a partition was copied, for the next one to become larger."""
_BACKOFF = Backoff(first=0.05, longest=2.0)
"""While the registry is out of reach."""
STORE_SECONDS = 60.0
"""How long an append is retried. After that the batch is delivered again."""


async def run_mirror(node: Node, sending: Sending, *, session_timeout: float) -> None:
    """Copy the entries of the partitions that this member of the group owns, until cancelled."""
    reader = Reader(GROUP, [TOPIC], node=node, session_timeout=session_timeout)

    async def work(batch: OwnedBatch) -> None:
        try:
            await _copy(batch, sending, node)
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


async def _copy(batch: OwnedBatch, sending: Sending, node: Node) -> None:
    """Append a copy of each entry to its sender's partition, in the order of the log.

    The stamp of a copy is the entry's own offset, so that a copy that is made again is not stored again. No copy is
    stored before all earlier ones of its batch are. So a copy whose sequence is too old for the log was stored, also if
    users were placed differently then: a later one has reached the same partition. A batch that is copied again after
    users were placed differently may store copies twice; clients know their ids.
    """
    epoch = batch.position(batch.first).epoch
    producer = f"mirror of {batch.partition} {epoch}"
    copies: list[Addressed] = []
    for record, offset in zip(batch.records(), batch.offsets(), strict=True):
        if record.key is not None and record.key.startswith(POST_KEY):
            continue
        try:
            entry = decode_entry(record.value)
        except Malformed:
            continue  # the owner of the partition has counted it
        if not entry.copy and entry.sender != entry.recipient:  # one's own message has reached all of one's clients
            copies.append(Addressed(structs.replace(entry, copy=True), Stamp(producer, offset), batch.fence))
    deadline = node.clock.monotonic() + STORE_SECONDS
    for first in range(0, len(copies), TOGETHER):
        await _append(copies[first : first + TOGETHER], sending, deadline)


async def _append(copies: Sequence[Addressed], sending: Sending, deadline: float) -> None:
    """Append copies by one call of the log. From the first on that has to be tried again, they are appended one after
    the other: those that are stored already are known by their stamps."""
    outcomes = await sending.append_all(copies)
    for outcome in outcomes:
        if isinstance(outcome, ShardyardError) and not isinstance(outcome, (SequenceTooOld, *AGAIN)):
            raise outcome
    again = next((number for number, outcome in enumerate(outcomes) if isinstance(outcome, AGAIN)), len(copies))
    for copy in copies[again:]:
        with contextlib.suppress(SequenceTooOld):
            await sending.append(copy, deadline)
