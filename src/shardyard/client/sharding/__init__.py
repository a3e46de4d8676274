"""The client of sharded queues.

async with ShardingClient("http://127.0.0.1:7400") as client:
    images = await client.declare_exchange("images", "x-modulus-hash")
    await images.publish(b"...", routing_key="cat.png")
    async with client.channel(prefetch=100) as channel:
        async for message in channel.consume("images"):
            await message.ack()
"""

from shardyard.client.sharding.api import Channel, Client, Consumer, Exchange, Message
from shardyard.client.sharding.client import ShardingClient
from shardyard.model.sharding import OutgoingMessage

__all__ = ["Channel", "Client", "Consumer", "Exchange", "Message", "OutgoingMessage", "ShardingClient"]
