"""Announcements are told from other events by their header, and left to the job that stores them."""

import contextlib

import pyarrow as pa
import pytest

from shardyard.fanout.announcements import are_announcements
from shardyard.model import Partition, Record
from shardyard.model.batch import SCHEMA
from shardyard.wire.channels import DELIVERED, EVENTS, FANOUT, ChannelEvent, encode_event
from tests.fanout.flow import flow, inbox_partition, until, user_in
from tests.log.samples import awaited

KIND = SCHEMA.field("headers").type


def test_a_record_with_the_header_is_an_announcement_in_any_slice() -> None:
    rows = [None, [("a", b"1")], [("a", b"1"), (DELIVERED, b"run")], [], [(DELIVERED, b"run")], None]
    headers = pa.array(rows, KIND)
    expected = [False, False, True, False, True, False]
    assert are_announcements(headers).tolist() == expected
    for start in range(len(rows)):
        for end in range(start, len(rows)):
            assert are_announcements(headers[start:end]).tolist() == expected[start:end]
    assert are_announcements(pa.chunked_array([headers[:3], headers[3:]])).tolist() == expected
    assert are_announcements(pa.nulls(3, KIND)).tolist() == [False] * 3


@pytest.mark.parametrize("replicated", [False, True])
@awaited
async def test_announcements_are_not_forwarded(replicated: bool) -> None:
    async with flow("memory") as f:
        await f.join("tea", user_in(0))
        await f.online(user_in(0))
        partition = Partition(EVENTS, inbox_partition("tea", (await f.log.topic(EVENTS)).receiving))
        event = encode_event(ChannelEvent(99, "system", "", 0, 0, "announced"))
        await f.log.append(partition, [Record("a", b"tea", event, ((DELIVERED, b"run"),))])
        async with contextlib.AsyncExitStack() as stack:
            if not replicated:
                await stack.enter_async_context(f.coordinator("c"))
            await stack.enter_async_context(f.worker("w", source=EVENTS if replicated else FANOUT))
            await f.post("tea", 2)

            async def posted() -> bool:
                return len((await f.received())[0].get("tea", [])) >= 2

            await until(posted, "the events after it")
            assert (await f.received())[0]["tea"] == f.posted["tea"]
