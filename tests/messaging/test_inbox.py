"""The inbox when its topic moves: what was stored before is not stored again."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from shardyard.log.memory import MemoryLog
from shardyard.messaging.inbox import Inbox
from shardyard.model import Appended, Fence, Partition, Stamp
from shardyard.runtime.clock import SystemClock
from shardyard.wire.inbox import InboxEntry, decode_entry
from tests.log.samples import move

PARTITIONS = {"inbox": 4, "inbox.2": 6, "inbox.3": 5}


class CountingLog(MemoryLog):
    """Counts the appends to each topic, also those that are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.appends: Counter[str] = Counter()

    async def append(self, partition: Partition, *args: Any, **options: Any) -> Appended:
        self.appends[partition.topic] += 1
        return await super().append(partition, *args, **options)


async def send(inbox: Inbox, number: int, recipient: str = "bob") -> tuple[str, bool]:
    """Ann sends it. Returns the topic that has it, and whether it had it before."""
    entry = InboxEntry(number, "ann", recipient, "phone", number, 1000, "hello")
    stamp, fence = Stamp("3:ann/phone", number), Fence("servers", 1)
    appended = await inbox.append(entry, stamp=stamp, fence=fence, deadline=SystemClock().monotonic() + 30)
    return appended.partition.topic, appended.duplicate


async def moved(log: MemoryLog, topic: str, successor: str) -> None:
    await log.create_topic(successor, PARTITIONS[successor])
    await move(log, topic, successor)


async def numbers(log: MemoryLog, topic: str) -> list[int]:
    batches = [await log.read(partition, 0) for partition in await log.topic(topic)]
    return sorted(decode_entry(record.value).number for batch in batches for record in batch.records())


def test_what_is_sent_again_after_the_inbox_has_moved_is_not_stored_again() -> None:
    async def scenario() -> None:
        log = CountingLog()
        inbox = Inbox(log, SystemClock())
        await inbox.open(PARTITIONS["inbox"])
        assert [await send(inbox, number) for number in (1, 2)] == [("inbox", False)] * 2
        await moved(log, "inbox", "inbox.2")
        assert await send(inbox, 2) == ("inbox", True), "noticed when the append is refused"
        assert await send(inbox, 3) == ("inbox.2", False)
        assert await send(inbox, 1) == ("inbox", True), "a lower number than one that was new"
        await moved(log, "inbox.2", "inbox.3")
        await inbox.refresh()
        again = [await send(inbox, number) for number in (1, 2, 3, 4)]
        assert again == [("inbox", True), ("inbox", True), ("inbox.2", True), ("inbox.3", False)]
        assert [await numbers(log, topic) for topic in PARTITIONS] == [[1, 2], [3], [4]]

    asyncio.run(scenario())


def test_what_is_stored_just_before_the_inbox_moves_is_found_in_the_old_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        log = MemoryLog()
        inbox = Inbox(log, SystemClock())
        await inbox.open(PARTITIONS["inbox"])
        await moved(log, "inbox", "inbox.2")
        await inbox.refresh()
        append = log.append

        async def append_and_move(*args: Any, **options: Any) -> Appended:
            appended = await append(*args, **options)
            await moved(log, "inbox.2", "inbox.3")
            await inbox.refresh()
            return appended

        with monkeypatch.context() as patch:
            patch.setattr(log, "append", append_and_move)
            assert await send(inbox, 1) == ("inbox.2", False)
        assert await send(inbox, 1) == ("inbox.2", True)

    asyncio.run(scenario())


def test_a_predecessor_is_looked_at_only_until_a_client_sends_something_new_to_a_user() -> None:
    async def scenario() -> None:
        log = CountingLog()
        inbox = Inbox(log, SystemClock())
        await inbox.open(PARTITIONS["inbox"])
        await moved(log, "inbox", "inbox.2")
        await inbox.refresh()
        for number in range(1, 10):
            assert await send(inbox, number) == ("inbox.2", False)
        assert log.appends == {"inbox": 1, "inbox.2": 9}
        await send(inbox, 10, "carl")
        assert log.appends["inbox"] == 2
        await log.delete_topic("inbox")
        assert await send(inbox, 11, "dora") == ("inbox.2", False), "before it is known that the topic is gone"
        await inbox.refresh()
        log.appends.clear()
        await send(inbox, 12, "emil")
        assert log.appends == {"inbox.2": 1}

    asyncio.run(scenario())
