"""Consumers that are stopped from outside or from inside: by a signal, or by `sys.exit` in a handler."""

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.client import BlockingConsumer, BlockingProducer, Consumer, Message
from shardyard.client import consumer as consumer_module
from shardyard.client.failures import HandlerExit
from shardyard.client.handling import Slots
from shardyard.client.signals import sigterm_as_interrupt
from shardyard.model import InvalidCall
from shardyard.runtime.loop_thread import LoopThread
from tests.client.test_producer import dead_address
from tests.queues.setup import Cluster, run

RECORDS = "/v1/topics/orders/records"

BLOCKING = """
import sys
from shardyard.client import BlockingConsumer

with BlockingConsumer(sys.argv[1], "billing", ["orders"]) as consumer:
    consumer.run(lambda message: print(message.value.decode(), flush=True))
print("over", flush=True)
"""
ASYNC = """
import asyncio, sys
from shardyard.client import Consumer

async def handle(message):
    print(message.value.decode(), flush=True)

async def main():
    async with Consumer(sys.argv[1], "billing", ["orders"]) as consumer:
        await consumer.run(handle, stop_on_signals=True)
    print("over", flush=True)

asyncio.run(main())
"""
SLOW_BLOCKING = BLOCKING.replace(
    "lambda message: print(message.value.decode(), flush=True)",
    "lambda message: print(message.value.decode(), flush=True) or print('done', sys.stdin.readline())",
)
SLOW_ASYNC = ASYNC.replace(
    "    print(message.value.decode(), flush=True)\n",
    "    print(message.value.decode(), flush=True)\n    print('done', await asyncio.to_thread(sys.stdin.readline))\n",
)
EXIT_IN_THREAD = """
import sys
from shardyard.client import BlockingConsumer

def handle(message):
    if message.value == b"b":
        sys.exit(3)

with BlockingConsumer(sys.argv[1], "billing", ["orders"]) as consumer:
    consumer.run(handle)
"""
EXIT_IN_COROUTINE = """
import asyncio, sys
from shardyard.client import Consumer

async def handle(message):
    if message.value == b"b":
        sys.exit(3)

async def main():
    async with Consumer(sys.argv[1], "billing", ["orders"]) as consumer:
        await consumer.run(handle)

asyncio.run(main())
"""
OPENING = """
import logging, sys
from shardyard.client import BlockingConsumer

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
with BlockingConsumer(sys.argv[1], "billing", ["orders"], name="m1"):
    print("open")
"""
LATE_EXIT_IN_THREAD = EXIT_IN_THREAD.replace("sys.exit(3)", "print('b', flush=True), sys.stdin.readline(), sys.exit(3)")
LATE_EXIT_IN_COROUTINE = EXIT_IN_COROUTINE.replace(
    "sys.exit(3)", "print('b', flush=True), await asyncio.to_thread(sys.stdin.readline), sys.exit(3)"
).replace("run(handle)", "run(handle, stop_on_signals=True)")


async def publish(cluster: Cluster) -> None:
    await cluster.topic(partitions=1)
    await cluster.do("POST", RECORDS, {"records": [{"value": value, "key": "k"} for value in "ab"]})


@contextlib.asynccontextmanager
async def start(program: str, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a Python program with the broker's address as its argument; it is killed at the end of the block."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", program, url)
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("program", [BLOCKING, ASYNC], ids=["blocking", "async"])
def test_a_signal_ends_a_consumer_without_a_traceback_and_it_leaves_its_group(
    program: str, number: signal.Signals
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await publish(cluster)
        async with start(program, cluster.urls[0]) as process:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"a\n"
            assert await process.stdout.readline() == b"b\n"  # the first one is done by now
            process.send_signal(number)
            async with asyncio.timeout(60):
                assert await process.communicate() == (b"over\n", b"")
            assert process.returncode == 0
        assert (await cluster.rows())[0]["committed"] in (1, 2)
        assert (await cluster.get("/v1/groups/billing"))["members"] == []

    run(scenario)


@pytest.mark.processes
@pytest.mark.parametrize("program", [SLOW_BLOCKING, SLOW_ASYNC], ids=["blocking", "async"])
def test_a_handler_that_runs_when_a_signal_comes_may_finish(program: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.publish("a")
        async with start(program, cluster.urls[0]) as process:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"a\n"
            process.send_signal(signal.SIGTERM)
            await cluster.until(lambda: not catches_sigterm(process.pid))
            async with asyncio.timeout(60):
                assert await process.communicate(b"now\n") == (b"done now\n\nover\n", b"")
            assert process.returncode == 0
        assert (await cluster.rows())[0]["committed"] == 1

    run(scenario)


@pytest.mark.processes
@pytest.mark.parametrize("program", [LATE_EXIT_IN_THREAD, LATE_EXIT_IN_COROUTINE], ids=["thread", "coroutine"])
def test_sys_exit_in_a_handler_that_finishes_after_a_signal_sets_the_exit_code(program: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        await publish(cluster)
        async with start(program, cluster.urls[0]) as process:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"b\n"
            process.send_signal(signal.SIGTERM)
            await cluster.until(lambda: not catches_sigterm(process.pid))
            async with asyncio.timeout(60):
                assert await process.communicate(b"now\n") == (b"", b"")
            assert process.returncode == 3
        assert (await cluster.rows())[0]["committed"] == 1
        assert (await cluster.get("/v1/groups/billing"))["members"] == []

    run(scenario)


def test_without_a_signal_a_cancelled_consumer_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_module, "FINISH_SECONDS", 3600.0)

    async def scenario(cluster: Cluster) -> None:
        await publish(cluster)
        handling = asyncio.Event()

        async def hang(_: object) -> None:
            handling.set()
            await asyncio.Event().wait()

        async with asyncio.timeout(60), cluster.consumer() as consumer:
            work = asyncio.create_task(consumer.run(hang, stop_on_signals=True))
            await handling.wait()
            work.cancel()
            await asyncio.wait({work})
            assert work.cancelled()

    run(scenario)


def test_ctrl_c_right_after_the_work_has_begun_ends_a_blocking_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = asyncio.run_coroutine_threadsafe
    interrupted = threading.Event()

    def interrupt(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        future = schedule(work, loop)
        if work.__name__ == "run_until_exit":
            interrupted.set()
            raise KeyboardInterrupt
        return future

    def consume(url: str) -> None:
        with BlockingConsumer(url, "billing", ["orders"]) as consumer:
            consumer.run(print)

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupt)
        thread = threading.Thread(target=consume, args=(cluster.urls[0],), daemon=True)
        thread.start()
        await cluster.until(lambda: not thread.is_alive())
        assert interrupted.is_set()
        assert (await cluster.get("/v1/groups/billing"))["members"] == []

    run(scenario)


def test_ctrl_c_right_after_a_blocking_producer_has_opened_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = asyncio.run_coroutine_threadsafe

    def interrupt(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        future = schedule(work, loop)
        if work.__name__ == "__aenter__":
            future.result()
            raise KeyboardInterrupt
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupt)
    producer = BlockingProducer(dead_address())
    with pytest.raises(KeyboardInterrupt):
        producer.__enter__()
    assert not producer._producer._brokers.is_open
    with pytest.raises(InvalidCall, match="the BlockingProducer is not open"):
        producer.send("orders", "a")


def catches_sigterm(pid: int) -> bool:
    """Whether a process still handles SIGTERM in its own way: consumers do so only with the first one."""
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_consumer_that_stops_starts_no_more_handlers() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        async with slots:
            waiting = asyncio.create_task(slots.__aenter__())
            await asyncio.sleep(0)
            draining = asyncio.create_task(slots.drain())
            await asyncio.sleep(0)
            assert not draining.done()
        await draining
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("in_thread", [True, False], ids=["thread", "coroutine"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_no_further_handler_is_started_after_one_that_ends_the_program(
    error: type[BaseException], *, in_thread: bool
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.do("POST", RECORDS, {"records": [{"value": value} for value in "abc"]})
        started: list[bytes] = []

        def handle(message: Message) -> None:
            started.append(message.value)
            raise error

        async def handle_in_the_loop(message: Message) -> None:
            handle(message)

        async with asyncio.timeout(60), cluster.consumer() as consumer:
            with pytest.raises(error):
                await consumer.run(handle if in_thread else handle_in_the_loop, concurrency=1)
        assert started == [b"a"]

    run(scenario)


def test_a_new_limit_starts_no_handler_after_one_that_ends_the_program() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        with pytest.raises(HandlerExit):
            async with slots:
                waiting = asyncio.create_task(slots.__aenter__())
                await asyncio.sleep(0)
                raise HandlerExit(SystemExit(3))
        slots.set(5)
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(scenario())


@pytest.mark.processes
@pytest.mark.parametrize("program", [EXIT_IN_THREAD, EXIT_IN_COROUTINE], ids=["thread", "coroutine"])
def test_sys_exit_in_a_handler_ends_the_program_with_its_code_and_commits_what_is_done(program: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        await publish(cluster)
        async with start(program, cluster.urls[0]) as process:
            async with asyncio.timeout(60):
                assert await process.communicate() == (b"", b"")
            assert process.returncode == 3
        row = (await cluster.rows())[0]
        assert (row["committed"], row["lag"]) == (1, 1), "the record that ended the program is delivered again"
        assert (await cluster.get("/v1/groups/billing"))["members"] == []
        assert await cluster.get("/v1/groups/billing/dead", topic="orders") == []

    run(scenario)


async def interrupt_while_opening(url: str, reason: bytes) -> None:
    """Ctrl-C when a consumer has logged why it is not open yet."""
    async with start(OPENING, url) as process:
        assert process.stdout is not None
        assert reason in await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            output, errors = await process.communicate()
        assert output == b""
        assert errors.startswith(b"Traceback")
        assert errors.endswith(b"\nKeyboardInterrupt\n")
        assert errors.count(b"Traceback") == 1
        assert process.returncode == -signal.SIGINT


@pytest.mark.processes
def test_ctrl_c_while_no_broker_can_be_reached_is_a_keyboard_interrupt_and_nothing_else() -> None:
    asyncio.run(interrupt_while_opening(dead_address(), b"can't be reached"))


@pytest.mark.processes
def test_ctrl_c_while_a_member_waits_to_be_allowed_is_a_keyboard_interrupt_and_nothing_else() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(deny=["m1"])
        await interrupt_while_opening(cluster.urls[0], b"waiting until they let it in")

    run(scenario)


def test_closing_the_loop_of_a_blocking_client_ends_what_still_runs_in_it() -> None:
    ended: list[str] = []

    async def end_late(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def start_both() -> list["asyncio.Task[None]"]:
        tasks = [asyncio.create_task(end_late(name)) for name in ("cancelled before", "running")]
        await asyncio.sleep(0)
        tasks[0].cancel()
        return tasks

    loop = LoopThread("loop of a test")
    tasks = loop.run(start_both())
    loop.close()
    assert ended == ["cancelled before", "running"]
    assert all(task.cancelled() for task in tasks)


def test_signals_are_refused_outside_of_the_main_thread() -> None:
    async def consume(url: str) -> None:
        async with Consumer(url, "billing", ["orders"]) as consumer:
            with pytest.raises(InvalidCall, match="signals reach the main thread only"):
                await consumer.run(print, stop_on_signals=True)

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await asyncio.to_thread(asyncio.run, consume(cluster.urls[0]))

    run(scenario)


def test_a_handler_of_sigterm_that_the_program_has_set_stays_in_place() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        own = signal.getsignal(signal.SIGTERM)
        with sigterm_as_interrupt():
            assert signal.getsignal(signal.SIGTERM) is own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
