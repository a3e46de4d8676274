"""Signals between processes. The time after which a listener looks by itself is so high that only a signal can end a
wait, unless a test is about that time."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.runtime import process_signal
from shardyard.runtime.process_signal import Listener, Sender

TIMEOUT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def only_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_signal, "FALLBACK_SECONDS", 1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "listeners"


@contextlib.contextmanager
def sending(folder: Path) -> Iterator[Sender]:
    sender = Sender(folder)
    yield sender
    sender.close()


def wakes(listener: Listener) -> bool:
    """Whether its wait ends."""
    waiting = threading.Thread(target=listener.wait, daemon=True)
    waiting.start()
    waiting.join(TIMEOUT_SECONDS)
    return not waiting.is_alive()


def test_a_listener_is_woken_by_a_signal_that_came_before_and_by_one_that_comes_while_it_waits(folder: Path) -> None:
    with Listener(folder) as listener, sending(folder) as sender:
        sender.send()
        assert wakes(listener)
        later = threading.Timer(0.05, sender.send)
        later.start()
        assert wakes(listener)
        later.join()


def test_all_listeners_are_signalled_but_the_one_that_is_excepted(folder: Path) -> None:
    with Listener(folder) as one, Listener(folder) as two, sending(folder) as sender:
        sender.send()
        one.wait()
        two.wait()
        sender.send(but=one)
        two.wait()
        waiting = threading.Thread(target=one.wait)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        one.wake()
        waiting.join()


def test_each_of_many_listeners_that_come_and_go_is_signalled_from_the_start(folder: Path) -> None:
    with sending(folder) as sender:
        for _ in range(50):  # many of them within one tick of the file system's clock
            sender.send()
            with Listener(folder) as listener:
                sender.send()
                listener.wait()
        sender.send()
    assert not folder.exists(), "the last listener leaves nothing behind"


def test_a_sender_never_waits_for_a_listener_that_does_not_look(folder: Path) -> None:
    with Listener(folder) as listener, sending(folder) as sender:
        for _ in range(10_000):
            sender.send()
            listener.wake()
        assert wakes(listener)


@pytest.mark.processes
def test_what_a_killed_process_left_is_removed_and_the_others_are_signalled(folder: Path) -> None:
    script = "import sys; from pathlib import Path; from shardyard.runtime.process_signal import Listener\n"
    script += "listener = Listener(Path(sys.argv[1])); print(listener.name, flush=True); listener.wait(); input()"
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = folder / process.stdout.readline().strip()
        process.kill()
    with Listener(folder) as listener, sending(folder) as sender:
        assert left.exists()
        sender.send()
        listener.wait()
        assert not left.exists()


def test_a_process_in_which_sigpipe_kills_survives_listeners_that_were_killed(folder: Path) -> None:
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(folder / "left.socket"))
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with sending(folder) as sender:
            sender.send()
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert not list(folder.iterdir())


def test_a_file_of_somebody_else_stays_where_it_is(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with Listener(folder) as listener, sending(folder) as sender:
        sender.send()
        listener.wait()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_path_may_be_longer_than_the_address_of_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    with Listener(folder / "listeners") as listener, sending(folder / "listeners") as sender:
        sender.send()
        listener.wait()
    assert not list(folder.iterdir())


def test_where_no_socket_can_be_made_a_listener_polls_and_can_still_be_woken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file where the folder should be")
    with Listener(folder) as listener, sending(folder) as sender:
        sender.send()
        assert wakes(listener)
    monkeypatch.setattr(process_signal, "POLL_SECONDS", 1000)
    with Listener(folder / "without" / "parents") as listener:
        listener.wake()
        assert wakes(listener)


def test_a_listener_looks_by_itself_after_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_signal, "FALLBACK_SECONDS", 0.01)
    with Listener(folder) as listener:
        assert wakes(listener)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can listen where it is not the owner")
def test_the_owner_of_a_folder_can_signal_root(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    os.chown(tmp_path, 12345, 12345)
    with Listener(tmp_path / "listeners") as listener:
        for path in (tmp_path / "listeners", tmp_path / "listeners" / listener.name):
            status = path.stat()
            assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (12345, 12345, 0o750)
