"""Short runs of `chaos`; `make chaos` runs long ones. And histories that its check must not let pass."""

from pathlib import Path

import pytest

from tests.groups.chaos import DATABASE
from tests.postgresql import PostgresqlServer
from tests.sharding import chaos


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_nothing_is_lost_or_stuck_when_nodes_are_killed_and_stalled(tmp_path: Path) -> None:
    report = chaos.run(tmp_path, seconds=6, seed=7)
    assert report.problems == []
    assert report.kills > 0
    assert report.takeovers > 0
    assert report.acknowledged > 300, "too little happened to prove anything"


@pytest.mark.processes
@pytest.mark.server
@pytest.mark.timeout(300)
def test_nothing_is_lost_or_stuck_on_postgresql(tmp_path: Path, postgresql: PostgresqlServer) -> None:
    with postgresql.new_database() as url:
        (tmp_path / DATABASE).write_text(url)
        report = chaos.run(tmp_path, seconds=6, seed=8)
    assert report.problems == []
    assert report.kills > 0
    assert report.takeovers > 0
    assert report.acknowledged > 300, "too little happened to prove anything"


SENT = ["I 1", "A", "I 2", "A", "I 3"]
"""The last one was never acknowledged."""
GOT = [f"0 1 0 p0:{number}:{index}" for number in (1, 2) for index in range(20)]


def history(folder: Path, got: list[str]) -> chaos.Report:
    (folder / "p0.sent").write_text("\n".join(SENT) + "\n")
    (folder / "n0.1.got").write_text("\n".join(got) + "\n")
    return chaos.check(folder)


def test_the_check_passes_what_comes_again(tmp_path: Path) -> None:
    report = history(
        tmp_path, [*GOT, GOT[3].replace("0 1 0", "0 1 1"), *(g.replace("0 1 0", "0 2 1") for g in GOT[30:])]
    )
    assert report.problems == []
    assert (report.acknowledged, report.again, report.takeovers) == (40, 11, 1)


def test_the_check_finds_a_message_that_is_lost(tmp_path: Path) -> None:
    assert history(tmp_path, GOT[:-1]).problems == ["1 messages are lost, such as p0:2:19"]


def test_the_check_finds_messages_of_a_key_in_the_wrong_order(tmp_path: Path) -> None:
    got = list(GOT)
    got[0], got[20] = got[20], got[0]
    assert "came after" in history(tmp_path, got).problems[0]


def test_the_check_finds_errors_of_processes(tmp_path: Path) -> None:
    (tmp_path / "n0.err").write_text("Traceback (most recent call last):\n")
    assert "n0.err has a traceback" in history(tmp_path, GOT).problems[0]
