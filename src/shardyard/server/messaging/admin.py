"""Who may administer a messaging server."""

import hmac

from shardyard.model import WrongToken


class AdminToken:
    """The token that metrics and draining require; None: everybody who reaches the server may."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def check(self, token: str | None) -> None:
        """`WrongToken` unless it is the token."""
        if self._token is not None and not hmac.compare_digest((token or "").encode(), self._token.encode()):
            raise WrongToken("this server")
