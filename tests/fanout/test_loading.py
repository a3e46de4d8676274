"""Memberships from Parquet and CSV files."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardyard.fanout import membership_files
from shardyard.fanout.channels import Channels
from shardyard.fanout.loading import Loaded, load
from shardyard.fanout.membership_files import MalformedRow
from shardyard.log.memory import MemoryLog
from shardyard.model import InvalidCall, InvalidValue
from shardyard.wire.channels import MEMBERS


def run(work: Callable[[Channels], Awaitable[None]]) -> MemoryLog:
    log = MemoryLog()
    asyncio.run(_awaited(work(Channels(log))))
    return log


async def _awaited(work: Awaitable[None]) -> None:
    await work


ROWS = [("general", "alice"), ("general", "bob"), ("dev", "alice")]


def written(path: Path, rows: Sequence[tuple[str, ...]], header: str = "channel,user") -> Path:
    if path.suffix == ".csv":
        path.write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n")
    else:
        names = header.split(",")
        pq.write_table(pa.table({name: [row[i] for row in rows] for i, name in enumerate(names)}), path)
    return path


@pytest.mark.parametrize("name", ["members.csv", "members.parquet", "no-suffix"])
def test_a_file_is_loaded_and_may_be_loaded_again(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, ROWS)
    seen: list[tuple[int, int]] = []

    async def work(channels: Channels) -> None:
        for _ in range(2):
            loaded = await load(channels, path, progress=lambda done, rows: seen.append((done, rows)))
            assert loaded == Loaded(rows=3, joins=3, leaves=0, malformed=0)
            assert await channels.members("general") == ["alice", "bob"]
            assert await channels.members("dev") == ["alice"]

    run(work)
    assert seen == [(0, 3), (3, 3)] * 2


@pytest.mark.parametrize("name", ["members.csv", "members.parquet"])
def test_rows_may_say_what_to_do_in_their_order(tmp_path: Path, name: str) -> None:
    rows = [("general", "alice", "join"), ("general", "bob", "join"), ("general", "alice", "leave")]
    path = written(tmp_path / name, rows, "channel,user,action")

    async def work(channels: Channels) -> None:
        assert await load(channels, path) == Loaded(rows=3, joins=2, leaves=1, malformed=0)
        assert await channels.members("general") == ["bob"]

    run(work)


def test_columns_may_be_dictionaries_and_others_are_ignored(tmp_path: Path) -> None:
    columns = {
        "since": pa.array([1, 2]),
        "user": pa.array(["alice", "bob"], pa.large_string()),
        "channel": pa.array(["general", "general"]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "m.parquet")

    async def work(channels: Channels) -> None:
        await load(channels, tmp_path / "m.parquet")
        assert await channels.members("general") == ["alice", "bob"]

    run(work)


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        ("m.csv", b",alice", "channel is ''"),
        ("m.csv", b"general,", "user is ''"),
        ("m.csv", b"general," + b"x" * 129, "user is 'xxx"),
        ("m.csv", b"general,\xff", "user is '.xff', expected text in UTF-8"),
        ("m.csv", b"general,a\0b", "without NUL"),
        ("m.csv", b"general", "it has 1 columns instead of 2"),
        ("m.csv", b"general,alice,join", "it has 3 columns instead of 2"),
        ("m.parquet", None, "user is missing"),
    ],
)
def test_a_malformed_row_is_an_error_before_anything_is_stored(
    tmp_path: Path, name: str, row: bytes | None, why: str
) -> None:
    path = tmp_path / name
    if row is None:
        pq.write_table(pa.table({"channel": ["general"] * 4, "user": ["a", "b", None, "d"]}), path)
    else:
        path.write_bytes(b"channel,user\ngeneral,a\ngeneral,b\n" + row + b"\ngeneral,d\n")

    async def refused(channels: Channels) -> None:
        with pytest.raises(MalformedRow, match=why) as error:
            await load(channels, path)
        assert error.value.row == 3

    log = run(refused)
    assert all(topic.name != MEMBERS for topic in asyncio.run(log.topics()))

    async def skipped(channels: Channels) -> None:
        loaded = await load(channels, path, skip_malformed=True)
        assert loaded == Loaded(rows=4, joins=3, leaves=0, malformed=1)
        assert await channels.members("general") == ["a", "b", "d"]

    run(skipped)


@pytest.mark.parametrize("good", [b"", b"general,a\n"])
def test_malformed_rows_after_the_last_good_one_are_counted(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(b"channel,user\n" + good + b"general,a,b\nx\n")

    async def work(channels: Channels) -> None:
        count = len(good.splitlines())
        loaded = await load(channels, path, skip_malformed=True)
        assert loaded == Loaded(rows=2 + count, joins=count, leaves=0, malformed=2)

    run(work)


def test_an_unknown_action_is_malformed(tmp_path: Path) -> None:
    path = written(
        tmp_path / "m.csv", [("general", "alice", "join"), ("general", "bob", "kick")], "channel,user,action"
    )

    async def work(channels: Channels) -> None:
        with pytest.raises(MalformedRow, match="action is 'kick', expected join or leave"):
            await load(channels, path)

    run(work)


def test_row_numbers_count_over_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_files, "BATCH_ROWS", 10)
    monkeypatch.setattr(membership_files, "CSV_BLOCK_BYTES", 100)
    for name in ("m.csv", "m.parquet"):
        path = written(tmp_path / name, [("general", "" if n == 57 else f"user{n}") for n in range(100)])

        async def work(channels: Channels, path: Path = path) -> None:
            with pytest.raises(MalformedRow, match="row 58 of"):
                await load(channels, path)
            assert (await load(channels, path, skip_malformed=True)).joins == 99

        run(work)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("file", b"", "can't be read"),
        ("file", b"room,user\na,b\n", "expected the columns channel, user"),
        ("file", b"channel,user,user\na,b,c\n", "expected the columns channel, user"),
        ("file", b"PAR1 and then nothing", "can't be read"),
        ("m.parquet", b"channel,user\na,b\n", "m.parquet is not a Parquet file: give it another name if it is CSV"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    async def work(channels: Channels) -> None:
        with pytest.raises(InvalidCall, match=why):
            await load(channels, path)
        with pytest.raises(InvalidValue, match="a file that can be read"):
            await load(channels, tmp_path / "missing")
        with pytest.raises(InvalidValue, match="a file that can be read"):
            await load(channels, tmp_path)

    run(work)


def test_numbers_are_no_names(tmp_path: Path) -> None:
    pq.write_table(pa.table({"channel": [1], "user": ["alice"]}), tmp_path / "m.parquet")

    async def work(channels: Channels) -> None:
        with pytest.raises(InvalidValue, match=r"int64.*expected strings"):
            await load(channels, tmp_path / "m.parquet")

    run(work)
