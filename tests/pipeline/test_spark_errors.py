"""Errors of Spark become one line that says what happened."""

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import PySparkException

from shardyard.model import InvalidCall
from shardyard.pipeline.spark_errors import SparkEnded, SparkFailed, translate_spark_errors

TRACE = 'Traceback (most recent call last):\n  File "job.py", line 1, in write\n    save()\n'
CASES = [
    ("[COLUMN] no such column\n== SQL ==\nselect x", "[COLUMN] no such column"),
    ("", "Spark failed without a message: see Spark's own log"),
    (
        "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception:  SQLSTATE: XXKST",
        "a Python process of Spark has ended: it was killed, or had no memory left",
    ),
    ("[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: no route SQLSTATE: XXKST", "no route"),
    (f"[FOREACH_BATCH] Return Message: {TRACE}OSError: no space left\n\tat py4j.Protocol", "OSError: no space left"),
    (
        (
            f"{TRACE}py4j.protocol.Py4JJavaError: An error occurred while calling o1.save.\n"
            ": org.apache.spark.SparkException: Job aborted\n\tat org.apache"
        ),
        "Job aborted",
    ),
]


@pytest.mark.parametrize(("text", "message"), CASES)
def test_the_message_is_one_line_without_traces(text: str, message: str) -> None:
    with pytest.raises(SparkFailed) as raised, translate_spark_errors():
        raise PySparkException(text)
    assert str(raised.value) == message
    assert raised.value.may_pass


@pytest.mark.parametrize(
    ("name", "may_pass"), [("model.errors.Busy", True), ("model.errors.Damaged", False), ("other.Error", False)]
)
def test_errors_of_shardyard_are_taken_out_and_tell_whether_they_may_pass(name: str, may_pass: bool) -> None:
    with pytest.raises(SparkFailed, match=r"^it is so$") as raised, translate_spark_errors():
        raise PySparkException(f"trace\nshardyard.{name}: it is so SQLSTATE: 1234\n more")
    assert raised.value.may_pass == may_pass
    with pytest.raises(InvalidCall, match=r"^wrong$"), translate_spark_errors():
        raise PySparkException("trace\nshardyard.model.errors.InvalidValue: wrong\n more")


@pytest.mark.parametrize("error", [Py4JNetworkError("Answer from Java side is empty"), ConnectionRefusedError("no")])
def test_a_jvm_that_is_gone_is_no_reason_to_try_again(error: Exception) -> None:
    with pytest.raises(SparkEnded) as raised, translate_spark_errors():
        raise error
    assert not raised.value.may_pass
