"""The same messages go to the same shards here and in a real RabbitMQ."""

import asyncio
import random
import string

import aio_pika
from aio_pika.abc import AbstractConnection, AbstractIncomingMessage

from shardyard.client.rabbitmq.messages import to_amqp
from shardyard.client.rabbitmq.shards import queues_of
from shardyard.model.sharding import Exchange, ExchangeType, OutgoingMessage, Policy, shard_name
from shardyard.sharding.routing import distribute
from shardyard.sharding.shards import with_shards
from shardyard.sharding.topology import Topology
from tests.rabbitmq import RabbitMQ

EXCHANGE = "routed"
NODE = "a"
SHARDS = 12
"""More than ten, because their names are not in the order of their numbers then."""
KEYS = 5_000


def random_key(numbers: random.Random) -> str:
    return "".join(numbers.choices(string.printable + "äß漢😀", k=numbers.randrange(30)))


def random_messages() -> list[OutgoingMessage]:
    """Every other one has CC or BCC, or both."""
    numbers = random.Random(7)

    def keys() -> tuple[str, ...]:
        return tuple(random_key(numbers) for _ in range(numbers.choice((0, 1, 3))))

    return [
        OutgoingMessage(b"%d" % n, random_key(numbers), cc=keys() if n % 2 else (), bcc=keys() if n % 2 else ())
        for n in range(KEYS)
    ]


def our_shards(messages: list[OutgoingMessage]) -> dict[bytes, int]:
    """The index of the shard that Shardyard chooses, by body."""
    names = {shard_name(EXCHANGE, NODE, index): index for index in range(SHARDS)}
    exchange, policy = Exchange(EXCHANGE, ExchangeType.MODULUS_HASH), Policy("all", ".*", SHARDS)
    topology = with_shards(Topology(1, {EXCHANGE: exchange}, {"all": policy}, nodes=frozenset({NODE})))
    by_queue = distribute(topology, EXCHANGE, messages).by_queue
    return {messages[place].body: names[name] for name, places in by_queue.items() for place in places}


async def their_shards(url: str, connection: AbstractConnection, messages: list[OutgoingMessage]) -> dict[bytes, int]:
    """The index of the shard that RabbitMQ has stored each message in, by body."""
    channel = await connection.channel()
    exchange = await channel.get_exchange(EXCHANGE)
    for start in range(0, KEYS, 500):
        part = messages[start : start + 500]
        await asyncio.gather(*(exchange.publish(to_amqp(message), message.routing_key) for message in part))
    found: dict[bytes, int] = {}
    all_found = asyncio.Event()
    for name in await queues_of([url], EXCHANGE):
        index = int(name.rpartition(" - ")[2])

        async def note(message: AbstractIncomingMessage, index: int = index) -> None:
            found[message.body] = index
            if len(found) == KEYS:
                all_found.set()

        queue = await channel.get_queue(name)
        await queue.consume(note, no_ack=True)
    async with asyncio.timeout(60):
        await all_found.wait()
    return found


def test_random_keys_with_and_without_cc_go_to_the_same_shards_as_in_rabbitmq(rabbitmq: RabbitMQ) -> None:
    async def compare() -> None:
        async with await aio_pika.connect(rabbitmq.url) as connection, connection.channel() as channel:
            rabbitmq.set_policy(EXCHANGE, f"^{EXCHANGE}$", f'{{"shards-per-node": {SHARDS}}}')
            await channel.declare_exchange(EXCHANGE, "x-modulus-hash", durable=True)
            messages = random_messages()
            ours = our_shards(messages)
            assert set(ours.values()) == set(range(SHARDS))
            assert ours == await their_shards(rabbitmq.url, connection, messages)

    asyncio.run(compare())
