"""Work that exactly one of several processes does at a time: whichever holds the lease."""

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from shardyard.model import Fenced, ShardyardError
from shardyard.runtime.clock import Clock

_log = logging.getLogger(__name__)


class Lease(Protocol):
    """A lease that several processes compete for. It expires unless its holder renews it."""

    async def acquire(self) -> int | None:
        """Acquire or renew the lease. Returns its fencing token; None while another process holds it."""

    async def release(self, token: int) -> None:
        """Let another process have it at once, if it is still held under this token."""

    def lost(self) -> None:
        """Another process has it, as its holder found out otherwise than by `acquire`."""


class LeaderLoop:
    """Calls `work` again and again while this process holds the lease. When the leader dies, another process takes
    over after the lease has expired.

    Errors do not end the loop: they are logged, and the work is retried. `Fenced` means that the lease was lost.
    """

    def __init__(
        self,
        name: str,
        lease: Lease,
        work: Callable[[int], Awaitable[object]],
        *,
        every: float,
        clock: Clock,
        wait: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        """`work` gets the fencing token. `every`: seconds between two rounds. `wait` may return sooner than the seconds
        it is given, when there is something to do."""
        self._name = name
        self._lease = lease
        self._work = work
        self._every = every
        self._wait = wait or clock.sleep
        self._token: int | None = None
        self._failing: str | None = None
        """The error of the last round, which is logged once, and not again in every round that it lasts."""

    @property
    def leads(self) -> bool:
        return self._token is not None

    async def run(self) -> None:
        """Until cancelled; then the lease is released."""
        try:
            while True:
                await self._round()
                await self._wait(self._every)
        finally:
            await self._release()

    async def run_once(self) -> bool:
        """One round, whose errors are raised. Returns whether this process leads."""
        self._token = await self._lease.acquire()
        if self._token is None:
            return False
        await self._work(self._token)
        return True

    async def _round(self) -> None:
        try:
            await self.run_once()
            if self._failing is not None:
                _log.info("%s works again", self._name)
            self._failing = None
        except Fenced:
            self._token = None
            self._lease.lost()
        except ShardyardError as error:
            if self._failing != type(error).__name__:
                _log.warning("%s will be retried: %s", self._name, error)
            self._failing = type(error).__name__
        except Exception:  # noqa: BLE001 one failed round must not be the last one
            _log.exception("%s failed and will be retried", self._name)

    async def _release(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            with contextlib.suppress(ShardyardError):
                await self._lease.release(token)
