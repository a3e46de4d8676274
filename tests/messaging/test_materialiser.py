"""The member that stores `inbox` in the history: outages, restarts, duplicates and records that are none."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

import pytest

from shardyard.groups import Node, protocol, status
from shardyard.log import Log, open_log
from shardyard.messaging.history import ChatList, History, Page, PlacedEntry, open_history
from shardyard.messaging.history.materialiser import GROUP, Materialiser
from shardyard.model import Damaged, DatabaseUnavailable, Partition, Record, UnknownGroup
from shardyard.registry import Registry, Transaction, open_registry
from shardyard.runtime.metrics import HISTORY_MALFORMED_RECORDS
from shardyard.wire.inbox import TOPIC, InboxEntry, encode_entry
from tests.messaging.history_model import HistoryModel, mark, message

PARTITIONS = 3
TIMEOUT_SECONDS = 60.0
USERS = ["a", "b", "c", "d"]


class ObservedHistory(History):
    """A history whose outages and progress a test controls and sees."""

    def __init__(self, inner: History) -> None:
        self._inner = inner
        self.failure: Exception | None = None
        """What `store` raises."""
        self.attempts = asyncio.Semaphore(0)
        """Released at each call of `store`."""
        self.durable = asyncio.Semaphore(0)
        """Released when a call of `store` has stored its entries."""
        self.hangs = False
        """`store` does not return after that."""
        self.stored: list[PlacedEntry] = []

    async def store(self, entries: Sequence[PlacedEntry]) -> None:
        self.attempts.release()
        if self.failure is not None:
            raise self.failure
        await self._inner.store(entries)
        self.stored += entries
        self.durable.release()
        if self.hangs:
            await asyncio.Event().wait()

    async def page(self, user: str, peer: str, *, before: int | None = None, limit: int = 50) -> Page:
        return await self._inner.page(user, peer, before=before, limit=limit)

    async def chats(self, user: str, *, before: int | None = None, limit: int = 50) -> ChatList:
        return await self._inner.chats(user, before=before, limit=limit)

    async def addressed_to(self, user: str, epoch: int, first: int, end: int, limit: int) -> Sequence[PlacedEntry]:
        return await self._inner.addressed_to(user, epoch, first, end, limit)

    async def sent_by(self, user: str, after: int, limit: int) -> Sequence[PlacedEntry]:
        return await self._inner.sent_by(user, after, limit)


class Environment:
    def __init__(self, log: Log, registry: Registry, node: Node, history: ObservedHistory) -> None:
        self.log, self.registry, self.node, self.history = log, registry, node, history
        self.sent = HistoryModel()

    async def send(self, *entries: InboxEntry) -> None:
        """Append each entry to the partition of the user whom it is addressed to."""
        epoch = (await self.log.topic(TOPIC)).epoch
        for entry in entries:
            partition = partition_of(entry.sender if entry.copy else entry.recipient)
            offset = (await self.log.span(partition)).end
            await self.log.append(partition, [Record(str(entry.id), None, encode_entry(entry))])
            self.sent.store([PlacedEntry(partition, epoch, offset, entry)])

    async def committed(self) -> dict[int, int | None]:
        try:
            return {row.partition.index: row.committed for row in await status(self.log, self.registry, GROUP)}
        except UnknownGroup:
            return {}

    async def until_stored(self) -> None:
        """Wait until everything is committed. It is polled, because no single event signals it."""
        ends = {index: (await self.log.span(Partition(TOPIC, index))).end for index in range(PARTITIONS)}
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while {index: offset or 0 for index, offset in (await self.committed()).items()} != ends:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    @contextlib.asynccontextmanager
    async def materialiser(self, **options: float) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(Materialiser(self.node, self.history, **options).run())  # type: ignore[arg-type]
        try:
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def check(self) -> None:
        """The history is that of everything sent."""
        epoch = (await self.log.topic(TOPIC)).epoch
        for user in USERS:
            assert await self.history.chats(user) == self.sent.chats(user, None, 50)
            assert await self.history.sent_by(user, 0, 1000) == self.sent.sent_by(user, 0, 1000)
            found = await self.history.addressed_to(user, epoch, 0, 10_000, 1000)
            assert found == self.sent.addressed_to(user, epoch, 0, 10_000, 1000)
            for peer in USERS:
                assert await self.history.page(user, peer) == self.sent.page(user, peer, None, 50)


def partition_of(user: str) -> Partition:
    return Partition(TOPIC, USERS.index(user) % PARTITIONS)


def conversation(first: int, count: int) -> list[InboxEntry]:
    """Messages among all users, copies of some, and marks."""
    entries = []
    for id_ in range(first, first + count):
        sender, recipient = USERS[id_ % 4], USERS[id_ // 4 % 4]
        entries.append(
            mark(id_, sender, recipient, "seen", id_ - 5) if id_ % 5 == 0 else message(id_, sender, recipient)
        )
        if id_ % 3 == 0:
            entries.append(message(id_, sender, recipient, copy=True))
    return entries


@contextlib.asynccontextmanager
async def environment() -> AsyncIterator[Environment]:
    with open_registry("memory://") as registry:
        async with open_log("memory://") as log, Node(log, registry) as node, open_history("memory://") as history:
            await log.create_topic(TOPIC, PARTITIONS)
            yield Environment(log, registry, node, ObservedHistory(history))


def test_everything_in_the_inbox_is_stored_at_its_place_and_committed() -> None:
    async def scenario() -> None:
        async with environment() as env, env.materialiser():
            await env.send(*conversation(1, 30))
            await env.until_stored()
            await env.check()
            await env.send(*conversation(31, 10))
            await env.until_stored()
            await env.check()

    asyncio.run(scenario())


def test_a_materialiser_that_is_stopped_in_the_middle_continues_and_duplicates_change_nothing() -> None:
    async def scenario() -> None:
        async with environment() as env:
            entries = conversation(1, 40)
            for first in range(0, len(entries), 8):
                await env.send(*entries[first : first + 8])
                await env.send(*entries[first // 2 : first // 2 + 3])
                env.history.attempts, env.history.durable = asyncio.Semaphore(0), asyncio.Semaphore(0)
                env.history.hangs = first % 3 > 0
                async with env.materialiser():
                    await (env.history.durable if env.history.hangs else env.history.attempts).acquire()
            env.history.hangs = False
            async with env.materialiser():
                await env.until_stored()
            await env.check()
            places = [(each.partition, each.offset) for each in env.history.stored]
            assert len(places) > len({*places})  # some had been stored, and not committed

    asyncio.run(scenario())


def test_nothing_is_committed_before_it_is_durable_and_an_outage_loses_and_skips_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with environment() as env:
            env.history.failure = DatabaseUnavailable("history", "it is down")
            async with env.materialiser():
                await env.send(*conversation(1, 20))
                for _ in range(3 * PARTITIONS + 1):
                    await env.history.attempts.acquire()
                assert not any((await env.committed()).values())
                env.history.failure = None
                await env.until_stored()
            await env.check()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    retried = [record for record in caplog.records if "will be retried" in record.getMessage()]
    assert 1 <= len(retried) <= PARTITIONS


def test_a_partition_that_is_lost_during_an_outage_is_stored_by_its_next_owner() -> None:
    async def scenario() -> None:
        async with environment() as env:
            env.history.failure = DatabaseUnavailable("history", "it is down")
            await env.send(*conversation(1, 20))
            async with env.materialiser(session_timeout=1.0):
                await env.history.attempts.acquire()

                def evict(tx: Transaction) -> None:
                    (member,) = tx.members(GROUP)
                    protocol.evict(tx, protocol.group_row(tx, GROUP), member)

                env.registry.run(evict)
                env.history.failure = None
                await env.until_stored()
            await env.check()

    asyncio.run(scenario())


def test_malformed_records_are_skipped_counted_and_logged_once_for_each_partition(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with environment() as env, env.materialiser():
            counted = HISTORY_MALFORMED_RECORDS.value
            malformed = [
                b"",
                b"\x93\x01",
                encode_entry(mark(1, "a", "b", "seen", 2**63)),
                encode_entry(message(1, "a\0", "b")),
            ]
            for index in range(2):
                await env.log.append(Partition(TOPIC, index), [Record(f"{index}", None, value) for value in malformed])
            await env.send(*conversation(1, 20))
            await env.until_stored()
            await env.check()
            assert HISTORY_MALFORMED_RECORDS.value - counted == 2 * len(malformed)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert sum("is skipped" in record.getMessage() for record in caplog.records) == 2


def test_an_error_that_retrying_does_not_mend_ends_it() -> None:
    async def scenario() -> None:
        async with environment() as env:
            env.history.failure = Damaged("history", "a table is gone")
            await env.send(message(1, "a", "b"))
            with pytest.raises(Damaged, match="a table is gone"):
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await Materialiser(env.node, env.history).run()
            assert not any((await env.committed()).values())

    asyncio.run(scenario())
