"""What was expected, in words."""

from typing import Any

import pytest
from msgspec import Struct, json, structs

from shardyard.model import Malformed
from shardyard.queues.settings import TopicSettings
from shardyard.wire import requests, sharding
from shardyard.wire.codec import decode
from shardyard.wire.settings import GroupSettings
from shardyard.wire.validation import in_words, validation_error
from tests.queues.setup import Cluster, run

KINDS = [kind for kind in vars(requests).values() if isinstance(kind, type) and issubclass(kind, Struct)]


@pytest.mark.parametrize("kind", [*KINDS, GroupSettings, TopicSettings])
def test_every_field_of_requests_and_settings_can_be_described(kind: type[Struct]) -> None:
    for field in structs.fields(kind):
        assert "`" not in in_words(field.type)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (requests.NewTopic, {"name": "a", "partitions": "4"}, "partitions is '4': expected an integer"),
        (requests.NewTopic, {"name": "a"}, "partitions is missing: expected an integer"),
        (
            requests.Resize,
            {"partitions": 4, "partition": 3},
            "field is 'partition': expected one of partitions (did you mean partitions?)",
        ),
        (requests.Resize, [4], "body is [4]: expected an object with partitions"),
        (requests.Join, {"topics": []}, "topics is []: expected a list of at least 1, each item a string"),
        (requests.Fence, {"epoch": -1}, "epoch is -1: expected an integer from 0 to 4611686018427387904"),
        (requests.TopicChanges, {"token": 12345678}, "token is '***': expected a string, or null"),
        (requests.Reset, {"topic": "a", "to": "b"}, "to is 'b': expected one of earliest, latest, offset, time"),
        (
            requests.Commit,
            {"epoch": 1, "positions": {"orders/0": [1, 2]}},
            "positions is {'orders/0': [1, 2]}: expected an object of names, each with a list of "
            + ", ".join(["an integer from 0 to 4611686018427387904"] * 3),
        ),
        (
            requests.Failures,
            {"failures": [1]},
            "failures is [1]: expected a list, each item an object with partition, epoch, offset, reason, traceback",
        ),
        (
            sharding.PublishMessages,
            {"messages": [{"body": "a"}, {"body": 5}]},
            "messages[1].body is 5: expected a string, or null",
        ),
        (
            sharding.PublishMessages,
            {"messages": [{"bdy": "a"}]},
            "messages[0].field is 'bdy': expected one of "
            + ", ".join(structs.asdict(sharding.JsonMessage()))
            + " (did you mean body?)",
        ),
        (dict[str, Any], [1], "body is [1]: expected an object of names, each with any value"),
    ],
)
def test_a_validation_error_names_what_is_wrong_and_what_was_expected(kind: Any, value: object, says: str) -> None:
    with pytest.raises(Malformed):  # it is wrong
        decode(json.encode(value), kind)
    assert str(validation_error(kind, value)) == says


def test_long_values_are_shortened_in_errors() -> None:
    assert len(str(validation_error(requests.Resize, {"partitions": "x" * 10_000_000}))) < 300
    assert len(str(validation_error(requests.Resize, {"x" * 10_000_000: 1}))) < 300
    assert len(str(validation_error(requests.Resize, ["x"] * 100_000))) < 300


@pytest.mark.parametrize(
    ("method", "path", "body", "says"),
    [
        (
            "PATCH",
            "/v1/topics/orders",
            b'{"records_per_second": "fast"}',
            "records_per_second is 'fast': expected an integer from 1 to 2147483647, or null",
        ),
        ("PATCH", "/v1/groups/billing", b'{"concurrency": 0}', "concurrency is 0: expected an integer from 1 to"),
        ("PATCH", "/v1/groups/billing", b"[1]", "body is [1]: expected an object of names"),
        ("PATCH", "/v1/groups/billing", b'{"paused": yes}', "the body can't be read: JSON is malformed"),
        (
            "POST",
            "/v1/topics/orders/expand",
            b'{"partitions": "x", "partitions": 9}',
            "body is 'partitions': expected an object with partitions, each once",
        ),
        ("GET", "/v1/groups/billing/partitions/orders/0/records?offset=x&owner=1", None, "offset is 'x': expected an "),
        (
            "GET",
            "/v1/groups/billing/partitions/orders/0/records?offset=1",
            None,
            "owner is missing: expected an integer",
        ),
    ],
)
def test_an_invalid_body_or_query_gets_a_plain_message(method: str, path: str, body: bytes | None, says: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        response = await cluster.request(method, path, body=body)
        assert response.status == 400
        assert response.json["error"]["message"].startswith(says)

    run(scenario)
