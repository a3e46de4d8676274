"""`shardyard pipeline demo`: the whole story on one machine, under load."""

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shardyard.cli.output import Json, print_json, print_table
from shardyard.cli.pipeline.options import Master, spark_session
from shardyard.model import InvalidValue

if TYPE_CHECKING:
    from shardyard.pipeline.session import SparkSession

BEFORE, AFTER = 12, 24
INGEST_SECONDS = 8.0
SETTLE_SECONDS = 2.0
"""For which orders go on after the reshard, so that the audit has some of the new topic too."""


def demo(
    report: Annotated[Path, typer.Option("--report", help="Write the plan's report into this HTML file.")] = Path(
        "shardyard-plan.html"
    ),
    master: Master = None,
    json: Json = False,
) -> None:
    """Let orders flow while a lake is kept, balance measured, a plan made and the topic resharded; then audit it all.

    Everything but the report happens in a temporary folder. Takes a minute or two.

    Examples:

      shardyard pipeline demo --report plan.html
    """
    if not report.absolute().parent.is_dir():
        raise InvalidValue("--report", str(report), "a file in a folder that exists")
    say = Console(stderr=json, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="shardyard-demo-") as folder, spark_session("demo", master, None) as spark:
        found = _Story(spark, Path(folder), report, say, quiet=json).tell()
    if json:
        print_json(found)
    else:
        say.print(f"\n[bold]{found['audit']['sentence']}[/]\nreport: {report}")
    if not found["audit"]["ok"]:
        raise typer.Exit(1)


class _Story:
    """What happens, one thing after the other, while traffic flows."""

    def __init__(self, spark: "SparkSession", folder: Path, report: Path, say: Console, *, quiet: bool) -> None:
        self._spark, self._folder, self._report, self._say, self._quiet = spark, folder, report, say, quiet
        self._log, self._registry = f"sqlite:///{folder / 'log'}", f"sqlite:///{folder / 'registry.db'}"

    def tell(self) -> dict[str, Any]:
        from shardyard.cli.pipeline.traffic import TOPIC, Traffic  # noqa: PLC0415 numba, which other commands do not need

        found: dict[str, Any] = {}
        with Traffic(self._log, self._registry, BEFORE) as traffic:
            self._title(
                f"Orders flow into {TOPIC!r} ({BEFORE} partitions), a group bills them, and a lake is kept up to date:"
            )
            found["ingest"] = self._ingest(TOPIC)
            self._title("How evenly?")
            found["balance"] = self._balance(TOPIC)
            self._title("What if?")
            found["plan"] = self._plan(TOPIC)
            self._title(f"To {AFTER} partitions, while orders flow:")
            found["reshard"] = self._reshard(TOPIC)
            time.sleep(SETTLE_SECONDS)
            traffic.finish()
            traffic.write_deliveries(self._folder / "deliveries.parquet")
            self._title(
                f"{traffic.sent:,} orders were sent, {traffic.delivered:,} billed. Were any lost, or out of order?"
            )
        found["audit"] = self._audit(found["reshard"]["target"])
        return found

    def _title(self, text: str) -> None:
        self._say.print(f"\n[bold]{text}[/]")

    def _table(self, rows: list[dict[str, Any]]) -> None:
        if not self._quiet:
            print_table(rows)

    def _ingest(self, topic: str) -> dict[str, Any]:
        from shardyard.pipeline.lake.ingest import ingest  # noqa: PLC0415 Spark is slow to import

        lake = self._folder / "lake"
        seen: list[int] = []
        until = time.monotonic() + INGEST_SECONDS

        def enough() -> bool:
            return time.monotonic() > until and len(set(seen)) > 1

        done = ingest(
            self._spark,
            self._log,
            [topic],
            lake,
            continuous=True,
            every=0.5,
            on_progress=lambda progress: seen.append(progress.records),
            stopped=enough,
        )
        row = {
            "records": done.records,
            "batches": done.batches,
            "files": len(list((lake / "records").rglob("*.parquet"))),
        }
        self._table([row])
        return row

    def _balance(self, topic: str) -> dict[str, Any]:
        from shardyard.cli.pipeline.balance import show  # noqa: PLC0415 as above
        from shardyard.cli.pipeline.options import loads  # noqa: PLC0415
        from shardyard.pipeline.balance.report import balance_report  # noqa: PLC0415
        from shardyard.pipeline.balance.scheme import every_scheme  # noqa: PLC0415

        self._loads = loads(self._spark, self._log, [topic], None, "key", None, None, None)
        schemes = every_scheme(["modulus", "jump"], None, [AFTER])
        report = balance_report(
            self._loads, schemes, assignors=["sticky"], members=[4], hot=3, partitions={topic: BEFORE}
        )
        if not self._quiet:
            show(report)
        return report.to_json()

    def _plan(self, topic: str) -> dict[str, Any]:
        from shardyard.pipeline.plan.html_report import render  # noqa: PLC0415
        from shardyard.pipeline.plan.load import load_of  # noqa: PLC0415 as above
        from shardyard.pipeline.plan.report import make_plan  # noqa: PLC0415

        load = load_of(self._loads, 10_000, partitions=BEFORE)
        made = make_plan(load, partitions=[BEFORE, AFTER, 256], members=[4, 16])
        self._report.write_text(render(made, f"Plan for {topic}"))
        self._say.print(made.recommendation)
        return {"recommendation": made.recommendation, "report": str(self._report)}

    def _reshard(self, topic: str) -> dict[str, Any]:
        from shardyard.pipeline.reshard.reshard import reshard  # noqa: PLC0415 as above

        done = reshard(self._spark, self._log, topic, partitions=AFTER, registry=self._registry)
        row = asdict(done)
        self._table([{name: value for name, value in row.items() if name != "groups"}])
        self._table([{"group": group, "records that come again": again} for group, again in done.groups.items()])
        return row

    def _audit(self, sent: str) -> dict[str, Any]:
        from shardyard.pipeline.audit.audit import audit, delivered_from_table, sent_from_topic  # noqa: PLC0415 as above

        topic = self._spark.read.format("shardyard").options(log=self._log, topics=sent).load()
        table = self._spark.read.parquet(str(self._folder / "deliveries.parquet"))
        report = audit(sent_from_topic(topic), delivered_from_table(table, id="id", order="n", at="at"))
        latency = report.to_json()["latency"] or {}
        self._table([{"lost": report.lost, "twice": report.duplicated, "out of order": report.out_of_order} | latency])
        return report.to_json() | {"sentence": report.sentence()}
