"""Every job on a Spark Connect server: nothing in them needs the JVM in their own process."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardyard.pipeline
from shardyard.log import Sender, open_log
from shardyard.messaging.history.tables import HistoryTables
from shardyard.model import Record
from shardyard.pipeline.delta_jars import delta_jars
from shardyard.placement import Jump
from shardyard.registry import open_registry
from shardyard.wire.inbox import InboxEntry, Mark, encode_entry
from tests.pipeline.channels import Channels
from tests.pipeline.cluster import HOME
from tests.pipeline.connect_server import ConnectServer, connect_server
from tests.pipeline.logs import by_key, contents, create, fill, ids, url

pytestmark = [
    pytest.mark.spark,
    pytest.mark.processes,
    pytest.mark.xdist_group("connect"),
    pytest.mark.timeout(600),
]

RECORDS = 500
INBOX = 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    with connect_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@dataclass(frozen=True)
class Jobs:
    """What the jobs worked on, and what they printed."""

    log: str
    folder: Path
    printed: dict[str, Any]


def fill_inbox(log: str) -> None:
    create(log, "inbox", 3)
    send_messages(log, range(1, 31))

    async def send() -> None:
        async with open_log(log) as opened:
            seen = [InboxEntry(40 + n, "bob", "alice", "web", n, 1_760_000_001_000, Mark("seen", n)) for n in (5, 9)]
            await Sender(opened, "inbox").send([Record.new(encode_entry(entry), b"alice") for entry in seen])

    asyncio.run(send())


def send_messages(log: str, numbers: Iterable[int]) -> None:
    async def send() -> None:
        async with open_log(log) as opened:
            entries = [InboxEntry(n, "alice", "bob", "phone", n, 1_760_000_000_000 + n, f"text {n}") for n in numbers]
            await Sender(opened, "inbox").send([Record.new(encode_entry(entry), b"bob") for entry in entries])

    asyncio.run(send())


@pytest.fixture(scope="module")
def jobs(server: ConnectServer, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """All jobs, one after the other in one process, because its start takes longer than most of them."""
    folder = tmp_path_factory.mktemp("jobs")
    log, registry, lake = url(folder), f"sqlite:///{folder / 'registry.db'}", str(folder / "lake")
    open_registry(registry).close()
    create(log, "orders", 3)
    fill(log, "orders", RECORDS)
    fill_inbox(log)
    deliveries = pa.table({"id": ids(contents(log, "orders"))[1:], "n": range(RECORDS - 1)})
    pq.write_table(deliveries, folder / "deliveries.parquet")
    (folder / "channels").mkdir()
    channels = Channels(folder / "channels")
    channels.change_members([("general", f"user-{n}", True) for n in range(5)])
    channels.change_presence([(f"user-{n}", "phone", True) for n in range(3)])
    channels.close()
    (folder / "users.txt").write_text("user-1\nuser-2\n")
    commands = {
        "ingest": ["ingest", "orders", "inbox", "--log", log, "--lake", lake],
        "ingest again": ["ingest", "orders", "--log", log, "--lake", lake],
        "history": ["history", "--lake", lake, "--out", str(folder / "history")],
        "balance": ["balance", "--log", log, "--topic", "orders", "--partitions", "12", "--members", "4"],
        "plan": ["plan", "--log", log, "--topic", "orders", "--partitions", "12", "--members", "4"],
        "audit": ["audit", "--log", log, "--sent", "orders", "--parquet", str(folder / "deliveries.parquet")],
        "reshard": ["reshard", "orders", "--partitions", "5", "--log", log, "--registry", registry],
        "routing": ["routing", "--log", channels.log, "--into", str(folder / "routing")],
        "fanout": [
            *("fanout", "--log", channels.log, "--registry", registry, "--text", "Hello"),
            *("--users", str(folder / "users.txt")),
        ],
        "memory": ["balance", "--log", log, "--topic", "orders", "--memory", "4g"],
    }
    lines = [["pipeline", *command, "--remote", server.url, "--json"] for command in commands.values()]
    client = [sys.executable, "-m", "tests.pipeline.connect_client"]
    done = subprocess.run(client, input=json.dumps(lines), stdout=subprocess.PIPE, text=True, check=True)
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    return Jobs(log, folder, dict(zip(commands, printed, strict=True)))


def result(jobs: Jobs, name: str, code: int = 0) -> Any:
    printed = jobs.printed[name]
    assert printed["code"] == code, printed["err"]
    return json.loads(printed["out"])


def test_ingest_brings_each_record_into_the_lake_once(jobs: Jobs) -> None:
    done = result(jobs, "ingest")
    assert (done["records"], done["format"]) == (RECORDS + INBOX, "delta" if delta_jars() else "parquet")
    assert result(jobs, "ingest again")["records"] == 0


def test_history_has_the_messages_of_the_inbox(jobs: Jobs) -> None:
    assert result(jobs, "history")["messages"] == 30
    page = asyncio.run(HistoryTables(jobs.folder / "history").page("alice", "bob", limit=5))
    assert [message.text for message in page.messages] == [f"text {n}" for n in range(30, 25, -1)]


def test_balance_and_plan_count_the_records(jobs: Jobs) -> None:
    assert str(RECORDS) in json.dumps(result(jobs, "balance"))
    assert result(jobs, "plan")["recommendation"]


def test_audit_finds_what_was_not_delivered(jobs: Jobs) -> None:
    assert result(jobs, "audit", code=1)["lost"] == 1


def test_reshard_copies_every_record_in_order(jobs: Jobs) -> None:
    assert result(jobs, "reshard")["records"] == RECORDS
    assert by_key(contents(jobs.log, "orders.2")) == by_key(contents(jobs.log, "orders"))


def test_routing_and_fanout(jobs: Jobs) -> None:
    assert result(jobs, "routing")["users"] == 5
    assert result(jobs, "fanout")


def test_memory_is_refused_because_the_server_has_its_own(jobs: Jobs) -> None:
    printed = jobs.printed["memory"]
    assert printed["code"] == 2
    assert "has its own memory: set it where the server is started" in " ".join(printed["err"].split())


def test_no_job_uses_the_jvm_of_its_own_process() -> None:
    source = Path(shardyard.pipeline.__path__[0])
    uses_jvm = re.compile(r"\b(_jvm|_jdf|_jc|_jsparkSession|SparkContext|sparkContext|rdd)\b")
    found = {path.relative_to(source).parts[0] for path in source.rglob("*.py") if uses_jvm.search(path.read_text())}
    assert found == {"jvm"}


# The declarative pipeline in examples/

EXAMPLE = Path(__file__).parents[2] / "examples" / "declarative-pipeline"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, with a log where it expects one."""
    folder = tmp_path_factory.mktemp("example") / "project"
    shutil.copytree(EXAMPLE, folder)
    spec = folder / "spark-pipeline.yml"
    text = spec.read_text()
    assert "file:///tmp/shardyard-pipeline" in text
    spec.write_text(text.replace("file:///tmp/shardyard-pipeline", (folder / "storage").as_uri()))
    (folder / "data").mkdir()
    log = url(folder / "data")
    create(log, "orders", 3)
    fill(log, "orders", RECORDS)
    fill_inbox(log)
    return folder


def run_pipeline(server: ConnectServer, project: Path) -> None:
    command = [str(HOME / "bin" / "spark-pipelines"), "run", "--spec", "spark-pipeline.yml", "--remote", server.url]
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(HOME)}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_declarative_pipeline_ingests_each_record_once_and_derives_balance_and_history(
    server: ConnectServer, project: Path
) -> None:
    run_pipeline(server, project)
    assert server.table("records").num_rows == RECORDS + INBOX
    log = url(project / "data")
    fill(log, "orders", 100, first=RECORDS)
    send_messages(log, range(31, 36))
    run_pipeline(server, project)
    records = server.table("records")
    orders = [row["id"] for row in records.to_pylist() if row["topic"] == "orders"]
    assert sorted(orders) == ids(contents(log, "orders"))
    loads = {(row["topic"], row["partition"]): row["records"] for row in server.table("partition_loads").to_pylist()}
    assert loads == {
        (topic, index): len(found)
        for topic in ("orders", "inbox")
        for index, found in enumerate(contents(log, topic))
        if found
    }
    jump = Jump("xxh64", 24)
    expected = Counter(jump.place(r.key) for found in contents(log, "orders") for r in found)
    placed = [
        row
        for row in server.table("placements").to_pylist()
        if (row["topic"], row["hash"], row["partitioner"], row["partitions"]) == ("orders", "xxh64", "jump", 24)
    ]
    assert {row["partition"]: row["records"] for row in placed} == expected
    hottest = server.table("hot_keys").to_pylist()[0]
    assert (hottest["key"], hottest["records"]) == (b"bob", 35)
    assert sorted(server.table("messages")["text"].to_pylist()) == sorted(f"text {n}" for n in range(1, 36))
    assert server.table("marks").to_pylist() == [{"reader": "bob", "peer": "alice", "kind": "seen", "upto": 9}]
