"""Options of the data source: what they mean, and errors that name the option."""

from pathlib import Path

import pytest

from shardyard.model import InvalidValue
from shardyard.pipeline.source.options import ReadBound, absolute, read_options, write_options

READ = {"log": "sqlite:////data/log", "topics": "orders"}
WRITE = {"log": "sqlite:////data/log", "topic": "orders"}


def test_a_batch_is_read_from_the_first_record_to_the_last() -> None:
    options = read_options(READ, streaming=False)
    assert (options.start, options.end) == (ReadBound("earliest"), ReadBound("latest"))
    assert options.topics == ("orders",)


def test_a_stream_starts_with_the_next_record_and_fails_when_data_is_lost() -> None:
    options = read_options(READ, streaming=True)
    assert options.start == ReadBound("latest")
    assert options.fail_on_data_loss


def test_names_of_options_are_not_case_sensitive() -> None:
    assert read_options(READ | {"MAXrecordspertrigger": "7"}, streaming=True).max_records_per_trigger == 7


def test_a_bound_is_a_name_a_time_or_offsets() -> None:
    offsets = read_options(READ | {"startingOffsets": '{"orders": {"0": 5, "1": "latest"}}'}, streaming=False)
    assert offsets.start == ReadBound("earliest", explicit={"orders": {0: 5, 1: "latest"}}, option="startingOffsets")
    for text in ("1760000000000", "2025-10-09T08:53:20Z", "2025-10-09T10:53:20+02:00", "2025-10-09T08:53:20"):
        assert read_options(READ | {"endingTimestamp": text}, streaming=False).end.timestamp == 1_760_000_000_000


def test_several_topics_are_separated_by_commas() -> None:
    assert read_options(READ | {"topics": "b, a"}, streaming=False).topics == ("a", "b")


def test_the_path_of_a_log_does_not_depend_on_the_working_directory() -> None:
    assert absolute("sqlite:///data/log") == f"sqlite:///{Path.cwd()}/data/log"
    assert absolute("sqlite:////data/log") == "sqlite:////data/log"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": ""}, "option 'topics' is ''"),
        ({"topics": "a,,b"}, "option 'topics' is 'a,,b': expected names, separated by commas, each once"),
        ({"topics": "a,a"}, "option 'topics' is 'a,a'"),
        ({"log": ""}, "option 'log' is ''"),
        ({"startingOffsets": "first"}, "option 'startingOffsets' is 'first': expected earliest, latest, or JSON"),
        ({"startingOffsets": '{"a": 3}'}, "option 'startingOffsets'"),
        ({"startingOffsets": '{"a": {"0": 1.5}}'}, "option 'startingOffsets'"),
        ({"startingOffsets": '{"a": {"x": 1}}'}, "option 'startingOffsets'"),
        ({"startingOffsets": "[]"}, "option 'startingOffsets'"),
        ({"startingTimestamp": "noon"}, "option 'startingTimestamp' is 'noon': expected milliseconds"),
        ({"startingTimestamp": "1", "startingOffsets": "earliest"}, "expected no 'startingOffsets' at the same time"),
        ({"recordsPerTask": "many"}, "option 'recordsPerTask' is 'many': expected an integer"),
        ({"recordsPerTask": "0"}, "option 'recordsPerTask' is 0: expected a whole number of at least 1"),
        ({"topic": "orders"}, "option is 'topic': expected one of log, topics"),
        ({"maxRecordsPerTrigger": "1"}, "option is 'maxrecordspertrigger': expected one of"),
    ],
)
def test_bad_options_of_a_read_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        read_options(READ | options, streaming=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"failOnDataLoss": "no"}, "option 'failOnDataLoss' is 'no': expected true or false"),
        ({"maxRecordsPerTrigger": "-1"}, "option 'maxRecordsPerTrigger' is -1"),
        ({"endingOffsets": "latest"}, "option is 'endingoffsets': expected one of"),
    ],
)
def test_bad_options_of_a_stream_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        read_options(READ | options, streaming=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": ""}, "option 'topic' is ''"),
        ({"partitioner": "ring"}, "partitioner is 'ring': expected one of"),
        ({"partitioner": "jump", "hash": "fnv1a32"}, "hash is 'fnv1a32': expected a 64-bit hash"),
        ({"topics": "a"}, "option is 'topics': expected one of log, topic"),
    ],
)
def test_bad_options_of_a_write_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        write_options(WRITE | options, streaming=False)
