"""Loading memberships from a file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from shardyard.fanout.channels import Channels
from shardyard.fanout.membership_files import read_changes
from shardyard.model import RetryLater


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of the rows of a file."""

    rows: int
    joins: int
    leaves: int
    malformed: int
    """Rows that were skipped."""


def _ignore(_done: int, _rows: int) -> None:
    """Progress is not reported."""


async def load(
    channels: Channels,
    path: Path,
    *,
    skip_malformed: bool = False,
    progress: Callable[[int, int], None] = _ignore,
) -> Loaded:
    """Store the memberships of a Parquet or CSV file, in the order of its rows; see `membership_files`.

    The whole file is read and checked first, so that a malformed row is an error before anything is stored. Loading the
    same file again leaves the same memberships, so a load that was interrupted is simply repeated. `progress` is called
    with the rows that are stored and the rows that there are.
    """
    rows = sum(len(changes) for changes in read_changes(path, skip_malformed=skip_malformed))
    done = joins = malformed = 0
    progress(0, rows)
    for changes in read_changes(path, skip_malformed=skip_malformed):
        malformed += changes.malformed
        try:
            await channels.change_many(changes.channels, changes.users, changes.joins)
        except RetryLater as error:
            raise RetryLater(f"{error} (at least {done} of {rows} rows are stored: load the file again)") from error
        done += len(changes)
        joins += pc.sum(changes.joins, min_count=0).as_py()
        progress(done, rows)
    return Loaded(done + malformed, joins, done - joins, malformed)
