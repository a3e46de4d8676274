"""Calls that wait to be sent on a connection."""

from shardyard.wire import frames


class Outbox:
    """The frames of calls that were made and not sent yet: at most one per call.

    Small calls, such as heartbeats and commits, are sent before publishes and large requests that wait: otherwise they
    would wait for megabytes, and members would lose their sessions. Publishes keep their order.
    """

    def __init__(self) -> None:
        self._small: dict[int, bytes] = {}
        self._others: dict[int, bytes] = {}

    def __bool__(self) -> bool:
        return bool(self._small or self._others)

    def put(self, number: int, call: frames.Call, frame: bytes) -> None:
        is_small = len(frame) <= frames.SHARED_BYTES and not isinstance(call, frames.Publish)
        (self._small if is_small else self._others)[number] = frame

    def drop(self, number: int) -> bool:
        """Do not send the call with this number. Returns whether it waited; otherwise it was sent already."""
        return (self._small.pop(number, None) or self._others.pop(number, None)) is not None

    def clear(self) -> None:
        self._small.clear()
        self._others.clear()

    def take(self) -> bytes:
        """The next message: a single frame, or several up to `SHARED_BYTES` together."""
        taken: list[bytes] = []
        size = 0
        for waiting in (self._small, self._others):
            while waiting:
                number = next(iter(waiting))
                size += len(waiting[number])
                if taken and size > frames.SHARED_BYTES:
                    return frames.message(taken)
                taken.append(waiting.pop(number))
        return frames.message(taken)
