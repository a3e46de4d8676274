"""Copying a batch of entries to their senders' partitions while the inbox changes."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from msgspec import structs

from shardyard.groups import Node, Reader
from shardyard.log import Log, open_log
from shardyard.log.requests import AppendRequest
from shardyard.messaging import mirror
from shardyard.messaging.config import DEFAULT_CONFIG
from shardyard.messaging.inbox import Inbox
from shardyard.messaging.recent import RecentlySent
from shardyard.messaging.sending import Sending
from shardyard.messaging.snowflakes import LeasedSnowflakes
from shardyard.model import SEQUENCE_WINDOW, Appended, OutcomeUnknown, Record, ShardyardError
from shardyard.registry import open_registry
from shardyard.wire.inbox import TOPIC, InboxEntry, decode_entry, encode_entry

SENDERS = 400


class CountingLog:
    """A log that notes its calls."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.calls: list[int] = []
        """The number of appends of each."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append_many(self, requests: Sequence[AppendRequest]) -> list[Appended | ShardyardError]:
        self.calls.append(len(requests))
        return await self._log.append_many(requests)


class ChangingLog(CountingLog):
    """A log whose third call with appends is stored without an answer, and whose inbox is expanded after it."""

    async def append_many(self, requests: Sequence[AppendRequest]) -> list[Appended | ShardyardError]:
        outcomes = await super().append_many(requests)
        if len(self.calls) == 3:
            await self._log.expand_topic(TOPIC, 3)
            return [OutcomeUnknown("the log", "the connection is lost")] * len(outcomes)
        return outcomes


@pytest.mark.parametrize("together", [SEQUENCE_WINDOW // 4, 2 * SEQUENCE_WINDOW])
def test_no_copy_is_lost_when_the_inbox_is_expanded_while_a_batch_is_copied(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FEWEST", "MOST"):
        monkeypatch.setattr(mirror, name, together)

    async def scenario() -> None:
        with open_registry("memory://") as registry:
            async with open_log("memory://") as log, Node(log, registry) as node:
                inbox = Inbox(log, node.clock)
                await inbox.open(2)
                # Those of one partition first: their offsets are far from those of the other one.
                senders = sorted((f"user {n}" for n in range(SENDERS)), key=inbox.partition_of)
                entries = [InboxEntry(n, sender, "bob", "d", n, 1, "hello") for n, sender in enumerate(senders, 1)]
                records = [Record(str(e.id), b"bob", encode_entry(e), (), 1) for e in entries]
                await log.append(inbox.partition_of("bob"), records)
                changing = ChangingLog(log)
                sending = sending_to(changing, inbox, node)
                async with Reader("copies", [TOPIC], node=node) as reader:
                    batch = await anext(aiter(reader))
                    for _ in range(2):  # it is copied, and again, as after a commit that was lost
                        await mirror._copy([batch], sending, node)
                assert len(changing.calls) > 3
                assert max(changing.calls) == together
                assert set(await copied(log)) == {entry.id for entry in entries}

    asyncio.run(scenario())


def test_the_copies_of_all_partitions_share_calls_and_those_of_one_that_was_lost_are_left_to_its_next_owner() -> None:
    async def scenario() -> None:
        with open_registry("memory://") as registry:
            async with open_log("memory://") as log, Node(log, registry) as node:
                inbox = Inbox(log, node.clock)
                await inbox.open(3)
                entries = [InboxEntry(n, f"user {n}", f"to {n}", "d", n, 1, "hello") for n in range(1, 31)]
                places = {entry.id: inbox.partition_of(entry.recipient) for entry in entries}
                for entry in entries:
                    record = Record(str(entry.id), entry.recipient.encode(), encode_entry(entry), (), 1)
                    await log.append(places[entry.id], [record])
                counting = CountingLog(log)
                async with Reader("copies", [TOPIC], node=node) as reader:
                    arriving = aiter(reader)
                    batches = [await anext(arriving) for _ in range(3)]
                    lost = batches[1]
                    await log.set_fence(structs.replace(lost.fence, epoch=lost.fence.epoch + 1))
                    await mirror._copy(batches, sending_to(counting, inbox, node), node)
                    lost._reader.stop(lost=True)
                    await mirror._commit(batches, reader, node)
                assert counting.calls == [30]
                kept = [entry.id for entry in entries if places[entry.id] != lost.partition]
                assert sorted(await copied(log)) == kept
                with registry.snapshot() as tx:
                    rows = {row.partition: row.committed for row in tx.ownerships("copies")}
                ends = {batch.partition: batch.position(batch.end) for batch in batches}
                assert rows == {**ends, lost.partition: None}

    asyncio.run(scenario())


def sending_to(log: CountingLog, inbox: Inbox, node: Node) -> Sending:
    """What appends the copies."""
    ids = LeasedSnowflakes(node.transactions, node.name, node.clock)
    users, clock = RecentlySent(), node.clock
    return Sending(cast(Log, log), inbox, ids, users, clock, DEFAULT_CONFIG, lambda _: None, lambda _: None)


async def copied(log: Log) -> list[int]:
    """The ids of all copies in the log."""
    stored = [record for partition in await log.topic(TOPIC) for record in (await log.read(partition, 0)).records()]
    return [entry.id for entry in (decode_entry(record.value) for record in stored) if entry.copy]
