"""Log and registry on a PostgreSQL server that is reached by TLS alone."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from shardyard.log import open_log
from shardyard.model import DatabaseDenied, DatabaseUnavailable, Partition, Record, ShardyardError
from shardyard.registry import open_registry
from tests.cli.invocation import invoke
from tests.postgresql import PASSWORD, PostgresqlServer, lend, postgresql_server

pytestmark = pytest.mark.server


class TlsServer(NamedTuple):
    """A server that refuses connections without TLS."""

    postgresql: PostgresqlServer
    certificate: Path
    """Of the server, for the host `localhost`, signed by itself."""
    stranger: Path
    """A certificate for the same host that the server does not have."""

    def url(self, options: str, host: str = "localhost") -> str:
        """`options`: those of the URL, in which `{own}` and `{stranger}` stand for the certificates."""
        given = options.format(own=self.certificate, stranger=self.stranger)
        return f"postgresql://yard:{PASSWORD}@{host}:{self.postgresql.port}/postgres?hostaddr=127.0.0.1&{given}"


def create_certificate(folder: Path) -> Path:
    """A certificate for `localhost` that is its own authority, and its key, in the files where PostgreSQL looks for
    them."""
    certificate, key = folder / "server.crt", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return certificate


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    mine = tmp_path_factory.mktemp("tls")
    with postgresql_server() as postgresql:
        data = postgresql.folder / "data"
        for path in (certificate := create_certificate(data), data / "server.key"):
            lend(path)
        (mine / "root.crt").write_bytes(certificate.read_bytes())
        (data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")
        postgresql.execute("ALTER SYSTEM SET ssl = on")
        postgresql.stop()
        postgresql.start()
        yield TlsServer(postgresql, mine / "root.crt", create_certificate(mine))


@pytest.mark.parametrize("options", ["sslmode=require", "sslmode=verify-full&sslrootcert={own}"])
def test_log_and_registry_work_by_tls_on_all_of_their_connections(server: TlsServer, options: str) -> None:
    url = server.url(options)
    topic = options.partition("&")[0].replace("=", "-")
    record = Record("order-1", b"customer-7", b"v", timestamp=1)

    async def use() -> list[tuple[str, bool]]:
        async with open_log(url) as log:
            await log.create_topic(topic, 1)
            reading = asyncio.create_task(log.read(Partition(topic, 0), 0, wait=20.0))
            await log.append(Partition(topic, 0), [record])
            assert (await reading).records() == [record]
            return connections(url)

    with open_registry(url) as registry:
        registry.run(lambda tx: tx.put_setting(f"topic/{topic}", "owner", "ann"))
        setting = registry.read(lambda tx: tx.setting(f"topic/{topic}", "owner"))
        assert setting is not None
        assert setting.value == "ann"
        open_ones = asyncio.run(use())
    assert {"shardyard registry", "shardyard log writer", "shardyard log"} <= {name for name, _ in open_ones}
    assert all(encrypted for _, encrypted in open_ones)


def connections(url: str) -> list[tuple[str, bool]]:
    """The name of each connection of ours, and whether it is encrypted."""
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT application_name, ssl FROM pg_stat_activity JOIN pg_stat_ssl USING (pid)"
            " WHERE application_name LIKE 'shardyard%'"
        ).fetchall()


@pytest.mark.parametrize(
    ("options", "host", "error", "words"),
    [
        (
            "sslmode=verify-full&sslrootcert={stranger}",
            "localhost",
            DatabaseUnavailable,
            "certificate verify failed.*check sslmode and sslrootcert in the URL, and the certificate of the server",
        ),
        (
            "sslmode=verify-full&sslrootcert={own}",
            "127.0.0.1",
            DatabaseUnavailable,
            'certificate for "localhost" .*does not match host name "127.0.0.1".*check sslmode',
        ),
        (
            "sslmode=verify-full&sslrootcert=/no/such.crt",
            "localhost",
            DatabaseUnavailable,
            'certificate file "/no/such.crt" does not exist',
        ),
        ("sslmode=disable", "localhost", DatabaseDenied, "no encryption"),
    ],
    ids=["another authority", "another host", "no authority", "without TLS"],
)
def test_a_server_that_is_not_trusted_is_one_clear_line_without_the_password(
    server: TlsServer,
    options: str,
    host: str,
    error: type[ShardyardError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = server.url(options, host)
    with pytest.raises(error, match=words) as of_log:
        open_log(url)
    with pytest.raises(error, match=words) as of_registry:
        open_registry(url)
    assert invoke(monkeypatch, "broker", "--port", "0", "--log", url, "--registry", url) == 1
    printed = capsys.readouterr().err
    assert printed == f"error: {of_registry.value}\n"
    for message in (str(of_log.value), str(of_registry.value), printed.rstrip()):
        assert "\n" not in message
        assert PASSWORD not in message
