"""The leader's lease: one holder at a time, and a token by which a late write of an earlier one is known."""

from dataclasses import replace

from shardyard.model import Fenced
from shardyard.registry import LeaseRow, Transaction

REBALANCER = "rebalancer"


def acquire(tx: Transaction, name: str, holder: str, seconds: float) -> int | None:
    """Take the lease if it is free, or keep it if it is ours. Returns its token; None if another one holds it."""
    row = tx.lease(name)
    if row is not None and row.expires_at > tx.now and row.holder != holder:
        if row.expires_at > tx.now + seconds:  # the clock went back: no lease lasts that long
            tx.put_lease(replace(row, expires_at=tx.now + seconds))
        return None
    ours = row is not None and row.holder == holder and row.expires_at > tx.now
    token = row.token + (not ours) if row is not None else 1
    tx.put_lease(LeaseRow(name, holder, token, tx.now + seconds))
    return token


def give_up(tx: Transaction, name: str, token: int) -> None:
    """Let others have it at once, if it is still ours."""
    row = tx.lease(name)
    if row is not None and row.token == token:
        tx.put_lease(LeaseRow(name, row.holder, token, tx.now))


def check(tx: Transaction, name: str, token: int) -> None:
    """`Fenced` if somebody has taken the lease since: to be called in every transaction that relies on it."""
    row = tx.lease(name)
    if row is None or row.token != token:
        raise Fenced(f"the lease {name!r} with token {token} is over: {row.holder if row else 'nobody'} has it now")
