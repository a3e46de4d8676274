"""Checks of what a Spark session is started with: Spark itself finds mistakes late, and explains them at length."""

import os
import re
import socket
from urllib.parse import urlsplit

from shardyard.model import InvalidValue, RetryLater

CONNECT = "sc://"
"""How the address of a Spark Connect server begins."""
CONNECT_PORT = 15002
CONNECT_SECONDS = 5.0
MIN_MEMORY = 512 * 1024**2
"""Spark refuses to start with less than 450 MiB, and Java does not give it all of its memory."""

PROXIES = [name for lower in ("grpc_proxy", "https_proxy", "http_proxy") for name in (lower, lower.upper())]
"""Variables of the environment that make gRPC connect through a proxy."""

_MASTER = re.compile(r"local(\[(\d+|\*)( *, *\d+)?\])?|local-cluster\[[\d, ]+\]|yarn|(spark|k8s|sc)://.+")
_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def check_master(master: str) -> None:
    """`InvalidValue` unless it is a master, or a Spark Connect server."""
    if not _MASTER.fullmatch(master):
        expected = "local[*], local[4], spark://host:7077, yarn, k8s://... or sc://host:15002"
        raise InvalidValue("master", without_options(master), expected)


def without_options(master: str) -> str:
    """The address for messages: the options of a Spark Connect server may have a token."""
    return master.partition(";")[0]


def check_memory(memory: str) -> None:
    """`InvalidValue` unless it is a size that Spark's driver can start with."""
    size = re.fullmatch(r"(\d+)([kmgt])", memory.lower())
    if size is None or int(size[1]) * _UNITS[size[2]] < MIN_MEMORY:
        raise InvalidValue("memory", memory, "a whole number and a unit, such as 4g or 1500m; at least 512m")


def check_connect_server(remote: str) -> None:
    """`RetryLater` if nothing listens at the address of a Spark Connect server: Spark would try for minutes. Behind a
    proxy that is left to Spark."""
    server = without_options(remote)
    address = urlsplit(server)
    try:
        where = (address.hostname or "", address.port or CONNECT_PORT)
    except ValueError:
        raise InvalidValue("master", server, "an address such as sc://host:15002") from None
    if any(map(os.environ.get, PROXIES)):
        return
    try:
        socket.create_connection(where, CONNECT_SECONDS).close()
    except OSError as error:
        raise RetryLater(
            f"the Spark Connect server at {where[0]}:{where[1]} can't be reached ({error}): check the address, and "
            "that the server runs"
        ) from error
