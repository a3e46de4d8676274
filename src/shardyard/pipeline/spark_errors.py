"""What Spark reports, in one line."""

import contextlib
import re
from collections.abc import Iterator

from pyspark.errors import PySparkException

from shardyard import model
from shardyard.model import InvalidCall, ShardyardError
from shardyard.pipeline.source.offsets import DataLost

_OURS = re.compile(r"^shardyard\.[\w.]+\.(\w+): (.*?)\s*(?:SQLSTATE: \w+)?$", re.MULTILINE)
_KINDS = {name: getattr(model, name) for name in model.__all__} | {"DataLost": DataLost}


class SparkFailed(ShardyardError):
    """Raised when Spark gave up on a job; the message is the first line of its own."""


@contextlib.contextmanager
def told_plainly() -> Iterator[None]:
    """Raise what a task or a query of ours raised as what it was, and what Spark itself says in one line."""
    try:
        yield
    except PySparkException as error:
        text = str(error)
        if found := _OURS.findall(text):
            name, message = found[-1]
            kind = _KINDS.get(name, ShardyardError)
            wrong_call = isinstance(kind, type) and issubclass(kind, InvalidCall)
            raise (InvalidCall if wrong_call else SparkFailed)(message) from error
        raise SparkFailed(_first_line(text)) from error


def _first_line(text: str) -> str:
    """Without the traces below."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "Spark failed without a message: see its own log"
