"""Nodes over HTTP: list, forget."""

from collections import Counter

from fastapi import APIRouter, Request, Response

from shardyard.server.http import caller_of, read_body, request_body, respond
from shardyard.server.routing import StrictRoute
from shardyard.server.sharding.exchanges import Authorised
from shardyard.wire import sharding as wire

router = APIRouter(prefix="/v1/nodes", tags=["nodes"], route_class=StrictRoute)


@router.get("")
async def list_nodes(service: Authorised) -> Response:
    """All nodes that ever joined and were not forgotten."""
    sharding = service.sharding
    topology = await sharding.topology_cache.refresh()
    await sharding.directory.refresh()
    members = sharding.directory.members()
    created = Counter(queue.node for queue in topology.queues.values())
    owners = (sharding.directory.owner_of(queue.partition) for queue in topology.queues.values())
    owned = Counter(owner.member for owner in owners if owner is not None)
    return respond(
        [
            wire.NodeInfo(
                name,
                members[name].address if name in members else None,
                name in members,
                created[name],
                owned[name],
            )
            for name in sorted(topology.nodes)
        ]
    )


@router.post("/owned-queues", openapi_extra=request_body(wire.QueueNames))
async def owned_queues(request: Request, service: Authorised) -> Response:
    """What is in those of these queues that this node owns. Nodes ask each other."""
    return respond(await service.owned((await read_body(request, wire.QueueNames)).names))


@router.delete("/{name}")
async def forget_node(name: str, request: Request, service: Authorised) -> Response:
    """Forget a node that does not run and will not come back. Its shards take no more messages; those with unread ones
    are left, and listed in the response."""
    left = await service.administer(service.sharding.administration.forget_node(name, caller_of(request)))
    return respond(wire.Removed.of(name, left))
