"""Holding the seal of a topic while its last records are copied, and how long producers were refused by it."""

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import Coroutine, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardyard.log import Log
from shardyard.model import Damaged, Moved, ShardyardError, Topic, UnknownTopic
from shardyard.pipeline.atomic_files import write_json
from shardyard.pipeline.blocking import BlockingLog
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.runtime.retry import retry

SEAL_SECONDS = 5.0
"""How long the seal stays in force after it was last renewed, if the reshard is killed and not run again."""
RENEW_SECONDS = 1.0
_WAIT_SECONDS = 30.0
"""How long to wait while another holder has the topic sealed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldSeal:
    """A seal that this process holds."""

    holder: str
    generation: int
    """Of the topic while it is sealed. Moving it is refused if the seal was lost in the meantime."""


@dataclass(frozen=True, slots=True)
class SealTime:
    """When a seal was in force, in seconds since 1970."""

    holder: str
    start: float
    end: float
    """While the seal is held: when it ends unless it is renewed, so that it is right even if the process is killed."""
    is_over: bool = False


class SealTimes:
    """The seals of a reshard, over all its attempts, stored on disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "seals.json"

    def all(self) -> list[SealTime]:
        try:
            return [SealTime(**stored) for stored in json.loads(self._path.read_text())]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            raise Damaged(str(self._path), f"{type(error).__name__}: {error}") from None

    def put(self, time: SealTime) -> None:
        """Store the time of a seal, or replace what is stored about it."""
        others = [known for known in self.all() if known.holder != time.holder]
        write_json(self._path, [asdict(known) for known in [*others, time]])

    def seconds(self) -> float:
        """For how long producers may have been refused."""
        return sum(max(time.end - time.start, 0.0) for time in self.all())


def end_left_seals(opened: BlockingLog, topic: str, times: SealTimes) -> None:
    """End the seal that an attempt left behind when it was killed, so that producers need not wait for its end."""
    for time in times.all():
        if not time.is_over:
            with contextlib.suppress(Moved, UnknownTopic):
                opened.wait(opened.log.unseal_topic(topic, time.holder))
            times.put(replace(time, end=min(time.end, SystemClock().now()), is_over=True))


@contextlib.contextmanager
def sealed(opened: BlockingLog, topic: str, times: SealTimes, clock: Clock | None = None) -> Iterator[HeldSeal]:
    """Seal a topic, and renew the seal in the background until the block ends. Unless the topic has moved by then, it
    takes records again. `clock`: for the renewals, and for waiting while another holder has the topic sealed."""
    clock = clock or SystemClock()
    holder = f"reshard-{uuid.uuid4().hex}"
    log = opened.log
    now = clock.now()
    times.put(SealTime(holder, now, now + SEAL_SECONDS))
    start, described = opened.wait(_seal(log, topic, holder, clock))
    generation = described.generation
    time = SealTime(holder, start, start + SEAL_SECONDS)
    renewing = opened.wait(_start(_renew(log, topic, generation, time, times, clock)))
    try:
        yield HeldSeal(holder, generation)
    finally:
        opened.wait(_stop(renewing))
        with contextlib.suppress(ShardyardError):
            opened.wait(log.unseal_topic(topic, holder))
        _note(times, SealTime(holder, start, clock.now(), is_over=True))


async def _seal(log: Log, topic: str, holder: str, clock: Clock) -> tuple[float, Topic]:
    """Seal the topic. Returns when that began, which is not before another holder has ended its seal."""
    start = 0.0

    async def attempt() -> Topic:
        nonlocal start
        start = clock.now()
        return await log.seal_topic(topic, holder, seconds=SEAL_SECONDS)

    described = await retry(attempt, clock=clock, deadline=clock.monotonic() + _WAIT_SECONDS)
    return start, described


async def _renew(log: Log, topic: str, generation: int, time: SealTime, times: SealTimes, clock: Clock) -> None:
    while True:
        await clock.sleep(RENEW_SECONDS)
        with contextlib.suppress(ShardyardError):  # if the seal is lost, the move is refused
            renewed = await log.seal_topic(topic, time.holder, seconds=SEAL_SECONDS)
            if renewed.generation != generation:  # it was lost, and this is another one, which is of no use
                await log.unseal_topic(topic, time.holder)
                return
            _note(times, replace(time, end=clock.now() + SEAL_SECONDS))


def _note(times: SealTimes, time: SealTime) -> None:
    """Store the time of a seal that is held or was. A failure must not end the reshard, which may have succeeded."""
    try:
        times.put(time)
    except OSError as error:
        _log.warning("how long producers are refused may be reported wrongly: %s", error)


async def _start(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    return asyncio.create_task(work, name="renewing the seal")


async def _stop(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
