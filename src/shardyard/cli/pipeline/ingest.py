"""`shardyard pipeline ingest`: copy topics into a lake."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import print_json, print_message, print_table
from shardyard.cli.pipeline.options import LogUrl, Master, Memory, partition_counts, spark_session, successors
from shardyard.model import InvalidValue, whole_number

if TYPE_CHECKING:
    from shardyard.pipeline.lake.ingest import Progress as IngestProgress


def ingest(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", help="The topics to ingest.")],
    log: LogUrl,
    lake: Annotated[
        Path, typer.Option("--lake", metavar="FOLDER", help="The lake's folder; created if it does not exist.")
    ],
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Run until stopped (Ctrl-C, SIGTERM), not just until caught up.")
    ] = False,
    every: Annotated[
        float,
        typer.Option("--every", metavar="SECONDS", help="With --continuous: how long to wait after catching up."),
    ] = 5.0,
    records_per_batch: Annotated[
        int, integer_option("--records-per-batch", help="The maximum number of records in a batch.")
    ] = 2_000_000,
    fail_on_data_loss: Annotated[
        bool,
        typer.Option(
            "--fail-on-data-loss/--allow-data-loss",
            help="Fail, which is the default, or continue if records were trimmed before they were ingested.",
        ),
    ] = True,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Copy topics into a lake of Parquet files, each record exactly once.

    Run it again to continue where it stopped; topics that are in the lake already are brought up to date, too. Any
    Parquet tool can read FOLDER/records, which has a folder for each topic and day.

    Examples:

      shardyard pipeline ingest orders --log sqlite:///data/log --lake data/lake

      shardyard pipeline ingest orders returns --log sqlite:///data/log --lake data/lake --continuous --every 30
    """
    whole_number("--records-per-batch", records_per_batch, at_least=1)
    if not every >= 0:
        raise InvalidValue("--every", every, "seconds, at least 0")
    partition_counts(log, topics)
    from shardyard.pipeline.lake.files import Lake
    from shardyard.pipeline.lake.ingest import ingest as run

    Lake(lake).check()
    stop = threading.Event()
    with spark_session("ingest", master, memory, own_progress=True) as spark:
        if continuous:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stop.set())
        with _ProgressBar() as bar:
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
        print_message(f"{name!r} continues as {successor!r}, which has its records too: ingest that into another lake")
    if json:
        print_json(asdict(done))
    else:
        print_table([{**asdict(done), "topics": ",".join(done.topics)}])


class _ProgressBar:
    """A progress bar for the ingest, on a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("records", total=None)

    def __enter__(self) -> "_ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, progress: "IngestProgress") -> None:
        total = progress.records + progress.left
        self._progress.update(self._task, completed=progress.records, total=total or None)
