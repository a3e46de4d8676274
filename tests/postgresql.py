"""A real PostgreSQL server for tests, on a free loopback port, with ways to kill, stall and restart it."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from tests.servers import free_port

START_SECONDS = 60.0
PASSWORD = "yard-secret"
FAST = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "32MB", "max_connections": "200"}
"""For tests that do not cut the power. It still survives SIGKILL: the operating system keeps what was written."""


class PostgresqlServer:
    """A server in a temporary folder. It listens on 127.0.0.1 alone, and asks for a password."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self._settings = FAST | settings
        self._process: subprocess.Popen[bytes] | None = None
        self._create()

    def _create(self) -> None:
        """PostgreSQL refuses to run as root, so root lends the folder to another user."""
        data = self.folder / "data"
        password = self.folder / "password"
        password.write_text(PASSWORD)
        for path in (self.folder, password):
            lend(path)
        self._run("initdb", "-D", data, "-U", "yard", "-A", "scram-sha-256", "--pwfile", password, "-E", "UTF8", "-N")

    def _run(self, program: str, *arguments: object) -> None:
        subprocess.run(
            [_binary(program), *map(str, arguments)],
            check=True,
            capture_output=True,
            user=_user(),
            cwd=self.folder,
            timeout=START_SECONDS,
        )

    def start(self) -> None:
        options = [f"-c{name}={value}" for name, value in self._settings.items()]
        with (self.folder / "server.log").open("ab") as output:
            self._process = subprocess.Popen(
                [
                    _binary("postgres"),
                    f"-D{self.folder / 'data'}",
                    f"-p{self.port}",
                    "-clisten_addresses=127.0.0.1",
                    f"-cunix_socket_directories={self.folder}",
                    *options,
                ],
                stdout=output,
                stderr=output,
                user=_user(),
                cwd=self.folder,
                process_group=0,
            )
        self._wait_until_ready()

    def recover(self) -> None:
        """Wait until it accepts connections after trouble of its own, and start it if it has ended."""
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None:
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()
            with suppress(psycopg.OperationalError):
                psycopg.connect(self.url("postgres"), connect_timeout=5).close()
                return
            time.sleep(0.05)
        self.start()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.url("postgres"), connect_timeout=5).close()
            except psycopg.OperationalError:
                assert self._process is not None
                assert self._process.poll() is None, (self.folder / "server.log").read_text()
                assert time.monotonic() < deadline, (self.folder / "server.log").read_text()
                time.sleep(0.05)
            else:
                return

    def url(self, database: str, *, user: str = "yard", password: str = PASSWORD) -> str:
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str, database: str = "postgres") -> None:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(statement.encode())

    @contextmanager
    def new_database(self) -> Iterator[str]:
        """The URL of an empty database, which is dropped at the end."""
        name = f"yard_{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name}")
        yield self.url(name)
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def kill(self) -> None:
        """SIGKILL every process of the server, as when the machine's memory is gone."""
        assert self._process is not None
        children = _children_in(self._process.pid)
        os.killpg(self._process.pid, signal.SIGKILL)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process.wait()
        while any(map(_is_running, children)):  # until then they hold memory that the next server refuses to share
            time.sleep(0.01)
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def stall(self) -> None:
        """SIGSTOP every process of the server: connections stay open and get no response."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        for pid in (self._process.pid, *_children_in(self._process.pid)):
            with suppress(ProcessLookupError):  # a connection has ended since
                os.kill(pid, number)

    def cut_connections(self) -> None:
        """End every client's connection, as a fail-over or an administrator does."""
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND datname IS NOT NULL"
        )

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.resume()
            self._process.send_signal(signal.SIGINT)  # fast shutdown: connections are ended
            self._process.wait(START_SECONDS)


@contextmanager
def postgresql_server(parent: Path | None = None, **settings: str) -> Iterator[PostgresqlServer]:
    """A running server, in a folder of its own in `parent`. `settings` are PostgreSQL's own."""
    if not is_installed():
        missing = "PostgreSQL is missing: apt-get install postgresql"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    with tempfile.TemporaryDirectory(prefix="yard-pg-", dir=parent) as name:
        Path(name).chmod(0o755)
        server = PostgresqlServer(Path(name), **settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def lend(path: Path) -> None:
    """Give a file or a folder to the user that runs the server, if that is another one."""
    if (user := _user()) is not None:
        shutil.chown(path, user)


def is_installed() -> bool:
    return shutil.which("postgres", path=_search_path()) is not None


def _binary(program: str) -> str:
    found = shutil.which(program, path=_search_path())
    assert found is not None, f"{program} is missing"
    return found


def _search_path() -> str:
    """Debian keeps the programs of each version in a folder of its own; the newest comes first."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name), reverse=True)
    return os.pathsep.join([*map(str, versions), os.environ.get("PATH", os.defpath)])


def _user() -> str | None:
    """The user that runs the server when root runs the tests."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _children_in(parent: int) -> list[int]:
    children = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue
            if int(fields[1]) == parent:
                children.append(int(folder.name))
    return children
