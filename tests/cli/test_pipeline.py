"""The pipeline's commands, as a user runs them. tests/pipeline/test_cluster.py has `ingest` and `balance`."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardyard.groups import protocol
from shardyard.messaging.history.tables import HistoryTables
from shardyard.model import Record
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.session_checks import PROXIES
from shardyard.registry import Transaction, open_registry
from shardyard.wire.inbox import InboxEntry, encode_entry
from tests.cli.invocation import invoke
from tests.pipeline.logs import append, contents, create, fill, url
from tests.servers import free_port

LOG = "sqlite:///log"
pytestmark = pytest.mark.spark


def shardyard(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("shardyard")), "pipeline", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=200)


def run_json(folder: Path, *arguments: str, code: int = 0) -> Any:
    """The JSON that the command prints."""
    done = shardyard(folder, *arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.usefixtures("spark")
def test_reshard_rewrites_a_topic_and_audit_finds_a_lost_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = url(tmp_path)
    create(log, "orders", 3)
    fill(log, "orders", 200)
    assert (
        invoke(monkeypatch, "pipeline", "reshard", "orders", "--partitions", "5", "--log", log, "--no-groups", "--json")
        == 0
    )
    done = json.loads(capsys.readouterr().out)
    assert (done["target"], done["records"], done["partitions"]) == ("orders.2", 200, 5)
    assert len(contents(log, "orders.2")) == 5

    pq.write_table(pa.table({"id": [f"id-{n}" for n in range(199)], "n": range(199)}), tmp_path / "deliveries.parquet")
    deliveries = ("--parquet", str(tmp_path / "deliveries.parquet"), "--order", "n")
    assert invoke(monkeypatch, "pipeline", "audit", "--log", log, "--sent", "orders", *deliveries) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("# audit\nmetric\tvalue\nsent\t200\n")
    assert "\n\n# examples: lost\n" in printed.out
    assert printed.err == "200 sent, 199 delivered: 1 lost, 0 twice, 0 out of order: broken (lost)\n"


@pytest.mark.usefixtures("spark")
def test_balance_and_plan_use_the_topics_own_numbers_and_print_titled_tables_and_prose_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, registry = url(tmp_path), f"sqlite:///{tmp_path / 'registry.db'}"
    create(log, "orders", 8)
    fill(log, "orders", 200, keys=11)

    def join(tx: Transaction) -> None:
        for member in ("m1", "m2", "m3"):
            protocol.join(tx, "billing", member, topics=["orders"])
        protocol.join(tx, "other", "m1", topics=["mails"])

    with open_registry(registry) as opened:
        opened.run(join)
    source = ("--log", log, "--topic", "orders")

    assert invoke(monkeypatch, "pipeline", "balance", *source) == 0
    printed = capsys.readouterr()
    titles = [line for line in printed.out.splitlines() if line.startswith("# ")]
    assert titles[0] == "# orders: 200 records"
    assert re.fullmatch(r"# orders: hot keys \(no other key has more than 18 records or \d+ bytes\)", titles[1])
    header, actual, *schemes = printed.out.splitlines()[1:4]
    assert header.startswith("scheme\trecords max/mean\t")
    assert actual.startswith("actual\t")
    assert [line.partition("\t")[0] for line in schemes] == ["fnv1a32 modulus 8"]
    assert printed.err.startswith("orders: ")

    assert invoke(monkeypatch, "pipeline", "plan", *source, "--registry", registry) == 0
    printed = capsys.readouterr()
    titles = [line for line in printed.out.splitlines() if line.startswith("# ")]
    assert titles == ["# partitions", "# when members are added", "# when partitions are added"]
    assert "ADR" not in printed.out + printed.err
    assert printed.err.startswith("8 partitions for 3 members: ")
    assert printed.err.endswith(
        "The load has 11 different keys, which fill at most 11 partitions: more would stay empty.\n"
    )
    assert invoke(monkeypatch, "pipeline", "plan", *source, "--members", "2", "--json", "--fan-out-memory") == 0
    plan = json.loads(capsys.readouterr().out)
    assert [count["partitions"] for count in plan["partition_counts"]] == [8, 16, 32]
    assert plan["load"]["distinct_keys"] == 11
    assert plan["worker_memory"]


@pytest.mark.usefixtures("spark")
@pytest.mark.timeout(300)  # on a busy machine, the start of Spark and its first jobs take long
def test_history_ingests_the_inbox_and_writes_tables_that_the_next_run_finds_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = url(tmp_path)
    create(log, "inbox", 2)
    value = encode_entry(InboxEntry(1, "alice", "bob", "phone", 1, 1000, "hello"))
    append(log, "inbox", 0, [Record("1", b"bob", value), Record("x", b"bob", b"no entry")])
    arguments = ("history", "--lake", str(tmp_path / "lake"), "--out", str(tmp_path / "tables"))
    assert invoke(monkeypatch, "pipeline", *arguments, "--log", log, "--buckets", "2") == 0
    printed = capsys.readouterr()
    assert "record 1 of partition 0 is not a message and was skipped: " in printed.err
    names, values = (line.split("\t") for line in printed.out.splitlines())
    row = dict(zip(names, values, strict=True))
    assert (row["version"], row["records"], row["messages"], row["malformed"]) == ("1", "2", "1", "1")

    assert invoke(monkeypatch, "pipeline", *arguments, "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["version"], done["records"], done["messages"], done["total"]) == (1, 0, 0, 1)
    page = asyncio.run(HistoryTables(tmp_path / "tables").page("bob", "alice"))
    assert [message.text for message in page.messages] == ["hello"]


def test_plan_of_an_assumed_load_does_not_start_spark(tmp_path: Path) -> None:
    load = ("--assume-records", "1000", "--assume-bytes", "256000")
    plan = run_json(tmp_path, "plan", *load, "-p", "256", "--members", "16", "--report", "plan.html")
    moves = {step["assignor"]: step["moves"] for step in plan["member_steps"] if step["after"] == 17}
    assert (moves["sticky"], moves["contiguous"]) == (15, 120)
    assert "<svg" in (tmp_path / "plan.html").read_text()


def test_a_reshard_that_is_not_in_progress_cannot_be_aborted(tmp_path: Path) -> None:
    create(url(tmp_path), "orders", 3)
    done = shardyard(tmp_path, "reshard", "orders", "--abort", "--log", LOG)
    assert (done.returncode, done.stderr) == (2, "error: there is no reshard of 'orders' under way\n")


SEND = ("--log", LOG, "--registry", "sqlite:///registry.db", "--text", "Hello")
INVALID = [
    (["ingest", "refunds", "--log", LOG, "--lake", "lake"], "topic 'refunds' does not exist"),
    (["ingest", "orders", "--log", LOG, "--lake", "lake", "--records-per-batch", "0"], "--records-per-batch is 0"),
    (["ingest", "orders", "--log", LOG, "--lake", "lake", "--format", "orc"], "format is 'orc': expected parquet or"),
    (["ingest", "orders", "--log", LOG, "--lake", "lake", "--max-restarts", "-1"], "--max-restarts is -1"),
    (["ingest", "orders", "--log", LOG, "--lake", "lake", "--port", "70000"], "--port is 70000: expected 0 to 65535"),
    (["ingest", "orders", "--log", "kafka://x", "--lake", "lake"], "log URL is 'kafka://x': expected sqlite:///a/path"),
    (["ingest", "orders", "--log", LOG, "--lake", "lake", "--every", "3"], "expected --every only with --continuous"),
    (["ingest", "orders", "--log", LOG, "--lake", "lake", "--memory", "5x"], "memory is '5x': expected a whole number"),
    (["ingest", "orders", "--log", LOG, "--lake", "lake", "--memory", "10m"], "memory is '10m': expected a whole"),
    (["ingest", "orders", "--log", LOG, "--lake", "lake", "--master", "foo"], "master is 'foo': expected local[*],"),
    (["balance", "--log", LOG, "--topic", "orders", "--assignor", "foo"], "assignor is 'foo': expected one of"),
    (["plan", "--log", LOG, "--topic", "orders", "--members", "2", "--assignor", "x"], "assignor is 'x': expected one"),
    (["balance", "--parquet", "registry.txt"], "--parquet is 'registry.txt': expected Parquet files, and registry.txt"),
    (["balance", "--parquet", "."], "--parquet is '.': expected Parquet files, and"),
    (["balance", "--log", LOG, "--topic", "refunds"], "topic 'refunds' does not exist"),
    (["balance", "--log", LOG], "expected either --log and --topic, or --parquet"),
    (["balance", "--parquet", "none"], "--parquet is 'none': expected a file or folder that exists"),
    (
        ["balance", "--log", LOG, "--topic", "orders", "-p", "0"],
        "--partitions is '0': expected integers of at least 1",
    ),
    (["balance", "--log", LOG, "--topic", "orders", "-p", "x"], "--partitions is 'x': expected integers"),
    (["balance", "--log", LOG, "--topic", "orders", "--hash", "md5"], "hash is 'md5': expected one of"),
    (["balance", "--log", LOG, "--topic", "orders", "--window", "soon"], "window is 'soon': expected a number of"),
    (
        ["plan", "--assume-records", "5"],
        "expected either --assume-records with --assume-bytes, or something to measure",
    ),
    (["plan", "--members", "2"], "expected either --assume-records with --assume-bytes, or something to measure"),
    (["plan", "--assume-records", "5", "--assume-bytes", "5", "-p", "0"], "--partitions is '0'"),
    (["plan", "--assume-records", "5", "--assume-bytes", "5", "--report", "no/p.html"], "--report is 'no/p.html'"),
    (["plan", "--assume-records", "-5", "--assume-bytes", "5"], "records is -5"),
    (["plan", "--assume-records", "5", "--assume-bytes", "5"], "expected either --members, such as --members 4,8, or"),
    (["plan", "--log", LOG, "--topic", "orders"], "expected either --members, such as --members 4,8, or --registry"),
    (
        ["plan", "--log", LOG, "--topic", "orders", "--registry", "sqlite:///nowhere.db"],
        "--registry is 'sqlite:///nowhere.db': expected a registry that exists",
    ),
    (["reshard", "orders", "--log", LOG, "--no-groups", "-p", "0"], "partitions is 0: expected a whole number"),
    (["reshard", "orders", "--log", LOG, "-p", "5"], "expected either --registry"),
    (["reshard", "refunds", "--log", LOG, "--no-groups", "-p", "5"], "topic 'refunds' does not exist"),
    (
        ["history", "--lake", "lake", "--out", "tables"],
        "--lake is 'lake': expected a lake that exists; give --log to create it",
    ),
    (["history", "--lake", "lake", "--out", "tables", "--log", LOG], "topic 'inbox' does not exist"),
    (["history", "--lake", "lake", "--out", "tables", "--buckets", "0"], "buckets is 0"),
    (["routing", "--log", LOG, "--into", "routing"], "topic 'members' does not exist"),
    (["fanout", *SEND], "expected one of --channels, --users and --all"),
    (["fanout", *SEND, "--users", "a.txt", "--all", "users"], "expected one of --channels, --users and --all"),
    (["fanout", *SEND, "--users", "none.txt"], "--users is 'none.txt': expected a file that exists"),
    (["fanout", *SEND, "--all", "channels"], "expected --routing"),
    (["fanout", *SEND, "--all", "users", "--routing", "none"], "topic 'inbox' does not exist"),
    (["audit", "--log", LOG], "expected --sent, or --channels"),
    (["audit", "--log", LOG, "--channels", "--sent", "orders"], "expected --channels without --sent"),
    (["audit", "--log", LOG, "--channels"], "topic 'events' does not exist"),
    (["audit", "--log", LOG, "--sent", "orders"], "expected either --delivered or --parquet"),
    (["audit", "--log", LOG, "--sent", "orders", "--delivered", "refunds"], "topic 'refunds' does not exist"),
    (["audit", "--log", LOG, "--sent", "orders", "--delivered", "orders", "--until", "noon"], "--until is 'noon'"),
]


@pytest.mark.parametrize(("arguments", "message"), INVALID, ids=[" ".join(arguments) for arguments, _ in INVALID])
def test_an_invalid_call_prints_one_line_and_writes_nothing(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    create(url(tmp_path), "orders", 3)
    (tmp_path / "registry.txt").write_text("no Parquet\n")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    code = invoke(monkeypatch, "pipeline", *arguments)
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith(f"error: {message}"), printed.err
    assert len(printed.err.splitlines()) == 1
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == []
    with blocking(url(tmp_path)) as opened:
        assert [topic.name for topic in opened.wait(opened.log.topics())] == ["orders"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lake", "/proc/lake"], "/proc/lake can't be written (No such file or directory): check its permissions"),
        (
            ["--lake", "lake", "--remote", f"sc://127.0.0.1:{free_port()}"],
            "the Spark Connect server at 127.0.0.1:PORT can't be reached",
        ),
    ],
)
def test_what_can_not_be_written_or_reached_is_said_before_spark_starts(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    create(url(tmp_path), "orders", 3)
    monkeypatch.chdir(tmp_path)
    assert invoke(monkeypatch, "pipeline", "ingest", "orders", "--log", LOG, *arguments) == 1
    printed = capsys.readouterr().err
    assert re.sub(r"1:\d+", "1:PORT", printed).startswith(f"error: {message}")
    assert len(printed.splitlines()) == 1
