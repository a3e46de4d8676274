"""`shardyard topics`: create, show, resize, configure and delete topics."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from shardyard.cli.help import Command, Rows
from shardyard.cli.options import Json, Partitions, integer_option, value_option
from shardyard.cli.output import print_json, print_list, print_message, print_table, print_tables
from shardyard.cli.queues.options import Brokers, Settings, Topic, check_name
from shardyard.cli.queues.session import request
from shardyard.cli.queues.settings import format_setting, parse_settings, settings_help
from shardyard.model import InvalidValue, TopicInUse, whole_number
from shardyard.model.limits import INTERNAL_PREFIX
from shardyard.wire.companions import parse_companion
from shardyard.wire.requests import NewTopic, Resize, TopicChanges

app = typer.Typer(name="topics", help="Create, show, resize, configure and delete topics.", no_args_is_help=True)

NewPartitions = Annotated[int, integer_option("--partitions", "-p", help="The new number of partitions.")]
_PARTITIONERS = "modulus, jump or round_robin"
_COLUMNS = ("name", "partitions", "receiving", "kind", "partitioner", "hash")


@app.command("list")
def list_topics(
    every: Annotated[
        bool, typer.Option("--all", help="Include internal topics, such as those for retries and dead letters.")
    ] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """List topics, without Shardyard's internal ones.

    Examples:

      shardyard topics list

      shardyard topics list --all --broker http://10.0.0.5:7400 --json
    """
    topics = request(brokers, "GET", "/v1/topics")
    shown = [topic for topic in topics if every or not _is_internal(topic["name"])]
    print_list(shown if json else [_row(topic) for topic in shown], "topics", len(topics) - len(shown), json=json)


@app.command("create")
def create(
    topic: Topic,
    partitions: Partitions = 12,
    partitioner: Annotated[
        str, typer.Option("--partitioner", metavar="NAME", help=f"How keys map to partitions: {_PARTITIONERS}.")
    ] = "modulus",
    hash_name: Annotated[
        str | None, value_option("--hash", metavar="NAME", help="The hash of keys. Default: the partitioner's own.")
    ] = None,
    retention_ms: Annotated[
        int | None, integer_option("--retention-ms", help="Drop records older than this many milliseconds.")
    ] = None,
    retention_bytes: Annotated[
        int | None,
        integer_option("--retention-bytes", help="Drop the oldest records of a partition beyond this many bytes."),
    ] = None,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Create a topic.

    Examples:

      shardyard topics create orders --partitions 12

      shardyard topics create clicks -p 256 --partitioner jump --retention-ms 604800000
    """
    for name, value in (("--retention-ms", retention_ms), ("--retention-bytes", retention_bytes)):
        if value is not None:
            whole_number(name, value, at_least=1)
    body = NewTopic(topic, partitions, partitioner, hash_name, retention_ms, retention_bytes)
    _print(request(brokers, "POST", "/v1/topics", body), json=json)


@app.command("show")
def show(topic: Topic, brokers: Brokers = None, json: Json = False) -> None:
    """Show a topic's settings, and the offsets of its partitions.

    For a topic that is being contracted, also shows the partitions that are draining, and how many records each group
    has left to read on them.

    Examples:

      shardyard topics show orders
    """
    _print_details(request(brokers, "GET", _path(topic)), json=json)


@app.command("expand")
def expand(topic: Topic, partitions: NewPartitions, brokers: Brokers = None, json: Json = False) -> None:
    """Increase the number of partitions. Groups assign the new ones to their members automatically.

    New records of a key may go to another partition than its earlier ones. To keep the records of a key together and in
    order, use `shardyard pipeline reshard`.

    Examples:

      shardyard topics expand orders --partitions 24
    """
    _print(request(brokers, "POST", f"{_path(topic)}/expand", Resize(partitions)), json=json)


@app.command("contract")
def contract(topic: Topic, partitions: NewPartitions, brokers: Brokers = None, json: Json = False) -> None:
    """Decrease the number of partitions. The last ones take no more records, and are deleted once all groups
    have read them.

    Their records are deleted, too. A partition that no group has read is kept until one has.

    Examples:

      shardyard topics contract orders --partitions 6
    """
    contracted = request(brokers, "POST", f"{_path(topic)}/contract", Resize(partitions))
    _print(contracted, json=json)
    for row in _draining_rows(contracted):
        print_message(f"{row['partition']} will be deleted {row['deleted']}")


class _Set(Command):
    def sections(self) -> Mapping[str, Rows]:
        return {"Settings": settings_help(TopicChanges)}


@app.command("set", cls=_Set)
def set_topic(topic: Topic, settings: Settings, brokers: Brokers = None, json: Json = False) -> None:
    """Change a topic's settings; those not named stay as they are. Takes effect at once.

    token is what publishers must send (token=- reads it from standard input). records_per_second limits each broker,
    retention_bytes each partition.

    Examples:

      shardyard topics set orders records_per_second=5000 retention_ms=604800000

      shardyard topics set orders token=- < token.txt

      shardyard topics set orders token=none
    """
    changes = parse_settings(TopicChanges, settings)
    if changes.get("token") == "-":
        changes["token"] = sys.stdin.readline().strip()
    try:
        changed = request(brokers, "PATCH", _path(topic), changes)
    except InvalidValue as error:  # the broker speaks of JSON's null, which is written none here
        raise InvalidValue(error.name, error.value, error.expected.replace("null", "none")) from None
    _print_details(changed, json=json)


@app.command("delete")
def delete(
    topic: Topic,
    force: Annotated[
        bool, typer.Option("--force", help="Delete it even while members subscribe to it, and delete dead letters.")
    ] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Delete a topic and all of its records. Refused while members subscribe to it, unless forced.

    The retry and dead-letter topics that groups have for it are deleted too. Without --force, those that hold dead
    letters are kept.

    Examples:

      shardyard topics delete orders

      shardyard topics delete orders --force
    """
    try:
        deleted = request(brokers, "DELETE", _path(topic), force=str(force).lower())
    except TopicInUse as error:
        groups = ", ".join(error.groups)
        error.args = (f"topic {topic!r} is subscribed to by {groups}: stop their members, or use --force",)
        raise
    print_deleted(f"topic {topic!r}", deleted, json=json)


def print_deleted(what: str, deleted: dict[str, Any], *, json: bool) -> None:
    """Print what was deleted, which companion topics were deleted with it, and which were kept."""
    if json:
        print_json(deleted)
        return
    print_message(f"{what} is deleted")
    for name in deleted["also_deleted"]:
        print_message(f"topic {name!r} went with it")
    for kept in deleted["kept"]:
        name = kept["topic"]
        records = f" (records: {kept['records']})" if kept["records"] else ""
        print_message(
            f"topic {name!r} is kept: {kept['because']}{records}; `shardyard topics delete {name}` deletes it"
        )


def _path(topic: str) -> str:
    return f"/v1/topics/{check_name(topic)}"


def _is_internal(name: str) -> bool:
    return name.startswith(INTERNAL_PREFIX) or parse_companion(name) is not None


def _row(topic: dict[str, Any]) -> dict[str, Any]:
    return {column: topic[column] for column in _COLUMNS}


def _print(topic: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(topic)
    else:
        print_table([_row(topic)])


def _print_details(topic: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(topic)
        return
    settings = {name: value for name, value in topic.items() if name not in ("spans", "draining")}
    print_tables(
        {
            "topic": [{"setting": name, "value": format_setting(value)} for name, value in settings.items()],
            "offsets": [{"partition": index, **span} for index, span in enumerate(topic["spans"])],
            "draining": _draining_rows(topic),
        }
    )


def _draining_rows(topic: dict[str, Any]) -> list[dict[str, str]]:
    """The partitions that are draining, and when they will be deleted."""
    return [
        {"partition": f"{topic['name']}/{draining['partition']}", "deleted": _deletion_time(draining)}
        for draining in topic["draining"]
    ]


def _deletion_time(draining: dict[str, Any]) -> str:
    if draining["drained"]:
        return "shortly"
    waiting_for = [
        f"{group} has read {count} more record{'' if count == 1 else 's'}"
        for group, count in draining["waiting_for"].items()
    ]
    return f"once {' and '.join(waiting_for) or 'a group has read it'}"
