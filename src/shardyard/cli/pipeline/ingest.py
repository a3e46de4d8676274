"""`shardyard pipeline ingest`: topics -> lake."""

import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardyard.cli.output import Count, Json, print_json, print_table
from shardyard.cli.pipeline.options import LogUrl, Master, Memory, partition_counts, spark_session, successors
from shardyard.model import InvalidValue, whole_number

if TYPE_CHECKING:
    from shardyard.pipeline.lake.ingest import Progress as Ingesting


def ingest(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", help="Topics to keep in the lake.")],
    log: LogUrl,
    lake: Annotated[Path, typer.Option("--lake", help="The lake's folder; made if it is not there.")],
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Go on until stopped (Ctrl-C, SIGTERM), not only until caught up.")
    ] = False,
    every: Annotated[
        float, typer.Option("--every", help="With --continuous: seconds to rest when all is ingested.")
    ] = 5.0,
    records_per_batch: Annotated[int, Count("--records-per-batch", help="The most that a batch takes.")] = 2_000_000,
    fail_on_data_loss: Annotated[
        bool,
        typer.Option(
            "--fail-on-data-loss/--allow-data-loss", help="Fail when records were trimmed before they were ingested."
        ),
    ] = True,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Bring a lake of Parquet files up to date with topics, each record exactly once.

    Run it again to go on where it stopped; a topic that is in the lake stays up to date. Any Parquet tool can read
    LAKE/records: its files are in folders by topic and day.

    Examples:

      shardyard pipeline ingest orders --log sqlite:///data/log --lake data/lake

      shardyard pipeline ingest orders returns --log sqlite:///data/log --lake data/lake --continuous --every 30
    """
    whole_number("--records-per-batch", records_per_batch, at_least=1)
    if not every >= 0:
        raise InvalidValue("--every", every, "seconds, at least 0")
    partition_counts(log, topics)
    from shardyard.pipeline.lake.files import Lake  # noqa: PLC0415 Spark is slow to import
    from shardyard.pipeline.lake.ingest import ingest as run  # noqa: PLC0415

    Lake(lake).check()
    stop = threading.Event()
    with spark_session("ingest", master, memory, own_bar=True) as spark:
        if continuous:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stop.set())
        with _Bar() as bar:
            done = run(
                spark,
                log,
                topics,
                lake,
                continuous=continuous,
                every=every,
                records_per_batch=records_per_batch,
                fail_on_data_loss=fail_on_data_loss,
                on_progress=bar.show,
                stopped=stop.is_set,
            )
    for name, successor in successors(log, done.topics).items():
        say = f"{name!r} goes on as {successor!r}, which has its records too: ingest that into a lake of its own"
        Console(stderr=True, highlight=False, soft_wrap=True).print(say)
    if json:
        print_json(asdict(done))
    else:
        print_table([{**asdict(done), "topics": ",".join(done.topics)}])


class _Bar:
    """Spark's own progress as a bar, on a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("records", total=None)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, ingesting: "Ingesting") -> None:
        total = ingesting.records + ingesting.left
        self._progress.update(self._task, completed=ingesting.records, total=total or None)
