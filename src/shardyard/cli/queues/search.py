"""`shardyard search`: find records."""

from typing import Annotated

from shardyard.cli.output import Count, Json, print_json, print_table, say
from shardyard.cli.queues.options import TIME, Brokers, Text, Topic, ask, checked, shown_time, time_ms
from shardyard.model import InvalidCall, InvalidValue


def search(
    topic: Topic,
    record: Annotated[str | None, Text("--id", metavar="ID", help="The record's id.")] = None,
    key: Annotated[str | None, Text("--key", "-k", metavar="KEY", help="The record's key.")] = None,
    trace: Annotated[str | None, Text("--trace", metavar="ID", help="The record's trace id.")] = None,
    tag: Annotated[str | None, Text("--tag", metavar="TAG", help="A tag of the record.")] = None,
    since: Annotated[
        str | None, Text("--since", metavar="TIME", help=f"Published then or later, such as {TIME}.")
    ] = None,
    until: Annotated[str | None, Text("--until", metavar="TIME", help="Published before.")] = None,
    partition: Annotated[int | None, Count("--partition", help="Only on this one.")] = None,
    limit: Annotated[int, Count("--limit", help="The most to find; of more, the newest.")] = 100,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Find the records of a topic that have all of what is named, the newest last.

    Examples:

      shardyard search orders --key customer-7 --since 2026-01-31T12:00:00Z

      shardyard search orders --tag eu --limit 10

      shardyard search orders --trace 4bf92f3577b34da6 --json
    """
    wanted = {
        "id": record,
        "key": key,
        "trace": trace,
        "tag": tag,
        "since": (first := time_ms("--since", since)),
        "until": (end := time_ms("--until", until)),
    }
    if all(value is None for value in wanted.values()):
        raise InvalidCall(f"expected at least one of {', '.join(f'--{name}' for name in wanted)}")
    if first is not None and end is not None and first >= end:
        raise InvalidValue("--until", until, f"a time after --since, {since}")
    asked = wanted | {"partition": partition, "limit": limit}
    found = ask(brokers, "GET", f"/v1/topics/{checked(topic)}/search", **asked)
    if json:
        print_json(found)
        return
    print_table(
        [
            {
                "partition": hit["partition"],
                "offset": hit["offset"],
                "time": shown_time(hit["timestamp"]),
                "id": hit["id"],
                "key": hit.get("key", hit.get("key_base64")),
                "value": hit.get("value", hit.get("value_base64", "")),
            }
            for hit in found
        ]
    )
    if not found:
        say("nothing found")
