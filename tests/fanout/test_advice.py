"""Which mode is advised for which size."""

import pytest

from shardyard.fanout.advice import GIGABYTE, Thresholds, advise
from shardyard.fanout.modes import Mode
from shardyard.model import InvalidValue
from shardyard.wire.fanout import TableFigures


def table(gigabytes: float, online: int) -> TableFigures:
    return TableFigures(int(gigabytes * GIGABYTE), 1000, 5 * online, online, 9000)


@pytest.mark.parametrize(
    ("mode", "gigabytes", "online", "advised", "reason"),
    [
        ("replicated", 8, 500_000, "replicated", "every worker can hold all of it"),
        ("replicated", 8, 500_001, "partitioned", "500001 users are online, more than 500000"),
        ("replicated", 10.5, 1000, "partitioned", "the table takes 10.5 GB, more than 10 GB"),
        ("partitioned", 2, 1000, "replicated", "a table of 8 GB"),
        ("partitioned", 1e-6, 1, "replicated", "1 user online and a table of less than 0.001 GB"),
        ("partitioned", 3, 1000, "partitioned", "the table takes 12 GB, more than 10 GB"),
    ],
)
def test_the_thresholds_of_the_adr_decide(mode: Mode, gigabytes: float, online: int, advised: str, reason: str) -> None:
    advice = advise(mode, [table(gigabytes, online)] * 4)
    assert (advice.advised, advice.changes) == (advised, mode != advised)
    assert reason in advice.reason
    assert advice.partitioned_bytes * 4 == advice.replicated_bytes == advice.table_bytes
    assert advice.online == online


def test_thresholds_can_be_given() -> None:
    assert advise("replicated", [table(1, 100)], Thresholds(99)).advised == "partitioned"
    assert advise("replicated", [table(1, 100)], Thresholds(100, GIGABYTE)).advised == "replicated"
    with pytest.raises(InvalidValue):
        Thresholds(0)
    with pytest.raises(InvalidValue, match="at least one fan-out worker"):
        advise("replicated", [])
