"""`shardyard topics`: make, look at, resize, set, delete."""

import sys
from typing import Annotated, Any

import typer

from shardyard.cli.output import Count, Json, print_json, print_table
from shardyard.cli.queues.options import Brokers, Settings, Topic, ask, changes, checked, say

app = typer.Typer(name="topics", help="Make topics, look at them, resize, set and delete them.", no_args_is_help=True)

Partitions = Annotated[int, Count("--partitions", "-p", help="How many partitions it is to have.")]
_OWN = "shardyard."
_COLUMNS = ("name", "partitions", "receiving", "kind", "partitioner", "hash")


@app.command("list")
def list_topics(
    every: Annotated[bool, typer.Option("--all", help="Also those that Shardyard keeps for itself.")] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """List the topics.

    Examples:

      shardyard topics list

      shardyard topics list --all --broker http://10.0.0.5:7400 --json
    """
    found = [topic for topic in ask(brokers, "GET", "/v1/topics") if every or not topic["name"].startswith(_OWN)]
    _print(found, json=json)


@app.command("create")
def create(
    topic: Topic,
    partitions: Partitions = 12,
    partitioner: Annotated[str, typer.Option("--partitioner", help="How a key finds its partition.")] = "modulus",
    hash_name: Annotated[str | None, typer.Option("--hash", help="Of keys. Default: the partitioner's own.")] = None,
    retention_ms: Annotated[int | None, Count("--retention-ms", help="Drop records that are older.")] = None,
    retention_bytes: Annotated[
        int | None, Count("--retention-bytes", help="Drop the oldest records of a partition that is larger.")
    ] = None,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Make a topic.

    Examples:

      shardyard topics create orders --partitions 12

      shardyard topics create events -p 256 --partitioner jump --retention-ms 604800000
    """
    asked = {
        "name": topic,
        "partitions": partitions,
        "partitioner": partitioner,
        "hash": hash_name,
        "retention_ms": retention_ms,
        "retention_bytes": retention_bytes,
    }
    _print(ask(brokers, "POST", "/v1/topics", asked), json=json)


@app.command("show")
def show(topic: Topic, brokers: Brokers = None, json: Json = False) -> None:
    """Show a topic, what is set about it, and which offsets its partitions hold.

    Examples:

      shardyard topics show orders
    """
    _print_whole(ask(brokers, "GET", _path(topic)), json=json)


@app.command("expand")
def expand(topic: Topic, partitions: Partitions, brokers: Brokers = None, json: Json = False) -> None:
    """Raise the number of partitions. Groups share the new ones out by themselves.

    Keys may live on other partitions from then on; `shardyard pipeline reshard` moves their earlier records too.

    Examples:

      shardyard topics expand orders --partitions 24
    """
    _print(ask(brokers, "POST", f"{_path(topic)}/expand", {"partitions": partitions}), json=json)


@app.command("contract")
def contract(topic: Topic, partitions: Partitions, brokers: Brokers = None, json: Json = False) -> None:
    """Lower the number of partitions: those beyond take no more records, and go when all groups are done with them.

    What is stored on them goes with them. While no group has read them, they stay.

    Examples:

      shardyard topics contract orders --partitions 6
    """
    _print(ask(brokers, "POST", f"{_path(topic)}/contract", {"partitions": partitions}), json=json)


@app.command("set")
def set_topic(topic: Topic, settings: Settings, brokers: Brokers = None, json: Json = False) -> None:
    """Change settings; those that are not named stay. It takes effect at once.

    token (that publishers must show; - reads it from standard input), records_per_second (through each broker),
    retention_ms, retention_bytes. none takes a setting away.

    Examples:

      shardyard topics set orders records_per_second=5000 retention_ms=604800000

      shardyard topics set orders token=- < token.txt

      shardyard topics set orders token=none
    """
    from shardyard.queues.broker.asks import TopicChanges  # noqa: PLC0415 slow to import

    asked = changes(TopicChanges, settings)
    if asked.get("token") == "-":
        asked["token"] = sys.stdin.readline().strip()
    _print_whole(ask(brokers, "PATCH", _path(topic), asked), json=json)


@app.command("delete")
def delete(
    topic: Topic,
    force: Annotated[
        bool, typer.Option("--force", help="Also while members subscribe to it, and with dead letters.")
    ] = False,
    brokers: Brokers = None,
) -> None:
    """Delete a topic with all of its records; refused while somebody subscribes to it, unless by force.

    The retry and dead-letter topics that groups have beside it go with it. Those with dead letters are kept, unless by
    force.

    Examples:

      shardyard topics delete orders

      shardyard topics delete orders --force
    """
    told = ask(brokers, "DELETE", _path(topic), force=str(force).lower())
    say_deleted(f"topic {topic!r}", told)


def say_deleted(what: str, told: dict[str, Any]) -> None:
    """What is deleted, what went with it, and what was kept."""
    say(f"{what} is deleted")
    for name in told["also_deleted"]:
        say(f"topic {name!r} went with it")
    for kept in told["kept"]:
        name = kept["topic"]
        records = f" (records: {kept['records']})" if kept["records"] else ""
        say(f"topic {name!r} is kept: {kept['because']}{records}; `shardyard topics delete {name}` deletes it")


def _path(topic: str) -> str:
    return f"/v1/topics/{checked(topic)}"


def _print(found: Any, *, json: bool) -> None:
    if json:
        print_json(found)
    else:
        rows = found if isinstance(found, list) else [found]
        print_table([{column: _text(topic[column]) for column in _COLUMNS} for topic in rows])


def _print_whole(topic: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(topic)
        return
    print_table([{"setting": name, "value": _text(value)} for name, value in topic.items() if name != "spans"])
    print_table([{"partition": index, **span} for index, span in enumerate(topic["spans"])], "offsets")


def _text(value: object) -> object:
    return "" if value is None else value
