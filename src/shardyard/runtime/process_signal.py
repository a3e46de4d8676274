"""A signal without content between the processes of one machine: "something changed here, look".

Each listener has a Unix datagram socket in a folder, and a sender sends a byte to every socket that it finds there.
Unlike a FIFO, such a socket can be signalled as soon as its file exists, a sender keeps no descriptor for it and can
tell the one of a killed process from one in use, and there is no SIGPIPE.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

_log = logging.getLogger(__name__)

FALLBACK_SECONDS = 0.5
"""How long a listener waits for a signal before it looks by itself: a sender may have been killed before it signalled,
or be of a version that does not signal, or have no right to."""
POLL_SECONDS = 0.005
"""The same where no socket can be created, such as in a read-only folder."""
REST_SECONDS = 0.001
"""The least time between two returns of `Listener.wait`, so that looking costs little while signals come in quick
succession."""
MAX_LISTENERS = 256
"""How many listeners a sender signals. Further ones look every `FALLBACK_SECONDS`."""
_SETTLED_NS = 100_000_000
"""A folder's modification time of this age changes with the next file. That of a younger one may stay the same, because
the next file can fall into the same tick of the file system's clock."""
_ENDING = ".socket"
_MAX_PATH_BYTES = 100
"""Longer paths do not fit into the address of a socket."""


class Listener:
    """Gets the signals of all senders to a folder. One thread waits; any thread may call `wake`."""

    def __init__(self, folder: Path) -> None:
        """The folder is created if need be, but not its parents. Where that, or a socket in it, is not possible, the
        listener works and is never signalled."""
        self._folder = folder.absolute()
        self.name = secrets.token_hex(8) + _ENDING
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._waking, self._woken = socket.socketpair()
        for each in (self._socket, self._waking, self._woken):
            each.setblocking(False)
        self._ready = select.poll()
        self._ready.register(self._socket, select.POLLIN)
        self._ready.register(self._woken, select.POLLIN)
        self._returned = 0.0
        self._seconds = FALLBACK_SECONDS
        try:
            self._bind()
        except OSError as error:
            _log.debug("no signals in %s, so it is polled: %s", self._folder, error)
            self._seconds = POLL_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self) -> None:
        """Wait for a signal, for `wake`, or for the time after which to look in any case. What came since the last wait
        counts; several are answered by one return."""
        ready = self._ready.poll(self._seconds * 1000)
        if ready and (rest := self._returned + REST_SECONDS - time.monotonic()) > 0:
            time.sleep(rest)
        self._returned = time.monotonic()
        for received in (self._socket, self._woken) if ready else ():
            with contextlib.suppress(BlockingIOError):
                while True:
                    received.recv(64)

    def wake(self) -> None:
        """End the current wait, or else the next one, at once. Does nothing after `close`."""
        with contextlib.suppress(OSError):  # also when it was woken so often that no more signals fit
            self._waking.send(b"!")

    def close(self) -> None:
        """No thread may wait any more."""
        for each in (self._socket, self._waking, self._woken):
            each.close()
        with contextlib.suppress(OSError):
            (self._folder / self.name).unlink()
        with contextlib.suppress(OSError):  # there are other listeners
            self._folder.rmdir()

    def _bind(self) -> None:
        path = self._folder / self.name
        for attempt in range(3):
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir()
                _give_as(self._folder, self._folder.parent)
            try:
                with _reachable(self._folder) as base:
                    self._socket.bind(f"{base}/{self.name}")
                break
            except FileNotFoundError:  # the last listener has removed the folder meanwhile
                if attempt == 2:
                    raise
        _give_as(path, self._folder.parent)


class Sender:
    """Signals the listeners of a folder. It never blocks and never fails; without listeners it costs some microseconds.
    Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._socket: socket.socket | None = None
        """Created when there is a listener."""
        self._lock = threading.Lock()
        self._listed_at: int | None = None
        """The folder's modification time when it was listed; None if it has to be listed again."""
        self._names: list[str] = []

    def send(self, *, but: Listener | None = None) -> None:
        """Signal all listeners `but` this one."""
        try:
            with self._lock:
                names = [name for name in self._listeners() if but is None or name != but.name]
                if names:
                    self._signal(names)
        except FileNotFoundError:  # there has never been a listener, or the last one is gone
            self._listed_at = None
        except OSError as error:
            _log.debug("cannot signal the listeners in %s: %s", self._folder, error)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _listeners(self) -> list[str]:
        modified = os.stat(self._folder).st_mtime_ns
        if modified != self._listed_at:
            names = [name for name in os.listdir(self._folder) if name.endswith(_ENDING)]
            self._names = names[:MAX_LISTENERS]
            self._listed_at = modified if time.time_ns() - modified > _SETTLED_NS else None
        return self._names

    def _signal(self, names: list[str]) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        with _reachable(self._folder) as base:
            for name in names:
                self._signal_one(self._socket, base, name)

    def _signal_one(self, sending: socket.socket, base: str, name: str) -> None:
        try:
            sending.sendto(b"!", f"{base}/{name}")
        except BlockingIOError:
            pass  # it has signals that it has not seen yet
        except ConnectionRefusedError:  # its process was killed
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
        except OSError as error:  # it is gone, or belongs to a user whom this one may not signal
            _log.debug("cannot signal %s in %s: %s", name, self._folder, error)


@contextlib.contextmanager
def _reachable(folder: Path) -> Iterator[str]:
    """A path of the folder that is short enough for the address of a socket. Linux has one for any folder."""
    if len(os.fsencode(folder)) + len("/0123456789abcdef") + len(_ENDING) <= _MAX_PATH_BYTES:
        yield str(folder)
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _give_as(path: Path, like: Path) -> None:
    """Let those use `path` who may use `like`, even if it is root who listens. As SQLite does with its side files."""
    with contextlib.suppress(OSError):
        wanted = like.stat()
        path.chmod(wanted.st_mode & 0o777)
        os.chown(path, wanted.st_uid, wanted.st_gid)
