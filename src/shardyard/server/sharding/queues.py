"""Queues over HTTP, the shards of exchanges among them: declare, show, get, purge, delete."""

from fastapi import APIRouter, Request, Response

from shardyard.model import PseudoQueue
from shardyard.model.sharding import Queue
from shardyard.server.http import caller_of, read_body, request_body, respond
from shardyard.server.routing import StrictRoute
from shardyard.server.sharding.exchanges import Authorised, check_path_name
from shardyard.sharding.topology import Topology
from shardyard.wire import sharding as wire

router = APIRouter(prefix="/v1/queues", tags=["queues"], route_class=StrictRoute)


@router.get("")
async def list_queues(service: Authorised, exchange: str | None = None) -> Response:
    """All queues, or the shards of an exchange, and what is in them."""
    topology = await service.sharding.topology_cache.refresh()
    if exchange is None:
        queues = [topology.queues[name] for name in sorted(topology.queues)]
    else:
        queues = list(topology.shards(exchange))
        if not queues:
            topology.exchange(exchange)
    return respond(await service.infos(queues))


@router.post("", status_code=201, openapi_extra=request_body(wire.NewQueue))
async def declare_queue(request: Request, service: Authorised) -> Response:
    """Declare a queue. Nothing changes if it exists. The names of sharded exchanges and of shards are refused."""
    body = await read_body(request, wire.NewQueue)
    check_path_name("queue name", body.name)
    declared = await service.administer(service.sharding.administration.declare_queue(body.name, caller_of(request)))
    return respond(wire.QueueInfo.of(declared), 201)


@router.get("/{name}")
async def describe_queue(name: str, service: Authorised) -> Response:
    """A queue, and what is in it."""
    topology = await service.sharding.topology_cache.refresh()
    (info,) = await service.infos([_queue(topology, name, "shown")])
    return respond(info)


@router.delete("/{name}")
async def delete_queue(name: str, request: Request, service: Authorised) -> Response:
    """Delete a queue with its messages: one that was declared, one of dead letters, or a shard that drains."""
    dropped = await service.administer(service.sharding.administration.delete_queue(name, caller_of(request)))
    return respond(wire.Purged(name, dropped))


@router.post("/{name}/get", openapi_extra=request_body(wire.GetMessages))
async def get_messages(name: str, request: Request, service: Authorised) -> Response:
    """Messages of a queue. They count as acknowledged."""
    body = await read_body(request, wire.GetMessages)
    topology = await service.sharding.topology_cache.refresh()
    return respond(await service.get([_queue(topology, name, "got from")], body.max_messages))


@router.post("/{name}/purge")
async def purge(name: str, service: Authorised) -> Response:
    """Remove the messages of a queue that wait for delivery."""
    queue = _queue(await service.sharding.topology_cache.refresh(), name, "purged")
    return respond(wire.Purged(name, await service.purge(queue.name)))


def _queue(topology: Topology, name: str, operation: str) -> Queue:
    """The queue; `PseudoQueue` if it is the name of a sharded exchange, whose routes are others."""
    if name not in topology.queues and topology.is_sharded(name):
        raise PseudoQueue(name, operation)
    return topology.queue(name)
