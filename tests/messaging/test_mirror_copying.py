"""Copying a batch of entries to their senders' partitions while the inbox changes."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

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


class ChangingLog:
    """A log whose third call with appends is stored without an answer, and whose inbox is expanded after it."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.calls: list[int] = []
        """The number of appends of each."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append_many(self, requests: Sequence[AppendRequest]) -> list[Appended | ShardyardError]:
        self.calls.append(len(requests))
        outcomes = await self._log.append_many(requests)
        if len(self.calls) == 3:
            await self._log.expand_topic(TOPIC, 3)
            return [OutcomeUnknown("the log", "the connection is lost")] * len(outcomes)
        return outcomes


@pytest.mark.parametrize("together", [SEQUENCE_WINDOW // 4, 2 * SEQUENCE_WINDOW])
def test_no_copy_is_lost_when_the_inbox_is_expanded_while_a_batch_is_copied(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "TOGETHER", together)

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
                sending = Sending(
                    cast(Log, changing),
                    inbox,
                    LeasedSnowflakes(node.transactions, node.name, node.clock),
                    RecentlySent(),
                    node.clock,
                    DEFAULT_CONFIG,
                    lambda _: None,
                    lambda _: None,
                )
                async with Reader("copies", [TOPIC], node=node) as reader:
                    batch = await anext(aiter(reader))
                    for _ in range(2):  # it is copied, and again, as after a commit that was lost
                        await mirror._copy(batch, sending, node)
                assert len(changing.calls) > 3
                assert max(changing.calls) == together
                copied = set()
                for partition in await log.topic(TOPIC):
                    stored = (decode_entry(record.value) for record in (await log.read(partition, 0)).records())
                    copied |= {entry.id for entry in stored if entry.copy}
                assert copied == {entry.id for entry in entries}

    asyncio.run(scenario())
