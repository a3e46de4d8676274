"""ejabberd from Debian, with stream management, message carbons and the archive: its resume, mirror and history."""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import psycopg
from bench.messengers.messenger import Messenger, Server, Service, running
from bench.messengers.xmpp import HOST, PASSWORD, XmppClient
from bench.servers import has_postgresql
from tests.postgresql import PASSWORD as POSTGRESQL_PASSWORD
from tests.postgresql import postgresql_server
from tests.servers import free_port, install

REGISTRATIONS_AT_ONCE = 16
SCHEMA = Path("/usr/share/ejabberd/sql/pg.sql")
"""Of Debian's package."""
MAX_SESSIONS = 100
"""Of one user; the default is 10."""


def configuration(port: int, api_port: int, database: Mapping[str, object] | None) -> str:
    """The defaults, but without TLS, shapers and the limit on sessions. Archive and offline messages are in Mnesia,
    which is the default, or in this database. YAML includes JSON."""
    loopback = "127.0.0.1"
    return json.dumps(
        {
            "hosts": [HOST],
            "loglevel": "warning",
            "listen": [
                {
                    "port": port,
                    "ip": loopback,
                    "module": "ejabberd_c2s",
                    "starttls": False,
                    "backlog": 4096,
                },
                {
                    "port": api_port,
                    "ip": loopback,
                    "module": "ejabberd_http",
                    "request_handlers": {"/api": "mod_http_api"},
                },
            ],
            "acl": {"loopback": {"ip": ["127.0.0.0/8"]}},
            "api_permissions": {"bench": {"who": {"access": {"allow": {"acl": "loopback"}}}, "what": ["register"]}},
            "shaper_rules": {"max_user_sessions": MAX_SESSIONS},
            "modules": {
                "mod_admin_extra": {},
                "mod_carboncopy": {},
                "mod_disco": {},
                "mod_http_api": {},
                "mod_mam": {"default": "always"},
                "mod_offline": {},
                "mod_ping": {},
                "mod_roster": {},
                "mod_stream_mgmt": {"resend_on_timeout": True},
            },
            "default_db": "sql" if database else "mnesia",
            **(database or {}),
        },
        indent=1,
    )


async def register(url: str, users: Sequence[str]) -> None:
    waiting = list(users)
    async with aiohttp.ClientSession() as http:

        async def register_some() -> None:
            while waiting:
                account = {"user": waiting.pop(), "host": HOST, "password": PASSWORD}
                async with http.post(f"{url}/api/register", json=account) as response:
                    if response.status not in {200, 409}:  # 409: it exists
                        raise RuntimeError(f"ejabberd did not register {account}: {await response.text()}")

        await asyncio.gather(*(register_some() for _ in range(REGISTRATIONS_AT_ONCE)))


@contextlib.contextmanager
def serve(folder: Path, _: int, database: Mapping[str, object] | None = None) -> Iterator[Service | None]:
    """Run one node, without Erlang's distribution. `ejabberdctl` is not used because it switches to a user that cannot
    write to our folder."""
    found = find_ejabberd()
    if found is None:
        yield None
        return
    port, api_port = free_port(), free_port()
    path = folder / "ejabberd.yml"
    path.write_text(configuration(port, api_port, database))
    settings = {
        "HOME": str(folder),
        "ERL_LIBS": str(found.parent),
        "EJABBERD_CONFIG_PATH": str(path),
        "EJABBERD_LOG_PATH": str(folder / "ejabberd.log"),
    }
    options = ["+K", "true", "+P", "250000", "-mnesia", "dir", f'"{folder}/data"']  # as ejabberdctl has them
    server = Server(["/usr/bin/erl", "-noinput", *options, "-s", "ejabberd"], port, folder, settings)
    with running([server]):
        url = f"http://127.0.0.1:{api_port}"
        yield Service(
            [server], [f"127.0.0.1:{port}"], folder=folder, register=lambda users: asyncio.run(register(url, users))
        )


def find_ejabberd() -> Path | None:
    """The folder of its application, which is installed if it is missing. None if that fails; the reason is printed."""
    found = sorted(Path("/usr/lib").glob("*/ejabberd-*/ebin")) if install("ejabberd") else []
    return found[-1].parent if found else None


@contextlib.contextmanager
def serve_with_postgresql(folder: Path, count: int) -> Iterator[Service | None]:
    """The same with archive and offline messages in PostgreSQL, which syncs every commit."""
    if find_ejabberd() is None or not has_postgresql():
        yield None
        return
    with postgresql_server(fsync="on", full_page_writes="on", shared_buffers="128MB") as postgresql:
        with psycopg.connect(postgresql.url("postgres"), autocommit=True) as connection:
            connection.execute(SCHEMA.read_bytes())
        database = {
            "sql_type": "pgsql",
            "sql_server": "127.0.0.1",
            "sql_port": postgresql.port,
            "sql_database": "postgres",
            "sql_username": "yard",
            "sql_password": POSTGRESQL_PASSWORD,
        }
        with serve(folder, count, database) as service:
            if service is not None:
                service.helpers.append(int((postgresql.folder / "data/postmaster.pid").read_text().split()[0]))
            yield service


EJABBERD = Messenger("ejabberd", XmppClient, serve, max_servers=1)
EJABBERD_POSTGRESQL = Messenger("ejabberd, PostgreSQL", XmppClient, serve_with_postgresql, max_servers=1)
