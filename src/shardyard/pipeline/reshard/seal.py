"""Holding the seal of a topic while its last records are copied."""

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from shardyard.log import Log
from shardyard.log.port import SEAL_SECONDS
from shardyard.model import ShardyardError, Topic
from shardyard.pipeline.blocking import BlockingLog
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.runtime.retry import retry

RENEW_SECONDS = 2.0
"""How often the seal is renewed, which would otherwise end after `SEAL_SECONDS`."""
_WAIT_SECONDS = 2 * SEAL_SECONDS
"""How long to wait for a seal that a reshard left behind that was killed."""


@dataclass(frozen=True, slots=True)
class HeldSeal:
    """A seal that this process holds."""

    holder: str
    generation: int
    """Of the topic while it is sealed. Moving it is refused if the seal was lost in the meantime."""


@contextlib.contextmanager
def sealed(opened: BlockingLog, topic: str, clock: Clock | None = None) -> Iterator[HeldSeal]:
    """Seal a topic, and renew the seal in the background until the block ends. Unless the topic has moved by then, it
    takes records again. `clock`: for the renewals, and for waiting while another holder has the topic sealed."""
    clock = clock or SystemClock()
    holder = f"reshard-{uuid.uuid4().hex}"
    log = opened.log
    generation = opened.wait(_seal(log, topic, holder, clock)).generation
    renewing = opened.wait(_start(_renew(log, topic, holder, clock)))
    try:
        yield HeldSeal(holder, generation)
    finally:
        opened.wait(_stop(renewing))
        with contextlib.suppress(ShardyardError):
            opened.wait(log.unseal_topic(topic, holder))


async def _seal(log: Log, topic: str, holder: str, clock: Clock) -> Topic:
    deadline = clock.monotonic() + _WAIT_SECONDS
    return await retry(lambda: log.seal_topic(topic, holder, seconds=SEAL_SECONDS), clock=clock, deadline=deadline)


async def _renew(log: Log, topic: str, holder: str, clock: Clock) -> None:
    while True:
        await clock.sleep(RENEW_SECONDS)
        with contextlib.suppress(ShardyardError):  # if the seal is lost, the move is refused
            await log.seal_topic(topic, holder, seconds=SEAL_SECONDS)


async def _start(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    return asyncio.create_task(work, name="renewing the seal")


async def _stop(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
