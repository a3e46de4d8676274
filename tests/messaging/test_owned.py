"""A partition that a messaging server owns, by itself."""

import asyncio
from types import SimpleNamespace
from unittest import mock

import pytest

from shardyard.groups.protocol import Grant
from shardyard.log import open_log
from shardyard.messaging.config import DEFAULT_CONFIG
from shardyard.messaging.owned import OwnedPartition
from shardyard.model import Partition
from shardyard.runtime.clock import SystemClock
from shardyard.wire.inbox import InboxEntry


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
