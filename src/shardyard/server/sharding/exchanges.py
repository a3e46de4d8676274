"""Exchanges over HTTP: declare, bind, publish, get, purge, rebalance, delete."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from shardyard.model import InvalidValue, Stamp, UnknownQueue
from shardyard.model.sharding import Binding, Queue
from shardyard.model.sharding_errors import refusal
from shardyard.server.http import caller_of, read_body, request_body, respond
from shardyard.server.routing import StrictRoute
from shardyard.server.sharding.service import Service, authorised_service
from shardyard.sharding.topology import Topology
from shardyard.wire import sharding as wire

router = APIRouter(prefix="/v1/exchanges", tags=["exchanges"], route_class=StrictRoute)

Authorised = Annotated[Service, Depends(authorised_service)]
"""The service, as a parameter of every route that requires the broker's token."""


@router.get("")
async def list_exchanges(service: Authorised) -> Response:
    """All exchanges."""
    topology = await service.sharding.topology_cache.refresh()
    return respond([wire.ExchangeInfo.of(topology.exchanges[name]) for name in sorted(topology.exchanges)])


@router.post("", status_code=201, openapi_extra=request_body(wire.NewExchange))
async def declare_exchange(request: Request, service: Authorised) -> Response:
    """Declare an exchange. If a policy matches its name, its shards are created with it. If it exists already, nothing
    changes, and it must be the same."""
    body = await read_body(request, wire.NewExchange)
    check_path_name("exchange name", body.name)
    declared = await service.administer(
        service.sharding.administration.declare_exchange(body.exchange(), caller_of(request))
    )
    return respond(wire.ExchangeInfo.of(declared), 201)


@router.get("/{name}")
async def describe_exchange(name: str, service: Authorised) -> Response:
    """An exchange with its effective policy, its bindings and its shards, and what is in them."""
    topology = await service.sharding.topology_cache.refresh()
    exchange, policy = topology.exchange(name), topology.effective_policy(name)
    return respond(
        wire.ExchangeDescription(
            wire.ExchangeInfo.of(exchange),
            None if policy is None else wire.PolicyInfo.of(policy),
            [wire.BindingInfo.of(binding) for binding in topology.bindings(name)],
            await service.infos(topology.shards(name)),
        )
    )


@router.delete("/{name}")
async def delete_exchange(name: str, request: Request, service: Authorised, discard: bool = False) -> Response:
    """Delete an exchange. Shards with unread messages are left, and listed in the response: they can be consumed by
    their names, and are removed when they are empty. `discard`: delete these with their messages."""
    left = await service.administer(
        service.sharding.administration.delete_exchange(name, caller_of(request), discard=discard)
    )
    return respond(wire.Removed.of(name, left))


@router.get("/{name}/policy")
async def effective_policy(name: str, service: Authorised) -> Response:
    """The policy that applies to an exchange, if one does."""
    policy = (await service.sharding.topology_cache.refresh()).effective_policy(name)
    return respond(wire.EffectivePolicy(name, None if policy is None else wire.PolicyInfo.of(policy)))


@router.post("/{name}/bindings", status_code=201, openapi_extra=request_body(wire.NewBinding))
async def bind(name: str, request: Request, service: Authorised) -> Response:
    """Bind a queue to an exchange. Nothing changes if it is. `declare`: declare the queue first, if it does not
    exist."""
    body = await read_body(request, wire.NewBinding)
    if body.declare:
        check_path_name("queue name", body.queue)
    binding = Binding(name, body.queue, body.routing_key)
    await service.administer(service.sharding.administration.bind(binding, caller_of(request), declare=body.declare))
    return respond(wire.BindingInfo.of(binding), 201)


@router.delete("/{name}/bindings")
async def unbind(name: str, request: Request, service: Authorised, queue: str, routing_key: str = "") -> Response:
    """Undo a binding. Nothing changes if there is none: `was_bound` says whether there was."""
    binding = Binding(name, queue, routing_key)
    was_bound = await service.administer(service.sharding.administration.unbind(binding, caller_of(request)))
    return respond(wire.Unbound(name, queue, routing_key, was_bound))


@router.post("/{name}/messages", openapi_extra=request_body(wire.PublishMessages))
async def publish(name: str, request: Request, service: Authorised) -> Response:
    """Publish messages. They are durable when the response comes, which says how many queues took each of them. If one
    is not stored, because its queue is full or none takes it, the response is an error, whose field `refused` has the
    places of those that are not; the others are stored. With `mandatory` of false, it is none, and the response says
    which these are."""
    body = await read_body(request, wire.PublishMessages)
    messages = [message.message() for message in body.messages]
    routed, refused = await service.publish(name, messages, _stamp(body))
    if body.mandatory:
        outcomes = [refused.get(place, count) for place, count in enumerate(routed)]
        if (error := refusal(name, messages, outcomes, mandatory=True)) is not None:
            raise error
    return respond(wire.PublishResult(routed, {str(at): str(error) for at, error in refused.items()}))


def _stamp(body: wire.PublishMessages) -> Stamp | None:
    if (body.producer is None) != (body.sequence is None):
        raise InvalidValue("producer", body.producer, "both producer and sequence, or neither of them")
    return None if body.producer is None or body.sequence is None else Stamp(body.producer, body.sequence)


@router.post("/{name}/get", openapi_extra=request_body(wire.GetMessages))
async def get_messages(name: str, request: Request, service: Authorised) -> Response:
    """Messages of any shard that has some. They count as acknowledged."""
    body = await read_body(request, wire.GetMessages)
    shards = shards_of(await service.sharding.topology_cache.refresh(), name)
    return respond(await service.get(shards, body.max_messages))


@router.post("/{name}/purge")
async def purge(name: str, service: Authorised) -> Response:
    """Remove the messages of all shards that wait for delivery. If some could not be purged, because no node serves
    them for several seconds, the response is an error, whose fields say which these are; the others are purged."""
    shards = shards_of(await service.sharding.topology_cache.refresh(), name)
    return respond(wire.Purged(name, await service.purge_all(name, shards)))


@router.post("/{name}/rebalance")
async def rebalance(name: str, request: Request, service: Authorised) -> Response:
    """Move the unread messages of an exchange to the shards that its routing leads to now, in order per routing key.
    Publishers and consumers wait meanwhile."""
    done = await service.sharding.rebalancing.rebalance(name, caller_of(request))
    return respond(wire.RebalanceResult.of(done))


def shards_of(topology: Topology, name: str) -> tuple[Queue, ...]:
    """The shards that an exchange has, or had. `UnknownExchange` or `UnknownQueue` if there are none."""
    if not (shards := topology.shards(name)):
        topology.exchange(name)
        raise UnknownQueue(name)
    return shards


def check_path_name(what: str, name: str) -> None:
    """Names are in paths."""
    if "/" in name or (name and not name.strip(".")):
        raise InvalidValue(what, name, "a name without '/' and not only of dots, which have a meaning in paths")
