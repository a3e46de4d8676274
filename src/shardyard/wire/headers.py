"""The names of the record headers that Shardyard itself sets."""

ATTEMPT = "shardyard-attempt"
"""How often its handling failed so far."""
ORIGIN = "shardyard-origin"
"""Where it failed first, such as `orders/3/17`."""
PUBLISHED = "shardyard-published"
"""Its timestamp where it failed first, in ms since 1970: when it was published."""
ERROR = "shardyard-error"
"""The text of the last error."""
DIED = "shardyard-died"
"""When it was given up, in ms since 1970."""
REDRIVEN = "shardyard-redriven"
"""Of a tombstone: the offset of the dead letter of the same id and partition that was driven again."""
DUE = "shardyard-due"
TARGET = "shardyard-target"
PARTITION = "shardyard-partition"
REASON = "shardyard-reason"
RESERVED = frozenset({DUE, TARGET, PARTITION, REASON})
"""Headers of a record while it waits; it is delivered without them."""

REASON_CHARACTERS = 1000
"""The longest reason that is kept of a failure."""
