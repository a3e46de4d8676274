"""Exactly once when a partition is taken over or an append is repeated, each danger scripted."""

import asyncio
import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from shardyard.fanout.coordinator import Coordinator
from shardyard.fanout.hot_channels import split_targets
from shardyard.fanout.worker import Worker
from shardyard.log import Log
from shardyard.log.requests import AppendRequest
from shardyard.model import Fenced, OutcomeUnknown, Partition, Record
from shardyard.wire.channels import EVENTS, FANOUT, ChannelEvent, decode_event, encode_event
from tests.fanout.flow import CONFIG, Flow, fanout_partition, flow, inbox_partition, kill, until, user_in
from tests.fanout.test_worker import StallingLog, arrived, split_tea
from tests.log.samples import awaited


class ScriptedLog:
    """A log whose appends go another way."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class DelayingLog(ScriptedLog):
    """The first append arrives late, even if its caller is killed meanwhile: it is on its way to a database."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.may_arrive = asyncio.Event()
        self.on_its_way: asyncio.Task[Any] | None = None

    async def append_many(self, requests: Sequence[AppendRequest]) -> Any:
        self.on_its_way = asyncio.create_task(self._append_late(requests))
        return await asyncio.shield(self.on_its_way)

    async def _append_late(self, requests: Sequence[AppendRequest]) -> Any:
        await self.may_arrive.wait()
        return await self._log.append_many(requests)


class OvertakenLog(ScriptedLog):
    """The delayed append of another one arrives just before the first append."""

    def __init__(self, log: Log, delaying: DelayingLog) -> None:
        super().__init__(log)
        self._delaying = delaying
        self.outcomes: list[Any] = []

    async def append_many(self, requests: Sequence[AppendRequest]) -> Any:
        if not self.outcomes and self._delaying.on_its_way is not None:
            self._delaying.may_arrive.set()
            self.outcomes = await self._delaying.on_its_way
        return await self._log.append_many(requests)


class ForgetfulLog(ScriptedLog):
    """The first append is stored, and its caller does not learn that."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.has_forgotten = False

    async def append_many(self, requests: Sequence[AppendRequest]) -> Any:
        outcomes = await self._log.append_many(requests)
        if self.has_forgotten:
            return outcomes
        self.has_forgotten = True
        return [OutcomeUnknown("the log", "the connection is lost")] * len(outcomes)


def member(f: Flow, kind: str, log: ScriptedLog | StallingLog) -> Coordinator | Worker:
    host = copy.copy(f.node)
    host.log = cast(Log, log)
    return Coordinator(host, config=CONFIG) if kind == "coordinator" else Worker(host, config=CONFIG)


def other(f: Flow, kind: str) -> Coordinator | Worker:
    """The one that `kind` works with."""
    return f.worker("w") if kind == "coordinator" else f.coordinator("c")


async def tea_with_members_everywhere(f: Flow) -> None:
    users = [user_in(q) for q in range(4)]
    await f.join("tea", *users)
    await f.online(*users)


@pytest.mark.parametrize("kind", ["coordinator", "worker"])
@awaited
async def test_a_late_append_of_the_last_owner_is_refused_once_its_successor_has_looked(kind: str) -> None:
    async with flow("memory") as f, other(f, kind):
        await tea_with_members_everywhere(f)
        delaying = DelayingLog(f.log)
        last = member(f, kind, delaying)
        await last.__aenter__()
        await f.post("tea", 3)
        await until(lambda: delaying.on_its_way is not None, "its append is on its way")
        await kill(last)
        overtaken = OvertakenLog(f.log, delaying)
        async with member(f, kind, overtaken):
            await arrived(f, "tea", [0, 1, 2, 3])
        assert [type(outcome) for outcome in overtaken.outcomes] == [Fenced] * len(overtaken.outcomes) != []


@pytest.mark.parametrize("kind", ["coordinator", "worker"])
@awaited
async def test_an_append_that_was_stored_without_an_answer_is_repeated_and_stored_once(kind: str) -> None:
    async with flow("memory") as f, other(f, kind):
        await tea_with_members_everywhere(f)
        forgetful = ForgetfulLog(f.log)
        async with member(f, kind, forgetful) as forwarding:
            await f.post("tea", 3)
            await until(lambda: bool(forwarding.done), "it knows that all is stored")
        assert forgetful.has_forgotten
        assert await events_in(f, fanout_partition("tea")) == f.posted["tea"]
        await arrived(f, "tea", [0, 1, 2, 3])


@awaited
async def test_what_was_split_is_completed_as_it_was_begun_and_what_follows_is_placed_as_the_channel_is_now() -> None:
    """The last coordinator was killed while it split events over four partitions. The channel is not hot any more."""
    async with flow("memory") as f:
        await tea_with_members_everywhere(f)
        await f.node.transactions.run(partial(split_tea, ways=4))
        stalling = StallingLog(f.log, 2, is_made=True)
        last = member(f, "coordinator", stalling)
        await last.__aenter__()
        await f.post("tea", 3)
        await until(stalling.stalled.is_set, "two of the four partitions have them")
        await kill(last)
        await f.node.transactions.run(partial(split_tea, ways=None))
        await f.post("tea", 3)
        async with f.coordinator("c"), f.worker("w"):
            await arrived(f, "tea", [0, 1, 2, 3])
        own = fanout_partition("tea")
        before, after = f.posted["tea"][:3], f.posted["tea"][3:]
        wanted = {p: before + (after if p == own else []) for p in split_targets(own, 4)}
        assert {p: await events_in(f, p) for p in wanted} == wanted
        assert Counter([len(await events_in(f, p)) for p in range(256)]) == {0: 252, 3: 3, 6: 1}


@awaited
async def test_events_with_timestamps_in_the_future_are_forwarded_once() -> None:
    """What the last owner has forwarded of them is found, although it was appended long before these times."""
    config = replace(CONFIG, clock_skew_seconds=0.0)
    async with flow("memory") as f:
        value = encode_event(ChannelEvent(1, "sender", "", 0, 0, "from the future"))
        events = Partition(EVENTS, inbox_partition("tea"))
        await f.log.append(events, [Record("event", b"tea", value, timestamp=2**52)])
        last = f.coordinator("c1", config)
        last._commits.note = lambda *_: None  # type: ignore[method-assign]  # it is killed before it commits
        await last.__aenter__()
        await until(lambda: bool(last.done), "it is forwarded")
        await kill(last)
        async with f.coordinator("c2", config) as next_:
            await until(lambda: bool(next_.done), "the next owner has done its part")
        assert await events_in(f, fanout_partition("tea")) == [1]


async def events_in(f: Flow, index: int) -> list[int]:
    batch = await f.log.read(Partition(FANOUT, index), 0)
    return [decode_event(record.value).id for record in batch.records()]
