"""What everything on PostgreSQL shares: connections, errors, schema versions and notifications."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import psycopg
import pytest

from shardyard.model import (
    Damaged,
    DatabaseDenied,
    DatabaseUnavailable,
    InvalidValue,
    NoRoom,
    ShardyardError,
    UnknownDatabase,
    WrongSchemaVersion,
)
from shardyard.model.url import EngineUrl, parse_url
from shardyard.runtime.postgresql import (
    Aborted,
    Connection,
    Listener,
    connect,
    migrate,
    translated,
    translated_errors,
)
from tests.postgresql import PASSWORD, PostgresqlServer, postgresql_server

TIMEOUT_SECONDS = 60.0
"""How long a test waits for what must happen soon."""


@pytest.fixture
def url(postgresql_url: str) -> EngineUrl:
    return parse_url("registry", postgresql_url)


@pytest.fixture
def connection(url: EngineUrl) -> Iterator[Connection]:
    with connect(url, "test") as connection:
        yield connection


def url_of(text: str) -> EngineUrl:
    return parse_url("registry", text)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Connecting --------------------------------------------------------------------------------------------------


def test_a_connection_has_its_purpose_our_schema_and_durable_commits(
    postgresql: PostgresqlServer, url: EngineUrl
) -> None:
    postgresql.execute("ALTER DATABASE {} SET synchronous_commit = off".format(url.dsn.rsplit("/", 1)[1]))
    with connect(url, "registry", settings={"enable_seqscan": "off"}) as connection:
        for setting, value in {
            "application_name": "shardyard registry",
            "search_path": "shardyard",
            "synchronous_commit": "on",
            "enable_seqscan": "off",
            "jit": "off",
        }.items():
            assert connection.execute("SELECT current_setting(%s)", [setting]).fetchone() == (value,)


def test_an_option_of_the_url_comes_before_ours(url: EngineUrl) -> None:
    with connect(replace(url, dsn=url.dsn + "?application_name=mine"), "registry") as connection:
        assert connection.execute("SELECT current_setting('application_name')").fetchone() == ("mine",)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda s: s.url("nowhere"), UnknownDatabase, 'database "nowhere" does not exist.*create the database'),
        (lambda s: s.url("postgres", password="s3cret"), DatabaseDenied, "password authentication failed.*PGPASSWORD"),
        (lambda s: s.url("postgres", user="nobody"), DatabaseDenied, "check the user"),
        (lambda s: f"postgresql://yard@127.0.0.1:{s.port}/postgres", DatabaseDenied, "no password supplied"),
        (
            lambda _: "postgresql://yard:s3cret@127.0.0.1:1/x",
            DatabaseUnavailable,
            r"Connection refused.*check that the server is at 127\.0\.0\.1:1, runs, and accepts connections",
        ),
        (lambda _: "postgresql://yard:s3cret@host.invalid/x", DatabaseUnavailable, r"is at host\.invalid:5432, runs"),
        (
            lambda _: "postgresql://yard:s3cret@127.0.0.1:1,localhost:2/x",
            DatabaseUnavailable,
            r"is at 127\.0\.0\.1:1, localhost:2, runs",
        ),
        (lambda _: "postgresql://yard:s3cret@127.0.0.1,[::1]/x?port=1", DatabaseUnavailable, r"1:1, ::1:1, runs"),
        (lambda _: "postgresql:///x?host=/no/such", DatabaseUnavailable, "is at /no/such:5432, runs"),
        (lambda s: s.url("postgres") + "?sslmode=require", DatabaseUnavailable, "does not support SSL.*check sslmode"),
        (lambda s: s.url("postgres") + "?no_such_option=1", InvalidValue, "no_such_option"),
        (lambda s: s.url("postgres", password="%zz-s3cret"), InvalidValue, "can't parse"),
    ],
)
def test_a_server_that_can_not_be_used_is_one_clear_line_without_the_password(
    postgresql: PostgresqlServer, change: Callable[[PostgresqlServer], str], error: type[ShardyardError], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        connect(url_of(change(postgresql)), "test")
    message = str(raised.value)
    assert "\n" not in message
    assert "s3cret" not in message
    assert PASSWORD not in message


def test_a_database_of_another_encoding_is_refused(postgresql: PostgresqlServer) -> None:
    postgresql.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(ShardyardError, match=r"LATIN1.*UTF8"):
        connect(url_of(postgresql.url("latin")), "test")
    postgresql.execute("DROP DATABASE latin")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ('FATAL:  too many connections for role "app"', DatabaseUnavailable),
        ('FATAL:  too many connections for database "db"', DatabaseUnavailable),
        ('FATAL:  database "db" is not currently accepting connections', DatabaseUnavailable),
        ('FATAL:  role "app" is not permitted to log in', DatabaseDenied),
        ('FATAL:  role "app" does not exist', DatabaseDenied),
        ('FATAL:  no pg_hba.conf entry for host "::1", user "app", database "db", no encryption', DatabaseDenied),
        ('FATAL:  database "db" does not exist', UnknownDatabase),
        ('FATAL:  permission denied for database "db"', DatabaseDenied),
    ],
)
def test_a_limit_of_a_role_or_database_may_pass_and_a_wrong_name_does_not(
    url: EngineUrl, message: str, error: type[ShardyardError]
) -> None:
    failure = psycopg.OperationalError(f'connection to server at "127.0.0.1", port 5432 failed: {message}\n')
    assert type(translated(failure, url)) is error


def test_a_server_that_starts_is_at_the_right_address(url: EngineUrl) -> None:
    message = 'connection to server at "db", port 5432 failed: FATAL:  the database system is starting up'
    ours = translated(psycopg.OperationalError(message), url, "db:5432")
    assert str(ours).endswith("the database system is starting up): try again in a moment")


def test_the_applications_logging_is_left_as_it_is() -> None:
    assert logging.getLogger("psycopg").filters == []


@pytest.mark.server
def test_too_many_connections_are_told_apart_from_wrong_credentials() -> None:
    with postgresql_server(max_connections="4", superuser_reserved_connections="0") as server:
        server.execute("CREATE ROLE ann LOGIN PASSWORD 'x'")
        url = url_of(server.url("postgres", user="ann", password="x"))
        with pytest.raises(DatabaseUnavailable, match="max_connections"), ExitStack() as connections:
            for _ in range(5):
                connections.enter_context(connect(url, "test"))


@pytest.mark.server
@pytest.mark.timeout(60)
def test_a_server_that_stopped_responding_hangs_neither_a_statement_nor_a_connect() -> None:
    with postgresql_server() as server:
        url = url_of(server.url("postgres") + "?connect_timeout=2")
        connection = connect(url, "test", response_seconds=0.5)
        server.stall()
        with pytest.raises(DatabaseUnavailable, match=r"no response for 0\.5 s"), translated_errors(url):
            connection.execute("SELECT 1")
        assert connection.closed
        with pytest.raises(DatabaseUnavailable, match="timeout"):
            connect(url, "test")
        server.resume()
        connect(url, "test").close()


@pytest.mark.parametrize("what", ["registry", "log"])
def test_a_missing_driver_is_one_line_with_the_command_that_installs_it(what: str) -> None:
    script = f"""
import sys
sys.modules["psycopg"] = None
from shardyard.{what} import open_{what}
try:
    open_{what}("postgresql://db/yard")
except Exception as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    help_ = "pip install 'shardyard[postgresql]'"
    assert run.stdout == f"a {what} at postgresql:// needs the postgresql packages: {help_}\n"


# Errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("40001", Aborted, "run it again"),
        ("40P01", Aborted, "run it again"),
        ("55P03", Aborted, "run it again"),
        ("57014", Aborted, "run it again"),
        ("53100", NoRoom, "no space left"),
        ("53300", DatabaseUnavailable, "max_connections"),
        ("25006", DatabaseUnavailable, "primary.*target_session_attrs"),
        ("42501", DatabaseDenied, "CREATE SCHEMA shardyard AUTHORIZATION"),
        ("57P01", DatabaseUnavailable, "try again"),
        ("57P03", DatabaseUnavailable, "try again"),
        ("08006", DatabaseUnavailable, "try again"),
        ("42P01", Damaged, "damaged"),
        ("XX001", Damaged, "damaged"),
    ],
)
def test_an_error_of_the_server_becomes_ours_by_its_code(code: str, error: type[ShardyardError], words: str) -> None:
    url = url_of("postgresql://ann:s3cret@db/yard")
    ours = translated(psycopg.errors.lookup(code)("what the server says\nDETAIL: more"), url)
    assert type(ours) is error
    assert str(ours).startswith(("postgresql://***@db/yard", "no space left on the disk for postgresql://***@db/yard"))
    with pytest.raises(error, match=words):
        raise ours


def test_an_error_of_the_caller_stays_as_it_is(connection: Connection, url: EngineUrl) -> None:
    with pytest.raises(psycopg.errors.InvalidTextRepresentation), translated_errors(url):
        connection.execute("SELECT 'x'::integer")


def test_a_connection_that_was_cut_is_unavailable(
    postgresql: PostgresqlServer, connection: Connection, url: EngineUrl
) -> None:
    postgresql.cut_connections()
    with pytest.raises(DatabaseUnavailable, match="terminat"), translated_errors(url):
        connection.execute("SELECT 1")
    assert connection.closed


# Schema versions ---------------------------------------------------------------------------------------------


def create_letters(connection: Connection) -> None:
    connection.execute("CREATE TABLE letters (letter text)")


def add_numbers(connection: Connection) -> None:
    connection.execute("ALTER TABLE letters ADD COLUMN number integer")


def test_migrations_that_are_missing_are_carried_out_once_in_our_schema(connection: Connection, url: EngineUrl) -> None:
    migrate(connection, url, "test", [create_letters])
    migrate(connection, url, "test", [create_letters])
    connection.execute("INSERT INTO letters VALUES ('a')")
    migrate(connection, url, "test", [create_letters, add_numbers])
    assert connection.execute("SELECT * FROM shardyard.letters").fetchall() == [("a", None)]
    assert connection.execute("SELECT version FROM test_version").fetchall() == [(2,)]


def test_a_migration_that_fails_changes_nothing(connection: Connection, url: EngineUrl) -> None:
    def fail(_: Connection) -> None:
        raise DatabaseUnavailable("x", "y")

    with pytest.raises(DatabaseUnavailable):
        migrate(connection, url, "test", [create_letters, fail])
    assert connection.execute("SELECT to_regnamespace('shardyard')").fetchone() == (None,)
    migrate(connection, url, "test", [create_letters])


def test_tables_of_a_newer_version_are_refused(connection: Connection, url: EngineUrl) -> None:
    migrate(connection, url, "test", [create_letters, add_numbers])
    with pytest.raises(WrongSchemaVersion, match=r"the test in postgresql.* has schema version 2.* works with 1"):
        migrate(connection, url, "test", [create_letters])


def test_a_version_that_is_missing_is_damage(connection: Connection, url: EngineUrl) -> None:
    migrate(connection, url, "test", [create_letters])
    connection.execute("DELETE FROM test_version")
    with pytest.raises(Damaged, match="schema version is missing"):
        migrate(connection, url, "test", [create_letters])


def test_many_processes_may_migrate_at_once(url: EngineUrl) -> None:
    start, failed = threading.Barrier(5), list[Exception]()

    def run(component: str) -> None:
        with connect(url, "test") as connection:
            start.wait(TIMEOUT_SECONDS)
            try:
                migrate(connection, url, component, [lambda _: None])
            except Exception as error:  # noqa: BLE001 the test shows it
                failed.append(error)

    threads = [threading.Thread(target=run, args=(component,)) for component in ("a", "a", "a", "b", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_user_without_rights_is_told_what_an_administrator_should_run(
    postgresql: PostgresqlServer, url: EngineUrl
) -> None:
    name = url.dsn.rsplit("/", 1)[1]
    postgresql.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
    try:
        guest = url_of(postgresql.url(name, user="guest", password="guest"))
        with connect(guest, "test") as connection:
            with pytest.raises(DatabaseDenied, match="CREATE SCHEMA shardyard AUTHORIZATION"):
                migrate(connection, guest, "test", [create_letters])
            postgresql.execute("CREATE SCHEMA shardyard AUTHORIZATION guest", name)
            migrate(connection, guest, "test", [create_letters])
    finally:
        postgresql.execute("DROP OWNED BY guest CASCADE", name)
        postgresql.execute("DROP ROLE guest")


# Notifications -----------------------------------------------------------------------------------------------


class Heard:
    """The payloads that a listener received, in order, and how often it may have missed some."""

    def __init__(self) -> None:
        self.payloads: list[str] = []
        self.gaps = 0

    def notified(self, payloads: list[str]) -> None:
        self.payloads.extend(payloads)

    def missed(self) -> None:
        self.gaps += 1


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def listener(url: EngineUrl, heard: Heard) -> Iterator[Listener]:
    listener = Listener(url, "test", {"letters": heard.notified}, heard.missed)
    listener.start()
    assert listener.wait_until_listening(TIMEOUT_SECONDS)
    yield listener
    listener.close()


@pytest.mark.usefixtures("listener")
def test_payloads_arrive_in_the_order_of_the_commits(connection: Connection, heard: Heard) -> None:
    for letter in "abc":
        connection.execute("SELECT pg_notify('letters', %s)", [letter])
        connection.execute("SELECT pg_notify('other', %s)", [letter])
    eventually(lambda: heard.payloads == ["a", "b", "c"])
    assert heard.gaps == 1


@pytest.mark.usefixtures("listener")
def test_after_a_lost_connection_it_reconnects_and_reports_the_gap(
    postgresql: PostgresqlServer, url: EngineUrl, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        postgresql.cut_connections()
        eventually(lambda: heard.gaps == 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert PASSWORD not in caplog.text
    with connect(url, "test") as connection:
        connection.execute("SELECT pg_notify('letters', 'a')")
    eventually(lambda: heard.payloads == ["a"])


def test_a_listener_that_is_closed_hears_nothing_more_and_its_thread_ends(
    connection: Connection, listener: Listener, heard: Heard
) -> None:
    listener.close()
    listener.close()
    connection.execute("SELECT pg_notify('letters', 'a')")
    eventually(lambda: not any(thread.name == "shardyard-test-listen" for thread in threading.enumerate()))
    assert heard.payloads == []


def test_a_listener_that_was_never_started_is_closed(url: EngineUrl) -> None:
    Listener(url, "test", {}, lambda: None).close()
    assert not any(thread.name == "shardyard-test-listen" for thread in threading.enumerate())


def test_a_callback_that_raises_is_logged_and_the_thread_goes_on(
    url: EngineUrl, connection: Connection, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: list[str]) -> None:
        raise ValueError("no such letter")

    listener = Listener(url, "test", {"bad": fail, "letters": heard.notified}, heard.missed)
    listener.start()
    assert listener.wait_until_listening(TIMEOUT_SECONDS)
    with caplog.at_level(logging.WARNING):
        connection.execute("SELECT pg_notify('bad', 'a')")
        connection.execute("SELECT pg_notify('letters', 'b')")
        eventually(lambda: heard.payloads == ["b"])
    assert "no such letter" in caplog.text
    listener.close()
