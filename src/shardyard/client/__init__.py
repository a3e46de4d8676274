"""The clients: publish to topics and consume from them through brokers, and chat through messaging servers.

    async with Producer("http://127.0.0.1:7400") as producer:
        await producer.send("orders", b"...", key=b"customer-7")

    async with Consumer("http://127.0.0.1:7400", "billing", ["orders"]) as consumer:
        await consumer.run(handle)

`BlockingProducer` and `BlockingConsumer` are the same for programs without an event loop.

    async with MessagingClient("http://127.0.0.1:7500", user="alice") as client:
        await client.send("bob", "hello")
        async for message in client: ...
"""

from typing import TYPE_CHECKING, Any

from shardyard.client.blocking import BlockingConsumer, BlockingProducer
from shardyard.client.brokers import Brokers
from shardyard.client.consumer import Consumer
from shardyard.client.handling import Message
from shardyard.client.producer import Producer

if TYPE_CHECKING:
    from shardyard.client.messaging import MessagingClient

__all__ = ["BlockingConsumer", "BlockingProducer", "Brokers", "Consumer", "Message", "MessagingClient", "Producer"]


def __getattr__(name: str) -> Any:
    """Imports the messaging client when it is first used: it loads aiohttp, which takes longer than all the rest."""
    if name == "MessagingClient":
        from shardyard.client.messaging import MessagingClient  # noqa: PLC0415

        return MessagingClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
