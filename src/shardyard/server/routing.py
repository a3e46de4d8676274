"""Routes whose query parameters are declared: others are refused, since a misspelt one would be ignored silently."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from msgspec import Struct

from shardyard.model import InvalidValue
from shardyard.wire.validation import unknown


def query_parameters(kind: type[Struct]) -> dict[str, Any]:
    """The query of a request, as OpenAPI describes it, for a route that reads it by `read_query`."""
    _, components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    described = components[kind.__name__]
    required = described["required"]
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name in required, "schema": schema}
            for name, schema in described["properties"].items()
        ]
    }


class StrictRoute(APIRoute):
    """A route that answers 400 to query parameters which neither its function nor `query_parameters` declares."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        declared = [field.alias for field in self.dependant.query_params]
        declared += [each["name"] for each in (self.openapi_extra or {}).get("parameters", ())]

        async def check_and_handle(request: Request) -> Response:
            if request.scope["query_string"]:  # parsing takes a while
                _check(request, declared)
            return await handle(request)

        return check_and_handle


def _check(request: Request, declared: list[str]) -> None:
    for name in request.query_params:
        if name not in declared:
            if not declared:
                raise InvalidValue("query parameter", name, f"none for {request.method} {request.url.path}")
            raise unknown("query parameter", name, declared)
