"""The names of the record headers that Shardyard itself sets."""

ATTEMPT = "shardyard-attempt"
"""How often the record's handler has failed so far."""
ORIGIN = "shardyard-origin"
"""Where the record was published, such as `orders/3/17`."""
PUBLISHED = "shardyard-published"
"""When the record was published, in ms since 1970."""
ERROR = "shardyard-error"
"""The last error of the handler."""
TRACEBACK = "shardyard-traceback"
"""Of a dead letter: the end of the traceback of that error."""
DIED = "shardyard-died"
"""When the record became a dead letter, in ms since 1970."""
REDRIVEN = "shardyard-redriven"
"""Of a tombstone: the offset of the dead letter, of the same id and partition, that was redriven."""
DUE = "shardyard-due"
TARGET = "shardyard-target"
PARTITION = "shardyard-partition"
REASON = "shardyard-reason"
RESERVED = frozenset({DUE, TARGET, PARTITION, REASON})
"""Headers of a record that waits until it is due. It is delivered without them."""

REASON_CHARACTERS = 1000
"""How much of the error message of a failure is kept."""
TRACEBACK_BYTES = 4096
"""How much of the end of a traceback is kept."""


def end_of(text: str, size: int) -> bytes:
    """The end of a string in UTF-8, at most `size` bytes, without half a character."""
    encoded = text[-size:].encode(errors="replace")
    return encoded if len(encoded) <= size else encoded[-size:].decode(errors="ignore").encode()


def start_of(text: str, size: int) -> bytes:
    """The start of a string in UTF-8, at most `size` bytes, without half a character."""
    return text[:size].encode(errors="replace")[:size].decode(errors="ignore").encode()
