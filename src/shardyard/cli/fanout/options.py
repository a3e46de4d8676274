"""Options that the commands for channels share, and the stores that they name."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import getpass
import os
from typing import Annotated

import typer

from shardyard.cli.options import value_option
from shardyard.cli.stores import default_store
from shardyard.model import InvalidValue, ShardyardError
from shardyard.model.url import parse_url

DEFAULT_LOG = "sqlite:///data/log"

LogUrl = Annotated[str, typer.Option("--log", help="The log of the servers.", metavar="URL")]
RegistryUrl = Annotated[
    str | None,
    value_option(
        "--registry",
        metavar="URL",
        help="The registry of the servers. Default: registry.db beside the log, or in its database.",
    ),
]


def registry_url(log: str, registry: str | None) -> str:
    """The given one, or the one that goes with the log. `InvalidValue` for stores that end with the process."""
    if registry is None:
        registry = default_store("--registry", "log", log, "registry.db")
    for option, url in (("--log", log), ("--registry", registry)):
        _check_shared(option, url)
    return registry


def _check_shared(option: str, url: str) -> None:
    if parse_url(option.removeprefix("--"), url).engine == "memory":
        raise InvalidValue(option, url, "storage that other processes use, too, such as sqlite:///data/log")


def existing_log(log: str) -> str:
    """The URL, if there is a log: a misspelt one must not create another."""
    from shardyard.log import log_exists

    _check_shared("--log", log)
    if not log_exists(log):
        raise ShardyardError(f"there is no log at {parse_url('log', log)}: start a server first, or name it with --log")
    return log


def existing_stores(log: str, registry: str | None) -> tuple[str, str]:
    """The URLs of log and registry, if there are such stores."""
    from shardyard.registry import registry_exists

    registry = registry_url(log, registry)
    existing_log(log)
    if not registry_exists(registry):
        where = parse_url("registry", registry)
        raise ShardyardError(f"there is no registry at {where}: start a server first, or name it with --registry")
    return log, registry


def user() -> str:
    """Who runs the command, for the audit log."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return str(os.getuid())
