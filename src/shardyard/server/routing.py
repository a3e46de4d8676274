"""Finds the route of a request, and measures all requests.

All routes are registered with FastAPI, which describes them in the OpenAPI schema, but its dispatch would be half of
what publishing a single record costs. The few routes of the data plane are therefore called without it: with the path
and the authentication of the registered route, and with the same error handlers as all others.
"""

import inspect
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar, get_args

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.params import Depends
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardyard.queues.broker import Broker
from shardyard.runtime.metrics import REQUEST_SECONDS, REQUESTS, REQUESTS_IN_FLIGHT, Counter
from shardyard.server.http import ERROR_HANDLERS

Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Response]])

NO_ROUTE = "none"
"""The label `route` of requests whose path does not exist."""

_DATA_PLANE: set[Callable[..., Any]] = set()


def data_plane(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint to be called without FastAPI's dispatch.

    Its parameters are those of its path (strings and integers), `request`, and `broker` with its authentication.
    """
    _DATA_PLANE.add(endpoint)
    return endpoint


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


class _DirectRoute:
    """A route of the data plane."""

    def __init__(self, route: APIRoute) -> None:
        [self.method] = list(route.methods or [])
        self.measured = _Measured(route.path)
        self._pattern = route.path_regex
        self._endpoint = route.endpoint
        parameters = inspect.signature(route.endpoint, eval_str=True).parameters
        self._integers = [name for name in route.param_convertors if int in get_args(parameters[name].annotation)]
        (self._authorise,) = _dependencies(parameters["broker"].annotation)

    def match(self, path: str) -> dict[str, Any] | None:
        """The parameters of the path. None for another path, and for an integer that FastAPI has to complain about."""
        found = self._pattern.match(path)
        if found is None:
            return None
        parameters: dict[str, Any] = found.groupdict()
        for name in self._integers:
            text = parameters[name]
            if not (text.isascii() and text.isdecimal() and len(text) <= 9):
                return None
            parameters[name] = int(text)
        return parameters

    async def respond(self, request: Request, parameters: dict[str, Any]) -> Response:
        try:
            broker = await self._authorise(request)
            response: Response = await self._endpoint(request=request, broker=broker, **parameters)
        except Exception as error:
            handler = next((ERROR_HANDLERS[kind] for kind in type(error).__mro__ if kind in ERROR_HANDLERS), None)
            if handler is None:
                raise
            return await handler(request, error)
        return response


def _dependencies(annotation: Any) -> list[Callable[[Request], Awaitable[Broker]]]:
    """The functions of the `Depends` of an annotated parameter."""
    return [each.dependency for each in get_args(annotation) if isinstance(each, Depends) and each.dependency]


def dispatch(app: FastAPI, routers: Iterable[APIRouter]) -> ASGIApp:
    """The application, with direct calls of the data plane and with metrics of all requests.

    `routers`: those that the application includes, without a prefix.
    """
    direct = [
        _DirectRoute(route)
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and route.endpoint in _DATA_PLANE
    ]
    measured: dict[str, _Measured] = {}

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        started = time.perf_counter()
        REQUESTS_IN_FLIGHT.add(1)
        try:
            method, path = scope["method"], scope["path"]
            for route in direct:
                if route.method == method and (parameters := route.match(path)) is not None:
                    await call_direct(route, parameters, scope, receive, send, started)
                    return
            await call_fastapi(scope, receive, send, started)
        finally:
            REQUESTS_IN_FLIGHT.add(-1)

    async def call_direct(
        route: _DirectRoute, parameters: dict[str, Any], scope: Scope, receive: Receive, send: Send, started: float
    ) -> None:
        scope["app"] = app
        scope["path_params"] = parameters
        status = 500
        try:
            response = await route.respond(Request(scope, receive), parameters)
            status = response.status_code
            await response(scope, receive, send)
        finally:
            route.measured.record(status, started)

    async def call_fastapi(scope: Scope, receive: Receive, send: Send, started: float) -> None:
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, watch)
        finally:
            path = getattr(scope.get("route"), "path", NO_ROUTE)
            if path not in measured:
                measured[path] = _Measured(path)
            measured[path].record(status, started)

    return call
