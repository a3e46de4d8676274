"""Errors that Spark reports, as Shardyard's own errors with a message of one line."""

import contextlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from shardyard import model
from shardyard.model import InvalidCall, RetryLater, ShardyardError
from shardyard.pipeline.source.offsets import DataLost

_SHARDYARD_ERROR = re.compile(r"(?:^|: )shardyard\.[\w.]+\.(\w+): (.*?)\s*(?:SQLSTATE: \w+)?$", re.MULTILINE)
_STREAM_ERROR = re.compile(
    r"^\[STREAM_FAILED\] Query \[.*?\] terminated with exception:(.*?)\s*(?:SQLSTATE: \w+)?$", re.MULTILINE
)
_JAVA_ERROR = re.compile(r"^: (?:[\w.$]+: )?(.+)$", re.MULTILINE)
"""An error of Java that PySpark does not know, below its own message."""
_PYTHON_ERROR = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
"""An error of Python that Java has passed on, below its trace."""
_ERROR_TYPES = {name: getattr(model, name) for name in model.__all__} | {"DataLost": DataLost}

SPARK_ERRORS = (PySparkException, Py4JJavaError)
"""What Spark raises when a job fails, PySpark for errors that it knows."""


class SparkFailed(ShardyardError):
    """Raised when a Spark job failed; the message is the first line of Spark's own."""

    def __init__(self, message: str, *, may_pass: bool = True) -> None:
        """`may_pass`: whether the same job may succeed if it is started again."""
        super().__init__(message)
        self.may_pass = may_pass


class SparkEnded(SparkFailed):
    """Raised when the process of Spark's driver, a JVM, is gone."""

    def __init__(self) -> None:
        message = "Spark's JVM has ended: it was killed, or had no memory left. Start the job again to continue it"
        super().__init__(message, may_pass=False)


@contextlib.contextmanager
def translate_spark_errors() -> Iterator[None]:
    """Turn Spark's exceptions into Shardyard's.

    An error that our own code raised inside a task or a query arrives wrapped in traces of two languages; its message
    is taken out again. It is raised as `InvalidCall` if it was one, else as `SparkFailed`.
    """
    try:
        yield
    except SPARK_ERRORS as error:
        text = str(error)
        if matches := _SHARDYARD_ERROR.findall(text):
            name, message = matches[-1]
            kind = _ERROR_TYPES.get(name, ShardyardError)
            if isinstance(kind, type) and issubclass(kind, InvalidCall):
                raise InvalidCall(message) from error
            raise SparkFailed(message, may_pass=isinstance(kind, type) and issubclass(kind, RetryLater)) from error
        raise SparkFailed(_first_line(text)) from error
    except (Py4JError, ConnectionRefusedError) as error:
        raise SparkEnded from error


def is_from_lost_jvm(error: BaseException | None) -> bool:
    """Whether this error, raised by a call to Spark, says that Spark's JVM has ended."""
    if isinstance(error, Py4JError):
        return not isinstance(error, Py4JJavaError)
    return isinstance(error, ConnectionError | SparkEnded)


def _first_line(text: str) -> str:
    """The message without the stack traces of Java and Python around it."""
    if found := _JAVA_ERROR.search(text):
        return found[1]
    if matches := _PYTHON_ERROR.findall(text):
        return str(matches[-1])
    if found := _STREAM_ERROR.search(text):  # without a message if a connection to Python has ended
        return found[1].strip() or "a Python process of Spark has ended: it was killed, or had no memory left"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "Spark failed without a message: see Spark's own log"
