"""Measures all requests, by the route that answers them, and all calls on connections, by their kind."""

import time
from dataclasses import dataclass
from typing import get_args

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardyard.runtime.metrics import (
    CALL_SECONDS,
    CALLS,
    REQUEST_SECONDS,
    REQUESTS,
    REQUESTS_IN_FLIGHT,
    Counter,
    Histogram,
)
from shardyard.wire import frames

NO_ROUTE = "none"
"""The label `route` of requests whose path does not exist."""


@dataclass(frozen=True, slots=True)
class CallMetrics:
    """The metrics of one kind of call."""

    count: Counter
    seconds: Histogram


def call_metrics(name: str) -> CallMetrics:
    return CallMetrics(CALLS.series(name), CALL_SECONDS.series(name))


CALL_METRICS = {
    kind: call_metrics(kind.__name__.lower()) for kind in get_args(frames.Call) if kind is not frames.Cancel
}
"""Looked up once per kind: a call takes well below a microsecond to measure."""


class _Measured:
    """The metrics of one route."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seconds = REQUEST_SECONDS.series(path)
        self._by_status: dict[int, Counter] = {}

    def record(self, status: int, started: float) -> None:
        count = self._by_status.get(status)
        if count is None:
            count = self._by_status[status] = REQUESTS.series(self._path, str(status))
        count.add()
        self._seconds.observe(time.perf_counter() - started)


def measure(app: ASGIApp) -> ASGIApp:
    """The application, with metrics of all HTTP requests."""
    measured: dict[str, _Measured] = {}

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        REQUESTS_IN_FLIGHT.add(1)
        try:
            await app(scope, receive, watch)
        finally:
            REQUESTS_IN_FLIGHT.add(-1)
            path = getattr(scope.get("route"), "path", NO_ROUTE)
            if path not in measured:
                measured[path] = _Measured(path)
            measured[path].record(status, started)

    return call
