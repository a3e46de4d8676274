"""`shardyard search`: find records."""

from typing import Annotated

from shardyard.cli.options import Json, integer_option, value_option
from shardyard.cli.output import print_json, print_message, print_table
from shardyard.cli.queues.options import TIME, Brokers, Topic, check_name, format_time, parse_time, text_of
from shardyard.cli.queues.session import request
from shardyard.model import InvalidCall, InvalidValue


def search(
    topic: Topic,
    record_id: Annotated[str | None, value_option("--id", metavar="ID", help="The record's id.")] = None,
    key: Annotated[str | None, value_option("--key", "-k", metavar="KEY", help="The record's key.")] = None,
    trace: Annotated[str | None, value_option("--trace", metavar="ID", help="The record's trace id.")] = None,
    tag: Annotated[str | None, value_option("--tag", metavar="TAG", help="The record's tag.")] = None,
    since: Annotated[
        str | None, value_option("--since", metavar="TIME", help=f"Records of this time or later, such as {TIME}.")
    ] = None,
    until: Annotated[str | None, value_option("--until", metavar="TIME", help="Records from before this time.")] = None,
    partition: Annotated[int | None, integer_option("--partition", help="Search only this partition.")] = None,
    limit: Annotated[
        int, integer_option("--limit", help="The maximum number of records; if more match, the newest ones.")
    ] = 100,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Find the records of a topic that match all given options, newest last.

    Examples:

      shardyard search orders --key customer-7 --since 2026-01-31T12:00:00Z

      shardyard search orders --tag eu --limit 10

      shardyard search orders --trace 4bf92f3577b34da6 --json
    """
    conditions = {
        "id": record_id,
        "key": key,
        "trace": trace,
        "tag": tag,
        "since": (first := parse_time("--since", since)),
        "until": (end := parse_time("--until", until)),
    }
    if all(value is None for value in conditions.values()):
        raise InvalidCall(f"expected at least one of {', '.join(f'--{name}' for name in conditions)}")
    if first is not None and end is not None and first >= end:
        raise InvalidValue("--until", until, f"a time after --since, {since}")
    query = conditions | {"partition": partition, "limit": limit}
    records = request(brokers, "GET", f"/v1/topics/{check_name(topic)}/search", **query)
    if json:
        print_json(records)
        return
    print_table(
        [
            {
                "partition": record["partition"],
                "offset": record["offset"],
                "time": format_time(record["timestamp"]),
                "id": record["id"],
                "key": text_of(record, "key"),
                "value": text_of(record, "value"),
            }
            for record in records
        ]
    )
    if not records:
        print_message("no records found")
