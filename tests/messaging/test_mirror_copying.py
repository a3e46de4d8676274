"""Copying a batch of entries to their senders' partitions while the inbox changes."""

import asyncio

from shardyard.groups import Node, Reader
from shardyard.log import open_log
from shardyard.messaging import mirror
from shardyard.messaging.inbox import Inbox
from shardyard.model import Appended, Fence, Record, RetryLater, Stamp
from shardyard.registry import open_registry
from shardyard.wire.inbox import TOPIC, InboxEntry, decode_entry, encode_entry

SENDERS = 400


def test_no_copy_is_lost_when_the_inbox_is_expanded_while_a_batch_is_copied() -> None:
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
                appends = 0

                async def append(entry: InboxEntry, *, stamp: Stamp, fence: Fence, deadline: float) -> Appended:
                    nonlocal appends
                    appends += 1
                    if appends == 20:
                        await log.expand_topic(TOPIC, 3)
                    await asyncio.sleep(0)  # as an engine with a disk
                    return await inbox.append(entry, stamp=stamp, fence=fence, deadline=deadline)

                async with Reader("copies", [TOPIC], node=node) as reader:
                    async for batch in reader:
                        attempts = 0
                        while True:
                            attempts += 1
                            try:
                                await mirror._copy(batch, inbox, append, node)
                            except RetryLater:
                                continue
                            break
                        break
                assert attempts > 1
                copied = set()
                for partition in await log.topic(TOPIC):
                    stored = (decode_entry(record.value) for record in (await log.read(partition, 0)).records())
                    copied |= {entry.id for entry in stored if entry.copy}
                assert copied == {entry.id for entry in entries}

    asyncio.run(scenario())
