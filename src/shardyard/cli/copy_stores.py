"""`shardyard copy`: change to another engine and keep topics, positions and settings.

The module is not named after the command, because `spark-submit` runs `__main__.py` of this folder as a file: `copy.py`
beside it would hide the standard module of that name.
"""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import asyncio
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardyard.cli.options import Json, value_option
from shardyard.cli.output import print_json, print_message, print_table
from shardyard.model import Conflict, InvalidValue, Partition
from shardyard.model.extras import require
from shardyard.model.sharding import SHARDS_TOPIC, STATES_TOPIC
from shardyard.model.url import beside, parse_url

if TYPE_CHECKING:
    from shardyard.log.copy import Checkpoint
    from shardyard.registry import Registry

ADVICE_REMAINING = (
    "{} records were appended to the source meanwhile: stop its producers and consumers, and run the command again"
)
INTERRUPTED = "interrupted: the same command continues where it was"


@dataclass(frozen=True, slots=True)
class _Stores:
    """The URLs of a log and of the registry that goes with it."""

    log: str
    registry: str


def copy(
    source: Annotated[str, value_option("--from", metavar="URL", help="The log to copy from.")],
    target: Annotated[str, value_option("--to", metavar="URL", help="The log to copy to.")],
    source_registry: Annotated[
        str | None,
        value_option(
            "--from-registry",
            metavar="URL",
            help="The registry to copy from. Default: the same database, or registry.db beside the folder of the log.",
        ),
    ] = None,
    target_registry: Annotated[
        str | None, value_option("--to-registry", metavar="URL", help="The registry to copy to. Default: likewise.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare every record of the copy with the source.")
    ] = True,
    json: Json = False,
) -> None:
    """Copy all topics, the positions of groups and all settings to another log and registry, and verify the copy.

    It may be interrupted, and run again: it continues where it was. To move a running system, run it once while
    everything works, stop producers and consumers, run it again for the rest, and start them on the target. The source
    is only read. The target must not have topics of the same names that this command did not create.

    Exchanges and policies of sharded queues are copied, queues are not: the command is refused while there are any.

    Examples:

      shardyard copy --from sqlite:///data/log --to postgresql://yard@db.example.com/yard

      shardyard copy --from sqlite:///data/log --to sqlite:///new/log --json
    """
    require("server", "this command")
    origin = _Stores(source, source_registry or beside("log", source, "registry.db"))
    destination = _Stores(target, target_registry or beside("log", target, "registry.db"))
    _check(origin, destination)
    try:
        result = asyncio.run(_copy(origin, destination, verify=verify))
    except KeyboardInterrupt:
        print_message(INTERRUPTED)
        raise
    remaining = sum(row["remaining"] for row in result["topics"])
    if json:
        print_json(result)
    else:
        print_table(result["topics"])
        kept = ", ".join(f"{count} {what}" for what, count in result["registry"].items())
        print_message(f"copied {kept}; {'every record was compared' if verify else 'the records were not compared'}")
    if remaining:
        print_message(ADVICE_REMAINING.format(remaining))


def _check(origin: _Stores, destination: _Stores) -> None:
    """Refuse stores that can't be copied, before anything is created."""
    from shardyard.log import absolute_url, log_exists
    from shardyard.registry import registry_exists

    for url in (*asdict(origin).values(), *asdict(destination).values()):
        if url == "memory://":
            expected = "storage that outlives the command, such as sqlite:///data/log (memory:// is for programs)"
            raise InvalidValue("URL", url, expected)
    if absolute_url(origin.log) == absolute_url(destination.log):
        raise InvalidValue("--to", str(parse_url("log", destination.log)), "another log than --from")
    if not log_exists(origin.log):
        raise InvalidValue("--from", str(parse_url("log", origin.log)), "a log that exists")
    if not registry_exists(origin.registry):
        shown = str(parse_url("registry", origin.registry))
        raise InvalidValue("--from-registry", shown, "a registry that exists")


async def _copy(origin: _Stores, destination: _Stores, *, verify: bool) -> dict[str, Any]:
    from shardyard.groups import copy as registry_copy
    from shardyard.log import open_log
    from shardyard.log.copy import LogCopy
    from shardyard.registry import TransactionBatcher, open_registry
    from shardyard.sharding.rows import OF_SLOTS

    with open_registry(origin.registry) as old:
        _check_no_sharded_queues(old)
    with open_registry(origin.registry) as old, open_registry(destination.registry) as new, _Bar() as bar:
        transactions = TransactionBatcher(new)
        try:
            async with open_log(origin.log) as source, open_log(destination.log) as target:

                async def store(partition: Partition, at: "Checkpoint") -> None:
                    await transactions.run(lambda tx: registry_copy.store_checkpoint(tx, partition, at))

                checkpoints = await transactions.read(registry_copy.load_checkpoints)
                work = LogCopy(source, target, checkpoints, store, bar.advance)
                topics = [topic for topic in await source.topics() if topic.name not in (SHARDS_TOPIC, STATES_TOPIC)]
                await work.create(topics)
                bar.start("copying", await work.count(topics))
                copied = {topic.name: await work.copy(topic) for topic in topics}
                if verify:
                    bar.start("comparing", await work.count_copied(topics))
                    for topic in topics:
                        await work.compare(topic)
                await work.finish(topics)
                kept = await asyncio.to_thread(old.read, lambda tx: registry_copy.contents(tx, leave_out=OF_SLOTS))
                counts = await transactions.run(
                    lambda tx: registry_copy.put_contents(tx, kept, work.checkpoints, "shardyard copy")
                )
                reports = [await work.report(topic, copied[topic.name]) for topic in topics]
        finally:
            await asyncio.to_thread(transactions.close)
    return {"topics": [asdict(report) for report in reports], "registry": counts, "verified": verify}


def _check_no_sharded_queues(registry: "Registry") -> None:
    """Their acknowledgements name offsets, which are others in a copy."""
    from shardyard.sharding.rows import QUEUES

    queues = registry.read(lambda tx: tx.settings(QUEUES))
    if queues:
        raise Conflict(
            f"there are {len(queues)} sharded queues, such as {queues[0].name!r}, which can't be copied: consume what "
            "is in them, clear the policies, and delete the queues that were declared"
        )


class _Bar:
    """Progress in records, on a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("reading", total=None)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, what: str, total: int) -> None:
        self._progress.reset(self._task, description=what, total=total)

    def advance(self, records: int) -> None:
        self._progress.advance(self._task, records)
