"""Who may administer a messaging server."""

import hmac
import ipaddress

from fastapi import Request

from shardyard.model import WrongToken
from shardyard.server.auth import token_of
from shardyard.server.http import host_of


class AdminToken:
    """The token that metrics and draining require; None: everybody on this machine may."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def check(self, token: str | None, host: str) -> None:
        """`WrongToken` unless it is the token. `host`: the address of the caller."""
        if self._token is None:
            if not _is_this_machine(host):
                raise WrongToken("this server", "to be called from its own machine, or started with SHARDYARD_TOKEN")
        elif not hmac.compare_digest((token or "").encode(), self._token.encode()):
            raise WrongToken("this server")


async def check_admin(request: Request) -> None:
    """`WrongToken` unless the caller sent the token for administration, or the server has none."""
    admin: AdminToken = request.app.state.admin
    admin.check(token_of(request.headers), host_of(request))


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
