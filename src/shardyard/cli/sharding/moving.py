"""`shardyard exchanges move`: the messages of a RabbitMQ's sharded exchange."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from shardyard.cli.options import Json, value_option
from shardyard.cli.output import print_json, print_message, print_table
from shardyard.cli.queues.options import Brokers
from shardyard.cli.sharding.options import Exchange
from shardyard.cli.sharding.session import with_client
from shardyard.model.extras import require

if TYPE_CHECKING:
    from shardyard.client.sharding import ShardingClient


def move(
    exchange: Exchange,
    source: Annotated[
        list[str],
        typer.Option(
            "--from",
            metavar="URL",
            envvar="SHARDYARD_RABBITMQ",
            help="The address of the RabbitMQ; repeat it for each node of a cluster.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str | None, value_option("--to", metavar="EXCHANGE", help="The exchange here, if it has another name.")
    ] = None,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Move the messages of a sharded exchange from RabbitMQ to Shardyard. None is lost, and none is stored twice: if
    this is interrupted, run it again.

    Declare the exchange here first, and set its policy. Stop the consumers in RabbitMQ; publishers may go on, and what
    they publish in the meantime is moved, too. The environment variable SHARDYARD_RABBITMQ keeps a password out of the
    list of processes.

    Examples:

      shardyard exchanges move shard.images --from amqp://guest:guest@localhost/
    """
    require("rabbitmq", "moving messages from RabbitMQ")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed:,} messages"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"moving {exchange}", total=None)

        async def work(client: "ShardingClient") -> dict[str, int]:
            from shardyard.client.rabbitmq import RabbitMQClient, move_exchange  # noqa: PLC0415 needs an extra

            async with RabbitMQClient(source) as rabbitmq:
                return await move_exchange(
                    rabbitmq, client, exchange, to=to, moved=lambda _, count: progress.advance(task, count)
                )

        moved = with_client(brokers, work)
    rows = [{"queue": queue, "moved": count} for queue, count in moved.items()]
    if json:
        print_json(rows)
    else:
        print_table(rows)
        print_message(f"{sum(moved.values()):,} messages were moved to {to or exchange}")
