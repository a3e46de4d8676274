"""PostgreSQL's errors as ours. Each message names the database without its password, and says what helps."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from shardyard.model import (
    Damaged,
    DatabaseDenied,
    DatabaseUnavailable,
    NoRoom,
    RetryLater,
    ShardyardError,
    UnknownDatabase,
)
from shardyard.model.url import EngineUrl

ON_STANDBY = "connect to the primary server, with several hosts by ?target_session_attrs=read-write"


class Aborted(RetryLater):
    """Raised when the database aborted a transaction because of others: a serialization failure, a deadlock, a lock
    that was not granted in time. Nothing was changed, and the same transaction may succeed now. Engines handle it;
    their callers do not see it."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} aborted a transaction ({why}): run it again")
        self.where = where
        self.why = why


@contextmanager
def translated_errors(url: EngineUrl, addresses: str | None = None) -> Iterator[None]:
    """Raise psycopg's errors as ours. Those that are the caller's, such as a value of a wrong type, stay as they are.
    `addresses`: where the server should be, if this is an attempt to connect."""
    try:
        yield
    except psycopg.Error as error:
        ours = translated(error, url, addresses)
        if ours is None:
            raise
        raise ours from error


def translated(error: psycopg.Error, url: EngineUrl, addresses: str | None = None) -> ShardyardError | None:
    """Our error for psycopg's; None if there is none, because the error is the caller's. `addresses`: see
    `translated_errors`.

    The server does not say the code of an error that ends an attempt to connect, and its words may be in any language:
    then those in English are recognised, and all others mean that the database is unavailable.
    """
    where, why = str(url), first_line(error)
    code = error.sqlstate or _code_in(why)
    if code is None:
        return _unavailable(where, why, addresses) if isinstance(error, psycopg.OperationalError) else None
    make = _BY_CODE.get(code) or _BY_CLASS.get(code[:2])
    return None if make is None else make(where, why)


def _unavailable(where: str, why: str, addresses: str | None) -> ShardyardError:
    if re.search(_TLS, why):
        return DatabaseUnavailable(
            where, why, "check sslmode and sslrootcert in the URL, and the certificate of the server"
        )
    if addresses is None or _FROM_SERVER in why:
        return DatabaseUnavailable(where, why)
    return DatabaseUnavailable(
        where,
        why,
        f"check that the server is at {addresses}, runs, and accepts connections from this machine, then try again",
    )


def first_line(error: BaseException) -> str:
    """What an error says, without the details that libpq adds in further lines."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().removesuffix(".")


_MESSAGES = {
    "too many clients": "53300",
    "too many connections": "53300",  # for a role or a database, whose name follows
    "connection slots are reserved": "53300",
    "password authentication failed": "28P01",
    "no password supplied": "28P01",
    "authentication failed": "28000",
    r"no pg_hba\.conf entry": "28000",
    "is not permitted to log in": "28000",
    'role ".*" does not exist': "28000",
    'database ".*" does not exist': "3D000",
    "permission denied for database": "42501",
}
"""What the errors of an attempt to connect contain, as regular expressions, most specific first, and their codes."""


_TLS = "certificate|SSL error|does not support SSL|requires SSL"
"""What the errors of a connection that can't be encrypted, or whose server is not trusted, contain."""
_FROM_SERVER = "FATAL:"
"""What the errors contain that the server itself sent, such as while it starts."""


def _code_in(message: str) -> str | None:
    return next((code for words, code in _MESSAGES.items() if re.search(words, message)), None)


def _wrong_credentials(where: str, why: str) -> ShardyardError:
    return DatabaseDenied(
        where, why, "check the user and the password, in the URL, in PGPASSWORD or in ~/.pgpass, and the server's rules"
    )


def _missing_rights(where: str, why: str) -> ShardyardError:
    return DatabaseDenied(
        where,
        why,
        "let an administrator of the database run CREATE SCHEMA shardyard AUTHORIZATION <user>, or, if the schema "
        "exists, give its tables to that user",
    )


def _too_many_connections(where: str, why: str) -> ShardyardError:
    return DatabaseUnavailable(where, why, "close other clients, or raise max_connections, then try again")


def _read_only(where: str, why: str) -> ShardyardError:
    return DatabaseUnavailable(where, why, ON_STANDBY)


_BY_CODE: dict[str, Callable[[str, str], ShardyardError]] = {
    "25006": _read_only,
    "25P03": DatabaseUnavailable,  # it was idle in a transaction for too long, and the connection is closed
    "28000": _wrong_credentials,
    "28P01": _wrong_credentials,
    "3D000": UnknownDatabase,
    "3F000": Damaged,
    "40001": Aborted,
    "40P01": Aborted,
    "42501": _missing_rights,
    "42703": Damaged,  # our SQL is right, so a table is not
    "42P01": Damaged,
    "53100": lambda where, _why: NoRoom(where),
    "53300": _too_many_connections,
    "55P03": Aborted,
    "57014": Aborted,  # cancelled, by a timeout of the server or by an administrator
    "XX001": Damaged,
    "XX002": Damaged,
}

_BY_CLASS: dict[str, Callable[[str, str], ShardyardError]] = {
    "08": DatabaseUnavailable,
    "53": DatabaseUnavailable,
    "57": DatabaseUnavailable,
    "58": DatabaseUnavailable,
}
"""By the first two characters of the code: connections, resources, the server's operator, its operating system."""
