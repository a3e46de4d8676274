"""ejabberd from Debian, with stream management, message carbons and the archive: its resume, mirror and history."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
from bench.messengers.messenger import Messenger, Server, Service, running
from bench.messengers.xmpp import HOST, PASSWORD, XmppClient
from tests.servers import free_port, install

REGISTRATIONS_AT_ONCE = 16
MAX_SESSIONS = 100
"""Of one user; the default is 10."""


def configuration(port: int, api_port: int) -> str:
    """The defaults, but without TLS, shapers and the limit on sessions. YAML includes JSON."""
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
                "mod_mam": {"default": "always", "db_type": "mnesia"},
                "mod_offline": {},
                "mod_ping": {},
                "mod_roster": {},
                "mod_stream_mgmt": {"resend_on_timeout": True},
            },
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
def serve(folder: Path, _: int) -> Iterator[Service | None]:
    """Run one node, without Erlang's distribution. `ejabberdctl` is not used because it switches to a user that cannot
    write to our folder."""
    found = sorted(Path("/usr/lib").glob("*/ejabberd-*/ebin")) if install("ejabberd") else []
    if not found:
        print("ejabberd is skipped: it could not be installed", file=sys.stderr)
        yield None
        return
    port, api_port = free_port(), free_port()
    path = folder / "ejabberd.yml"
    path.write_text(configuration(port, api_port))
    settings = {
        "HOME": str(folder),
        "ERL_LIBS": str(found[-1].parents[1]),
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


EJABBERD = Messenger("ejabberd", XmppClient, serve, max_servers=1)
