"""Errors, grouped by what the caller should do about them.

    ShardyardError
        InvalidCall     the call is wrong: fix it, the same call will fail again
            InvalidValue
        RetryLater      the call is fine: the same call may succeed later
        Fenced          someone else owns this now: stop, and ask who you are

Each error carries its numbers as fields, and its message says what was expected.
"""


class ShardyardError(Exception):
    """The root: everything Shardyard raises on purpose is one of these."""


class InvalidCall(ShardyardError):
    """Raised when a call can never succeed as it is. Nothing was changed."""


class RetryLater(ShardyardError):
    """Raised when a call failed for a reason that may pass. Nothing was changed unless the error says so."""


class Fenced(ShardyardError):
    """Raised when the caller acts on an ownership it no longer has. Nothing was changed."""


class InvalidValue(InvalidCall, ValueError):
    """Raised when an argument is not what its place calls for."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        super().__init__(f"{name} is {value!r}: expected {expected}")
        self.name = name
        self.value = value
        self.expected = expected
