"""The callbacks of a registry's watches; for engines."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterable

_log = logging.getLogger(__name__)


def watched_by(name: str) -> set[str]:
    """The names whose watches a touch of `name` notifies: the name itself, and each of its beginnings that ends with
    "/"."""
    return {name, *(name[: end + 1] for end, character in enumerate(name) if character == "/")}


class Watches:
    """The callbacks for each watched name. May be used from several threads."""

    def __init__(self) -> None:
        self._callbacks: dict[str, dict[int, Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __contains__(self, name: object) -> bool:
        return name in self._callbacks

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def names(self) -> set[str]:
        """The names that are watched."""
        with self._lock:
            return set(self._callbacks)

    def add(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that removes the callback again; calling it twice is fine."""
        number = next(self._numbers)
        with self._lock:
            self._callbacks.setdefault(name, {})[number] = callback

        def end() -> None:
            with self._lock:
                callbacks = self._callbacks.get(name, {})
                callbacks.pop(number, None)
                if not callbacks:
                    self._callbacks.pop(name, None)

        return end

    def call(self, watched: Iterable[str]) -> None:
        """Call the callbacks of these watched names. One that raises is logged, and the others are still called."""
        with self._lock:
            callbacks = [callback for name in watched for callback in self._callbacks.get(name, {}).values()]
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - one watch must not affect the others, whatever its callback does
                _log.warning("a callback of a registry watch raised an exception", exc_info=True)

    def clear(self) -> None:
        with self._lock:
            self._callbacks.clear()
