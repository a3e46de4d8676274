"""`shardyard audit-log`: who changed what."""

from typing import Annotated

from shardyard.cli.output import Count, Json, dumps
from shardyard.cli.queues.options import Brokers, ask, print_listed, shown_time


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
    rows = [{**row, "at": shown_time(row["at"] * 1000), "detail": dumps(row["detail"])} for row in found]
    print_listed(found if json else rows, "changes", json=json)
