"""Brokers on PostgreSQL, as a user runs them."""

import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.cli.invocation import invoke
from tests.postgresql import PASSWORD, PostgresqlServer, postgresql_server
from tests.queues.brokers import BrokerProcess

TIMEOUT_SECONDS = 60.0
"""How long a test waits for what must happen soon."""


def is_ready(broker: BrokerProcess) -> bool:
    """Whether the broker says that it takes requests. If not, it says that its database is the reason."""
    try:
        with urlopen(f"{broker.url}/readyz", timeout=TIMEOUT_SECONDS):
            return True
    except HTTPError as error:
        with error:
            status, body = error.code, error.read()
    assert status == 503
    assert b'"database_unavailable"' in body
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.server
@pytest.mark.processes
def test_two_brokers_share_a_database_and_recover_when_its_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shell(broker: BrokerProcess, *arguments: str) -> str:
        assert invoke(monkeypatch, *arguments, "--broker", broker.url) == 0
        return capsys.readouterr().out

    with (
        postgresql_server() as server,
        server.new_database() as url,
        BrokerProcess(tmp_path, "a", database=url) as a,
        BrokerProcess(tmp_path, "b", database=url) as b,
    ):
        for broker in (a, b):
            broker.listens()
        shell(a, "topics", "create", "orders", "--partitions", "2")
        shell(a, "publish", "orders", "first")
        assert "orders" in shell(b, "topics", "list")
        server.kill()
        assert not is_ready(a)
        server.start()
        for broker in (a, b):
            wait_until(lambda broker=broker: is_ready(broker))  # type: ignore[misc]
        shell(b, "publish", "orders", "second")
        shell(a, "groups", "list")
        for broker in (a, b):
            assert PASSWORD not in broker.errors
            assert "Traceback" not in broker.errors


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        (lambda s: s.url("nowhere"), 2, 'database "nowhere" does not exist'),
        (lambda s: s.url("postgres", password="s3cret"), 1, "check the user and the password"),
        (lambda _: "postgresql://yard:s3cret@127.0.0.1:1/x", 1, "Connection refused"),
        (lambda s: s.url("postgres") + "?no_such_option=1", 2, "no_such_option"),
        (lambda _: "postgresql://yard:s3cret@127.0.0.1", 2, "the name of a database"),
    ],
)
def test_a_database_that_can_not_be_used_is_one_line_and_an_exit_code(
    postgresql: PostgresqlServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    url: Callable[[PostgresqlServer], str],
    code: int,
    words: str,
) -> None:
    arguments = ["broker", "--port", "0", "--log", f"sqlite:///{tmp_path}/log", "--registry", url(postgresql)]
    assert invoke(monkeypatch, *arguments) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert "s3cret" not in printed.err
    assert PASSWORD not in printed.err
