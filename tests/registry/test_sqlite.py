"""The registry in SQLite: files, processes, crashes, disks."""

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import text

from shardyard.model import (
    Busy,
    Damaged,
    NoRoom,
    NotOurs,
    NotWritable,
    Partition,
    ShardyardError,
)
from shardyard.registry import GroupRow, OwnershipRow, Registry, open_registry
from shardyard.registry.sql import SqlRegistry
from shardyard.registry.sqlite import SqliteStore
from shardyard.runtime import process_signal
from tests.registry.blocks import transaction

TIMEOUT_SECONDS = 60.0
"""How long a test waits for what must happen soon."""

NOBODY = 65534
"""The user and group of that name."""

Mount = Callable[[str], Path]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.db"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a small disk of its own. Skips the test where that is not allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / "disk"
        again = "remount," if folder in mounted else ""
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", again + options, "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"mounting a tmpfs takes root and a kernel that allows it ({error})")
        if not again:
            mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def opened(path: Path, busy_wait: float = TIMEOUT_SECONDS) -> Registry:
    return SqlRegistry(SqliteStore(path, busy_wait=busy_wait))


def put(registry: Registry, name: str) -> None:
    with transaction(registry) as tx:
        tx.put_group(GroupRow(name))


def names(registry: Registry) -> list[str]:
    with transaction(registry) as tx:
        return [row.name for row in tx.groups()]


@contextmanager
def process(path: Path, script: str) -> Iterator["subprocess.Popen[str]"]:
    """Another process, with the registry at `path` open as `registry`."""
    lines = [
        "from shardyard.registry import *",
        "from shardyard.model import *",
        f"registry = open_registry({f'sqlite:///{path}'!r})",
        script,
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def read_line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def press_enter(child: "subprocess.Popen[str]") -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def write(path: Path, script: str) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()


# Durability and processes ------------------------------------------------------------------------------------


def test_rows_are_there_after_reopening(path: Path) -> None:
    with opened(path) as registry, transaction(registry) as tx:
        tx.put_group(GroupRow("billing", epoch=3))
        tx.put_ownerships([OwnershipRow("billing", Partition("orders", 1), owner="a")])
        tx.put_setting("policy", "x", [1])
        tx.audit("ann", "create", "billing")
    with opened(path) as registry, transaction(registry) as tx:
        assert tx.groups() == [GroupRow("billing", epoch=3)]
        assert tx.ownerships_of("billing", "a")[0].partition == Partition("orders", 1)
        assert tx.put_setting("policy", "x", [2]).version == 2
        assert [row.number for row in tx.audit_log()] == [1]


def test_a_commit_is_synced_to_disk(path: Path) -> None:
    store = SqliteStore(path)
    with store.begin(TIMEOUT_SECONDS) as connection:
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
    store.close()


def test_closing_leaves_one_file(path: Path) -> None:
    registry = opened(path)
    registry.watch("x", lambda: None)
    put(registry, "billing")
    registry.close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.processes
def test_another_process_sees_our_rows_and_wakes_our_watch(path: Path) -> None:
    called = threading.Event()
    script = """
def change(tx):
    tx.put_group(GroupRow("theirs"))
    tx.touch("group/theirs")
print(registry.read(lambda tx: tx.groups()[0].name), flush=True)
input()
registry.run(change)
"""
    with opened(path) as registry:
        put(registry, "ours")
        with process(path, script) as child:
            assert read_line(child) == "ours"
            registry.watch("group/theirs", called.set)
            press_enter(child)
            assert called.wait(TIMEOUT_SECONDS)
            assert names(registry) == ["ours", "theirs"]
            assert child.wait(TIMEOUT_SECONDS) == 0


def test_a_watch_is_called_by_the_signal_of_another_process_or_else_after_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_signal, "FALLBACK_SECONDS", 100 * TIMEOUT_SECONDS)
    called = threading.Semaphore(0)
    with opened(path) as registry, opened(path) as other:
        end = registry.watch("a", called.release)
        for _ in range(20):
            with transaction(other) as tx:
                tx.touch("a")
            assert called.acquire(timeout=TIMEOUT_SECONDS)
        end()
    monkeypatch.setattr(process_signal, "FALLBACK_SECONDS", 0.05)
    monkeypatch.setattr(process_signal.Sender, "send", lambda *_, **__: None)
    with opened(path) as registry, opened(path) as other:
        registry.watch("a", called.release)
        with transaction(other) as tx:
            tx.touch("a")
        assert called.acquire(timeout=TIMEOUT_SECONDS)


@pytest.mark.processes
def test_a_process_killed_in_mid_transaction_leaves_what_was_committed(path: Path) -> None:
    script = """
def change(tx):
    tx.delete_group("committed")
    tx.put_ownerships(OwnershipRow("g", Partition("t", i), owner="x" * 1000) for i in range(10_000))
    print("in the middle", flush=True)
    input()
registry.run(lambda tx: tx.put_group(GroupRow("committed")))
registry.run(change)
"""
    with process(path, script) as child:
        assert read_line(child) == "in the middle"
        child.send_signal(signal.SIGKILL)
        assert child.wait(TIMEOUT_SECONDS) == -signal.SIGKILL
    with opened(path) as registry:
        assert names(registry) == ["committed"]
        with transaction(registry) as tx:
            assert tx.ownerships("g") == []
        put(registry, "next")


def test_many_may_open_a_new_registry_at_once(path: Path) -> None:
    start = threading.Barrier(6)
    failed: list[ShardyardError] = []

    def open_and_put(name: str) -> None:
        start.wait(TIMEOUT_SECONDS)
        try:
            with opened(path) as registry:
                put(registry, name)
        except ShardyardError as error:
            failed.append(error)

    threads = [threading.Thread(target=open_and_put, args=(str(number),)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with opened(path) as registry:
        assert names(registry) == ["0", "1", "2", "3", "4", "5"]


def test_a_write_lock_that_another_process_holds_for_too_long_raises_busy(path: Path) -> None:
    with opened(path, busy_wait=0.05) as registry:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Busy, match=r"registry .*registry\.db was busy for 0\.05 s"):
            put(registry, "billing")
        other.execute("ROLLBACK")
        put(registry, "shipping")
        assert names(registry) == ["shipping"]
        other.close()


def test_the_watching_thread_runs_only_while_there_are_watches(path: Path) -> None:
    def watching() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "shardyard-registry-watch"]

    with opened(path) as registry:
        assert watching() == []
        ends = [registry.watch(name, lambda: None) for name in ("a", "b")]
        (thread,) = watching()
        for end in ends:
            end()
        thread.join(TIMEOUT_SECONDS)
        assert watching() == []
        called = threading.Event()
        registry.watch("a", called.set)
        with transaction(registry) as tx:
            tx.touch("a")
        assert called.wait(TIMEOUT_SECONDS)
    assert watching() == []


# Files that are no registry ----------------------------------------------------------------------------------


def test_the_database_of_another_program_is_refused_and_left_alone(path: Path) -> None:
    write(path, "CREATE TABLE recipes (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(NotOurs, match="not a Shardyard registry"):
        opened(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [b"hello", b"\xa5" * 50_000], ids=["short", "long"])
def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(NotOurs):
        opened(path)
    assert path.read_bytes() == content


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotOurs):
        opened(tmp_path)


def test_an_empty_file_becomes_a_registry(path: Path) -> None:
    path.touch()
    with opened(path) as registry:
        put(registry, "billing")
        assert names(registry) == ["billing"]


def scribbled(content: bytes) -> bytes:
    return content[:4096] + b"\xa5" * (len(content) - 4096)


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize("spoil", [scribbled, truncated])
def test_a_damaged_registry_is_never_served(path: Path, spoil: Callable[[bytes], bytes]) -> None:
    with opened(path) as registry, transaction(registry) as tx:
        tx.put_ownerships(OwnershipRow("g", Partition("t", i), owner="a") for i in range(1000))
    path.write_bytes(spoil(path.read_bytes()))

    def read() -> None:
        with opened(path) as registry, transaction(registry) as tx:
            tx.ownerships("g")

    with pytest.raises(Damaged, match=r"registry\.db is damaged"):
        read()


def test_a_registry_that_has_lost_a_table_or_its_version_is_damaged(path: Path) -> None:
    opened(path).close()
    write(path, "DROP TABLE groups")
    with pytest.raises(Damaged, match="groups"), opened(path) as registry:
        names(registry)
    write(path, "DELETE FROM shardyard_registry")
    with pytest.raises(Damaged, match="schema version"):
        opened(path)


def test_a_value_that_is_no_json_is_damaged(path: Path) -> None:
    opened(path).close()
    write(path, "INSERT INTO settings VALUES ('policy', 'x', '{', 1)")
    with opened(path) as registry, pytest.raises(Damaged, match="JSON"), transaction(registry) as tx:
        tx.setting("policy", "x")


# Disks -------------------------------------------------------------------------------------------------------


def test_a_read_only_disk_raises_not_writable(mount: Mount) -> None:
    disk = mount("size=1m")
    opened(disk / "registry.db").close()
    mount("ro")
    for name in ("registry.db", "new.db", "folder/new.db"):
        with pytest.raises(NotWritable, match="can't be written"):
            opened(disk / name)


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder of a user who is not root, with the test running as that user: root may write everywhere."""
    with tempfile.TemporaryDirectory() as folder:
        root = os.geteuid() == 0
        if root:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            if root:
                os.seteuid(0)


def test_a_read_only_file_or_folder_raises_not_writable_until_it_is_writable_again(as_nobody: Path) -> None:
    path = as_nobody / "registry.db"
    opened(path).close()
    path.chmod(0o444)
    with pytest.raises(NotWritable, match="read-only"):
        opened(path)
    path.chmod(0o644)
    for mode in (0o555, 0o000):
        as_nobody.chmod(mode)
        for name in ("registry.db", "new.db", "folder/new.db"):
            with pytest.raises(NotWritable):
                opened(as_nobody / name)
    as_nobody.chmod(0o755)
    with opened(path) as registry:
        put(registry, "billing")
        assert names(registry) == ["billing"]


def test_a_folder_that_is_a_file_raises_not_writable(path: Path) -> None:
    path.touch()
    with pytest.raises(NotWritable):
        open_registry(f"sqlite:///{path}/registry.db")


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    return filler


def put_much(registry: Registry) -> None:
    with transaction(registry) as tx:
        tx.delete_group("before")
        tx.put_setting("policy", "x", "x" * 200_000)


def test_a_full_disk_raises_no_room_until_there_is_space_again(mount: Mount) -> None:
    disk = mount("size=1m")
    with opened(disk / "registry.db") as registry:
        put(registry, "before")
        filler = fill(disk)
        with pytest.raises(NoRoom):
            put_much(registry)
        assert names(registry) == ["before"]
        filler.unlink()
        put(registry, "after")
        assert names(registry) == ["after", "before"]


def test_opening_on_a_full_disk_raises_no_room(mount: Mount) -> None:
    disk = mount("size=1m")
    opened(disk / "registry.db").close()
    filler = fill(disk)
    for name in ("registry.db", "new.db"):
        with pytest.raises(NoRoom):
            opened(disk / name)
    filler.unlink()
    opened(disk / "registry.db").close()
