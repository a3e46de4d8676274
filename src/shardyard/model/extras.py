"""The optional packages. `pip install shardyard` brings the client and the commands that call brokers; the extras bring
the rest."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shardyard.model.errors import MissingExtra

MODULES = {
    "server": ("fastapi", "numpy", "pyarrow", "re2", "sqlalchemy", "uvicorn", "uvloop", "xxhash"),
    "postgresql": ("psycopg",),
    "pipeline": ("deltalake", "jinja2", "matplotlib", "pandas", "pyspark"),
    "plot": ("matplotlib",),
    "rabbitmq": ("aio_pika",),
}
"""What Shardyard imports from the packages of each extra."""


def require(extra: str, what: str, *modules: str) -> None:
    """Raise `MissingExtra`, which says how to install the extra, unless its packages are installed.

    `what` needs them: the beginning of the message, such as "the broker". `modules`: if it needs only some of them.
    """
    if any(find_spec(module) is None for module in modules or MODULES[extra]):
        raise MissingExtra(what, extra)


def lazy_exports(package: str, modules: Mapping[str, str], *needs: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports some of its names only when they are used, because their modules need
    packages of the extra `server`, or take long to import.

    `modules`: the module of each name. `needs`: the packages that these modules import.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        require("server", f"{package}.{name}", *needs)
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # the next time it is there
        return value

    return load
