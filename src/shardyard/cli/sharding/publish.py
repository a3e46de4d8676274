"""`shardyard exchanges publish`: publish messages from arguments or standard input."""

import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import structs

from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import print_json, print_message, print_table
from shardyard.cli.queues.options import Brokers
from shardyard.cli.sharding.options import Exchange
from shardyard.cli.sharding.session import with_client
from shardyard.cli.stdin import line_batches
from shardyard.model import InvalidCall, InvalidValue, ShardyardError, whole_number
from shardyard.model.errors import NotStored
from shardyard.model.sharding import OutgoingMessage

if TYPE_CHECKING:
    from shardyard.client.sharding import ShardingClient

BATCH_MESSAGES = 500
MAX_LINE_BYTES = 4 * 1024 * 1024


def publish(
    exchange: Exchange,
    bodies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BODY...]",
            help="Message bodies. Without any, each non-empty line of standard input is a message.",
        ),
    ] = None,
    routing_key: Annotated[
        str, typer.Option("--routing-key", "-k", metavar="KEY", help="The routing key.", show_default=False)
    ] = "",
    headers: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="A header; may be repeated.")
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", metavar="NAME=VALUE", help="A property, such as message_id=7; may be repeated."),
    ] = None,
    cc: Annotated[
        list[str] | None, typer.Option("--cc", metavar="KEY", help="A further routing key; may be repeated.")
    ] = None,
    expiration: Annotated[
        int | None, integer_option("--expiration-ms", help="Milliseconds after which it is no longer delivered.")
    ] = None,
    optional: Annotated[
        bool, typer.Option("--optional", help="Do not fail if no queue takes a message; it is dropped.")
    ] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Publish messages, and return when they are durable. Prints the number of messages, in how many queues they were
    stored in total, and how many no queue took (`unroutable`).

    Lines of standard input are published as they come.

    Examples:

      shardyard exchanges publish images hello --routing-key cat.png

      cat bodies.txt | shardyard exchanges publish images -k cat.png --header source=import
    """
    if expiration is not None:
        whole_number("--expiration-ms", expiration, at_least=0)
    template = OutgoingMessage(
        b"",
        routing_key,
        tuple((name, os.fsencode(value)) for name, value in _pairs("--header", headers)),
        tuple(cc or ()),
        (),
        tuple(_pairs("--property", properties)),
        expiration,
    )
    publishing = _Publishing(exchange, template, mandatory=not optional)
    batches = _given([os.fsencode(body) for body in bodies]) if bodies else _lines()
    publishing.run(brokers, batches)
    row = publishing.row()
    if json:
        print_json(row)
    else:
        print_table([row])


class _Publishing:
    """Publishes batches one after the other, and says how far it got if that fails or is interrupted."""

    def __init__(self, exchange: str, template: OutgoingMessage, *, mandatory: bool) -> None:
        self._exchange = exchange
        self._template = template
        self._mandatory = mandatory
        self._counts: list[int] = []
        """For each message that was published, how many queues took it."""
        self._unknown = 0
        """Messages that were sent, and are not acknowledged yet."""

    def run(self, brokers: list[str] | None, batches: AsyncIterator[list[bytes]]) -> None:
        async def work(client: "ShardingClient") -> None:
            target = client.exchange(self._exchange)
            async for bodies in batches:
                messages = [structs.replace(self._template, body=body) for body in bodies]
                self._unknown = len(messages)
                self._counts += await target.publish_batch(messages, mandatory=self._mandatory)
                self._unknown = 0

        try:
            with_client(brokers, work)
        except KeyboardInterrupt:
            print_message(f"interrupted ({self._progress()})")
            raise
        except (InvalidCall, NotStored) as error:  # nothing of the last batch was stored, or the error says what was
            if not self._counts:
                raise
            before = " before these" if isinstance(error, NotStored) else ""  # its places are those in the last batch
            raise ShardyardError(f"{error} (the first {len(self._counts)} messages were published{before})") from None
        except ShardyardError as error:
            if not self._counts and not self._unknown:
                raise
            raise ShardyardError(f"{error} ({self._progress()})") from None

    def _progress(self) -> str:
        may_be = f"; the next {self._unknown} may have been, too" if self._unknown else ""
        return f"the first {len(self._counts)} messages were published{may_be}"

    def row(self) -> dict[str, int]:
        """What was published."""
        return {"messages": len(self._counts), "stored": sum(self._counts), "unroutable": self._counts.count(0)}


async def _given(bodies: list[bytes]) -> AsyncIterator[list[bytes]]:
    for first in range(0, len(bodies), BATCH_MESSAGES):
        yield bodies[first : first + BATCH_MESSAGES]


async def _lines() -> AsyncIterator[list[bytes]]:
    async for lines in line_batches(BATCH_MESSAGES, MAX_LINE_BYTES):
        if bodies := [line for line in lines if line]:
            yield bodies


def _pairs(option: str, given: list[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for pair in given or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidValue(option, pair, "NAME=VALUE")
        pairs.append((name, value))
    return pairs
