"""The consumer: in parallel and in order, what it commits, failures, leaving, and brokers that are gone."""

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest

from shardyard.client import BlockingConsumer, Consumer, Message, handling
from shardyard.client.handling import Caller, Handling, Slots
from shardyard.groups import OwnedBatch
from shardyard.model import InvalidCall, InvalidValue, Partition, Record, UnknownTopic
from shardyard.runtime.clock import ManualClock
from tests.client.test_producer import dead_address
from tests.queues.engines import BROKERS
from tests.queues.setup import TIMEOUT_SECONDS, Cluster, Handled, run, running

RECORDS = "/v1/topics/orders/records"


@pytest.mark.parametrize("engine", BROKERS)
def test_records_are_handled_in_parallel_and_those_of_a_key_one_after_the_other(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        spans: defaultdict[bytes, list[tuple[int, float, float]]] = defaultdict(list)
        at_once = most = 0

        async def handle(message: Message) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            began = time.monotonic()
            await asyncio.sleep(0.02)
            spans[message.key or b""].append((int(message.value), began, time.monotonic()))
            at_once -= 1

        records = [{"value": f"{i}", "key": f"k{i % 8}"} for i in range(80)]
        await cluster.do("POST", RECORDS, {"records": records})
        async with running(cluster.consumer("m1"), handle):
            await cluster.until_done()
        assert most > 4
        assert sum(map(len, spans.values())) == 80
        for handled in spans.values():
            assert [number for number, _, _ in handled] == sorted(number for number, _, _ in handled)
            assert all(end <= start for (_, _, end), (_, start, _) in itertools.pairwise(handled))

    run(scenario, tmp_path, engine=engine)


def test_only_the_done_prefix_of_a_batch_is_committed_and_the_rest_is_redelivered() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.publish(*[f"{i}" for i in range(10)])
        done: list[str] = []

        async def handle(message: Message) -> None:
            if message.value == b"4":
                await asyncio.Event().wait()
            done.append(message.value.decode())

        first = cluster.consumer("m1", session_timeout=1.0)
        async with first:
            work = asyncio.create_task(first.run(handle))
            await cluster.until(lambda: len(done) == 9)
            work.cancel()  # what is done is committed when it is stopped
            await asyncio.gather(work, return_exceptions=True)
            assert (await cluster.rows())[0]["committed"] == 4
        handled = Handled()
        async with handled.at_work(cluster.consumer("m2")):
            await cluster.until_done()
        assert sorted(handled.values) == [f"{i}" for i in range(4, 10)]

    run(scenario)


def test_what_is_done_is_committed_when_the_block_ends_during_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.do("POST", RECORDS, {"records": [{"value": value, "key": "k"} for value in "ab"]})
        begun: list[bytes] = []

        async def handle(message: Message) -> None:
            begun.append(message.value)
            if message.value == b"b":
                await asyncio.Event().wait()

        async with cluster.consumer("m1") as consumer:
            coordinator = consumer._host.coordinator
            commit, committing = coordinator.commit, asyncio.Event()

            async def slow_commit(*arguments: Any) -> None:
                committing.set()
                await asyncio.sleep(0.05)
                await commit(*arguments)

            monkeypatch.setattr(coordinator, "commit", slow_commit)
            work = asyncio.create_task(consumer.run(handle))
            await cluster.until(lambda: begun == [b"a", b"b"])
            work.cancel()
            await committing.wait()
        assert (await cluster.rows())[0]["committed"] == 1

    run(scenario)


def test_a_part_of_a_batch_is_committed_while_the_rest_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handling, "COMMIT_SECONDS", 0.0)

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.publish(*[f"{i}" for i in range(20)])
        in_flight, go_on = asyncio.Event(), asyncio.Event()

        async def handle(message: Message) -> None:
            if message.value == b"15":
                in_flight.set()
                await go_on.wait()

        async def committed() -> int:
            return (await cluster.rows())[0]["committed"] or 0

        async with running(cluster.consumer("m1"), handle, concurrency=1):
            await in_flight.wait()
            await cluster.until(committed)
            assert 0 < await committed() <= 15
            go_on.set()
            await cluster.until_done()
            assert await committed() == 20

    run(scenario)


class Mute(Exception):
    """Says nothing of itself."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_a_failing_record_does_not_hold_up_others_whatever_its_handler_raises() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(backoff=[])
        handled: list[str] = []

        async def handle(message: Message) -> None:
            text = message.value.decode()
            if text == "cancel":
                raise asyncio.CancelledError
            if text == "time":
                raise TimeoutError("of its own")
            if text == "stop":
                raise StopIteration
            if text == "bad":
                raise ValueError("ä" * 5000)
            if text == "surrogate":
                raise ValueError("file \udcff")
            if text == "mute":
                raise Mute
            if text == "endless":
                raise ValueError("x" * 40_000_000)
            handled.append(text)

        values = ["a", "cancel", "b", "time", "stop", "bad", "surrogate", "mute", "endless", "c"]
        await cluster.publish(*values)
        async with running(cluster.consumer("m1"), handle):
            await cluster.until_done()
            letters = await cluster.get("/v1/groups/billing/dead", topic="orders")
            reasons = {letter["record"]["value"]: letter["reason"] for letter in letters}
            assert sorted(handled) == ["a", "b", "c"]
            assert reasons["cancel"] == "the handler was cancelled"
            assert reasons["time"] == "TimeoutError: of its own"
            assert "StopIteration" in reasons["stop"]
            assert reasons["bad"].startswith("ValueError: ää")
            assert reasons["surrogate"] == "ValueError: file ?"
            assert reasons["mute"] == "Mute, whose message can't be shown"
            assert reasons["endless"] == ("ValueError: " + "x" * 1000)[:1000]
            assert len(reasons) == 7

    run(scenario)


def test_a_plain_handler_runs_in_as_many_threads_as_the_concurrency_of_the_group() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(concurrency=12, backoff=[])
        together = threading.Barrier(12)
        threads: set[str] = set()

        def handle(message: Message) -> None:
            threads.add(threading.current_thread().name)
            if message.value == b"stop":
                next(iter(()))
            together.wait(10)

        await cluster.publish(*["x"] * 12, "stop")
        async with running(cluster.consumer("m1"), handle):
            await cluster.until_done()
            (letter,) = await cluster.get("/v1/groups/billing/dead", topic="orders")
            assert letter["reason"] == "RuntimeError: the handler raised StopIteration"
        assert len(threads) >= 12
        assert not together.broken
        assert threading.current_thread().name not in threads

    run(scenario)


HANGING = """
import asyncio, sys, threading
from shardyard.client import Consumer

async def main():
    loop, hangs = asyncio.get_running_loop(), asyncio.Event()

    def handle(message):
        loop.call_soon_threadsafe(hangs.set)
        threading.Event().wait()

    async with Consumer(sys.argv[1], "billing", ["orders"]) as consumer:
        work = asyncio.create_task(consumer.run(handle))
        await hangs.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    print("left", flush=True)

asyncio.run(main())
"""


@pytest.mark.processes
def test_a_process_ends_although_a_plain_handler_hangs() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.publish("a")
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HANGING, cluster.urls[0], stdout=asyncio.subprocess.PIPE
        )
        try:
            assert program.stdout is not None
            assert await program.stdout.readline() == b"left\n"
            async with asyncio.timeout(60):
                assert await program.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            await program.wait()

    run(scenario)


def test_the_thread_of_a_handler_that_timed_out_is_reused_when_it_ends() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(concurrency=1, backoff=[], handler_seconds=0.2)
        go_on, ended = threading.Event(), threading.Event()
        threads: list[str] = []

        def handle(message: Message) -> None:
            threads.append(threading.current_thread().name)
            if message.value == b"slow":
                go_on.wait(10)
                ended.set()

        await cluster.publish("slow", "a")
        async with running(cluster.consumer("m1"), handle):
            await cluster.until_done()
            (letter,) = await cluster.get("/v1/groups/billing/dead", topic="orders")
            assert letter["reason"] == "not done after 0.2 s"
            slow, other = threads
            assert slow != other
            go_on.set()
            assert await asyncio.to_thread(ended.wait, 10)  # the thread that ended last is the first to be reused
            while slow not in threads[2:]:
                await cluster.publish("b", "c")
                await cluster.until_done()
            assert set(threads) == {slow, other}

    run(scenario)


def test_a_handler_can_be_any_callable() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        seen: list[str] = []

        class Handler:
            async def __call__(self, message: Message) -> None:
                await asyncio.sleep(0)
                seen.append(message.value.decode())

        await cluster.publish("a")
        async with running(cluster.consumer("m1"), Handler()):
            await cluster.until_done()
            assert seen == ["a"]

    run(scenario)


def test_whole_batches_can_be_iterated_and_committed_by_the_caller() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.publish("a", "b", "c")
        async with cluster.consumer("m1", max_records=2) as consumer:
            async for batch in consumer:
                assert [r.value for r in batch.records()] == [b"a", b"b"]
                await batch.commit()
                break
            assert (await cluster.rows())[0]["committed"] == 2
            async for batch in consumer:
                assert [r.value for r in batch.records()] == [b"c"]
                added = await batch.append(Partition("orders", 0), [Record.new(b"d")])
                assert added.first.offset == 3
                break

    run(scenario)


def test_a_consumer_that_leaves_releases_its_partitions_at_once() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4)
        async with cluster.consumer("m1", session_timeout=60.0):
            async with cluster.consumer("m2", session_timeout=60.0):
                await cluster.until_shared(2, 2)
            began = time.monotonic()
            await cluster.until_shared(4)
            assert time.monotonic() - began < 5
        assert (await cluster.get("/v1/groups/billing"))["members"] == []

    run(scenario)


def test_latest_starts_with_records_published_after_the_join() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.publish("before")
        handled = Handled()
        async with handled.at_work(cluster.consumer("m1", start="latest")):
            await cluster.until_done()
            assert handled.values == []
            await cluster.publish("after")
            await cluster.until(lambda: handled.values)
            assert handled.values == ["after"]

    run(scenario)


@pytest.mark.parametrize("engine", BROKERS)
def test_consumers_fail_over_to_another_broker_when_theirs_stops(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4)
        handled = Handled()
        urls = [dead_address(), *cluster.urls]
        sent = [f"{i}" for i in range(100)]
        async with contextlib.AsyncExitStack() as stack:
            for name in ("m1", "m2", "m3"):
                consumer = Consumer(urls, "billing", ["orders"], name=name, session_timeout=5.0)
                await stack.enter_async_context(handled.at_work(consumer))
            producer = await stack.enter_async_context(cluster.producer())
            await asyncio.gather(*(producer.send("orders", value) for value in sent[:50]))
            await cluster.until(lambda: len(set(handled.values)) == 50)
            cluster.stop(0)
            await asyncio.gather(*(producer.send("orders", value) for value in sent[50:]))
            await cluster.until(lambda: set(handled.values) == set(sent))
        stored = [r.value.decode() for partition in await cluster.records() for r in partition]
        assert sorted(stored) == sorted(sent), "none lost, none twice"

    run(scenario, tmp_path, engine=engine, brokers=2)


def test_invalid_arguments_are_refused_before_anything_starts() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        for options, error in (
            ({"group": "b/d"}, InvalidCall),
            ({"group": "b?d"}, InvalidValue),
            ({"name": "a/b"}, InvalidValue),
        ):
            with pytest.raises(error):
                async with cluster.consumer(**options):
                    pass
        with pytest.raises(UnknownTopic):
            async with Consumer(cluster.urls, "billing", ["no?pe"]):
                pass
        with pytest.raises(InvalidValue):
            Consumer("nonsense", "billing", ["orders"])
        with pytest.raises(InvalidValue):
            cluster.consumer(session_timeout=0.1)

    run(scenario)


def test_a_blocking_consumer_iterates_and_runs() -> None:
    def program(url: str, seen: list[str]) -> None:
        with BlockingConsumer(url, "billing", ["orders"], session_timeout=2.0) as consumer:
            for batch in consumer:
                seen += [record.value.decode() for record in batch.records()]
                batch.commit()
                if len(seen) >= 3:
                    break

    def running_program(url: str, seen: list[str]) -> None:
        def handle(message: Message) -> None:
            seen.append(message.value.decode())
            if message.value == b"last":
                raise SystemError("bad luck")

        with (
            BlockingConsumer(url, "billing", ["orders"], session_timeout=2.0) as consumer,
            contextlib.suppress(TimeoutError),
        ):
            consumer._loop.run(asyncio.wait_for(consumer._consumer.run(handle), 1.5))

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(backoff=[])
        await cluster.publish("a", "b", "c")
        seen: list[str] = []
        await asyncio.to_thread(program, cluster.urls[0], seen)
        assert seen == ["a", "b", "c"]
        assert (await cluster.rows())[0]["lag"] == 0
        await cluster.publish("d", "last")
        await asyncio.to_thread(running_program, cluster.urls[0], seen)
        assert sorted(seen[3:]) == ["d", "last"]
        (letter,) = await cluster.get("/v1/groups/billing/dead", topic="orders")
        assert letter["reason"] == "SystemError: bad luck"

    run(scenario)
    with pytest.raises(InvalidValue):
        BlockingConsumer("nonsense", "billing", ["orders"]).__enter__()


BLOCKING = """
import sys
from shardyard.client import BlockingConsumer

with BlockingConsumer(sys.argv[1], "billing", ["orders"]) as consumer:
    consumer.run(lambda message: print(message.value.decode(), flush=True))
    print("over", flush=True)
"""


@pytest.mark.processes
def test_an_interrupted_blocking_consumer_commits_and_leaves() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.do("POST", RECORDS, {"records": [{"value": value, "key": "k"} for value in "ab"]})
        pipe = asyncio.subprocess.PIPE
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BLOCKING, cluster.urls[0], stdout=pipe, stderr=pipe
        )
        try:
            assert program.stdout is not None
            assert await program.stdout.readline() == b"a\n"
            assert await program.stdout.readline() == b"b\n"  # the first one is done by now
            program.send_signal(signal.SIGINT)
            async with asyncio.timeout(60):
                assert await program.communicate() == (b"over\n", b"")
            assert program.returncode == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            await program.wait()
        assert (await cluster.rows())[0]["committed"] in (1, 2)
        assert (await cluster.get("/v1/groups/billing"))["members"] == []

    run(scenario)


def test_a_consumer_that_cannot_leave_warns_when_its_partitions_get_other_owners(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.client.remote.LEAVE_SECONDS", 0.1)

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with cluster.consumer("m1", session_timeout=3.0, retry_seconds=0.2):
            cluster.stop(0)
            await cluster.until(lambda: not _listens(cluster.urls[0]))

    run(scenario)
    said = (
        "member m1 could not leave group billing, because no broker could be reached: "
        "its partitions get other owners when its session expires in 3 s"
    )
    assert said in [record.getMessage() for record in caplog.records]


def _listens(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
        return True
    return False


def test_slots_keep_their_limit_when_waits_are_cancelled_and_the_limit_changes() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        inside: list[Any] = []

        async def take(name: str, leave: asyncio.Event) -> None:
            async with slots:
                inside.append(name)
                await leave.wait()
            inside.remove(name)

        async def until_inside(*names: str) -> None:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while inside != list(names):  # noqa: ASYNC110 checked in every iteration of the loop
                    await asyncio.sleep(0)

        events = {name: asyncio.Event() for name in "abcd"}
        tasks = {name: asyncio.create_task(take(name, event)) for name, event in events.items()}
        await asyncio.sleep(0)
        assert inside == ["a"]
        tasks["b"].cancel()
        events["a"].set()
        await asyncio.wait({tasks["a"], tasks["b"]})
        await until_inside("c")
        slots.set(2)
        await until_inside("c", "d")
        for event in events.values():
            event.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert inside == []

    asyncio.run(scenario())


def test_a_message_knows_where_it_was_published_also_on_a_retry() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(backoff=[0.1])
        heard: list[tuple[str, int]] = []

        async def handle(message: Message) -> None:
            heard.append((message.origin, message.attempt))
            raise ValueError("no")

        await cluster.publish("a", "b")
        async with running(cluster.consumer("m1"), handle):
            await cluster.until(lambda: len(heard) == 4)
        assert sorted(heard) == [("orders/0/0", 1), ("orders/0/0", 2), ("orders/0/1", 1), ("orders/0/1", 2)]

    run(scenario)


class _Batch:
    """A batch of five records that notes its commits."""

    partition, epoch, end, lost = Partition("orders", 0), 1, 15, False

    def __init__(self) -> None:
        self.commits: list[int | None] = []
        self.finished = asyncio.Event()

    def __len__(self) -> int:
        return 5

    def offsets(self) -> list[int]:
        return [10, 11, 12, 13, 14]

    def records(self) -> list[Record]:
        return [Record(f"{i}", b"key", b"x") for i in range(5)]

    async def commit(self, upto: int | None = None) -> None:
        self.commits.append(upto)
        if upto == self.end:
            self.finished.set()


def test_a_batch_is_committed_to_its_end_once_since_the_next_one_may_be_committed_by_then() -> None:
    async def fail(failures: Any) -> None:
        assert failures == []

    async def scenario() -> None:
        clock, batch = ManualClock(), _Batch()

        async def handle(_: Message) -> None:
            await clock.advance(1.0)  # so that each record is followed by a commit

        handling = Handling(cast(OwnedBatch, batch), fail, clock)
        await handling.run(Caller(handle, lambda: None, lambda: 1, clock), Slots(1))
        assert batch.commits == [11, 12, 13, 14, 15]

    asyncio.run(scenario())
