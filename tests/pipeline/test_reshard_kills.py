"""A reshard is killed at each of its steps while producers write, and the next run finishes it."""

import asyncio
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pyspark.sql import SparkSession

from shardyard.log import Sender, open_log
from shardyard.log.sqlite import SqliteLog
from shardyard.model import Moved, Partition, Record, Sealed
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.reshard import reshard as resharding
from shardyard.pipeline.reshard import seal
from shardyard.pipeline.reshard.copying import Copying
from shardyard.pipeline.reshard.direct_rounds import DirectRounds
from shardyard.pipeline.reshard.job import abort
from shardyard.pipeline.reshard.positions import GroupPositions
from shardyard.pipeline.reshard.reshard import Resharded, reshard
from shardyard.pipeline.source.staging import Staging, staging_folder
from shardyard.registry import open_registry
from tests.pipeline.logs import by_key, consume, contents, create, fill, ids, url

pytestmark = pytest.mark.processes

RECORDS = 60
CONSUMED = 20
SEAL_SECONDS = 60.0
"""Of seals that only another run is to end."""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])

Step = tuple[type | Any, str, int, bool]
STEPS: dict[str, Step] = {
    # name: whose function, its name, which of its calls is killed, and whether after it rather than before it
    "records are staged and not listed": (Staging, "start", 1, False),
    "records are listed and none is appended": (Staging, "start", 1, True),
    "some records are appended": (SqliteLog, "append", 1, True),
    "all records are appended": (Staging, "finish", 1, False),
    "the round is finished and not compared": (DirectRounds, "compare", 1, False),
    "the round is compared": (DirectRounds, "compare", 1, True),
    "the topic is about to be sealed": (SqliteLog, "seal_topic", 1, False),
    "the topic is sealed": (SqliteLog, "seal_topic", 1, True),
    "the rest is staged": (Staging, "start", 3, True),
    "the rest is appended": (Staging, "finish", 3, False),
    "the rest is compared": (Copying, "check_complete", 1, True),
    "the positions are transferred": (GroupPositions, "transfer", 1, True),
    "the topic has moved": (SqliteLog, "move_topic", 1, True),
    "the state is about to be removed": (resharding, "remove_job", 1, False),
    "the state is removed": (resharding, "remove_job", 1, True),
}
IN_THE_SEAL = list(STEPS)[7:12]
MOVED = list(STEPS)[12:]


def no_spark() -> SparkSession:
    raise AssertionError("so few records are copied without Spark")


def run(log: str, registry: str) -> Resharded:
    return reshard(no_spark, log, "orders", partitions=5, registry=registry)


def killed_at(function: Callable[..., Any], call: int, after: bool) -> Callable[..., Any]:
    """The function, with the process killed before or after one of its calls."""
    calls = itertools.count(1)

    def kill_if(due: bool) -> None:
        if due:
            os.kill(os.getpid(), signal.SIGKILL)

    if asyncio.iscoroutinefunction(function):

        async def asynchronous(*args: Any, **options: Any) -> Any:
            due = next(calls) == call
            kill_if(due and not after)
            result = await function(*args, **options)
            kill_if(due and after)
            return result

        return asynchronous

    def synchronous(*args: Any, **options: Any) -> Any:
        due = next(calls) == call
        kill_if(due and not after)
        result = function(*args, **options)
        kill_if(due and after)
        return result

    return synchronous


def run_until(step: str, log: str, registry: str, seal_seconds: float) -> None:
    """The work of a process that is killed. Records arrive just before the topic is sealed, so that some are left."""
    catch_up = resharding._Reshard._catch_up

    def catch_up_and_send(work: Any) -> None:
        catch_up(work)
        fill(log, "orders", 30, first=RECORDS)

    where, name, call, after = STEPS[step]
    with (
        patch.object(seal, "SEAL_SECONDS", seal_seconds),
        patch.object(resharding._Reshard, "_catch_up", catch_up_and_send),
        patch.object(where, name, killed_at(getattr(where, name), call, after)),
    ):
        run(log, registry)


@pytest.fixture
def log(tmp_path: Path) -> str:
    log = url(tmp_path)
    create(log, "orders", 3)
    fill(log, "orders", RECORDS)
    return log


@pytest.fixture
def registry(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'registry.db'}"


def kill(step: str, log: str, registry: str, seal_seconds: float = SEAL_SECONDS) -> None:
    process = PROCESSES.Process(target=run_until, args=(step, log, registry, seal_seconds))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


async def send(log: str) -> None:
    async with open_log(log) as opened:
        late = [Record(f"late-{n}", b"key-%d" % n, b"") for n in range(10)]
        await Sender(opened, "orders").send(late)


def check_copy(log: str) -> None:
    """Nothing is lost, nothing is there twice, and the records of each key are in order."""
    after = contents(log, "orders.2")
    assert len(set(ids(after))) == len(ids(after))
    assert set(ids(contents(log, "orders"))) <= set(ids(after))
    for found in by_key(after).values():
        numbers = [int(name.removeprefix("id-")) for name in found if name.startswith("id-")]
        assert numbers == sorted(numbers)
        assert [name for name in found[len(numbers) :] if name.startswith("id-")] == [], "what was sent late is behind"


@pytest.mark.parametrize("step", STEPS)
def test_a_reshard_that_is_killed_at_any_step_is_finished_by_the_next_run(log: str, registry: str, step: str) -> None:
    async def run_again() -> Resharded:
        """While a producer sends, which waits if the topic is sealed."""
        killed_at = time.time()
        async with open_log(log) as opened:
            topic = await opened.topic("orders")
            assert (topic.sealed, topic.successor) == (
                step in [*IN_THE_SEAL, *MOVED],
                "orders.2" if step in MOVED else None,
            )
            sending = asyncio.create_task(send(log))
            started_at = time.time()
            done = await asyncio.to_thread(run, log, registry)
            async with asyncio.timeout(SEAL_SECONDS / 2):  # the next run has ended the seal
                await sending
        if step in IN_THE_SEAL:
            assert done.sealed_seconds >= started_at - killed_at, "the seal of the killed run counts"
        return done

    seen: list[str] = []
    asyncio.run(consume(log, registry, "orders", CONSUMED, seen))
    kill(step, log, registry)
    if step == "the state is removed":
        with pytest.raises(Moved):
            run(log, registry)
        asyncio.run(send(log))
    else:
        assert asyncio.run(run_again()).target == "orders.2"
    check_copy(log)
    expected = set(ids(contents(log, "orders.2")))
    assert len([name for name in expected if name.startswith("late")]) == 10
    asyncio.run(consume(log, registry, "orders", len(expected), seen))
    assert set(seen) == expected, "groups get what they have not processed"
    assert [path for path in staging_folder(log).rglob("*.json") if path.is_file()] == []


def test_producers_continue_when_the_seal_of_a_killed_reshard_ends_by_itself(log: str, registry: str) -> None:
    open_registry(registry).close()
    kill("the topic is sealed", log, registry, seal_seconds=0.5)
    asyncio.run(send(log))
    assert len([name for name in ids(contents(log, "orders")) if name.startswith("late")]) == 10
    done = run(log, registry)
    assert done.sealed_seconds >= 0.5
    check_copy(log)


def test_producers_continue_when_a_reshard_that_was_killed_in_its_seal_is_aborted(log: str, registry: str) -> None:
    open_registry(registry).close()
    kill("the topic is sealed", log, registry)
    with blocking(log) as opened, pytest.raises(Sealed):
        opened.wait(opened.log.append(Partition("orders", 0), [Record("refused", b"key-1", b"")]))
    abort(log, "orders")
    with blocking(log) as opened:
        opened.wait(opened.log.append(Partition("orders", 0), [Record("taken", b"key-1", b"")]))
