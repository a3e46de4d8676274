"""Exchanges, queues, policies and nodes: requests of the HTTP API to any node."""

from typing import TypeVar

from shardyard.client.brokers import Brokers
from shardyard.client.paths import path
from shardyard.model.sharding import Policy
from shardyard.wire import sharding as wire
from shardyard.wire.codec import encode
from shardyard.wire.media import JSON

T = TypeVar("T")

REBALANCE_SECONDS = 600.0
"""The longest time for a rebalance, which copies the backlog."""
PURGE_SECONDS = 15.0
"""The longest time for a purge, which waits for the next owners of shards whose node has died."""


class Administration:
    """Calls any node, and fails over to the next one. All of these calls can safely be repeated."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def declare_exchange(self, body: wire.NewExchange) -> wire.ExchangeInfo:
        return await self._send("POST", path("exchanges"), wire.ExchangeInfo, body)

    async def exchanges(self) -> list[wire.ExchangeInfo]:
        return await self._send("GET", path("exchanges"), list[wire.ExchangeInfo])

    async def describe(self, exchange: str) -> wire.ExchangeDescription:
        return await self._send("GET", path("exchanges", exchange), wire.ExchangeDescription)

    async def delete_exchange(self, name: str) -> wire.Removed:
        return await self._send("DELETE", path("exchanges", name), wire.Removed)

    async def purge_exchange(self, name: str) -> wire.Purged:
        return await self._send("POST", path("exchanges", name, "purge"), wire.Purged, wait=PURGE_SECONDS)

    async def rebalance(self, name: str) -> wire.RebalanceResult:
        where = path("exchanges", name, "rebalance")
        return await self._send("POST", where, wire.RebalanceResult, wait=REBALANCE_SECONDS)

    async def effective_policy(self, exchange: str) -> Policy | None:
        found = await self._send("GET", path("exchanges", exchange, "policy"), wire.EffectivePolicy)
        return None if found.policy is None else found.policy.policy()

    async def bind(self, exchange: str, queue: str, routing_key: str) -> None:
        where = path("exchanges", exchange, "bindings")
        await self._send("POST", where, wire.BindingInfo, wire.NewBinding(queue, routing_key))

    async def unbind(self, exchange: str, queue: str, routing_key: str) -> None:
        query = {"queue": queue, "routing_key": routing_key}
        await self._brokers.call("DELETE", path("exchanges", exchange, "bindings"), query=query)

    async def declare_queue(self, name: str) -> wire.QueueInfo:
        return await self._send("POST", path("queues"), wire.QueueInfo, wire.NewQueue(name))

    async def queues(self, exchange: str | None = None) -> list[wire.QueueInfo]:
        response = await self._brokers.get(path("queues"), exchange=exchange)
        return response.decode(list[wire.QueueInfo])

    async def queue(self, name: str) -> wire.QueueInfo:
        return await self._send("GET", path("queues", name), wire.QueueInfo)

    async def delete_queue(self, name: str) -> wire.Purged:
        return await self._send("DELETE", path("queues", name), wire.Purged)

    async def purge_queue(self, name: str) -> wire.Purged:
        return await self._send("POST", path("queues", name, "purge"), wire.Purged, wait=PURGE_SECONDS)

    async def policies(self) -> list[Policy]:
        return [each.policy() for each in await self._send("GET", path("policies"), list[wire.PolicyInfo])]

    async def set_policy(self, name: str, body: wire.NewPolicy) -> Policy:
        return (await self._send("PUT", path("policies", name), wire.PolicyInfo, body)).policy()

    async def clear_policy(self, name: str) -> wire.Removed:
        return await self._send("DELETE", path("policies", name), wire.Removed)

    async def nodes(self) -> list[wire.NodeInfo]:
        return await self._send("GET", path("nodes"), list[wire.NodeInfo])

    async def forget_node(self, name: str) -> wire.Removed:
        return await self._send("DELETE", path("nodes", name), wire.Removed)

    async def _send(self, method: str, where: str, kind: type[T], body: object = None, *, wait: float = 0.0) -> T:
        """`wait`: seconds that the node may take for what it does."""
        content = None if body is None else encode(body)
        headers = {} if body is None else {"Content-Type": JSON}
        timeout = self._brokers.failover_seconds
        response = await self._brokers.call(method, where, content, headers, wait=wait, timeout=timeout)
        return response.decode(kind)
