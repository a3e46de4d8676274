"""Leases: one holder at a time, and a fencing token that exposes a late write of an earlier holder."""

import math
from dataclasses import replace

from shardyard.model import Fenced
from shardyard.registry.batcher import TransactionBatcher
from shardyard.registry.port import LeaseRow, Snapshot, Transaction
from shardyard.runtime.clock import Clock


def acquire(tx: Transaction, name: str, holder: str, seconds: float) -> int | None:
    """Acquire the lease if it is free, or renew it if `holder` has it. Returns its token; None if another holder has
    it."""
    row = tx.lease(name)
    if row is not None and row.expires_at > tx.now and row.holder != holder:
        if row.expires_at > tx.now + seconds:  # the clock went back: no lease lasts that long
            tx.put_lease(replace(row, expires_at=tx.now + seconds))
        return None
    renewed = row is not None and row.holder == holder and row.expires_at > tx.now
    token = row.token + (not renewed) if row is not None else 1
    tx.put_lease(LeaseRow(name, holder, token, tx.now + seconds))
    return token


def release(tx: Transaction, name: str, token: int) -> None:
    """End the lease, so that others can acquire it at once. Does nothing if it is no longer held under this token."""
    row = tx.lease(name)
    if row is not None and row.token == token:
        tx.put_lease(LeaseRow(name, row.holder, token, tx.now))


def check(tx: Snapshot, name: str, token: int) -> None:
    """`Fenced` if another holder has acquired the lease since. Call this in every transaction that relies on it."""
    row = tx.lease(name)
    if row is None or row.token != token:
        holder = "nobody" if row is None else row.holder
        raise Fenced(f"the lease {name!r} with token {token} has ended: {holder} has it now")


class RegistryLease:
    """A `runtime.leader.Lease` in the registry."""

    def __init__(
        self, transactions: TransactionBatcher, name: str, holder: str, seconds: float, trusted: Clock | None = None
    ) -> None:
        """`trusted`: a clock by which a lease that was acquired counts as held for half of its time, without asking the
        registry. For work that passes its token to `check` in every transaction: should the registry's clock have been
        set, or the machine been suspended, another process may hold the lease by then."""
        self._transactions = transactions
        self._name = name
        self._holder = holder
        self._seconds = seconds
        self._trusted = trusted
        self._token: int | None = None
        self._renew_at = -math.inf
        """On the trusted clock's monotonic time."""

    async def acquire(self) -> int | None:
        """Acquire or renew the lease. Nothing is written while another holder has it, or while more than half of its
        time is left."""
        now = 0.0 if self._trusted is None else self._trusted.monotonic()
        if self._token is None or self._trusted is None or now >= self._renew_at:
            is_due = self._token is not None and self._trusted is not None
            self._token = None  # if this fails
            self._token, seconds = await (self._renew() if is_due else self._acquire())
            self._renew_at = now + seconds
        return self._token

    async def release(self, token: int) -> None:
        self._token = None
        await self._transactions.run(lambda tx: release(tx, self._name, token))

    def lost(self) -> None:
        self._token = None

    async def _acquire(self) -> tuple[int | None, float]:
        """The token, and the seconds until half of the lease's time is left."""
        half = self._seconds / 2
        row, now = await self._transactions.read(lambda tx: (tx.lease(self._name), tx.now))
        if row is not None and now < row.expires_at <= now + self._seconds:
            if row.holder != self._holder:
                return None, 0.0
            if row.expires_at > now + half:
                return row.token, row.expires_at - now - half
        return await self._renew()

    async def _renew(self) -> tuple[int | None, float]:
        """The same, without a look whether there is something to write."""
        token = await self._transactions.run(lambda tx: acquire(tx, self._name, self._holder, self._seconds))
        return token, self._seconds / 2
