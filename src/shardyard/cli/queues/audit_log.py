"""`shardyard audit-log`: who changed what."""

from typing import Annotated

from shardyard.cli.output import Count, Json, dumps, print_json, print_table
from shardyard.cli.queues.options import Brokers, ask, shown_time


def audit_log(
    limit: Annotated[int, Count("--limit", help="The most to list.")] = 100,
    before: Annotated[int | None, Count("--before", help="Only those before this number, for the next page.")] = None,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """List changes to topics and groups, the newest first.

    Examples:

      shardyard audit-log

      shardyard audit-log --limit 20 --before 480 --json
    """
    found = ask(brokers, "GET", "/v1/audit", limit=limit, before=before)
    if json:
        print_json(found)
    else:
        print_table([{**row, "at": shown_time(row["at"] * 1000), "detail": dumps(row["detail"])} for row in found])
