"""A partition that a messaging server owns, by itself."""

import asyncio
import random
from types import SimpleNamespace
from unittest import mock

import pytest

from shardyard.groups.protocol import Grant
from shardyard.log import open_log
from shardyard.messaging.config import DEFAULT_CONFIG
from shardyard.messaging.owned import OwnedPartition
from shardyard.model import Partition, Record
from shardyard.runtime.clock import SystemClock
from shardyard.wire.inbox import InboxEntry, encode_entry
from tests.messaging.servers import eventually


@pytest.mark.parametrize("turns", range(6))
def test_reading_ends_when_it_is_cancelled_in_the_moment_in_which_an_append_ends(turns: int) -> None:
    async def scenario() -> None:
        async with open_log("memory://") as log:
            await log.create_topic("inbox", 1)
            grant = Grant(1, None, revoked=False)
            owned = OwnedPartition(Partition("inbox", 0), grant, log, SystemClock(), DEFAULT_CONFIG, lambda: True)
            owned.begin_append()
            reading = asyncio.create_task(owned.run())
            await owned.ready
            for _ in range(3):
                await asyncio.sleep(0)  # it waits for the end of the append now
            owned.end_append("bob", InboxEntry(1, "alice", "bob", "phone", 1, 0, "hello"), None)
            for _ in range(turns):
                await asyncio.sleep(0)
            reading.cancel()
            done, _ = await asyncio.wait([reading], timeout=5)
            reading.cancel()
            await asyncio.wait([reading])
            assert done

    asyncio.run(scenario())


def test_a_copy_reaches_the_only_other_client_after_the_sending_one_has_gone() -> None:
    async def scenario() -> None:
        async with open_log("memory://") as log:
            grant = Grant(1, None, revoked=False)
            owned = OwnedPartition(Partition("inbox", 0), grant, log, SystemClock(), DEFAULT_CONFIG, lambda: True)
            tablet = mock.Mock(user="alice", device="tablet")
            phone = SimpleNamespace(user="alice", device="phone")
            for session in (phone, tablet):
                owned.attach(session)  # type: ignore[arg-type]  # as far as it is used here
            owned.detach(phone)  # type: ignore[arg-type]
            owned.deliver_copy(InboxEntry(1, "alice", "bob", "phone", 1, 0, "hello"))
            assert tablet.deliver.call_count == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_own_appends_and_those_of_others_are_delivered_once_and_in_order(seed: int) -> None:
    choose = random.Random(seed)

    async def scenario() -> None:
        async with open_log("memory://") as log:
            await log.create_topic("inbox", 1)
            partition = Partition("inbox", 0)
            grant = Grant(1, None, revoked=False)
            owned = OwnedPartition(partition, grant, log, SystemClock(), DEFAULT_CONFIG, lambda: True)
            delivered: list[int] = []
            bob = mock.Mock(user="bob", device="phone", deliver=lambda item: delivered.append(item.offset))
            owned.attach(bob)
            reading = asyncio.create_task(owned.run())

            async def append(number: int, *, own: bool) -> None:
                entry = InboxEntry(number, "alice", "bob", "tablet", number, 0, "hello")
                record = Record(str(number), b"bob", encode_entry(entry), (), 1)
                if own:
                    owned.begin_append()
                for _ in range(choose.randrange(3)):
                    await asyncio.sleep(0)
                appended = await log.append(partition, [record])
                for _ in range(choose.randrange(3)):
                    await asyncio.sleep(0)
                if own:
                    owned.end_append("bob", entry, appended.first.offset if choose.random() < 0.9 else None)

            appends = []
            for number in range(1, 301):
                appends.append(asyncio.create_task(append(number, own=choose.random() < 0.7)))
                await asyncio.sleep(choose.choice((0, 0, 0, 0.001, 0.01)))
            await asyncio.gather(*appends)
            await eventually(lambda: len(delivered) >= 300)
            assert delivered == list(range(300))
            assert not reading.done()
            reading.cancel()
            await asyncio.wait([reading])

    asyncio.run(scenario())
