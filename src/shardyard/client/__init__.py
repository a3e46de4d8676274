"""The client: publish to topics and consume from them through brokers.

    async with Producer("http://127.0.0.1:7400") as producer:
        await producer.send("orders", b"...", key=b"customer-7")

    async with Consumer("http://127.0.0.1:7400", "billing", ["orders"]) as consumer:
        await consumer.run(handle)

`BlockingProducer` and `BlockingConsumer` are the same for programs without an event loop.
"""

from shardyard.client.blocking import BlockingConsumer, BlockingProducer
from shardyard.client.brokers import Brokers
from shardyard.client.consumer import Consumer
from shardyard.client.handling import Message
from shardyard.client.producer import Producer

__all__ = ["BlockingConsumer", "BlockingProducer", "Brokers", "Consumer", "Message", "Producer"]
