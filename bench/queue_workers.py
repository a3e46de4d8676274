"""The processes that publish and consume, and the benchmark's handle on each of them."""

import asyncio
import contextlib
import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from bench.contenders.system import VALUES, Schedule, System

RESULT_TIMEOUT_SECONDS = 120.0


class Client:
    """What a worker process does on request, one method at a time."""

    def __init__(self, system: System, report: Callable[[object], None]) -> None:
        self._system = system
        self._report = report

    async def create(self) -> None:
        await self._system.create()

    async def publish(self) -> tuple[int, float]:
        """The number of records, and records per second."""
        start = time.perf_counter()
        sent = await self._system.publish_batches()
        return sent, sent / (time.perf_counter() - start)

    async def send_singles(self, in_flight: int) -> tuple[float, list[float]]:
        """Records per second, and how long each record took."""
        start = time.perf_counter()
        latencies = await self._system.send_singles(in_flight)
        return len(latencies) / (time.perf_counter() - start), latencies

    async def send_one(self) -> None:
        await self._system.send(VALUES[0])

    async def send_on_schedule(self) -> None:
        await self._system.send_on_schedule(self._system.schedule())

    async def consume(self, count: int) -> float:
        """Records per second, from the first delivery to the last commit."""
        first = 0.0

        def deliver(_: Sequence[bytes]) -> None:
            nonlocal first
            first = first or time.perf_counter()

        await self._system.consume(count, deliver)
        return count / (time.perf_counter() - first)

    async def follow(self) -> list[tuple[int, int]]:
        """Consume one record, report that, and then consume the records of a schedule: when each was due and when it
        was delivered, in ns."""
        times: list[tuple[int, int]] = []
        has_joined = False

        def deliver(values: Sequence[bytes]) -> None:
            nonlocal has_joined
            now = time.monotonic_ns()
            if not has_joined:
                has_joined = True
                self._report(None)
                values = values[1:]
            times.extend((Schedule.due_at(value), now) for value in values)

        await self._system.consume(1 + self._system.schedule.RECORDS, deliver)
        return times


def run_client(connection: Connection, connect: Callable[[str], System], address: str) -> None:
    """Run the requested methods one after the other, until the request is None.

    The process has imported the clients of all systems. A full garbage collection would look at all of that, and take
    tens of milliseconds, so what was there before the first request is left out of it.
    """

    async def run() -> None:
        async with connect(address) as system:
            client = Client(system, connection.send)
            gc.freeze()
            while (request := await asyncio.to_thread(connection.recv)) is not None:
                name, *arguments = request
                connection.send(await getattr(client, name)(*arguments))

    uvloop.run(run())  # the event loop one would choose for any of these clients


class Worker:
    """A process that runs `target` with one end of a pipe and the arguments."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, worker_connection = spawn.Pipe()
        self._process = spawn.Process(target=target, args=(worker_connection, *arguments), daemon=True)
        self._process.start()
        worker_connection.close()  # so that the end of the process ends the pipe

    def start(self, *request: object) -> None:
        """Send a request; `result` waits for the response."""
        self._connection.send(request)

    def result(self) -> Any:
        """Wait for the next response; raises if the process ends or takes too long."""
        if not self._connection.poll(RESULT_TIMEOUT_SECONDS):
            raise RuntimeError(f"a worker process sent no result within {RESULT_TIMEOUT_SECONDS:g} s")
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a worker process ended with exit code {self._process.exitcode}") from None

    def call(self, *request: object) -> Any:
        """Send a request and wait for the response."""
        self.start(*request)
        return self.result()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(10)
        self.kill()

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
