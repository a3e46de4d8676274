"""`shardyard audit-log`: who changed what."""

from typing import Annotated

from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import dumps, print_list
from shardyard.cli.queues.options import Brokers, format_time
from shardyard.cli.queues.session import request


def audit_log(
    limit: Annotated[int, integer_option("--limit", help="The maximum number of changes to list.")] = 100,
    before: Annotated[
        int | None, integer_option("--before", help="List changes before this number, to get the next page.")
    ] = None,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """List who changed which topic or group, newest first.

    Examples:

      shardyard audit-log

      shardyard audit-log --limit 20 --before 480 --json
    """
    changes = request(brokers, "GET", "/v1/audit", limit=limit, before=before)
    rows = [{**row, "at": format_time(row["at"] * 1000), "detail": dumps(row["detail"])} for row in changes]
    print_list(changes if json else rows, "changes", json=json)
