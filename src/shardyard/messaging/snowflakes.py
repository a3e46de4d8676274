"""Ids of messages: snowflakes of 41 bits of milliseconds, 8 of generator and 14 of sequence."""

import random
from collections.abc import Callable

from shardyard.model import RetryLater
from shardyard.registry import TransactionBatcher
from shardyard.registry.lease import acquire, release
from shardyard.runtime.clock import Clock
from shardyard.wire.messaging import CLOCKS_MS

START_MS = 1_735_689_600_000
"""2025-01-01 UTC, from which milliseconds count. They suffice until 2094."""
GENERATORS = 256
_SEQUENCES = 1 << 14

LEASE_SECONDS = 30.0
RENEW_SECONDS = 10.0


def id_at(ms: int) -> int:
    """The smallest id of this moment or a later one, in milliseconds since 1970."""
    return max(ms - START_MS, 0) << 22


def ms_of(id_: int) -> int:
    """When an id was made, in milliseconds since 1970."""
    return (id_ >> 22) + START_MS


class Snowflakes:
    """Makes ids that are unique among all generators with different numbers, and ascend."""

    def __init__(self, generator: int, now_ms: Callable[[], int]) -> None:
        self._generator = generator
        self._now_ms = now_ms
        self._ms = 0
        self._sequence = 0

    def next(self) -> int:
        """The next id. If the clock goes back, or more are made in a millisecond than its sequence has, the ids run
        ahead of the clock."""
        ms = self._now_ms() - START_MS
        if ms > self._ms:
            self._ms, self._sequence = ms, 0
        else:
            self._sequence += 1
            if self._sequence == _SEQUENCES:
                self._ms, self._sequence = self._ms + 1, 0
        return self._ms << 22 | self._generator << 14 | self._sequence


class LeasedSnowflakes:
    """Makes ids under a generator's number that no other process has at the same time: each number is a lease in the
    registry. `run` renews it; while that fails for too long, no ids are made."""

    def __init__(self, transactions: TransactionBatcher, holder: str, clock: Clock) -> None:
        self._transactions = transactions
        self._holder = holder
        self._clock = clock
        self._generator = -1
        self._token = 0
        self._until = 0.0
        """When the lease ends at the earliest, on the monotonic clock."""
        self._ids: Snowflakes | None = None
        self._ahead = 0.0
        """By how much the registry's clock is ahead. By that clock, the ids of all processes ascend alike."""

    async def acquire(self) -> None:
        """Take the first free number from a random one on. `RetryLater` if all are taken."""
        started = self._clock.monotonic()
        first = random.randrange(GENERATORS)
        for number in range(first, first + GENERATORS):
            generator = number % GENERATORS
            token, now = await self._acquire(generator)
            if token is not None:
                self._generator, self._token, self._until = generator, token, started + LEASE_SECONDS
                self._ahead = now - self._clock.now()
                self._ids = Snowflakes(generator, self._now_ms)
                return
        raise RetryLater(f"all {GENERATORS} numbers of id generators are taken: try again when a server has stopped")

    def _now_ms(self) -> int:
        return int((self._clock.now() + self._ahead) * 1000)

    async def run(self) -> None:
        """Renew the lease until cancelled."""
        while True:
            await self._clock.sleep(RENEW_SECONDS)
            started = self._clock.monotonic()
            try:
                token, _ = await self._acquire(self._generator)
                if token == self._token:
                    self._until = started + LEASE_SECONDS
                else:  # it had ended: ids of another process may have the number
                    self._ids = None
                    await self.acquire()
            except RetryLater:
                continue

    async def release(self) -> None:
        """Let others have the number."""
        if self._generator >= 0:
            await self._transactions.run(lambda tx: release(tx, _lease_name(self._generator), self._token))

    def next(self) -> int:
        """The next id. `RetryLater` while the number could be another process's."""
        if self._ids is None or self._clock.monotonic() >= self._until:
            raise RetryLater("this server has lost its number for making ids, and waits for the registry")
        return self._ids.next()

    def may_exist(self, id_: int) -> bool:
        """Whether any server can have made it by now, as far as their clocks differ."""
        return id_ < id_at(self._now_ms() + CLOCKS_MS)

    async def _acquire(self, generator: int) -> tuple[int | None, float]:
        """The token of the lease, if it is ours now, and the registry's time."""
        return await self._transactions.run(
            lambda tx: (acquire(tx, _lease_name(generator), self._holder, LEASE_SECONDS), tx.now)
        )


def _lease_name(generator: int) -> str:
    return f"messaging.ids/{generator}"
