"""Errors that Spark reports, as Shardyard's own errors with a message of one line."""

import contextlib
import re
from collections.abc import Iterator

from pyspark.errors import PySparkException

from shardyard import model
from shardyard.model import InvalidCall, ShardyardError
from shardyard.pipeline.source.offsets import DataLost

_SHARDYARD_ERROR = re.compile(r"^shardyard\.[\w.]+\.(\w+): (.*?)\s*(?:SQLSTATE: \w+)?$", re.MULTILINE)
_ERROR_TYPES = {name: getattr(model, name) for name in model.__all__} | {"DataLost": DataLost}


class SparkFailed(ShardyardError):
    """Raised when a Spark job failed; the message is the first line of Spark's own."""


@contextlib.contextmanager
def translate_spark_errors() -> Iterator[None]:
    """Turn Spark's exceptions into Shardyard's.

    An error that our own code raised inside a task or a query arrives wrapped in traces of two languages; its message
    is taken out again. It is raised as `InvalidCall` if it was one, else as `SparkFailed`.
    """
    try:
        yield
    except PySparkException as error:
        text = str(error)
        if matches := _SHARDYARD_ERROR.findall(text):
            name, message = matches[-1]
            kind = _ERROR_TYPES.get(name, ShardyardError)
            invalid_call = isinstance(kind, type) and issubclass(kind, InvalidCall)
            raise (InvalidCall if invalid_call else SparkFailed)(message) from error
        raise SparkFailed(_first_line(text)) from error


def _first_line(text: str) -> str:
    """The message without the stack traces below it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "Spark failed without a message: see Spark's own log"
