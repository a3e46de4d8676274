"""Policies over HTTP: set, list, show, clear."""

from fastapi import APIRouter, Request, Response

from shardyard.model import UnknownPolicy
from shardyard.server.http import caller_of, read_body, request_body, respond
from shardyard.server.routing import StrictRoute
from shardyard.server.sharding.exchanges import Authorised, check_path_name
from shardyard.wire import sharding as wire

router = APIRouter(prefix="/v1/policies", tags=["policies"], route_class=StrictRoute)


@router.get("")
async def list_policies(service: Authorised) -> Response:
    """All policies."""
    topology = await service.sharding.topology_cache.refresh()
    return respond([wire.PolicyInfo.of(topology.policies[name]) for name in sorted(topology.policies)])


@router.get("/{name}")
async def show_policy(name: str, service: Authorised) -> Response:
    """A policy."""
    policies = (await service.sharding.topology_cache.refresh()).policies
    if name not in policies:
        raise UnknownPolicy(name)
    return respond(wire.PolicyInfo.of(policies[name]))


@router.put("/{name}", openapi_extra=request_body(wire.NewPolicy))
async def set_policy(name: str, request: Request, service: Authorised) -> Response:
    """Set a policy, or replace the one of that name. It applies at once to the exchanges whose names match, and to
    those that are declared later. With fewer shards than before, the surplus ones take no more messages: those with
    unread messages are listed in the response, can be consumed by their names, and are removed when they are empty."""
    body = await read_body(request, wire.NewPolicy)
    check_path_name("policy name", name)
    policy = body.policy(name)
    left = await service.administer(service.sharding.administration.set_policy(policy, caller_of(request)))
    return respond(wire.PolicySet.after(policy, left))


@router.delete("/{name}")
async def clear_policy(name: str, request: Request, service: Authorised) -> Response:
    """Clear a policy. Shards with unread messages are left, and listed in the response: they can be consumed by their
    names, and are removed when they are empty."""
    left = await service.administer(service.sharding.administration.clear_policy(name, caller_of(request)))
    return respond(wire.Removed.of(name, left))
