"""`shardyard pipeline reshard`: rewrite a topic to another number of partitions, or another partitioner."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import contextlib
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import print_json, print_table
from shardyard.cli.pipeline.options import LogUrl, Master, Memory, partition_counts, spark_session
from shardyard.model import InvalidCall, whole_number
from shardyard.placement.names import HASH_NAMES, PARTITIONERS


def reshard(
    topic: Annotated[str, typer.Argument(help="The topic to rewrite.")],
    log: LogUrl,
    partitions: Annotated[
        int | None, integer_option("--partitions", "-p", help="The new number of partitions.")
    ] = None,
    partitioner: Annotated[
        str | None,
        typer.Option(
            "--partitioner", metavar="NAME", help=f"One of {', '.join(PARTITIONERS)}. Default: the topic's own."
        ),
    ] = None,
    hash_name: Annotated[
        str | None,
        typer.Option(
            "--hash",
            metavar="NAME",
            help=f"One of {', '.join(HASH_NAMES)}. Default: the topic's own, or that of a new partitioner.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="TOPIC", help="The new topic's name. Default: such as orders.2 for orders."),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option("--registry", metavar="URL", help="The registry of the groups whose positions are carried over."),
    ] = None,
    no_groups: Annotated[
        bool, typer.Option("--no-groups", help="No group reads the topic: there are no positions to carry over.")
    ] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Abort a reshard that is in progress.")] = False,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Rewrite a topic to another number of partitions or another partitioner, while producers keep writing.

    The records of each key stay in order. The records are copied to a new topic and verified, with Spark if there are
    many; then the old topic is sealed for a moment while the last ones are copied. From then on producers (Sender) and
    groups use the new topic, automatically. The old one stays until you delete it. If the command is interrupted, run
    it again to continue.

    Examples:

      shardyard pipeline reshard orders --partitions 24 --log sqlite:///data/log --registry sqlite:///data/registry.db

      shardyard pipeline reshard orders --abort --log sqlite:///data/log
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if abort:
        from shardyard.pipeline.reshard.job import abort as run_abort

        aborted = {"topic": topic, "deleted": run_abort(log, topic)}
        if json:
            print_json(aborted)
        else:
            print_table([aborted])
        return
    if partitions is None:
        raise InvalidCall("expected --partitions, or --abort")
    whole_number("partitions", partitions, at_least=1)
    if (registry is None) != no_groups:
        raise InvalidCall("expected either --registry, to carry over the positions of groups, or --no-groups")
    partition_counts(log, [topic])
    from shardyard.pipeline.reshard.reshard import check_registry
    from shardyard.pipeline.reshard.reshard import reshard as run

    if registry is not None:
        check_registry(registry)
    with contextlib.ExitStack() as stack:
        done = run(
            lambda: stack.enter_context(spark_session("reshard", master, memory)),
            log,
            topic,
            partitions=partitions,
            partitioner=partitioner,
            hash_=hash_name,
            target=target,
            registry=registry,
            on_step=lambda text: console.print(f"[dim]{text}[/]"),
        )
    if json:
        print_json(asdict(done))
    else:
        print_table([{name: value for name, value in asdict(done).items() if name != "groups"}])
        print_table([{"group": group, "records redelivered": count} for group, count in done.groups.items()])
