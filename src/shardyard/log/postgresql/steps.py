"""What a step of maintenance is."""

from collections.abc import Callable

from shardyard.runtime.postgresql import Connection

Committed = Callable[[], bool]
"""Called once when a step's transaction is committed: notes what was done. Returns whether there is more to do."""
Step = Callable[[Connection, int | None], Committed]
"""A small transaction. Gets the time in milliseconds, or None for the database's. It may run twice, or fail in the
end, so it changes nothing but the database: what it has to remember is for `Committed`."""
