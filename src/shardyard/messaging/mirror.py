"""The mirror through the log: a second group re-addresses every entry to its sender, whose other clients get it."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from msgspec import structs

from shardyard.groups import Node, Reader
from shardyard.groups.partition_reader import OwnedBatch
from shardyard.messaging.fresh import FreshRecords
from shardyard.messaging.sending import AGAIN, Addressed, Sending
from shardyard.model import Fence, Fenced, Malformed, SequenceTooOld, ShardyardError, Stamp
from shardyard.runtime.retry import Backoff, retry
from shardyard.wire.inbox import POST_KEY, TOPIC, decode_entry

_log = logging.getLogger(__name__)

GROUP = "messaging.mirror"
FEWEST, MOST = 32, 256
"""Copies that are appended by one call of the log, which is one commit. The messages that users send wait for it, so it
has to be short. Memory needs no limit beyond that of the batches: their copies are about as large as they are."""
CALLS = 8
"""Into which the copies are divided that are made together, if there are neither too few nor too many in each."""
LINGER_SECONDS = 0.05
"""How long to wait in all after the calls that copy what has come: meanwhile more comes, and between two calls the
messages that users send are stored."""
_BACKOFF = Backoff(first=0.05, longest=2.0)
"""While the registry is out of reach."""
STORE_SECONDS = 60.0
"""How long an append is retried. After that the batch is delivered again."""


class _MirrorHost:
    """A node whose log has at hand what this server has appended."""

    def __init__(self, node: Node, log: FreshRecords) -> None:
        self._node = node
        self.name = node.name
        self.log = log
        self.coordinator = node.coordinator
        self.clock = node.clock

    @property
    def is_open(self) -> bool:
        return self._node.is_open


async def run_mirror(node: Node, sending: Sending, *, session_timeout: float) -> None:
    """Copy the entries of the partitions that this member of the group owns, until cancelled."""
    reader = Reader(GROUP, [TOPIC], node=_MirrorHost(node, sending.fresh), session_timeout=session_timeout)
    waiting: list[OwnedBatch] = []  # at most one of each partition
    has_come = asyncio.Event()

    async def work() -> None:
        while True:
            await has_come.wait()
            has_come.clear()
            batches = waiting.copy()
            waiting.clear()
            await _copy(batches, sending, node)
            await _commit(batches, reader, node)

    try:
        async with reader, asyncio.TaskGroup() as tasks:
            tasks.create_task(work(), name="copying")
            async for batch in reader:
                waiting.append(batch)
                has_come.set()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _copy(batches: Sequence[OwnedBatch], sending: Sending, node: Node) -> None:
    """Append a copy of each entry to its sender's partition, in the order of the log. What remains of a batch whose
    partition has gone to another member is left to that one.

    The stamp of a copy is the entry's own offset, so that a copy that is made again is not stored again. No copy is
    stored before all earlier ones of its batch are. So a copy whose sequence is too old for the log was stored, also if
    users were placed differently then: a later one has reached the same partition. A batch that is copied again after
    users were placed differently may store copies twice; clients know their ids.
    """
    copies: list[Addressed] = []
    for batch in batches:
        copies += _copies(batch)
        await asyncio.sleep(0)  # messages that users send must not wait until all of them are decoded
    lost: set[Fence] = set()
    size = min(max(len(copies) // CALLS, FEWEST), MOST)
    calls = range(0, max(len(copies), 1), size)
    for first in calls:
        some = [copy for copy in copies[first : first + size] if copy.fence not in lost]
        lost |= await _append(some, sending, node.clock.monotonic() + STORE_SECONDS)
        await node.clock.sleep(LINGER_SECONDS / len(calls))


def _copies(batch: OwnedBatch) -> list[Addressed]:
    epoch = batch.position(batch.first).epoch
    producer = f"mirror of {batch.partition} {epoch}"
    copies = []
    for record, offset in zip(batch.records(), batch.offsets(), strict=True):
        if record.key is not None and record.key.startswith(POST_KEY):
            continue
        try:
            entry = decode_entry(record.value)
        except Malformed:
            continue  # the owner of the partition has counted it
        if not entry.copy and entry.sender != entry.recipient:  # one's own message has reached all of one's clients
            copies.append(Addressed(structs.replace(entry, copy=True), Stamp(producer, offset), batch.fence))
    return copies


async def _append(copies: Sequence[Addressed], sending: Sending, deadline: float) -> set[Fence]:
    """Append copies by one call of the log. From the first on that has to be tried again, they are appended one after
    the other: those that are stored already are known by their stamps. Returns the fences of partitions that have gone
    to other members."""
    outcomes = await sending.append_all(copies) if copies else []
    again = next((number for number, outcome in enumerate(outcomes) if isinstance(outcome, AGAIN)), len(copies))
    lost: set[Fence] = set()
    for number, (copy, outcome) in enumerate(zip(copies, outcomes, strict=True)):
        if copy.fence in lost:
            continue
        try:
            if number >= again:
                await sending.append(copy, deadline)
            elif isinstance(outcome, ShardyardError):
                raise outcome
        except Fenced:
            lost.add(copy.fence)
        except SequenceTooOld:
            pass  # it was stored
    return lost


async def _commit(batches: Sequence[OwnedBatch], reader: Reader, node: Node) -> None:
    """Commit all batches at once; one by one if some of them have just gone to other members."""

    async def commit(*some: OwnedBatch) -> None:
        if positions := {batch.partition: batch.end for batch in some if not batch.lost}:
            await reader.commit(positions)

    try:
        await retry(lambda: commit(*batches), clock=node.clock, backoff=_BACKOFF)
    except Fenced:
        for batch in batches:
            try:
                await retry(partial(commit, batch), clock=node.clock, backoff=_BACKOFF)
            except Fenced:
                _log.debug("%s went to another member of %s", batch.partition, GROUP)
