"""A short run of `chaos`; `make chaos` runs a long one."""

from pathlib import Path

from tests.groups import chaos


def test_nothing_is_lost_or_reordered_when_processes_are_killed_and_stalled(tmp_path: Path) -> None:
    report = chaos.run(tmp_path, seconds=10, seed=7)
    assert report.problems == []
    assert report.kills > 3
    assert report.stalls > 3
    assert report.acknowledged > 300, "too little happened to prove anything"
    assert report.delivered >= report.stored >= report.acknowledged
