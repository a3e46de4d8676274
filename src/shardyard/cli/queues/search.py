"""`shardyard search`: find records."""

from typing import Annotated

import typer

from shardyard.cli.output import Count, Json, print_json, print_table
from shardyard.cli.queues.options import Brokers, Topic, ask, checked, shown_time, time_ms


def search(
    topic: Topic,
    record: Annotated[str | None, typer.Option("--id", help="The record's id.")] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="The record's key.")] = None,
    trace: Annotated[str | None, typer.Option("--trace", help="The record's trace id.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="A tag of the record.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Published then or later, such as 2026-01-31T12:00:00Z.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Published before.")] = None,
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
    asked = {
        "id": record,
        "key": key,
        "trace": trace,
        "tag": tag,
        "since": time_ms("--since", since),
        "until": time_ms("--until", until),
        "partition": partition,
        "limit": limit,
    }
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
                "key": hit.get("key", hit.get("key_base64", "")),
                "value": hit.get("value", hit.get("value_base64", "")),
            }
            for hit in found
        ]
    )
