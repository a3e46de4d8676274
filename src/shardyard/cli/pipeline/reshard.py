"""`shardyard pipeline reshard`: a topic on other partitions."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from shardyard.cli.output import Count, Json, print_json, print_table
from shardyard.cli.pipeline.options import LogUrl, Master, Memory, partition_counts, spark_session
from shardyard.cli.place import HashName
from shardyard.model import InvalidCall, whole_number
from shardyard.placement import PARTITIONERS


def reshard(
    topic: Annotated[str, typer.Argument(help="The topic to rewrite.")],
    log: LogUrl,
    partitions: Annotated[int | None, Count("--partitions", "-p", help="How many there will be.")] = None,
    partitioner: Annotated[
        str | None, typer.Option("--partitioner", help=f"One of {', '.join(PARTITIONERS)}. Default: the topic's own.")
    ] = None,
    hash_name: HashName = None,
    target: Annotated[
        str | None, typer.Option("--target", help="The new topic's name. Default: orders.2 after orders, and so on.")
    ] = None,
    registry: Annotated[
        str | None, typer.Option("--registry", help="Where groups keep their positions, to be carried over.")
    ] = None,
    no_groups: Annotated[bool, typer.Option("--no-groups", help="There are no groups to carry over.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Give up a reshard that is under way.")] = False,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Rewrite a topic to another number of partitions or another partitioner, while producers go on writing.

    The records of each key stay in order. All is copied and checked, then the topic is sealed for a moment, the rest is
    copied, and the topic moves: producers (Sender) and groups go on with the new one by themselves. The old one stays
    until it is deleted. Cut off, the same command goes on where it stopped.

    Examples:

      shardyard pipeline reshard orders --partitions 24 --log sqlite:///data/log --registry sqlite:///data/registry.db

      shardyard pipeline reshard orders --abort --log sqlite:///data/log
    """
    say = Console(stderr=True, highlight=False, soft_wrap=True)
    if abort:
        from shardyard.pipeline.reshard.job import abort as give_up  # noqa: PLC0415 Spark is slow to import

        given_up = {"topic": topic, "deleted": give_up(log, topic)}
        if json:
            print_json(given_up)
        else:
            print_table([given_up])
        return
    if partitions is None:
        raise InvalidCall("expected --partitions, or --abort")
    whole_number("partitions", partitions, at_least=1)
    if (registry is None) != no_groups:
        raise InvalidCall("expected either --registry, to carry positions of groups over, or --no-groups")
    partition_counts(log, [topic])
    from shardyard.pipeline.reshard.reshard import check_registry  # noqa: PLC0415 as above
    from shardyard.pipeline.reshard.reshard import reshard as run  # noqa: PLC0415

    if registry is not None:
        check_registry(registry)
    with spark_session("reshard", master, memory) as spark:
        done = run(
            spark,
            log,
            topic,
            partitions=partitions,
            partitioner=partitioner,
            hash_=hash_name,
            target=target,
            registry=registry,
            on_step=lambda text: say.print(f"[dim]{text}[/]"),
        )
    if json:
        print_json(asdict(done))
    else:
        print_table([{name: value for name, value in asdict(done).items() if name != "groups"}])
        print_table([{"group": group, "records that come again": again} for group, again in done.groups.items()])
