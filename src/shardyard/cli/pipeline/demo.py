"""`shardyard pipeline demo`: all jobs of the pipeline, on one machine, under load."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shardyard.cli.options import Json
from shardyard.cli.output import print_json, print_table
from shardyard.cli.pipeline.balance import print_report
from shardyard.cli.pipeline.options import Master, read_loads, spark_session
from shardyard.model import InvalidValue

if TYPE_CHECKING:
    from shardyard.pipeline.session import SparkSession

BEFORE, AFTER = 12, 24
INGEST_SECONDS = 8.0
SETTLE_SECONDS = 2.0
"""How long orders keep flowing after the reshard, so that the audit covers some that were sent to the new topic."""


def demo(
    report: Annotated[
        Path, typer.Option("--report", metavar="FILE", help="Write the plan's report into this HTML file.")
    ] = Path("shardyard-plan.html"),
    master: Master = None,
    json: Json = False,
) -> None:
    """Run all jobs on a topic while orders flow: ingest, balance, plan, reshard, and then audit what was delivered.

    It runs in a temporary folder, except for the report, and takes a minute or two.

    Examples:

      shardyard pipeline demo --report plan.html
    """
    if not report.absolute().parent.is_dir():
        raise InvalidValue("--report", str(report), "a file in a folder that exists")
    console = Console(stderr=json, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="shardyard-demo-") as folder, spark_session("demo", master, None) as spark:
        results = _Demo(spark, Path(folder), report, console, quiet=json).run()
    if json:
        print_json(results)
    else:
        console.print(f"\n[bold]{results['audit']['sentence']}[/]\nreport: {report}")
    if not results["audit"]["ok"]:
        raise typer.Exit(1)


class _Demo:
    """Runs one job after the other while traffic flows. `quiet`: without tables, which JSON replaces."""

    def __init__(self, spark: "SparkSession", folder: Path, report: Path, console: Console, *, quiet: bool) -> None:
        self._spark, self._folder, self._report, self._console, self._quiet = spark, folder, report, console, quiet
        self._log, self._registry = f"sqlite:///{folder / 'log'}", f"sqlite:///{folder / 'registry.db'}"

    def run(self) -> dict[str, Any]:
        """The results of all jobs, by name."""
        from shardyard.cli.pipeline.traffic import TOPIC, Traffic

        results: dict[str, Any] = {}
        with Traffic(self._log, self._registry, BEFORE) as traffic:
            self._print_title(
                f"Orders flow into {TOPIC!r} ({BEFORE} partitions), a group bills them, and a lake is kept up to date:"
            )
            results["ingest"] = self._ingest(TOPIC)
            self._print_title("How evenly are they spread?")
            results["balance"] = self._balance(TOPIC)
            self._print_title("What would other numbers of partitions and members mean?")
            results["plan"] = self._plan(TOPIC)
            self._print_title(f"Reshard to {AFTER} partitions, while orders flow:")
            results["reshard"] = self._reshard(TOPIC)
            time.sleep(SETTLE_SECONDS)
            traffic.finish()
            traffic.write_deliveries(self._folder / "deliveries.parquet")
            self._print_title(
                f"{traffic.sent:,} orders were sent, {traffic.delivered:,} billed. Were any lost, or out of order?"
            )
        results["audit"] = self._audit(results["reshard"]["target"])
        return results

    def _print_title(self, text: str) -> None:
        self._console.print(f"\n[bold]{text}[/]")

    def _print_table(self, rows: list[dict[str, Any]]) -> None:
        if not self._quiet:
            print_table(rows)

    def _ingest(self, topic: str) -> dict[str, Any]:
        from shardyard.pipeline.lake.ingest import ingest

        lake = self._folder / "lake"
        progress_records: list[int] = []
        end = time.monotonic() + INGEST_SECONDS

        def has_run_long_enough() -> bool:
            return time.monotonic() > end and len(set(progress_records)) > 1

        done = ingest(
            self._spark,
            self._log,
            [topic],
            lake,
            continuous=True,
            every=0.5,
            on_progress=lambda progress: progress_records.append(progress.records),
            stopped=has_run_long_enough,
        )
        row = {
            "records": done.records,
            "batches": done.batches,
            "format": done.format,
        }
        self._print_table([row])
        return row

    def _balance(self, topic: str) -> dict[str, Any]:
        from shardyard.pipeline.balance.report import balance_report
        from shardyard.pipeline.balance.scheme import every_scheme

        self._loads = read_loads(self._spark, self._log, [topic], None, "key", None, None, None)
        schemes = every_scheme(["modulus", "jump"], None, [AFTER])
        report = balance_report(
            self._loads, schemes, assignors=["sticky"], members=[4], hot=3, partitions={topic: BEFORE}
        )
        if not self._quiet:
            print_report(report)
        return report.to_json()

    def _plan(self, topic: str) -> dict[str, Any]:
        from shardyard.pipeline.plan.html_report import render
        from shardyard.pipeline.plan.load import load_of
        from shardyard.pipeline.plan.report import make_plan

        load = load_of(self._loads, 10_000, partitions=BEFORE)
        planned = make_plan(load, partitions=[BEFORE, AFTER, 256], members=[4, 16])
        self._report.write_text(render(planned, f"Plan for {topic}"))
        self._console.print(planned.recommendation)
        return {"recommendation": planned.recommendation, "report": str(self._report)}

    def _reshard(self, topic: str) -> dict[str, Any]:
        from shardyard.pipeline.reshard.reshard import reshard

        done = reshard(self._spark, self._log, topic, partitions=AFTER, registry=self._registry)
        row = asdict(done)
        self._print_table([{name: value for name, value in row.items() if name != "groups"}])
        self._print_table([{"group": group, "records redelivered": count} for group, count in done.groups.items()])
        return row

    def _audit(self, sent: str) -> dict[str, Any]:
        from shardyard.pipeline.audit.audit import audit, delivered_from_table, sent_from_topic

        topic = self._spark.read.format("shardyard").options(log=self._log, topics=sent).load()
        table = self._spark.read.parquet(str(self._folder / "deliveries.parquet"))
        report = audit(sent_from_topic(topic), delivered_from_table(table, id="id", order="n", at="at"))
        latency = report.to_json()["latency"] or {}
        counts = {"lost": report.lost, "duplicated": report.duplicated, "out of order": report.out_of_order}
        self._print_table([counts | latency])
        return report.to_json() | {"sentence": report.sentence()}
