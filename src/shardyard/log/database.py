"""The part of the port that is the same for every engine that keeps its log in a database."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from shardyard.log import rules
from shardyard.log.appending import Append, outcome_of
from shardyard.log.catalog import StoredCatalog
from shardyard.log.port import DEFAULT_RETENTION, SEAL_SECONDS, Capabilities, Log
from shardyard.log.requests import AppendRequest
from shardyard.model import (
    Appended,
    Closed,
    Fence,
    InvalidCall,
    Partition,
    Retention,
    ShardyardError,
    Stamp,
    Topic,
    TopicKind,
    whole_number,
)
from shardyard.model.checks import check_text
from shardyard.model.limits import Limits, Records, check_partitions, check_topic_name, validate
from shardyard.runtime.clock import Clock, SystemClock

_log = logging.getLogger(__name__)
T = TypeVar("T")

WAITING_BYTES = 64 * 1024 * 1024
"""While more than this waits for the writer, further appends are held back."""
HELD_BACK_SECONDS = 0.01
"""How often an append that is held back tries again."""
LINGER_SECONDS = 0.004
"""How long to wait at most for producers whose appends have just returned to append again."""
LOCK_SECONDS = 0.02
"""How often to try for the maintenance lock while another process has it. Trying, unlike waiting, can be cancelled."""
CLEAR_BATCHES = 256
"""Batches deleted in one step."""
FORGET_FROM = 100_000
"""The number of stamps from which on old ones are forgotten."""
FORGET_EVERY = 1000
"""How many times maintenance runs before it looks for old stamps again, which takes a while if there are many."""
STAMP_MS = 7 * 24 * 3600 * 1000
"""How long a producer's stamps are remembered after its last append."""
STEPS_SECONDS = 4.0
"""How long the steps of one kind of maintenance in the background may take at a time."""
STEP_REST = 30.0
"""How much longer than a step took to wait before the next one, while records are appended."""


class DatabaseLog(Log):
    """Checks arguments, limits what waits, and keeps the log maintained in the background. An engine supplies the
    transactions."""

    def __init__(self, name: str, *, limits: Limits | None, maintain_every: float | None, clock: Clock | None) -> None:
        """`name`: for messages. `maintain_every`: seconds; None for never."""
        self._name = name
        self._limits = limits or Limits()
        self._clock = clock or SystemClock()
        self._maintain_every = maintain_every
        self._maintaining = asyncio.Lock()
        self._maintenance: asyncio.Task[None] | None = None
        self._appends = 0
        """Calls of `append` and `append_many` so far, and signs of those elsewhere, for which maintenance rests."""
        self._paused = 0.0
        """For how many seconds steps of maintenance have paused."""
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(contraction=True, stamps_across_processes=True, atomic_batches=True, dense_offsets=True)

    # What an engine supplies

    @abstractmethod
    async def _change_catalog(self, work: Callable[[StoredCatalog], T]) -> T:
        """Run `work` in a transaction that nobody else's changes of the catalog interfere with."""

    @abstractmethod
    async def _look_at_catalog(self, work: Callable[[StoredCatalog], T]) -> T:
        """Run `work`, which only reads, on one state of the catalog."""

    @abstractmethod
    async def _write(self, requests: Sequence[Append]) -> list[Appended | ShardyardError]:
        """Append in one commit. Returns the outcomes when what is stored is durable; raises if nothing is."""

    @property
    @abstractmethod
    def _waiting_bytes(self) -> int:
        """The size of the appends that have not started."""

    @abstractmethod
    async def _maintain(self, *, in_background: bool) -> None:
        """Take all steps of maintenance."""

    @abstractmethod
    def _stop(self) -> None:
        """Finish what is in progress, then release all resources. Runs in a thread."""

    # Topics

    async def create_topic(
        self,
        name: str,
        partitions: int,
        *,
        kind: TopicKind = TopicKind.NORMAL,
        retention: Retention = DEFAULT_RETENTION,
        partitioner: str = "modulus",
        hash_: str | None = None,
    ) -> Topic:
        wanted = Topic(
            check_topic_name(name, self._limits),
            check_partitions(partitions, self._limits),
            kind,
            rules.check_retention(retention),
            0,
            *rules.check_placement(partitioner, partitions, hash_),
        )
        return await self._change_catalog(lambda catalog: catalog.create_topic(wanted))

    async def expand_topic(self, name: str, partitions: int) -> Topic:
        count = check_partitions(partitions, self._limits)
        return await self._change_catalog(lambda catalog: catalog.expand_topic(name, count))

    async def contract_topic(self, name: str, partitions: int) -> Topic:
        rules.check_contraction(self.capabilities)
        count = whole_number("partitions", partitions, at_least=1)
        return await self._change_catalog(lambda catalog: catalog.contract_topic(name, count))

    async def drop_partitions(self, name: str, partitions: int) -> Topic:
        rules.check_contraction(self.capabilities)
        count = whole_number("partitions", partitions, at_least=1)
        return await self._change_catalog(lambda catalog: catalog.drop_partitions(name, count))

    async def set_retention(self, name: str, retention: Retention) -> Topic:
        rules.check_retention(retention)
        return await self._change_catalog(lambda catalog: catalog.set_retention(name, retention))

    async def seal_topic(self, name: str, holder: str, *, seconds: float = SEAL_SECONDS) -> Topic:
        duration = rules.check_seal(holder, seconds)
        return await self._change_catalog(lambda catalog: catalog.seal_topic(name, holder, duration))

    async def unseal_topic(self, name: str, holder: str) -> Topic:
        check_text("holder", holder)
        return await self._change_catalog(lambda catalog: catalog.unseal_topic(name, holder))

    async def move_topic(self, name: str, successor: str, *, holder: str, generation: int) -> Topic:
        check_text("successor", successor)
        check_text("holder", holder)
        return await self._change_catalog(lambda catalog: catalog.move_topic(name, successor, holder, generation))

    async def delete_topic(self, name: str) -> None:
        await self._change_catalog(lambda catalog: catalog.delete_topic(name))

    async def topic(self, name: str) -> Topic:
        return await self._look_at_catalog(lambda catalog: catalog.topic(name))

    async def topics(self) -> list[Topic]:
        return await self._look_at_catalog(lambda catalog: catalog.topics())

    async def catalog_version(self) -> int:
        return await self._look_at_catalog(lambda catalog: catalog.last_number())

    # Records

    async def append(
        self,
        partition: Partition,
        records: Records,
        *,
        stamp: Stamp | None = None,
        fence: Fence | Sequence[Fence] | None = None,
        generation: int | None = None,
    ) -> Appended:
        request = AppendRequest(partition, records, stamp, fence, generation)
        checked = self._checked(request, rules.milliseconds(self._clock))
        await self._wait_for_room()
        (outcome,) = await self._write((checked,))
        if isinstance(outcome, ShardyardError):
            raise outcome
        return outcome

    async def append_many(self, requests: Sequence[AppendRequest]) -> list[Appended | ShardyardError]:
        now = rules.milliseconds(self._clock)
        checked = [outcome_of(self._checked, request, now) for request in requests]
        await self._wait_for_room()
        valid = [one for one in checked if isinstance(one, Append)]
        try:
            written = iter(await self._write(valid) if valid else ())
        except Closed:
            raise
        except ShardyardError as error:
            written = iter([error] * len(valid))
        return [next(written) if isinstance(one, Append) else one for one in checked]

    def _checked(self, request: AppendRequest, now: int) -> Append:
        batch = validate(request.records, self._limits, now)
        rules.check_append_options(request.stamp, request.fence, request.generation)
        fences = rules.all_fences(request.fence)
        return Append(request.partition, batch.rows, batch.size, request.stamp, fences, request.generation)

    async def maintain(self) -> None:
        async with self._maintaining:
            self._open()
            await self._maintain(in_background=False)

    async def close(self) -> None:
        if self._closed:
            return
        if self._maintenance is not None and self._is_maintained():
            if self._maintenance.get_loop() is not asyncio.get_running_loop():
                raise InvalidCall(f"the log {self._name} is in use in another event loop: close it there")
            self._closed = True
            self._maintenance.cancel()
            await asyncio.gather(self._maintenance, return_exceptions=True)
        self._closed = True
        await asyncio.to_thread(self._stop)

    async def _wait_for_room(self) -> None:
        """Hold an append back while too much waits for the writer."""
        self._open()
        self._appends += 1
        while self._waiting_bytes > WAITING_BYTES:  # noqa: ASYNC110 it is another thread that writes
            await asyncio.sleep(HELD_BACK_SECONDS)
        self._open()

    def _open(self) -> None:
        """Raise if the log is closed; start its maintenance on first use in an event loop."""
        if self._closed:
            raise Closed(f"the log {self._name}")
        if self._maintain_every is not None and not self._is_maintained():
            self._maintenance = asyncio.create_task(self._keep_maintained(self._maintain_every))

    def _is_maintained(self) -> bool:
        """Whether the task runs. It ends with its event loop, after which the log may be used in another one."""
        task = self._maintenance
        return task is not None and not task.done() and not task.get_loop().is_closed()

    async def _keep_maintained(self, every: float) -> None:
        while True:
            await self._clock.sleep(every)
            try:
                async with self._maintaining:
                    await self._maintain(in_background=True)
            except ShardyardError as error:
                _log.warning("maintenance of %s will be retried: %s", self._name, error)
            except Exception:  # noqa: BLE001 the log works without it, and the next attempt may succeed
                _log.exception("maintenance of %s failed and will be retried", self._name)

    async def _take_all(
        self,
        step: Callable[[], Awaitable[bool]],
        *,
        in_background: bool,
        rest: Callable[[], float] = lambda: STEP_REST,
    ) -> None:
        """Repeat a step of maintenance as long as it finds something to do. In the background appends have priority:
        if there were any meanwhile, rest much longer than the step worked, and stop after a while. `rest`: how many
        times longer."""
        until = self._clock.monotonic() + STEPS_SECONDS
        while True:
            started, paused, appends = self._clock.monotonic(), self._paused, self._appends
            if not await step() or (in_background and started > until):
                break
            if in_background and self._appends != appends:
                worked = self._clock.monotonic() - started - (self._paused - paused)
                await self._clock.sleep(rest() * worked)

    async def _pause(self, seconds: float) -> None:
        """Let the event loop do other things for so long, or longer, in the middle of a step of maintenance."""
        started = self._clock.monotonic()
        await asyncio.sleep(seconds)
        self._paused += self._clock.monotonic() - started
