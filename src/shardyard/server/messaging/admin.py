"""Who may administer a messaging server."""

import hmac
import ipaddress

from shardyard.model import WrongToken


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


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
