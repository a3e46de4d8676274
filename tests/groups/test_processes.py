"""A short run of `chaos`; `make chaos` runs a long one. And histories that its check must not let pass."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from shardyard.log.sqlite import SqliteLog
from shardyard.model import Partition, Record
from tests.groups import chaos
from tests.postgresql import postgresql_server


@pytest.mark.processes
@pytest.mark.usefixtures("spark")
def test_nothing_is_lost_or_reordered_when_processes_are_killed_and_stalled(tmp_path: Path) -> None:
    report = chaos.run(tmp_path, seconds=10, seed=7)
    assert report.problems == []
    assert report.kills > 3
    assert report.stalls > 3
    assert report.acknowledged > 300, "too little happened to prove anything"
    assert report.delivered >= report.stored >= report.acknowledged


@pytest.mark.processes
@pytest.mark.server
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("spark")
def test_nothing_is_lost_or_reordered_when_postgresql_is_killed_restarted_stalled_and_cut_off(tmp_path: Path) -> None:
    with postgresql_server() as server:
        report = chaos.run(tmp_path, seconds=20, seed=7, server=server, server_stall=4.0)
    assert report.problems == []
    assert report.server_faults > 3
    assert report.acknowledged > 100, "too little happened to prove anything"
    assert report.delivered >= report.stored >= report.acknowledged


IDS = ["p0-0:0", "p0-1:0", "p0-0:1", "p0-0:2", "p0-1:1"]
INTENDED = ["I 3 1 p0-0 0 1", "A", "I 3 2 p0-1 0 1", "A", "I 3 3 p0-0 1 2", "A", "I 3 4 p0-1 1 1"]
"""The last one was stored, but never acknowledged."""
GIVEN = [*(f"3 1 {n} {IDS[n]}" for n in (0, 1, 2)), *(f"3 2 {n} {IDS[n]}" for n in (1, 2, 3, 4))]
"""Two owners: the second begins where the first had committed, so that two records come twice."""


def history(folder: Path, stored: list[str], given: list[str]) -> None:
    async def fill() -> None:
        async with SqliteLog(folder / "log") as log:
            await log.create_topic(chaos.TOPIC, chaos.PARTITIONS)
            records = [Record(id_, id_.split(":")[0].encode(), b"") for id_ in stored]
            await log.append(Partition(chaos.TOPIC, 3), records)

    asyncio.run(fill())
    (folder / "p0.sent").write_text("".join(line + "\n" for line in INTENDED))
    (folder / "m0.1.got").write_text("".join(line + "\n" for line in given))


def test_the_check_passes_what_is_delivered_again_to_a_second_owner(tmp_path: Path, spark: SparkSession) -> None:
    history(tmp_path, IDS, GIVEN)
    assert chaos.check(tmp_path, spark) == chaos.Report(acknowledged=4, stored=5, delivered=7, twice=2)


def swapped(lines: list[str], a: int, b: int) -> list[str]:
    lines = list(lines)
    lines[a], lines[b] = lines[b], lines[a]
    return lines


@pytest.mark.parametrize(
    ("stored", "given", "problem"),
    [
        (IDS[:4], lambda g: g[:6], None),  # what was not acknowledged may be missing
        (IDS, lambda g: g[:6], "from the log to members: 1 lost, such as {'id': 'p0-1:1'"),
        (IDS, lambda g: swapped(g, 4, 5), "epoch 2: not each record once and in order"),
        (
            IDS,
            lambda g: swapped(g[:2] + g[4:], 2, 3),
            "from the log to members: 1 out_of_order, such as {'key': 'p0-0'",
        ),
        (IDS, lambda g: [*g[:3], g[2], *g[3:]], "epoch 1: not each record once and in order"),
        (IDS, lambda g: [*g, "3 2 5 p0-9:0"], "from the log to members: 1 unexpected, such as {'id': 'p0-9:0'"),
        (IDS, lambda g: [g[0], *g[5:]], "epoch 2: begins at 3, skipping 1"),
        (IDS, lambda g: [g[0].replace("p0-0", "p0-1"), g[1].replace("p0-1", "p0-0"), *g[2:]], "offsets are not those"),
        ([*IDS[:2], *IDS[3:]], lambda g: g, "from producers to the log: 1 lost, such as {'id': 'p0-0:1'"),
        (swapped(IDS, 2, 3), lambda g: g, "from producers to the log: 1 out_of_order, such as {'key': 'p0-0'"),
        ([*IDS, IDS[0]], lambda g: g, "from producers to the log: 1 duplicated, such as {'id': 'p0-0:0'"),
    ],
)
def test_the_check_reports_what_must_not_happen(
    tmp_path: Path, spark: SparkSession, stored: list[str], given: Callable[[list[str]], list[str]], problem: str | None
) -> None:
    history(tmp_path, stored, given(GIVEN))
    problems = chaos.check(tmp_path, spark).problems
    if problem is None:
        assert problems == []
    else:
        assert any(problem in found for found in problems), problems
