"""`shardyard exchanges consume|get`: messages."""

import asyncio
import base64
import contextlib
import os
import signal
import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.cli.options import Json, integer_option, value_option
from shardyard.cli.output import dumps, print_json, print_message, print_table, printable
from shardyard.cli.queues.options import Brokers
from shardyard.cli.queues.session import request
from shardyard.cli.sharding.options import path
from shardyard.cli.sharding.publish import publish
from shardyard.cli.sharding.session import with_client
from shardyard.model import InvalidCall, InvalidValue, UnknownExchange, UnknownQueue, whole_number
from shardyard.model.sharding import QueueKind
from shardyard.wire.sharding import MAX_GET, GetMessages

if TYPE_CHECKING:
    from shardyard.client.sharding import Message, ShardingClient

Source = Annotated[
    str, typer.Argument(metavar="NAME", help="The name of an exchange, or of a single queue.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the commands to `shardyard exchanges`."""
    app.command("publish")(publish)
    app.command("consume")(consume)
    app.command("get")(get)


def consume(
    name: Source,
    count: Annotated[int | None, integer_option("--count", "-n", help="Stop after this many messages.")] = None,
    seconds: Annotated[
        float | None, value_option("--seconds", metavar="SECONDS", help="Stop after this many seconds.")
    ] = None,
    prefetch: Annotated[
        int, integer_option("--prefetch", help="Messages of each shard that may be on their way here.")
    ] = 100,
    local: Annotated[bool, typer.Option("--local", help="Only shards that the broker itself owns.")] = False,
    brokers: Brokers = None,
    json: Annotated[bool, typer.Option("--json", help="Print each message as one line of JSON.")] = False,
) -> None:
    """Consume messages and print them as they come. Printed messages are acknowledged. Ctrl-C ends it.

    The consumer is attached to the shard with the fewest consumers, and reads others that have none. Prints queue,
    routing key and body, separated by tabs, and finally, on standard error, the number of messages. If all shards are
    draining, because their policy was cleared, it ends when they are empty.

    Examples:

      shardyard exchanges consume images

      shardyard exchanges consume images --count 100 --json

      shardyard exchanges consume 'sharding: images - a - 0' --seconds 10
    """
    if count is not None:
        whole_number("--count", count, at_least=1)
    if seconds is not None and not 0 < seconds < 2**40:
        raise InvalidValue("--seconds", seconds, "a number of more than 0")
    consuming = _Consuming(name, count, prefetch, local=local, json=json)

    async def until_stopped(client: "ShardingClient") -> None:
        task = asyncio.create_task(consuming.run(client))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        if seconds is not None:
            loop.call_later(seconds, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    try:
        with_client(brokers, until_stopped)
    except BrokenPipeError:  # the reader of our output has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    print_message(f"messages: {consuming.printed}")
    if consuming.is_gone:
        print_message(f"{name!r} is drained and gone")


def get(
    name: Source,
    count: Annotated[int, integer_option("--count", "-n", help="Get up to this many messages.")] = 1,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Get messages of any shard that has some, and acknowledge them.

    Examples:

      shardyard exchanges get images

      shardyard exchanges get images --count 10 --json
    """
    if not 1 <= count <= MAX_GET:
        raise InvalidValue("--count", count, f"a whole number from 1 to {MAX_GET}")
    body = GetMessages(count)
    try:
        found = request(brokers, "POST", path("exchanges", name, "get"), body)
    except UnknownExchange:
        found = request(brokers, "POST", path("queues", name, "get"), body)
    if json:
        print_json(found)
        return
    rows = [
        {
            "queue": message["queue"],
            "routing_key": message["routing_key"],
            "body": message["body"] if message["body"] is not None else f"base64:{message['body_base64']}",
            "redelivered": message["redelivered"],
        }
        for message in found
    ]
    print_table(rows)
    if not rows:
        print_message(f"no messages in {name!r}")


class _Consuming:
    """Prints and acknowledges messages, until there are enough, or what it consumes is gone."""

    def __init__(self, name: str, count: int | None, prefetch: int, *, local: bool, json: bool) -> None:
        self._name = name
        self._count = count
        self._prefetch = prefetch
        self._local = local
        self._json = json
        self.printed = 0
        self.is_gone = False

    async def run(self, client: "ShardingClient") -> None:
        source = await _source(client, self._name)
        try:
            await self._print_messages(client)
        except UnknownQueue:
            if source is _Source.QUEUE:
                raise
            if source is _Source.EXCHANGE:
                advice = f"`shardyard policies set NAME '^{self._name}$' --shards-per-node 2` gives it some"
                raise InvalidCall(f"exchange {self._name!r} has no shards: {advice}") from None
            self.is_gone = True  # draining shards are removed when their last message is acknowledged

    async def _print_messages(self, client: "ShardingClient") -> None:
        async with client.channel(prefetch=self._prefetch) as channel:
            async for message in channel.consume(self._name, local=self._local):
                sys.stdout.write(_line(message, json=self._json))
                sys.stdout.flush()
                await message.ack()
                self.printed += 1
                if self.printed == self._count:
                    return


class _Source(Enum):
    """What is consumed."""

    SHARDS = "a shard, or an exchange that has some"
    EXCHANGE = "an exchange without shards"
    QUEUE = "another queue"


async def _source(client: "ShardingClient", name: str) -> _Source:
    """What has this name. `UnknownQueue` if nothing has."""
    try:
        return _Source.SHARDS if await client.queues(name) else _Source.EXCHANGE
    except UnknownExchange:
        kind = (await client.administration.queue(name)).kind
        return _Source.SHARDS if kind == QueueKind.SHARD else _Source.QUEUE


def _line(message: "Message", *, json: bool) -> str:
    text = _text(message.body)
    if json:
        row: dict[str, object] = {"queue": message.queue, "routing_key": message.routing_key}
        row |= {"body": text} if text is not None else {"body_base64": base64.b64encode(message.body).decode()}
        row["headers"] = {name: value.decode(errors="replace") for name, value in message.headers}
        row["properties"] = dict(message.properties)
        row |= {"redelivered": message.redelivered, "delivery_count": message.delivery_count}
        return dumps(row) + "\n"
    shown = text if text is not None else message.body.decode(errors="backslashreplace")
    cells = [cell.replace("\t", "\\t").replace("\n", "\\n") for cell in (message.queue, message.routing_key, shown)]
    if sys.stdout.isatty():
        cells = [printable(cell) for cell in cells]
    return "\t".join(cells) + "\n"


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
