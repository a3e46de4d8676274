"""A client of sharded queues for a command."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from shardyard.cli.queues.session import RETRY_SECONDS, addresses, explain_errors, request, token

if TYPE_CHECKING:
    from shardyard.client.sharding import ShardingClient

T = TypeVar("T")


def with_client(brokers: Sequence[str] | None, work: "Callable[[ShardingClient], Awaitable[T]]") -> T:
    """Do something with a client."""
    request(brokers, "GET", "/healthz")  # fail at once if no broker can be reached

    async def whole() -> T:
        from shardyard.client.sharding import ShardingClient  # noqa: PLC0415 aiohttp takes longer than all the rest

        async with ShardingClient(addresses(brokers), token=token(), retry_seconds=5 * RETRY_SECONDS) as client:
            return await work(client)

    with explain_errors():
        return asyncio.run(whole())
