"""Who a client is: credentials are exchanged for an access token, which servers check without asking anybody."""

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jwt
import msgspec

from shardyard.model import InvalidValue, ShardyardError, WrongToken
from shardyard.registry import TransactionBatcher
from shardyard.runtime.clock import Clock
from shardyard.wire.inbox import MAX_USER_LENGTH, User

ALGORITHM = "HS256"
AUDIENCE = "shardyard.messaging"
"""Of access tokens, so that other tokens under the same secret are not taken for one."""
SERVERS = "shardyard.messaging.servers"
"""The audience of tokens between servers."""
ACCESS_SECONDS = 3600.0
PEER_SECONDS = 60.0
LEEWAY_SECONDS = 5.0
"""By how much the clocks of servers may differ."""
SETTING = ("messaging", "signing-key")
MIN_SECRET_BYTES = 32
"""Of a shared secret: signatures with a shorter one could be guessed."""

WITH_USER = f"a token whose sub is a name of 1 to {MAX_USER_LENGTH} characters"


class TokenExpired(ShardyardError):
    """Raised for an access token whose time is over."""

    def __init__(self) -> None:
        super().__init__("the access token has expired: get a new session")


@dataclass(frozen=True, slots=True)
class AccessToken:
    """Proves to any messaging server who a client's user is, for a time."""

    text: str
    expires_at: float
    """Seconds since 1970."""


class Tokens:
    """Issues and checks access tokens, signed with a key that all messaging servers share."""

    def __init__(self, key: str, clock: Clock) -> None:
        self._key = key
        self._clock = clock

    def issue(self, user: str, seconds: float = ACCESS_SECONDS) -> AccessToken:
        expires_at = self._clock.now() + seconds
        claims = {"sub": user, "exp": int(expires_at), "aud": AUDIENCE}
        return AccessToken(jwt.encode(claims, self._key, ALGORITHM), expires_at)

    def check(self, token: str) -> tuple[str, float]:
        """The user of an access token, and when it expires. `TokenExpired`, or `WrongToken` if it is not ours."""
        claims = _decode(token, self._key, AUDIENCE)
        return _subject(claims), float(claims["exp"])

    def issue_for_peer(self, server: str) -> str:
        """A token by which a server proves itself to another one."""
        claims = {"sub": server, "exp": int(self._clock.now() + PEER_SECONDS), "aud": SERVERS}
        return jwt.encode(claims, self._key, ALGORITHM)

    def check_peer(self, token: str | None) -> None:
        """`WrongToken` unless it is the token of a server."""
        try:
            _decode(token or "", self._key, SERVERS)
        except TokenExpired:
            raise WrongToken("this server") from None


def _decode(token: str, key: str, audience: str | None) -> Mapping[str, Any]:
    try:
        claims: Mapping[str, Any] = jwt.decode(
            token,
            key,
            [ALGORITHM],
            audience=audience,
            leeway=LEEWAY_SECONDS,
            options={"require": ["exp", "sub"], "verify_aud": audience is not None},
        )
    except jwt.ExpiredSignatureError:
        raise TokenExpired from None
    except jwt.MissingRequiredClaimError:
        raise WrongToken("this server", "a token with sub and exp") from None
    except jwt.ImmatureSignatureError:
        raise WrongToken("this server", "a token whose time (nbf, iat) has come") from None
    except jwt.exceptions.InvalidSubjectError:
        raise WrongToken("this server", WITH_USER) from None
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
        raise WrongToken("this server", "a token that is signed with its key by HS256") from None
    return claims


def _subject(claims: Mapping[str, Any]) -> str:
    try:
        return msgspec.convert(claims["sub"], User)
    except msgspec.ValidationError:
        raise WrongToken("this server", WITH_USER) from None


async def signing_key(transactions: TransactionBatcher) -> str:
    """The key for access tokens, which the first server that asks for it makes and all others find in the registry."""
    scope, name = SETTING
    row = await transactions.read(lambda tx: tx.setting(scope, name))
    if row is None:
        made = secrets.token_hex(32)
        row = await transactions.run(lambda tx: tx.setting(scope, name) or tx.put_setting(scope, name, made))
    return str(row.value)


# Authentication


class Credentials(msgspec.Struct, frozen=True):
    """What a client gives for a session."""

    user: str | None = None
    secret: str | None = None
    """The shared secret."""
    token: str | None = None
    """A JWT that an application signed with the shared secret, with the user as its subject (`sub`) and an expiry."""


class Authenticator(Protocol):
    """Decides which user a client is."""

    async def authenticate(self, credentials: Credentials) -> str:
        """The user. `WrongToken` if the credentials are not valid."""


class SharedSecret:
    """Takes the secret itself together with any user, or a token that was signed with it. For applications that sign
    in their users themselves, and for servers that only trusted programs reach."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def authenticate(self, credentials: Credentials) -> str:
        if credentials.token is not None:
            try:
                return _subject(_decode(credentials.token, self._secret, None))
            except TokenExpired:
                raise WrongToken("this server", "a token that has not expired") from None
        given = (credentials.secret or "").encode()
        if not hmac.compare_digest(given, self._secret.encode()):
            raise WrongToken("this server", "its secret, or a token that is signed with it")
        return named_user(credentials)


class Open:
    """Believes everybody. For trying things on one's own machine."""

    async def authenticate(self, credentials: Credentials) -> str:
        return named_user(credentials)


def named_user(credentials: Credentials) -> str:
    """The user that the credentials name. `InvalidValue` if they name none."""
    try:
        return msgspec.convert(credentials.user, User)
    except msgspec.ValidationError:
        raise InvalidValue("user", credentials.user, f"a name of 1 to {MAX_USER_LENGTH} characters") from None
