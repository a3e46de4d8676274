"""Who is to be called when something changed; for engines."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterable

_log = logging.getLogger(__name__)


class Watches:
    """Who is to be called for which name. May be used from several threads."""

    def __init__(self) -> None:
        self._callbacks: dict[str, dict[int, Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __contains__(self, name: object) -> bool:
        return name in self._callbacks

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def add(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that takes it out again, and may be called twice."""
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

    def call(self, names: Iterable[str]) -> None:
        """Call those of `names`. One that fails is logged, and the others are still called."""
        with self._lock:
            callbacks = [callback for name in names for callback in self._callbacks.get(name, {}).values()]
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - whose callback it is must not matter to the others
                _log.warning("a callback that watches the registry failed", exc_info=True)

    def clear(self) -> None:
        with self._lock:
            self._callbacks.clear()
