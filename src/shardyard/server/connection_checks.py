"""One timer that looks at all connections of a server, for clients that make no progress."""

import asyncio
from typing import Protocol


class Checked(Protocol):
    """A connection that is checked again and again."""

    def check(self, now: float) -> None:
        """Close the connection if its client makes no progress. `now`: by the event loop's time."""


class ConnectionChecks:
    """Checks connections from `add` to `discard`. A timer for each of thousands of connections would cost far more than
    the checks themselves."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: between two checks."""
        self._seconds = seconds
        self._connections: set[Checked] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: Checked) -> None:
        self._connections.add(connection)
        if self._timer is None:
            self._start()

    def discard(self, connection: Checked) -> None:
        """Nothing happens if it is not checked any more."""
        self._connections.discard(connection)
        if not self._connections and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._check_all)

    def _check_all(self) -> None:
        self._start()
        now = asyncio.get_running_loop().time()
        for connection in list(self._connections):  # a check may close its connection
            connection.check(now)
