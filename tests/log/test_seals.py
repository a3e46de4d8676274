"""Seals: who holds one, how long it lasts, and that a topic is moved only by a holder that never lost it."""

import asyncio
import functools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardyard.log import Log, Sender
from shardyard.log.memory import MemoryLog
from shardyard.log.port import SEAL_SECONDS
from shardyard.log.postgresql import PostgresqlLog
from shardyard.log.sqlite import SqliteLog
from shardyard.model import Moved, Sealed, SealLost
from shardyard.runtime.clock import ManualClock
from tests.log import worker
from tests.log.samples import HOLDER, T0, TIMEOUT_SECONDS, awaited, contents, records
from tests.log.sparse import SparseLog
from tests.log.test_sqlite import Worker
from tests.sqlite_files import with_log

OTHER = "another holder"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite", "sparse", pytest.param("postgresql", marks=pytest.mark.server)])
def log(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Log:
    if request.param == "postgresql":
        return PostgresqlLog(request.getfixturevalue("postgresql_log_url"), maintain_every=None, clock=clock)
    if request.param == "sqlite":
        return SqliteLog(with_log(tmp_path), durability="process", maintain_every=None, clock=clock)
    return (SparseLog if request.param == "sparse" else MemoryLog)(clock=clock)


@awaited
async def test_a_seal_ends_by_itself_when_it_is_not_renewed(log: Log, clock: ManualClock) -> None:
    await log.create_topic("t", 1)
    sealed = await log.seal_topic("t", HOLDER)
    await clock.advance(SEAL_SECONDS - 0.01)
    assert (await log.topic("t")).sealed
    with pytest.raises(Sealed):
        await log.append(T0, records(0))
    with pytest.raises(Sealed):
        await log.expand_topic("t", 2)
    await clock.advance(0.01)
    after = await log.topic("t")
    assert (after.sealed, after.generation) == (False, sealed.generation)
    assert [topic.sealed for topic in await log.topics()] == [False]
    await log.append(T0, records(0), generation=after.generation)
    assert (await log.expand_topic("t", 2)).partitions == 2
    again = await log.seal_topic("t", HOLDER)
    assert again.sealed
    assert again.generation > sealed.generation


@awaited
async def test_a_holder_renews_its_seal_for_as_long_as_it_likes(log: Log, clock: ManualClock) -> None:
    await log.create_topic("t", 1)
    await log.create_topic("u", 1)
    sealed = await log.seal_topic("t", HOLDER, seconds=2)
    for _ in range(20):
        await clock.advance(1.9)
        assert await log.seal_topic("t", HOLDER, seconds=2) == sealed
        with pytest.raises(Sealed):
            await log.append(T0, records(0))
    assert (await log.seal_topic("t", HOLDER, seconds=0.5)) == sealed, "also to a shorter time"
    await clock.advance(0.5)
    await log.append(T0, records(0))


@awaited
async def test_while_one_holder_has_a_topic_sealed_no_other_seals_unseals_or_moves_it(
    log: Log, clock: ManualClock
) -> None:
    await log.create_topic("t", 1)
    await log.create_topic("u", 1)
    sealed = await log.seal_topic("t", HOLDER)
    with pytest.raises(Sealed):
        await log.seal_topic("t", OTHER)
    assert await log.unseal_topic("t", OTHER) == sealed
    with pytest.raises(SealLost) as refused:
        await log.move_topic("t", "u", holder=OTHER, generation=sealed.generation)
    assert (refused.value.topic, refused.value.holder) == ("t", OTHER)
    assert await log.topic("t") == sealed
    await clock.advance(SEAL_SECONDS)
    taken = await log.seal_topic("t", OTHER)
    assert taken.generation > sealed.generation
    with pytest.raises(Sealed):
        await log.seal_topic("t", HOLDER)
    with pytest.raises(SealLost):
        await log.move_topic("t", "u", holder=HOLDER, generation=taken.generation)
    moved = await log.move_topic("t", "u", holder=OTHER, generation=taken.generation)
    await clock.advance(100 * SEAL_SECONDS)
    assert await log.topic("t") == moved, "for good"
    with pytest.raises(Moved):
        await log.append(T0, records(0))


@awaited
async def test_a_topic_that_is_not_sealed_is_not_moved(log: Log) -> None:
    topic = await log.create_topic("t", 1)
    await log.create_topic("u", 1)
    with pytest.raises(SealLost, match="seal it again, copy what is new, then move it"):
        await log.move_topic("t", "u", holder=HOLDER, generation=topic.generation)
    sealed = await log.seal_topic("t", HOLDER)
    await log.unseal_topic("t", HOLDER)
    with pytest.raises(SealLost):
        await log.move_topic("t", "u", holder=HOLDER, generation=sealed.generation)
    assert (await log.topic("t")).successor is None


@pytest.mark.parametrize("sealed_again", [False, True])
@awaited
async def test_a_stalled_holder_whose_seal_has_ended_cannot_move_the_topic(
    log: Log, clock: ManualClock, sealed_again: bool
) -> None:
    await log.create_topic("t", 1)
    await log.create_topic("u", 1)
    first = await log.seal_topic("t", HOLDER)
    move = functools.partial(log.move_topic, "t", "u", holder=HOLDER, generation=first.generation)
    await clock.advance(SEAL_SECONDS)
    await log.append(T0, records(0))
    if sealed_again:
        await log.seal_topic("t", HOLDER)
    with pytest.raises(SealLost):
        await move()
    assert (await log.topic("t")).successor is None
    assert await contents(log, T0) == records(0)


@awaited
async def test_a_clock_that_is_set_back_ends_a_seal_rather_than_prolong_it(log: Log, clock: ManualClock) -> None:
    await log.create_topic("t", 1)
    await log.seal_topic("t", HOLDER)
    clock.jump(-3600)
    assert not (await log.topic("t")).sealed
    await log.append(T0, records(0))


@awaited
async def test_a_seal_that_has_ended_is_not_in_force_again_when_the_clock_is_set_back(
    log: Log, clock: ManualClock
) -> None:
    await log.create_topic("t", 1)
    await log.create_topic("u", 1)
    sealed = await log.seal_topic("t", HOLDER)
    clock.jump(SEAL_SECONDS)
    await log.append(T0, records(0))
    clock.jump(-SEAL_SECONDS / 2)
    assert not (await log.topic("t")).sealed
    with pytest.raises(SealLost):
        await log.move_topic("t", "u", holder=HOLDER, generation=sealed.generation)
    await log.append(T0, records(1))


@awaited
async def test_a_sender_waits_until_a_seal_has_ended(log: Log, clock: ManualClock) -> None:
    await log.create_topic("t", 1)
    sender = Sender(log, "t", clock=clock)
    await sender.send(records(0))
    await log.seal_topic("t", HOLDER)
    sending = asyncio.ensure_future(sender.send(records(1)))
    while not sending.done():
        await log.span(T0)  # gives other threads time
        await asyncio.sleep(0)  # and other tasks
        await clock.advance(0.1)
    (appended,) = await sending
    assert not appended.duplicate
    assert await contents(log, T0) == records(0, 1)


@contextmanager
def holding(folder: Path, seconds: int) -> Iterator[Worker]:
    """Another process that seals the topic, and renews the seal until it is killed."""
    command = [sys.executable, worker.__file__, "hold", str(folder), str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            holder = Worker(process)
            assert holder.read() == "ready"
            yield holder
        finally:
            process.kill()


@pytest.mark.processes
@awaited
async def test_a_topic_whose_holder_is_killed_takes_records_again_within_the_lease(tmp_path: Path) -> None:
    seconds = 3
    async with SqliteLog(tmp_path / "log", durability="process", maintain_every=None) as log:
        await log.create_topic("t", 1)
        await log.create_topic("u", 1)
        with holding(tmp_path / "log", seconds) as holder:
            holder.go()
            generations = [holder.read() for _ in range(12)]  # ten per lease, so for longer than it lasts unrenewed
            assert set(generations) == {(await log.topic("t")).generation}
            with pytest.raises(Sealed):
                await log.append(T0, records(0))
            holder.process.kill()
            holder.process.wait()
            loop = asyncio.get_running_loop()
            killed = loop.time()
            await Sender(log, "t", timeout=TIMEOUT_SECONDS).send(records(0))
            assert loop.time() - killed < seconds + 1
            with pytest.raises(SealLost):
                await log.move_topic("t", "u", holder="worker", generation=generations[0])
