"""What reads of many partitions keep of fences."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shardyard.log.requests import ReadRequest
from shardyard.log.sqlite import read_many
from shardyard.log.sqlite.files import connect, create_or_check
from shardyard.log.sqlite.read_many import KnownFences, Reads
from shardyard.model import Fence, Partition


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(connect(create_or_check(tmp_path / "log"), "process")) as opened:
        yield opened


def reads(*fences: Fence) -> Reads:
    return Reads([ReadRequest(Partition("t", number), 0, None, fence) for number, fence in enumerate(fences)])


def test_a_fence_holds_until_a_higher_epoch_of_it_is_known(db: sqlite3.Connection) -> None:
    known = KnownFences()
    both = reads(Fence("a", 2**40), Fence("b", 1))
    assert known.all_hold(db, both), "none of them is known yet"
    db.execute("INSERT INTO fences VALUES ('a', ?), ('b', 1), ('c', 9)", (2**40,))
    assert known.all_hold(db, both)
    db.execute("UPDATE fences SET epoch = epoch + 1 WHERE name = 'a'")
    assert not known.all_hold(db, both)
    assert known.all_hold(db, reads(Fence("a", 2**40 + 1), Fence("b", 1)))


def test_what_is_kept_of_fences_is_bounded_also_of_those_that_do_not_exist(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_many, "MOST_KNOWN", 10)
    known = KnownFences()
    for number in range(50):
        assert known.all_hold(db, reads(Fence(f"f{number}", 1)))
        assert len(known._epochs) <= 10
